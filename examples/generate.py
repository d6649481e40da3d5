"""Generate text with a fused model, its states staying on the device: CUDA graphs on a GPU, plain runs on a CPU.

    python examples/generate.py                         # a small model with random weights: what it says means nothing
    python examples/generate.py FUSED.onnx --tokens 64  # your model: input_ids and states in, logits and states out

The prompt goes in pieces, all tokens of a piece in one step, then token by token. Tokens are bytes here; put your
tokenizer in their place.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import deltafuse
import numpy as np
import onnx_ir as ir
from small_model import build


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
    for tokens in steps:
        logits = step(runner, tokens)
    made = [int(np.argmax(logits))]
    while len(made) < count:
        made.append(int(np.argmax(step(runner, made[-1:]))))
    return made


def step(runner: Any, tokens: Sequence[int]) -> np.ndarray:
    """Logits after the last of the tokens."""
    outputs = runner.run({runner.inputs[0]: np.array([tokens], np.int64)})
    logits: np.ndarray = outputs[runner.outputs[0]][0, -1]
    return logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a fused model; without it a small one is made")
    parser.add_argument("--prompt", default="The delta rule, gated by the channel, ")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--piece", type=int, default=16, help="tokens of the prompt in one step")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    arguments = parser.parse_args()

    model = arguments.model or ir.to_proto(build()).SerializeToString()
    prompt = list(arguments.prompt.encode())
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
    print(bytes(token % 256 for token in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
