"""Generate text with a fused model, its states staying on the device: CUDA graphs on a GPU, plain runs on a CPU.

    python examples/generate.py                         # a small model with random weights: what it says means nothing
    python examples/generate.py FUSED.onnx --tokens 64  # your model: tokens and states in, logits and states out

The prompt goes in pieces, all tokens of a piece in one step, then token by token. States of all kinds are carried along
together: KDA's states and short convolutions, MLA's caches of latents, caches of keys and values. Tokens are bytes
here; put your tokenizer in their place, or give tokens with --token-ids.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import deltafuse
import numpy as np
import onnx_ir as ir
from small_model import HYBRID, build


def generate(runner: Any, prompt: Sequence[int], count: int, piece: int = 16) -> list[int]:
    """The ``count`` most likely tokens after the prompt, one by one.

    Args:
        runner: of :func:`deltafuse.capture`, over a model that takes tokens [1, tokens] and gives logits first.
        prompt: tokens, at least one.
        count: how many to generate.
        piece: tokens of the prompt that go in with one step; what is left over goes in one by one, so that only two
            sets of shapes are ever used. 1: all of them one by one.
    """
    runner.reset()
    whole = len(prompt) // piece * piece
    steps = [prompt[i : i + piece] for i in range(0, whole, piece)] + [[token] for token in prompt[whole:]]
    past = 0
    for tokens in steps:
        logits = step(runner, tokens, past)
        past += len(tokens)
    made = [int(np.argmax(logits))]
    while len(made) < count:
        made.append(int(np.argmax(step(runner, made[-1:], past))))
        past += 1
    return made


def step(runner: Any, tokens: Sequence[int], past: int) -> np.ndarray:
    """Logits after the last of the tokens, of which ``past`` came before."""
    outputs = runner.run(feeds(runner, tokens, past))
    logits: np.ndarray = outputs[runner.outputs[0]][0, -1]
    return logits


def feeds(runner: Any, tokens: Sequence[int], past: int) -> dict[str, np.ndarray]:
    """The inputs of a step beside the states: the tokens first, and what else the model asks for, by its name."""
    count = len(tokens)
    found = {runner.inputs[0]: np.array([tokens])}
    for name in runner.inputs[1:]:
        if "position" in name:
            found[name] = np.arange(past, past + count)[None]
        elif "mask" in name:
            found[name] = np.ones((1, past + count))
        elif "length" in name:  # of a cache that has one size for good
            found[name] = np.array([past])
        else:
            raise deltafuse.DeltaFuseError(f"the model asks for {name}, and generate.py knows nothing of it")
    types = {value.name: value.type for value in runner.session.get_inputs()}
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
    return {name: value.astype(kinds.get(types[name], np.float32)) for name, value in found.items()}


def token_ids(text: str) -> list[int]:
    """ "1,2,3" as numbers."""
    return [int(token) for token in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a fused model; without it a small one is made")
    parser.add_argument("--prompt", default="The delta rule, gated by the channel, ")
    parser.add_argument("--token-ids", type=token_ids, help="the prompt as tokens: 1,2,3; tokens come out too")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--piece", type=int, default=16, help="tokens of the prompt in one step")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    arguments = parser.parse_args()

    prompt = arguments.token_ids or list(arguments.prompt.encode())
    size = replace(HYBRID, capacity=len(prompt) + max(arguments.tokens, 4))
    model = arguments.model or ir.to_proto(build(size)).SerializeToString()
    try:
        with deltafuse.capture(model, device=arguments.device) as runner:
            generate(runner, prompt, 4, arguments.piece)  # warms up
            begin = time.perf_counter()
            made = generate(runner, prompt, arguments.tokens, arguments.piece)
            took = time.perf_counter() - begin
            print(f"{len(runner.states)} states stay on {runner.device.name}")
            for shapes in runner.captured:
                print(f"replayed: {shapes.split(', past')[0]}")
            for shapes, reason in list(runner.not_captured.items())[:2]:
                print(f"eager: {shapes.split(', past')[0]}: {reason}")
    except deltafuse.DeltaFuseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(prompt)} tokens in, {len(made)} tokens out, {1e3 * took / len(made):.2f} ms a token")
    print(",".join(map(str, made)) if arguments.token_ids else bytes(token % 256 for token in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
