"""deltafuse.capture and the fallback ladder on a GPU. Needs a GPU, onnxruntime-gpu, PyTorch and cuda-python.

PyTorch only looks on: free memory, streams of its own, tensors that share memory.
"""

from __future__ import annotations

import importlib.util
import lzma
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("capture on CUDA: PyTorch is not installed", allow_module_level=True)
import torch

if not torch.cuda.is_available():
    pytest.skip("capture on CUDA: no GPU here", allow_module_level=True)
if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("capture on CUDA: onnxruntime is not installed", allow_module_level=True)
import deltafuse
import onnx_ir as ir
import onnxruntime as ort
from deltafuse.capture_cuda import CudaApi, CudaError
from deltafuse.capture_device import CudaDevice
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.kda.spec import KdaConfig
from deltafuse.discovery import PluginError, cuda_status
from ep.call import Arrays, call_model, draw, quiet, run
from ep.models import LAYER
from onnx import parser

CUDA_EP = "CUDAExecutionProvider"
if CUDA_EP not in ort.get_available_providers():
    pytest.skip("capture on CUDA: this onnxruntime has no CUDA EP", allow_module_level=True)
try:
    if why := cuda_status():
        pytest.skip(f"capture on CUDA: {why}", allow_module_level=True)
    CudaApi(0)
except (PluginError, CudaError) as error:
    pytest.skip(f"capture on CUDA: {error}", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
from generate import generate  # noqa: E402
from small_model import ModelSize, build  # noqa: E402

BARE = KdaConfig(2, 4, 128, 128, 128**-0.5, qk_l2norm="sum", has_initial_state=True, has_final_state=True)
STATES = {"conv_state": "present_conv_state", "initial_state": "final_state"}
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU: this needs two")


@pytest.fixture(scope="module")
def small() -> bytes:
    return bytes(ir.to_proto(build(ModelSize(layers=3, hidden=256, heads=4, dtype="FLOAT16"))).SerializeToString())


def captured(model: Any, **how: Any) -> Any:
    """A runner that must capture."""
    made = deltafuse.capture(model, device="cuda", graphs="always", sess_options=quiet(), strict=True, **how)
    assert isinstance(made.device, CudaDevice), made.device.refusal
    return made


def eager(model: Any) -> Any:
    return deltafuse.capture(model, device="cuda", graphs="never", sess_options=quiet(), strict=True)


def steps(config: KdaConfig, inputs: Arrays, count: int) -> Arrays:
    """The reference after ``count`` runs of the same tokens."""
    out: Arrays = {}
    for _ in range(count):
        out = {name: np.asarray(x, np.float32) for name, x in reference(config, inputs).items()}
        inputs = inputs | {state: out[made] for state, made in STATES.items() if state in inputs}
    return out


def assert_step(made: Any, got: Arrays, want: Arrays, what: object) -> None:
    states = made.state_arrays()
    got = got | {output: states[name] for name, output in made.states.items()}
    errors = {name: relative_error(got[name], want[name]) for name in got}
    assert max(errors.values()) <= tolerance("cuda", "float32"), f"{what}: {errors}"


def assert_same(a: Any, b: Any, what: object) -> None:
    """Two runners' states and outputs, bit for bit."""
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=f"{what}: {name} differs")


