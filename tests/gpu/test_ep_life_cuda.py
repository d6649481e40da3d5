"""The plugin EP on a CUDA device over a long life: memory and its limit, the caller's stream, profiles.

Needs what test_ep_cuda.py needs.
"""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .test_ep_cuda import BARE, CUDA_EP, ORDERS, Bound, assert_close, make, steps  # skips where there is no GPU

import deltafuse  # isort: skip
import onnxruntime as ort
import torch
from deltafuse.custom_ops.kda.reference import reference, tolerance
from deltafuse.discovery import EP_NAME, get_library_path, load_library
from ep.call import Arrays, call_model, draw, quiet, run
from ep.models import LAYER

MIB = 1 << 20


def alone(
    model: bytes, options: Mapping[str, str] = {}, device: str = "cuda:0", sess: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    """A session with the plugin EP and the CPU EP, nothing else."""
    deltafuse.register()
    ours = [x for x in ort.get_ep_devices() if x.ep_metadata.get("deltafuse_device") == device]
    chosen = sess or quiet()
    chosen.add_provider_for_devices(ours, dict(options))
    made = ort.InferenceSession(model, chosen, enable_fallback=0)
    made.disable_fallback()
    return made


def memory(tag: str) -> list[dict[str, int]]:
    """What the EP's arenas of the session with this tag hold."""
    ask = load_library(get_library_path()).deltafuse_memory
    ask.restype = ctypes.c_char_p
    found: list[dict[str, int]] = json.loads(ask(tag.encode()))
    return found


def test_a_limit_is_kept_and_the_session_lives() -> None:
    small, large = draw(BARE, 1, 5), draw(BARE, 1, 3)
    large = {name: np.repeat(x, 600, 0) for name, x in large.items()}  # 150 MiB of states
    running = alone(call_model(BARE, small).SerializeToString(), {"memory_limit_mib": "64", "session_tag": "limit"})
    before = run(running, BARE, small)
    for _ in range(3):
        with pytest.raises(Exception, match=r"no memory on cuda:0 for a copy of \d+ bytes \(limit 64\.0 MiB, in use"):
            run(running, BARE, large)
        got = run(running, BARE, small)
        assert all(got[name].tobytes() == before[name].tobytes() for name in before)
    (arena,) = memory("limit")
    assert arena["limit"] == 64 * MIB and arena["total"] <= 64 * MIB and arena["failures"] >= 3


def test_a_failed_output_names_the_node_its_bytes_and_the_limit() -> None:
    """37.5 MiB of states come in and as many go out."""
    inputs = {name: np.repeat(x, 150, 0) for name, x in draw(BARE, 1, 3).items()}
    running = alone(call_model(BARE, inputs).SerializeToString(), {"memory_limit_mib": "64"})
    for _ in range(2):
        with pytest.raises(
            Exception, match=r"node 'kda': no memory for output final_state of 39321600 bytes \(limit 64\.0 MiB, in use"
        ):
            run(running, BARE, inputs)
    small = draw(BARE, 2, 9)
    assert_close(run(running, BARE, small), reference(BARE, small), tolerance("cuda", "float32"), "afterwards")


def test_a_failed_workspace_names_the_node_its_bytes_and_the_limit() -> None:
    inputs = draw(BARE, 1, 4096)
    with pytest.raises(Exception, match=r"node 'kda': no memory for a workspace of \d+ bytes \(limit 1\.0 MiB, in use"):
        alone(call_model(BARE, inputs, dynamic=False).SerializeToString(), {"memory_limit_mib": "1"})
    small = draw(BARE, 1, 2)
    running = alone(call_model(BARE, small).SerializeToString())
    assert_close(run(running, BARE, small), reference(BARE, small), tolerance("cuda", "float32"), "afterwards")


def test_known_shapes_hold_the_workspace_from_the_start() -> None:
    inputs = draw(BARE, 2, 700)
    running = alone(call_model(BARE, inputs, dynamic=False).SerializeToString(), {"session_tag": "held"})
    (arena,) = memory("held")
    assert arena["reserves"] == 1 and arena["in_use"] > 0
    for _ in range(2):
        assert_close(run(running, BARE, inputs), reference(BARE, inputs), tolerance("cuda", "float32"), "held")
    assert memory("held")[0]["reserves"] == 1
    del running
    gc.collect()
    assert memory("held") == []


@pytest.mark.parametrize("order", ["cuda first", "alone"])
def test_ten_thousand_runs_grow_nothing(order: str) -> None:
    inputs = draw(LAYER, 2, 1)
    model = call_model(LAYER, inputs).SerializeToString()
    running = alone(model, {"session_tag": "soak"}) if order == "alone" else make(model, order)
    bound = Bound(running, LAYER, inputs)
    lengths = [draw(LAYER, 1 + i % 2, 1 + 29 * i) for i in range(6)]

    def some(runs: int) -> tuple[int, list[dict[str, int]]]:
        for i in range(runs):
            bound.run()
            if i % 50 == 0:
                run(running, LAYER, lengths[i // 50 % len(lengths)])
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0], memory("soak")

    free, arenas = some(1000)
    free_after, arenas_after = some(10000)
    assert free - free_after < 4 * MIB, f"{(free - free_after) / MIB:.1f} MiB of device memory more"
    if order == "alone":
        assert len(arenas) == len(arenas_after) == 1
        same = ("total", "in_use", "max_in_use", "extensions", "failures")
        assert {name: arenas[0][name] for name in same} == {name: arenas_after[0][name] for name in same}


@pytest.mark.parametrize("order", ORDERS)
def test_kernels_in_the_profile(order: str, tmp_path: Path) -> None:
    options = quiet()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    inputs = draw(BARE, 2, 900)
    model = call_model(BARE, inputs).SerializeToString()
    running = alone(model, sess=options) if order == "alone" else make(model, order, options)
    for tokens in (900, 1, 900):
        run(running, BARE, draw(BARE, 2, tokens))
    events = json.loads(Path(running.end_profiling()).read_text())
    nodes = [event for event in events if event.get("cat") == "Node" and event["args"].get("provider") == EP_NAME]
    nodes = [event for event in nodes if event["args"]["op_name"] == "KimiDeltaAttention"]
    ours = [event for event in events if event.get("cat") == "Kernel" and event["args"].get("provider") == EP_NAME]
    assert [event["name"] for event in ours] == [f"deltafuse_kda_{what}" for what in ("prefill", "decode", "prefill")]
    for node, kernel in zip(nodes, ours, strict=True):
        assert kernel["args"]["time"] == "device" and kernel["args"]["node"] == "kda"
        assert kernel["args"]["device"].startswith("cuda:0")
        assert kernel["dur"] > 0 and kernel["ts"] >= node["ts"] - 50  # two clocks, paired once


class OnStream:
    """Work that is queued behind something slow on one stream: right only if all of it is on that stream."""

    def __init__(self, running: ort.InferenceSession, inputs: Arrays) -> None:
        self.bound = Bound(running, BARE, inputs)
        self.inputs = {name: torch.from_numpy(np.ascontiguousarray(x)).cuda() for name, x in inputs.items()}
        torch.cuda.synchronize()

    def run_late(self, stream: torch.cuda.Stream) -> None:
        for tensor in self.bound.tensors.values():
            tensor.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # 50 ms
            for name, tensor in self.bound.tensors.items():
                tensor.copy_(self.inputs[name])
        self.bound.run()


@pytest.mark.parametrize("which", ["own", "default", "default as 1"])
@pytest.mark.parametrize("tokens", [1, 130])
def test_user_compute_stream_alone(which: str, tokens: int) -> None:
    stream = torch.cuda.Stream() if which == "own" else torch.cuda.default_stream()
    option = str(stream.cuda_stream) if which != "default as 1" else "1"
    inputs = draw(BARE, 2, tokens)
    running = alone(call_model(BARE, inputs).SerializeToString(), {"user_compute_stream": option})
    work = OnStream(running, inputs)
    work.run_late(stream)
    # The run waited for its stream: nothing else waits for it here.
    with torch.cuda.stream(torch.cuda.Stream()):
        got = {"o": work.bound.o.cpu().numpy(), "final_state": work.bound.tensors["initial_state"].cpu().numpy()}
    assert_close(got, reference(BARE, inputs), tolerance("cuda", "float32"), which)
    # Operands on the host, copied by ONNX Runtime.
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
    assert_close(run(running, BARE, inputs), reference(BARE, inputs), tolerance("cuda", "float32"), which)


@pytest.mark.parametrize("tokens", [1, 130])
def test_captured_alone(tokens: int) -> None:
    stream = torch.cuda.Stream()
    inputs = draw(BARE, 2, tokens)
    running = alone(call_model(BARE, inputs).SerializeToString(), {"user_compute_stream": str(stream.cuda_stream)})
    bound = Bound(running, BARE, inputs)
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
        assert_close(bound.results(), steps(BARE, inputs, count), tolerance("cuda", "float32"), count)


def test_two_streams_for_one_session_are_refused() -> None:
    mine, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    inputs = draw(BARE, 1, 3)
    options: dict[str, dict[str, Any]] = {
        CUDA_EP: {"user_compute_stream": theirs.cuda_stream},
        EP_NAME: {"user_compute_stream": mine.cuda_stream},
    }
    model = call_model(BARE, inputs).SerializeToString()
    running = deltafuse.session(model, "cuda", sess_options=quiet(), provider_options=options, strict=True)
    with pytest.raises(Exception, match=r"node 'kda': .*user_compute_stream .* the session's CUDA EP works on stream"):
        run(running, BARE, inputs)
    options[EP_NAME] = options[CUDA_EP]
    running = deltafuse.session(model, "cuda", sess_options=quiet(), provider_options=options, strict=True)
    assert_close(run(running, BARE, inputs), reference(BARE, inputs), tolerance("cuda", "float32"), "one stream")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here: a stream of another device needs two")
def test_a_stream_of_another_device_is_refused() -> None:
    stream = torch.cuda.Stream(device=1)
    model = call_model(BARE, draw(BARE, 1, 3)).SerializeToString()
    with pytest.raises(Exception, match="it is a stream of cuda:1, the session is on cuda:0"):
        alone(model, {"user_compute_stream": str(stream.cuda_stream)})


def test_nvtx_ranges_change_nothing() -> None:
    inputs = draw(BARE, 1, 3)
    model = call_model(BARE, inputs).SerializeToString()
    try:
        running = alone(model, {"nvtx_ranges": "1"})
    except Exception as error:
        if "without NVTX's headers" in str(error):
            pytest.skip("this build was made without NVTX's headers")
        raise
    assert_close(run(running, BARE, inputs), reference(BARE, inputs), tolerance("cuda", "float32"), "nvtx")
