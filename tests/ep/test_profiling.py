"""Kernels of the plugin EP in ONNX Runtime's profile."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deltafuse
import onnxruntime as ort
import pytest
from deltafuse.discovery import EP_NAME

from .call import SMALL, call_model, draw, quiet, run
from .models import LAYER, two_calls

pytestmark = pytest.mark.usefixtures("library")


def profiled(model: bytes, tmp_path: Path, threads: int = 0) -> ort.InferenceSession:
    options = quiet()
    options.intra_op_num_threads = threads
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    made: ort.InferenceSession = deltafuse.session(model, device="cpu", sess_options=options, strict=True)
    return made


def events_of(made: ort.InferenceSession) -> tuple[list[Any], list[Any]]:
    """ONNX Runtime's own events for our nodes, and the kernels that the EP reported."""
    events = json.loads(Path(made.end_profiling()).read_text())
    nodes = [event for event in events if event.get("cat") == "Node" and event["args"].get("provider") == EP_NAME]
    return nodes, [event for event in events if event.get("cat") == "Kernel"]


def test_kernels_with_names_and_times(tmp_path: Path) -> None:
    inputs = draw(LAYER, 2, 300)
    made = profiled(two_calls(LAYER, inputs, keep_first=False).SerializeToString(), tmp_path)
    for _ in range(3):
        run(made, LAYER, inputs)
    nodes, kernels = events_of(made)
    assert [event["name"] for event in nodes] == ["kda_kernel_time", "second_kernel_time"] * 3
    assert [event["name"] for event in kernels] == ["deltafuse_kda_prefill"] * 6
    for node, kernel in zip(nodes, kernels, strict=True):
        arguments = kernel["args"]
        assert arguments["parent_name"] == node["name"] == f"{arguments['node']}_kernel_time"
        assert arguments["op_name"] == "KimiDeltaAttention" and arguments["provider"] == EP_NAME
        assert (arguments["device"], arguments["time"], arguments["dtype"]) == ("cpu", "host", "float32")
        assert (arguments["sequences"], arguments["tokens"]) == ("2", "600")
        # Microseconds, cut: the kernel lies within its node.
        assert node["ts"] - 1 <= kernel["ts"] and kernel["dur"] > 0
        assert kernel["ts"] + kernel["dur"] <= node["ts"] + node["dur"] + 2
        assert (kernel["pid"], kernel["tid"]) == (node["pid"], node["tid"])


def test_decode_has_a_name_of_its_own(tmp_path: Path) -> None:
    inputs = draw(SMALL, 3, 1)
    made = profiled(call_model(SMALL, inputs).SerializeToString(), tmp_path)
    run(made, SMALL, inputs)
    run(made, SMALL, draw(SMALL, 3, 3))
    assert [event["name"] for event in events_of(made)[1]] == ["deltafuse_kda_decode", "deltafuse_kda_prefill"]


def test_runs_of_many_threads(tmp_path: Path) -> None:
    inputs = draw(SMALL, 2, 40)
    # One thread for each run: the callers' threads are meant, and ThreadSanitizer cannot see ONNX Runtime's pool.
    made = profiled(call_model(SMALL, inputs).SerializeToString(), tmp_path, threads=1)
    options = quiet()
    options.intra_op_num_threads = 1
    quiet_one = deltafuse.session(
        call_model(SMALL, inputs).SerializeToString(), device="cpu", sess_options=options, strict=True
    )

    def work(_: int) -> None:
        for _ in range(5):
            run(made, SMALL, inputs)
            run(quiet_one, SMALL, inputs)  # not profiled: in nobody's profile

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    nodes, kernels = events_of(made)
    assert len(nodes) == len(kernels) == 30
    assert {event["tid"] for event in kernels} == {event["tid"] for event in nodes}


def test_a_failed_run_leaves_no_trace_in_the_next(tmp_path: Path) -> None:
    inputs = draw(SMALL, 2, 4)
    made = profiled(call_model(SMALL, inputs).SerializeToString(), tmp_path)
    with pytest.raises(Exception, match="node 'kda': beta has shape"):
        run(made, SMALL, inputs | {"beta": inputs["beta"][:, :-1]})
    run(made, SMALL, inputs)
    assert len(events_of(made)[1]) == 1
