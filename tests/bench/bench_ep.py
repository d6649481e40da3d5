"""What the plugin EP itself costs: registration and first session, host time a node, copies between EPs.

    python tests/bench/bench_ep.py --out result.json     # on a GPU where there is one
    python tests/bench/bench_ep.py --device cpu

- start: fresh processes that make a session and run it once: a model of one Neg by onnxruntime alone, and a model of
  one fused node by deltafuse, registration included. Bar: 0.5 s more.
- nodes: host time of a run of a chain of fused nodes, one token and the smallest geometry: the difference between many
  nodes and one, a node. "empty" runs no sequences (batch 0): no kernel is queued, so that what is left is the EP's work
  and onnxruntime's own a node; bar 5 us on an H200. "decode" queues a kernel a node; "neg" is a chain of onnxruntime's.
- copies: Memcpy nodes that ran in a model whose nodes the two EPs claim fully. Bar: 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
NODES = 200
RUNS = 300

# Makes a session and runs it once. Arguments: "ort" or "deltafuse", the model, the device.
START = """
import sys, time
import numpy as np
import onnxruntime as ort
ort.set_default_logger_severity(3)
began = time.perf_counter()
if sys.argv[1] == "deltafuse":
    import deltafuse
imported = time.perf_counter()
if sys.argv[1] == "deltafuse":
    deltafuse.register()
registered = time.perf_counter()
if sys.argv[1] == "deltafuse":
    made = deltafuse.session(sys.argv[2], sys.argv[3], strict=True)
else:
    cuda = ["CUDAExecutionProvider"] if sys.argv[3].startswith("cuda") else []
    made = ort.InferenceSession(sys.argv[2], providers=[*cuda, "CPUExecutionProvider"])
ready = time.perf_counter()
made.run(None, {x.name: np.zeros([d if isinstance(d, int) else 1 for d in x.shape], np.float32)
                for x in made.get_inputs()})
print(imported - began, registered - imported, ready - registered, time.perf_counter() - ready)
"""


def start(mode: str, model: Path, device: str, processes: int) -> dict[str, float]:
    """Median milliseconds by phase."""
    rows = []
    for _ in range(processes):
        done = subprocess.run(
            [sys.executable, "-c", START, mode, str(model), device], capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        rows.append([1e3 * float(x) for x in done.stdout.split()])
    phases = ("import_ms", "register_ms", "session_ms", "first_run_ms")
    return {name: round(statistics.median(x), 2) for name, x in zip(phases, zip(*rows, strict=True), strict=True)}


def chain(nodes: int) -> Any:
    """Fused nodes in a row, each on the last one's output: one head of 64 x 64 without states."""
    import onnx
    from deltafuse.custom_ops.kda.spec import KdaConfig
    from ep.call import call_model, draw

    config = KdaConfig(1, 1, 64, 64, 0.125)
    inputs = draw(config, 1, 1)
    model = call_model(config, inputs)
    first = next(node for node in model.graph.node if node.op_type == "KimiDeltaAttention")
    model.graph.node.remove(first)
    for i in range(nodes):
        node = onnx.NodeProto()
        node.CopyFrom(first)
        node.name = f"kda{i}"
        node.input[0] = f"o{i}" if i else "q"
        node.output[0] = f"o{i + 1}" if i + 1 < nodes else "o"
        model.graph.node.append(node)
    return model, inputs


def neg_chain(nodes: int) -> Any:
    from onnx import TensorProto, helper

    names = ["q", *(f"o{i}" for i in range(1, nodes)), "o"]
    made = [helper.make_node("Neg", [names[i]], [names[i + 1]], name=f"neg{i}") for i in range(nodes)]
    value = helper.make_tensor_value_info
    shape = ["B", "T", 64]
    graph = helper.make_graph(
        made, "negs", [value("q", TensorProto.FLOAT, shape)], [value("o", TensorProto.FLOAT, shape)]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)


