"""The plugin EP on a CUDA device: alone, before and behind ORT's CUDA EP. Needs a GPU, onnxruntime-gpu and PyTorch.

PyTorch supplies device memory, streams and CUDA graphs; it computes nothing here.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the plugin EP on CUDA: PyTorch is not installed", allow_module_level=True)
import torch

if not torch.cuda.is_available():
    pytest.skip("the plugin EP on CUDA: no GPU here", allow_module_level=True)
if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("the plugin EP on CUDA: onnxruntime is not installed", allow_module_level=True)
import deltafuse
import onnxruntime as ort
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.kda.spec import KdaConfig
from deltafuse.discovery import EP_NAME, PluginError, cuda_status
from ep.call import Arrays, call_model, draw, quiet, run
from ep.models import LAYER, activations, as_layer, executed, layer_model, two_calls

CUDA_EP = "CUDAExecutionProvider"
if CUDA_EP not in ort.get_available_providers():
    pytest.skip("the plugin EP on CUDA: this onnxruntime has no CUDA EP", allow_module_level=True)
try:
    if why := cuda_status():
        pytest.skip(f"the plugin EP on CUDA: {why}", allow_module_level=True)
except PluginError as error:
    pytest.skip(f"the plugin EP on CUDA: {error}", allow_module_level=True)

#: How the session's providers are arranged; "alone" is the plugin EP with the CPU EP.
ORDERS = ("cuda first", "plugin first", "alone")
#: The recurrence with carried state, as a decoder calls it.
BARE = KdaConfig(2, 4, 128, 128, 128**-0.5, qk_l2norm="sum", has_initial_state=True, has_final_state=True)


def make(model: bytes, order: str, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    options = options or quiet()
    if order == "cuda first":
        made: ort.InferenceSession = deltafuse.session(model, "cuda", sess_options=options, strict=True)
        return made
    deltafuse.register()
    ours = [x for x in ort.get_ep_devices() if x.ep_metadata.get("deltafuse_device") == "cuda:0"]
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_provider_for_devices(ours, {})
    if order == "plugin first":
        options.add_provider(CUDA_EP, {"device_id": "0"})
    made = ort.InferenceSession(model, options, enable_fallback=0)
    made.disable_fallback()
    assert made.get_providers()[0] == EP_NAME
    return made


def assert_close(got: Arrays, want: Arrays, allowed: float, what: object) -> None:
    errors = {name: relative_error(got[name], want[name]) for name in got}
    assert errors and max(errors.values()) <= allowed, f"{what}: {errors}, allowed {allowed}"


def test_device_is_found_by_its_bus_id() -> None:
    deltafuse.register()
    names = {x.ep_metadata["deltafuse_device"]: x for x in ort.get_ep_devices() if x.ep_name == EP_NAME}
    assert set(names) == {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        assert names[f"cuda:{index}"].ep_metadata["compute_capability"] == str(10 * major + minor)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_against_reference(dtype: str, order: str) -> None:
    running = None
    for tokens, case in (
        (1, "normal"),
        (7, "gate-unbounded"),
        (64, "normal"),
        (200, "normal"),
        (333, "gate-near-bound"),
    ):
        inputs = draw(LAYER, 2, tokens, tokens, case=case, dtype=dtype)
        if running is None:
            running = make(call_model(LAYER, inputs, dtype=dtype).SerializeToString(), order)
            assert [node.name for node in deltafuse.assignment(running).fused] == ["kda"]
        got = run(running, LAYER, inputs)
        assert_close(got, reference(LAYER, inputs), tolerance("cuda", dtype, case), (order, dtype, tokens))


@pytest.mark.parametrize("order", ORDERS)
def test_what_runs_where(order: str, tmp_path: Path) -> None:
    """Beside the CUDA EP nothing is copied between EPs; alone, the plugin's own copy kernels stand at the borders."""
    inputs = draw(LAYER, 2, 50)
    options = quiet()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    running = make(layer_model(LAYER, inputs).SerializeToString(), order, options)
    got = run(running, LAYER, activations(inputs))
    want = reference(LAYER, as_layer(inputs))
    assert_close(got, want | {"o": 2 * want["o"]}, tolerance("cuda", "float32"), order)
    ran = executed(running)
    other = "CPUExecutionProvider" if order == "alone" else CUDA_EP
    assert ran[("KimiDeltaAttention", EP_NAME)] == 1
    assert ran[("Neg", other)] == 1 and ran[("Mul", other)] == 1
    copies = {what: count for what, count in ran.items() if what[0].startswith("Memcpy")}
    if order == "alone":
        assert copies == {("MemcpyFromHost", EP_NAME): 1, ("MemcpyToHost", EP_NAME): 1}
    else:
        assert not copies


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_sequence_lengths_lie_on_the_device(index_dtype: str) -> None:
    config = replace(LAYER, has_cu_seqlens=True)
    inputs = draw(config, 5, 300, case="ragged", index_dtype=index_dtype)
    running = make(call_model(config, inputs).SerializeToString(), "cuda first")
    assert_close(run(running, config, inputs), reference(config, inputs), tolerance("cuda", "float32"), index_dtype)


