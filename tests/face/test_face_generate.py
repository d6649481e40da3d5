"""examples/generate.py and the small model that it runs by default."""

from __future__ import annotations

import lzma
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
from generate import generate  # noqa: E402
from small_model import HYBRID, ModelSize, build  # noqa: E402

PROMPT = [3, 17, 60, 2, 9, 44, 31, 5, 12, 8, 27]


def quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def runner(model: Any) -> Any:
    return deltafuse.capture(model, device="cpu", sess_options=quiet())


@pytest.fixture(scope="module")
def small() -> bytes:
    model = ir.to_proto(build())
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def test_pieces_of_the_prompt_make_no_difference(small: bytes) -> None:
    made = runner(small)
    assert len(made.states) == 4 and made.states["past.1.state"] == "present.1.state"
    results = [generate(made, PROMPT, 24, piece) for piece in (1, 4, len(PROMPT), 100)]
    assert results[0] == results[1] == results[2] == results[3]
    assert len(results[0]) == 24 and len(set(results[0])) > 1
    assert results[0] != generate(made, PROMPT[:-1], 24), "the prompt's last token changes what follows"


def test_tokens_are_those_of_plain_sessions(small: bytes) -> None:
    """The same with states carried by hand through stock onnxruntime, where the function bodies run."""
    session = ort.InferenceSession(small, quiet(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()][1:]
    shapes = [[1 if size == "batch" else size for size in value.shape] for value in session.get_inputs()[1:]]
    states = [np.zeros(shape, np.float32) for shape in shapes]
    tokens, made = list(PROMPT), []
    while len(made) < 12:
        logits, *states = session.run(None, {"input_ids": np.array([tokens])} | dict(zip(names, states, strict=True)))
        made.append(int(np.argmax(logits[0, -1])))
        tokens = made[-1:]
    assert generate(runner(small), PROMPT, 12) == made


@pytest.fixture(scope="module")
def hybrid() -> bytes:
    model = ir.to_proto(build(HYBRID))
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def test_states_and_caches_of_all_kinds_go_along(hybrid: bytes) -> None:
    made = runner(hybrid)
    assert set(made.states) == {
        *(f"past.{n}.{name}" for n in (0, 2) for name in ("conv", "state")),
        *("past.1.latent", "past.1.k_rope", "past.3.key", "past.3.value"),
    }
    results = [generate(made, PROMPT, 24, piece) for piece in (1, 4, 100)]
    assert results[0] == results[1] == results[2] and len(set(results[0])) > 1
    assert made.state_values()["past.1.latent"].shape() == [1, HYBRID.capacity, HYBRID.latent]


def test_what_a_cache_holds_makes_no_difference(hybrid: bytes) -> None:
    """Latents and keys and values say the same; a model without the attention says something else."""
    swapped = build(replace(HYBRID, attention={1: "expanded", 3: "latent"}))
    other = build(replace(HYBRID, attention={1: "latent"}))
    made = generate(runner(hybrid), PROMPT, 20)
    assert made == generate(runner(ir.to_proto(swapped).SerializeToString()), PROMPT, 20)
    assert made != generate(runner(ir.to_proto(other).SerializeToString()), PROMPT, 20)


def test_hybrid_tokens_are_those_of_plain_sessions(hybrid: bytes) -> None:
    session = ort.InferenceSession(hybrid, quiet(), providers=["CPUExecutionProvider"])
    past_values = [value for value in session.get_inputs() if value.name.startswith("past")]
    states = {v.name: np.zeros([1 if n == "batch" else n for n in v.shape], np.float32) for v in past_values}
    tokens, past, made = list(PROMPT), 0, []
    while len(made) < 12:
        feeds = {"input_ids": [tokens], "position_ids": [[*range(past, past + len(tokens))]], "cache_lengths": [past]}
        feeds = {name: np.array(value, np.int64) for name, value in feeds.items()}
        logits, *new = session.run(None, feeds | states)
        states = dict(zip(states, new, strict=True))
        past += len(tokens)
        made.append(int(np.argmax(logits[0, -1])))
        tokens = made[-1:]
    assert generate(runner(hybrid), PROMPT, 12) == made


def test_half_precision_models_load(tmp_path: Path) -> None:
    model = build(ModelSize(layers=3, dtype="FLOAT16", attention=HYBRID.attention))
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")
    assert len(generate(runner(tmp_path / "m.onnx"), PROMPT, 4)) == 4


def test_a_real_export_with_growing_caches(tmp_path: Path) -> None:
    """Three KDA layers and one with a key and value cache: the fused export says what the export says."""
    path, fused = tmp_path / "decode.onnx", tmp_path / "fused.onnx"
    path.write_bytes(lzma.decompress((ROOT / "tests" / "data" / "hybrid4_decode.onnx.xz").read_bytes()))
    deltafuse.fuse(path, fused, verify=False, require={"kda": 3})
    before, after = runner(path), runner(fused)
    assert len(after.states) == 8 and after.states["past.3.keys"] == "present.3.keys"
    assert generate(after, PROMPT, 20, piece=1) == generate(before, PROMPT, 20, piece=1)
    assert after.state_values()["past.3.keys"].shape() == [1, 1, len(PROMPT) + 19, 16]


@pytest.mark.parametrize("arguments", [[], ["--piece", "1", "--tokens", "8", "--device", "cpu"]])
def test_the_example_runs(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "generate.py"), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "38 tokens in" in done.stdout and "8 states stay on" in done.stdout


def test_the_example_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "generate.py"), "--device", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: device 'tpu'")


def test_tokens_in_tokens_out() -> None:
    command = [sys.executable, str(EXAMPLES / "generate.py"), "--token-ids", "5,6,7", "--tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split(",")
    assert len(last) == 4 and all(0 <= int(token) < 256 for token in last)
