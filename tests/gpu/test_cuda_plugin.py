"""The plugin EP beside a CUDA plugin EP, the one that ORT_CUDA_PLUGIN_EP_PATH names. Needs a GPU.

Any onnxruntime will do, with a classic CUDA provider (which is left alone then) or without one. Seen to pass with
nxrt-ep-cuda 0.1.0.dev6, with and without its ONNX_GENAI_PLUGIN_PARTIAL_GPU_CLAIM=1.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

if not os.environ.get("ORT_CUDA_PLUGIN_EP_PATH"):
    pytest.skip("beside a CUDA plugin EP: ORT_CUDA_PLUGIN_EP_PATH names none", allow_module_level=True)
if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("beside a CUDA plugin EP: onnxruntime is not installed", allow_module_level=True)
import deltafuse
import onnx_ir as ir
import onnxruntime as ort
from deltafuse import cuda_ep
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.discovery import EP_NAME, PluginError, cuda_status
from ep.call import call_model, draw, quiet, run
from ep.models import LAYER, activations, as_layer, layer_model, two_calls

try:
    if why := cuda_status():
        pytest.skip(f"beside a CUDA plugin EP: {why}", allow_module_level=True)
except PluginError as error:
    pytest.skip(f"beside a CUDA plugin EP: {error}", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from small_model import ModelSize, build

SIZE = ModelSize(layers=4, hidden=256, heads=4, head_dim=64, inner=512)


def make(model: bytes) -> ort.InferenceSession:
    made: ort.InferenceSession = deltafuse.session(model, "cuda", sess_options=quiet(), strict=True)
    return made


def plugin_name() -> str:
    return str(cuda_ep.activate(ort, cuda_ep.find(ort))[0].ep_name)


def test_it_is_used_and_the_order_is_right() -> None:
    made = make(call_model(LAYER, draw(LAYER, 1, 3)).SerializeToString())
    name = plugin_name()
    order = [EP_NAME, name] if cuda_ep.is_foreign(name) else [name, EP_NAME]
    assert made.get_providers() == [*order, "CPUExecutionProvider"]
    assert [node.name for node in deltafuse.assignment(made).fused] == ["kda"]
    found = cuda_ep.find(ort)
    assert (found.form, found.registered) == ("plugin", True)
    assert os.path.samefile(found.library, os.environ["ORT_CUDA_PLUGIN_EP_PATH"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_with_nodes_of_other_eps_on_both_sides(dtype: str) -> None:
    for tokens in (1, 64, 200):
        inputs = draw(LAYER, 2, tokens, tokens, dtype=dtype)
        made = make(layer_model(LAYER, inputs, dtype=dtype).SerializeToString())
        want = reference(LAYER, as_layer(inputs))
        want = want | {"o": 2 * want["o"]}
        for _ in range(20):
            got = run(made, LAYER, activations(inputs))
            errors = {name: relative_error(got[name], want[name]) for name in got}
            assert max(errors.values()) <= tolerance("cuda", dtype), (tokens, errors)


def test_states_pass_from_call_to_call() -> None:
    inputs = draw(LAYER, 2, 6)
    made = make(two_calls(LAYER, inputs, keep_first=True).SerializeToString())
    once = {name: np.asarray(x, np.float32) for name, x in reference(LAYER, inputs).items()}
    states = {"conv_state": once["present_conv_state"], "initial_state": once["final_state"]}
    want = reference(LAYER, inputs | states)
    for _ in range(5):
        got = run(made, LAYER, inputs)
        assert max(relative_error(got[name], want[name]) for name in got) <= tolerance("cuda", "float32")


@pytest.mark.parametrize("tokens", [1, 70])
def test_a_model(tokens: int) -> None:
    """Embedding and sampling on one side, four layers, on the CPU and here."""
    model = ir.to_proto(build(SIZE)).SerializeToString()
    rng = np.random.default_rng(3)
    gpu, cpu = make(model), deltafuse.session(model, "cpu", sess_options=quiet(), strict=True)
    feeds = {}
    for value in gpu.get_inputs():
        shape = [size if isinstance(size, int) else 2 if size == "batch" else tokens for size in value.shape]
        ids = "int64" in value.type
        feeds[value.name] = rng.integers(0, 256, shape) if ids else (0.1 * rng.standard_normal(shape)).astype("f")
    want = cpu.run(None, feeds)
    for _ in range(10):
        for one, other in zip(gpu.run(None, feeds), want, strict=True):
            assert relative_error(one, other.astype(np.float64)) < 1e-4


def test_steps_run_eagerly_where_the_plugin_is_another_makers() -> None:
    model = ir.to_proto(build(SIZE)).SerializeToString()
    if not cuda_ep.is_foreign(plugin_name()):
        pytest.skip("ONNX Runtime's own: test_capture_cuda.py")
    with (
        pytest.warns(RuntimeWarning, match="is not ONNX Runtime's CUDA EP, and may work on another stream"),
        deltafuse.capture(model, device="cuda", sess_options=quiet()) as gpu,
        deltafuse.capture(model, device="cpu", sess_options=quiet()) as cpu,
    ):
        for i in range(6):
            feeds = {"input_ids": np.full((2, 1), i + 3)}
            a, b = gpu.run(feeds)["logits"], cpu.run(feeds)["logits"]
            assert relative_error(a, b.astype(np.float64)) < 1e-4, i
        assert not gpu.captured and gpu.not_captured


def test_a_stream_is_refused_where_the_plugin_is_another_makers() -> None:
    if not cuda_ep.is_foreign(plugin_name()):
        pytest.skip("ONNX Runtime's own takes a stream")
    model = call_model(LAYER, draw(LAYER, 1, 3)).SerializeToString()
    options = {"CUDAExecutionProvider": {"user_compute_stream": 0}}
    with pytest.raises(deltafuse.DeltaFuseError, match="is not ONNX Runtime's CUDA EP and may ignore it"):
        deltafuse.session(model, "cuda", sess_options=quiet(), provider_options=options)