def host_us(model: Any, inputs: dict[str, Any], device: str, fused: int) -> float:
    """Median microseconds until a run returns; on a GPU its kernels are then still queued."""
    import deltafuse
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    # As it is: onnxruntime's optimiser would take pairs of Neg out.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    running = deltafuse.session(model.SerializeToString(), device, sess_options=options, strict=True)
    assert len(deltafuse.assignment(running).fused) == fused
    place, _, number = device.partition(":")
    binding = running.io_binding()
    values = {
        name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x, np.float32), place, int(number or 0))
        for name, x in inputs.items()
    }
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("o", place, int(number or 0))
    run_options = ort.RunOptions()
    run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        running.run_with_iobinding(binding, run_options)
        times.append(1e6 * (time.perf_counter() - begin))
        binding.synchronize_outputs()
    return statistics.median(times[RUNS // 5 :])


def node_costs(device: str) -> dict[str, float]:
    """Host microseconds a node."""
    costs = {}
    many, inputs = chain(1 + NODES)
    one, _ = chain(1)
    empty = {name: x[:0] for name, x in inputs.items()}
    for name, feeds in (("decode", inputs), ("empty", empty)):
        difference = host_us(many, feeds, device, 1 + NODES) - host_us(one, feeds, device, 1)
        costs[f"{name}_us"] = round(difference / NODES, 3)
    q = {"q": inputs["q"]}
    costs["neg_us"] = round(
        (host_us(neg_chain(1 + NODES), q, device, 0) - host_us(neg_chain(1), q, device, 0)) / NODES, 3
    )
    return costs


def copies(device: str, folder: Path) -> dict[str, int]:
    """How many nodes of each EP ran in a layer with other nodes around the fused one, and how many copies."""
    import deltafuse
    import onnxruntime as ort
    from ep.call import draw, run
    from ep.models import LAYER, activations, executed, layer_model

    inputs = draw(LAYER, 2, 50)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    running = deltafuse.session(
        layer_model(LAYER, inputs).SerializeToString(), device, sess_options=options, strict=True
    )
    run(running, LAYER, activations(inputs))
    ran = executed(running)
    found: dict[str, int] = {"memcpy": sum(count for (op, _), count in ran.items() if op.startswith("Memcpy"))}
    for (_, ep), count in ran.items():
        found[ep] = found.get(ep, 0) + count
    return found


def best_device() -> str:
    import deltafuse
    import onnxruntime as ort

    deltafuse.register()
    names = {x.ep_metadata.get("deltafuse_device") for x in ort.get_ep_devices()}
    return "cuda" if "cuda:0" in names and "CUDAExecutionProvider" in ort.get_available_providers() else "cpu"


def machine(device: str) -> dict[str, str]:
    import onnxruntime as ort

    found = {"onnxruntime": ort.__version__, "python": platform.python_version(), "cpu": platform.processor() or "?"}
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            found["cpu"] = line.partition(":")[2].strip()
            break
    if device.startswith("cuda"):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True)
            found["gpu"] = done.stdout.splitlines()[0] if done.stdout else "?"
        except OSError:
            found["gpu"] = "?"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="", help="cuda, cuda:N or cpu; default: cuda where it can be used")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for each figure of the start")
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    device = given.device or best_device()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, fused = folder / "plain.onnx", folder / "fused.onnx"
        plain.write_bytes(neg_chain(1).SerializeToString())
        fused.write_bytes(chain(1)[0].SerializeToString())
        begin = {
            "ort": start("ort", plain, device, given.processes),
            "deltafuse": start("deltafuse", fused, device, given.processes),
        }
        counted = ("register_ms", "session_ms", "first_run_ms")
        beyond = sum(begin["deltafuse"][name] - begin["ort"][name] for name in counted)
        nodes = node_costs(device)
        moved = copies(device, folder)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "machine": machine(device),
        "start": begin | {"beyond_ort_s": round(beyond / 1e3, 4), "bar_s": 0.5},
        "nodes": nodes | {"bar_us": 5.0, "of": "empty_us"},
        "copies": moved | {"bar": 0},
        "met": {"start": beyond < 500, "nodes": nodes["empty_us"] < 5, "copies": moved["memcpy"] == 0},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    print("ep:", ", ".join(f"{name} {'met' if met else 'NOT met'}" for name, met in result["met"].items()))


if __name__ == "__main__":
    main()