def test_no_tokens_keep_the_states() -> None:
    inputs = draw(LAYER, 2, 3)
    running = make(call_model(LAYER, inputs).SerializeToString(), "cuda first")
    streams = ("q", "k", "v", "g", "beta", "gate")
    got = run(running, LAYER, {name: x[:, :0] if name in streams else x for name, x in inputs.items()})
    assert got["o"].shape == (2, 0, 256)
    np.testing.assert_array_equal(got["final_state"], inputs["initial_state"])
    np.testing.assert_array_equal(got["present_conv_state"], inputs["conv_state"])


@pytest.mark.parametrize("keep_first", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_states_pass_from_call_to_call(order: str, keep_first: bool) -> None:
    inputs = draw(LAYER, 2, 6)
    running = make(two_calls(LAYER, inputs, keep_first=keep_first).SerializeToString(), order)
    once = {name: np.asarray(x, np.float32) for name, x in reference(LAYER, inputs).items()}
    states = {"conv_state": once["present_conv_state"], "initial_state": once["final_state"]}
    for _ in range(3):
        got = run(running, LAYER, inputs)
        assert_close(got, reference(LAYER, inputs | states), tolerance("cuda", "float32"), order)
        if keep_first:
            conv, state = running.run(["first_conv", "first_state"], dict(inputs))
            assert relative_error(-conv, once["present_conv_state"]) <= tolerance("cuda", "float32")
            assert relative_error(-state, once["final_state"]) <= tolerance("cuda", "float32")


class Bound:
    """A session with all operands bound to tensors on the device, the states in place."""

    def __init__(self, running: ort.InferenceSession, config: KdaConfig, inputs: Arrays) -> None:
        self.running, self.config = running, config
        self.first = inputs
        self.tensors = {name: torch.from_numpy(np.ascontiguousarray(x)).cuda() for name, x in inputs.items()}
        batch, tokens = inputs["q"].shape[:2]
        self.o = torch.full((batch, tokens, config.num_v_heads * config.head_v_dim), torch.nan, device="cuda")
        self.binding = running.io_binding()
        for name, tensor in self.tensors.items():
            self._bind(self.binding.bind_input, name, tensor)
        self._bind(self.binding.bind_output, "o", self.o)
        for output, state in (("present_conv_state", "conv_state"), ("final_state", "initial_state")):
            if output in config.output_names():
                self._bind(self.binding.bind_output, output, self.tensors[state])
        self.run_options = ort.RunOptions()

    @staticmethod
    def _bind(bind: Callable[..., None], name: str, tensor: torch.Tensor) -> None:
        bind(name, "cuda", 0, np.float32, tuple(tensor.shape), tensor.data_ptr())

    def reset(self) -> None:
        for name in ("conv_state", "initial_state"):
            if name in self.tensors:
                self.tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(self.first[name])))
        self.o.fill_(torch.nan)

    def run(self) -> None:
        self.running.run_with_iobinding(self.binding, self.run_options)

    def results(self) -> Arrays:
        torch.cuda.synchronize()
        got = {"o": self.o.cpu().numpy()}
        for output, state in (("present_conv_state", "conv_state"), ("final_state", "initial_state")):
            if output in self.config.output_names():
                got[output] = self.tensors[state].cpu().numpy()
        return got


def steps(config: KdaConfig, inputs: Arrays, count: int) -> Arrays:
    """The reference after ``count`` runs of the same tokens, each from the states that the one before left."""
    out: Arrays = {}
    for _ in range(count):
        out = {name: np.asarray(x, np.float32) for name, x in reference(config, inputs).items()}
        inputs = inputs | {"initial_state": out["final_state"]}
        if "conv_state" in inputs:
            inputs = inputs | {"conv_state": out["present_conv_state"]}
    return out