@pytest.mark.parametrize("in_place", [False, True], ids=["two sides", "in place"])
@pytest.mark.parametrize("config", [LAYER, BARE], ids=["layer", "bare"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_replayed_steps_against_the_reference(config: KdaConfig, tokens: int, in_place: bool) -> None:
    inputs = draw(config, 2, tokens)
    with captured(call_model(config, inputs).SerializeToString(), in_place=in_place) as made:
        assert set(made.states) == {name for name in STATES if name in inputs}
        feeds = {name: inputs[name] for name in made.inputs}
        first = {name: inputs[name] for name in made.states}
        for _ in range(2):  # the second time replays from the start
            made.reset(first)
            for count in range(1, 8):
                assert_step(made, made.run(feeds), steps(config, inputs, count), f"step {count}")
        assert len(made.captured) == 1 and not made.not_captured, (made.captured, made.not_captured)


def test_replays_equal_eager_runs_bit_for_bit(small: bytes) -> None:
    """Steps and pieces in turn, with shapes in between that are too rare to be captured."""
    tokens = np.random.default_rng(0).integers(0, 256, 400)
    lengths = [16, 1, 1, 1, 1, 16, 16, 1, 3, 16, 1, 5, 16, 1, 16, 7, 1, 1, 16, 2, 1, 16, 1, 1]
    with captured(small, warmup=1, cache=16) as graphs, eager(small) as plain:
        start = 0
        for i, length in enumerate(lengths):
            feeds = {"input_ids": tokens[None, start : start + length]}
            start += length
            assert_same(graphs.run(feeds), plain.run(feeds), f"step {i}, {length} tokens")
            assert_same(graphs.state_arrays(), plain.state_arrays(), f"states after step {i}")
        names = [shapes.split(",")[0] for shapes in graphs.captured]
        assert "input_ids 1x1" in names and "input_ids 1x16" in names, names
        assert not plain.captured and all(value.device_name() == "cuda" for value in graphs.state_values().values())


def test_generated_tokens(small: bytes) -> None:
    prompt = list(b"captured or not, the same tokens")
    with captured(small) as graphs, eager(small) as plain:
        want = generate(plain, prompt, 40)
        assert generate(graphs, prompt, 40) == want
        assert generate(graphs, prompt, 40) == want, "replayed from the first step on"
        assert generate(graphs, prompt, 40, piece=1) == generate(plain, prompt, 40, piece=1)


def test_prepare_leaves_the_states(small: bytes) -> None:
    feeds = {"input_ids": np.array([[5]])}
    with captured(small) as graphs, eager(small) as plain:
        for made in (graphs, plain):
            made.run({"input_ids": np.array([[1, 2, 3]])})
        before = graphs.state_arrays()
        assert graphs.prepare(feeds), graphs.not_captured
        assert_same(graphs.state_arrays(), before, "states after prepare")
        assert_same(graphs.run(feeds), plain.run(feeds), "the step after prepare")


def test_the_cache_and_close_give_memory_back(small: bytes) -> None:
    def free() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    with captured(small, cache=2) as made:
        seen: list[int] = []
        for round_ in range(4):
            for batch in (1, 2, 3):
                made.reset()
                assert made.prepare({"input_ids": np.ones((batch, 1), np.int64)}), made.not_captured
            assert len(made.captured) == 2
            for _ in range(200):
                made.run({"input_ids": np.ones((3, 1), np.int64)})
            if round_:
                seen.append(free())
        assert seen[0] - seen[-1] < 32 << 20, f"device memory shrank by {(seen[0] - seen[-1]) >> 20} MiB in two rounds"


def test_tensors_of_other_libraries(small: bytes) -> None:
    ids = torch.tensor([[7]], device="cuda")
    with captured(small) as graphs, eager(small) as plain:
        for i in range(8):
            values = graphs.run({"input_ids": ids}, values=True)
            graphs.synchronize()
            shared = torch.from_dlpack(values["logits"])
            assert shared.is_cuda and tuple(shared.shape) == (1, 1, 256)
            assert_same({"logits": shared.cpu().numpy()}, plain.run({"input_ids": np.array([[7]])}), f"step {i}")
        with pytest.raises(deltafuse.DeltaFuseError, match="input_ids is a tensor"):
            graphs.run({"input_ids": ids.float()})


def test_a_session_on_the_callers_stream() -> None:
    stream = torch.cuda.Stream()
    inputs = draw(LAYER, 2, 1)
    session = deltafuse.session(
        call_model(LAYER, inputs).SerializeToString(),
        "cuda",
        sess_options=quiet(),
        provider_options={CUDA_EP: {"user_compute_stream": stream.cuda_stream}},
        strict=True,
    )
    with deltafuse.capture(session, graphs="always") as made:
        assert made.device.stream == stream.cuda_stream
        made.reset({name: inputs[name] for name in STATES})
        for count in range(1, 7):
            assert_step(made, made.run({n: inputs[n] for n in made.inputs}), steps(LAYER, inputs, count), count)
        assert made.captured


def test_the_default_stream_is_honoured_and_not_captured() -> None:
    inputs = draw(LAYER, 2, 1)
    model = call_model(LAYER, inputs).SerializeToString()
    options = {CUDA_EP: {"user_compute_stream": 0}}
    session = deltafuse.session(model, "cuda", sess_options=quiet(), provider_options=options, strict=True)
    assert session.get_provider_options()[CUDA_EP]["user_compute_stream"] == "1", "the driver's handle for it"
    want = reference(LAYER, inputs)
    got = run(session, LAYER, inputs)
    errors = {name: relative_error(got[name], want[name]) for name in got}
    assert max(errors.values()) <= tolerance("cuda", "float32"), errors
    with pytest.raises(deltafuse.DeltaFuseError, match="the default stream, which CUDA cannot capture"):
        deltafuse.capture(session, graphs="always")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = deltafuse.capture(session)
        made.reset({name: inputs[name] for name in STATES})
        for count in range(1, 5):
            assert_step(made, made.run({n: inputs[n] for n in made.inputs}), steps(LAYER, inputs, count), count)
    assert made.not_captured and not made.captured


def cpu_node_model(middle: bool) -> bytes:
    """``Det`` has no CUDA kernel. ``middle``: between nodes that have one, else on a graph input."""
    first = "a = Neg (x)" if middle else "a = Identity (x)"
    det = "d = Det (a)" if middle else "d = Det (x)"
    text = f"""
        <ir_version: 8, opset_import: ["" : 20]>
        g (float[1, 2, 2] x, float[1, 2, 2] s) => (float[1, 2, 2] y, float[1, 2, 2] new_s) {{
          {first}
          {det}
          y = Mul (a, d)
          new_s = Add (s, y)
        }}
        """
    return bytes(parser.parse_model(text).SerializeToString())


@pytest.mark.parametrize("middle", [False, True], ids=["on an input", "in the middle"])
def test_what_cannot_be_captured_says_which_node(middle: bool) -> None:
    x = np.array([[[1, 2], [3, 5]]], np.float32)
    sign = -1 if middle else 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = deltafuse.capture(cpu_node_model(middle), device="cuda", sess_options=quiet())
        total = np.zeros_like(x)
        for i in range(1, 8):
            got = made.run({"x": i * x})["y"]
            want = sign * i * x * -(i * i)
            total += want
            np.testing.assert_allclose(got, want, rtol=1e-4, err_msg=f"step {i}")
            np.testing.assert_allclose(made.state_arrays()["s"], total, rtol=1e-4, err_msg=f"state after step {i}")
    (reason,) = made.not_captured.values()
    assert not made.captured and "on the CPU run" in reason and "Det" in reason, reason
    assert any("steps run eagerly" in str(warning.message) for warning in caught)
    with pytest.raises(deltafuse.DeltaFuseError, match=r"(?s)cannot be captured.*Det"):
        made = deltafuse.capture(cpu_node_model(middle), device="cuda", graphs="always", sess_options=quiet())
        for _ in range(8):
            made.run({"x": x})


def test_growing_caches_run_eagerly(tmp_path: Path) -> None:
    path, fused = tmp_path / "decode.onnx", tmp_path / "fused.onnx"
    path.write_bytes(lzma.decompress((ROOT / "tests" / "data" / "hybrid4_decode.onnx.xz").read_bytes()))
    deltafuse.fuse(path, fused, verify=False, require={"kda": 3})
    options = {CUDA_EP: {"use_tf32": "0"}}
    cpu = deltafuse.capture(fused, device="cpu", sess_options=quiet())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gpu = deltafuse.capture(fused, device="cuda", sess_options=quiet(), provider_options=options)
        for token in range(20):
            a, b = (made.run({"input_ids": np.array([[token]])})["logits"] for made in (gpu, cpu))
            assert relative_error(a, b) < 1e-3, f"token {token}"
    assert not gpu.captured and gpu.state_values()["past.3.keys"].shape() == [1, 1, 20, 16]


def test_runners_in_threads(small: bytes) -> None:
    """Each with a stream of its own, captured while the others run."""
    prompts = [list(f"prompt number {i} of four".encode()) for i in range(4)]
    with eager(small) as plain:
        want = [generate(plain, prompt, 30) for prompt in prompts]

    def one(prompt: list[int]) -> list[int]:
        with captured(small) as made:
            generate(made, prompt, 10)
            return generate(made, prompt, 30)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, prompts)) == want


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_refused_head_dim_runs_by_orts_op(tokens: int) -> None:
    config = replace(BARE, head_dim=96, head_v_dim=80)
    inputs = draw(config, 2, tokens)
    session = deltafuse.session(call_model(config, inputs).SerializeToString(), "cuda", sess_options=quiet())
    (node,) = deltafuse.assignment(session).refused
    assert "96" in node.reason and node.runs_as == f"com.microsoft::LinearAttention on {CUDA_EP}", node
    got, want = run(session, config, inputs), reference(config, inputs)
    errors = {name: relative_error(got[name], want[name]) for name in got}
    assert max(errors.values()) <= tolerance("cuda", "float32"), errors
    with pytest.raises(deltafuse.DeltaFuseError, match=r"'kda': .*96"):
        deltafuse.session(call_model(config, inputs).SerializeToString(), "cuda", sess_options=quiet(), strict=True)