@pytest.mark.parametrize("config", [LAYER, BARE], ids=["layer", "bare"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_states_bound_in_place(config: KdaConfig, tokens: int) -> None:
    inputs = draw(config, 3, tokens)
    bound = Bound(make(call_model(config, inputs).SerializeToString(), "cuda first"), config, inputs)
    for count in (1, 2, 3):
        bound.run()
        assert_close(bound.results(), steps(config, inputs, count), tolerance("cuda", "float32"), count)


@pytest.mark.parametrize("config", [LAYER, BARE], ids=["layer", "bare"])
@pytest.mark.parametrize("tokens", [1, 130])
def test_captured_into_a_cuda_graph(config: KdaConfig, tokens: int) -> None:
    """Capture from outside: the CUDA EP on the caller's stream, and no synchronisation at the end of a run."""
    stream = torch.cuda.Stream()
    inputs = draw(config, 2, tokens)
    running = deltafuse.session(
        call_model(config, inputs).SerializeToString(),
        "cuda",
        sess_options=quiet(),
        provider_options={CUDA_EP: {"user_compute_stream": stream.cuda_stream}},
        strict=True,
    )
    bound = Bound(running, config, inputs)
    bound.run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    torch.cuda.synchronize()
    for _ in range(3):
        bound.run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        bound.run()
    bound.reset()
    torch.cuda.synchronize()
    for count in (1, 2):
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        assert_close(bound.results(), steps(config, inputs, count), tolerance("cuda", "float32"), count)


def test_threads_share_a_session() -> None:
    cases = [draw(BARE, 1 + seed % 2, 20 + 37 * seed, seed) for seed in range(4)]
    running = make(call_model(BARE, cases[0]).SerializeToString(), "plugin first")
    wanted = [reference(BARE, inputs) for inputs in cases]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda inputs: run(running, BARE, inputs), cases * 5))
    for got, want in zip(results, wanted * 5, strict=True):
        assert_close(got, want, tolerance("cuda", "float32"), "threads")


@pytest.mark.parametrize("order", ORDERS)
def test_sessions_come_and_go(order: str) -> None:
    inputs = draw(LAYER, 2, 100)
    model = layer_model(LAYER, inputs).SerializeToString()
    free: list[int] = []
    for i in range(12):
        running = make(model, order)
        for _ in range(2):
            run(running, LAYER, activations(inputs))
        del running
        gc.collect()
        if i in (3, 11):
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] < 64 << 20, f"{(free[0] - free[1]) >> 20} MiB of device memory were not given back"


def test_unsupported_head_dim_is_refused_and_its_body_runs() -> None:
    config = replace(BARE, head_dim=96)
    inputs = draw(config, 1, 40)
    running = deltafuse.session(call_model(config, inputs).SerializeToString(), "cuda", sess_options=quiet())
    refused = deltafuse.assignment(running).refused
    assert [node.name for node in refused] == ["kda"]
    assert "96" in refused[0].reason, refused
    assert_close(run(running, config, inputs), reference(config, inputs), tolerance("cuda", "float32"), "body")


def test_wrong_shapes_raise_and_the_session_lives_on() -> None:
    inputs = draw(BARE, 2, 40)
    model = call_model(BARE, inputs)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim[:2]:
            dim.Clear()
    running = make(model.SerializeToString(), "cuda first")
    with pytest.raises(Exception, match=r"node 'kda': beta has shape \[2, 39, 4\]: expected \[2, 40, 4\]"):
        run(running, BARE, inputs | {"beta": np.ascontiguousarray(inputs["beta"][:, 1:])})
    assert_close(run(running, BARE, inputs), reference(BARE, inputs), tolerance("cuda", "float32"), "afterwards")


def test_auto_takes_the_gpu() -> None:
    inputs = draw(BARE, 1, 3)
    running: Any = deltafuse.session(call_model(BARE, inputs).SerializeToString(), sess_options=quiet(), strict=True)
    assert list(running.get_providers())[:2] == [CUDA_EP, EP_NAME]
    listed = r"^cuda:99: there is no such device here: there is (cuda:\d+, )*cuda:\d+$"  # as many as the machine has
    with pytest.raises(deltafuse.DeltaFuseError, match=listed):
        deltafuse.session(call_model(BARE, inputs).SerializeToString(), "cuda:99", sess_options=quiet(), strict=True)