@pytest.mark.parametrize("given", [None, "0", "1"])
def test_tf32_with_a_router(given: str | None) -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 20]>
        g (float[4, 8] x) => (float[4, 2] y, int64[4, 2] i) <int64[1] k = {2}> { y, i = TopK (x, k) }
        """
    options = {} if given is None else {CUDA_EP: {"use_tf32": given}}
    model = parser.parse_model(text).SerializeToString()
    session = deltafuse.session(model, "cuda", sess_options=quiet(), provider_options=options)
    assert session.get_provider_options()[CUDA_EP]["use_tf32"] == (given or "0")
    note = deltafuse.assignment(session).note
    assert ("as the caller set it" if given else "TF32 is off") in note, note


@needs_two
def test_a_stream_of_another_device_is_refused() -> None:
    stream = torch.cuda.Stream(device=1)
    inputs = draw(BARE, 1, 1)
    options = {CUDA_EP: {"user_compute_stream": stream.cuda_stream}}
    with pytest.raises(deltafuse.DeltaFuseError, match="a stream of cuda:1: the session is on cuda:0"):
        deltafuse.session(call_model(BARE, inputs).SerializeToString(), "cuda:0", provider_options=options)


@needs_two
def test_capture_on_the_second_device(small: bytes) -> None:
    prompt = list(b"on another device")
    with eager(small) as plain:
        want = generate(plain, prompt, 30)
    free = torch.cuda.mem_get_info(0)[0]
    with deltafuse.capture(small, device="cuda:1", graphs="always", sess_options=quiet(), strict=True) as made:
        assert generate(made, prompt, 30) == want and made.captured
        assert all(value.__dlpack_device__()[1] == 1 for value in made.state_values().values())
    assert free - torch.cuda.mem_get_info(0)[0] < 64 << 20, "nothing of it lies on the first device"
