"""Times the GroupedQMoE CPU kernel beside the same block as an unfused float32 graph, numbers checked first.

    python tests/bench/bench_moe_cpu.py --out result.json

Shape of Ling-3.0-flash (hidden 2560, inter 768, top 8, 8 groups keep 4, a shared expert) with fewer experts: a token
reads eight of them and the shared one, however many there are. Two unfused forms: "gather" takes the chosen experts'
weights and multiplies in batches, as torch.onnx exports transformers' batched_mm; "loop" has one If an expert, which is
the least that a float32 graph can read. One session each, interleaved runs, the least and the median of each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import deltafuse
from deltafuse.custom_ops.moe.draw import draw_inputs
from deltafuse.custom_ops.moe.reference import relative_error
from deltafuse.custom_ops.moe.spec import MoeConfig
from deltafuse.fusions.quantize import Quantize, parse_quantize
from moe.onnx_call import call_model

Arrays = dict[str, NDArray[Any]]
CONFIG = MoeConfig(
    32, 8, 2560, 768, 768, n_group=8, topk_group=4, norm_eps=1e-20, routed_scaling_factor=2.5, has_expert_bias=True
)
BAR = 3.0


class Graph:
    """Collects nodes and initializers."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def const(self, array: Any) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names


def router(g: Graph, config: MoeConfig, inputs: Arrays) -> tuple[str, str]:
    """Ids ``[N, k]`` and weights ``[N, k]``, in float32."""
    size = config.num_experts // config.n_group
    scores = g.op("Sigmoid", g.op("MatMul", "x", g.const(np.ascontiguousarray(inputs["router_weight"].T))))
    choice = g.op("Add", scores, g.const(inputs["expert_bias"]))
    grouped = g.op("Reshape", choice, g.const(np.array([-1, config.n_group, size])))
    best, _ = g.op("TopK", grouped, g.const(np.array([2])), outputs=2)
    total = g.op("ReduceSum", best, g.const(np.array([-1])), keepdims=0)
    _, kept = g.op("TopK", total, g.const(np.array([config.topk_group])), outputs=2)
    zeros = g.op("Mul", total, g.const(np.float32(0)))
    ones = g.op("Add", g.op("Cast", g.op("Mul", kept, g.const(0)), to=1), g.const(np.float32(1)))
    mask = g.op("ScatterElements", zeros, kept, ones, axis=1)
    mask = g.op("Gather", mask, g.const(np.arange(config.num_experts) // size), axis=1)
    masked = g.op("Where", g.op("Cast", mask, to=TensorProto.BOOL), choice, g.const(np.float32(-np.inf)))
    _, ids = g.op("TopK", masked, g.const(np.array([config.top_k])), outputs=2)
    weights = g.op("GatherElements", scores, ids, axis=1)
    weights = g.op("Div", weights, g.op("ReduceSum", weights, g.const(np.array([-1]))))
    return ids, g.op("Mul", weights, g.const(np.float32(config.routed_scaling_factor)))


def swiglu(g: Graph, mixed: str, axis: int, inter: int) -> str:
    gate, up = g.op("Split", mixed, g.const(np.array([inter, inter])), outputs=2, axis=axis)
    return str(g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up))


def gathered(g: Graph, config: MoeConfig, inputs: Arrays, ids: str, weights: str) -> str:
    flat = g.op("Reshape", ids, g.const(np.array([-1])))
    gate_up, down = (
        g.op("Gather", g.const(np.ascontiguousarray(inputs[f"{name}_weight"].transpose(0, 2, 1))), flat)
        for name in ("gate_up", "down")
    )
    mixed = g.op("MatMul", g.op("Unsqueeze", "x", g.const(np.array([0]))), gate_up)  # one token: [k, 1, 2I]
    out = g.op("MatMul", swiglu(g, mixed, 2, config.intermediate_size), down)
    factor = g.op("Reshape", weights, g.const(np.array([-1, 1, 1])))
    return str(g.op("ReduceSum", g.op("Mul", out, factor), g.const(np.array([0])), keepdims=0))


def looped(g: Graph, config: MoeConfig, inputs: Arrays, ids: str, weights: str) -> str:
    total = g.op("Mul", "x", g.const(np.float32(0)))
    for index in range(config.num_experts):
        hit = g.op("Equal", ids, g.const(index))
        factor = g.op("ReduceSum", g.op("Where", hit, weights, g.const(np.float32(0))), g.const(np.array([-1])))
        there = g.op("Squeeze", g.op("ReduceMax", g.op("Cast", hit, to=TensorProto.INT32)), g.const(np.array([0, 1])))
        inner, branches = Graph(), {}
        inner.tensors = g.tensors
        mixed = inner.op("MatMul", "x", inner.const(np.ascontiguousarray(inputs["gate_up_weight"][index].T)))
        out = inner.op(
            "MatMul",
            swiglu(inner, mixed, 1, config.intermediate_size),
            inner.const(np.ascontiguousarray(inputs["down_weight"][index].T)),
        )
        result = inner.op("Add", total, inner.op("Mul", out, factor))
        for node in inner.nodes:  # names of their own
            node.input[:] = [f"e{index}_{n}" if n.startswith("v") and n in _made(inner) else n for n in node.input]
        for node in inner.nodes:
            node.output[:] = [f"e{index}_{n}" for n in node.output]
        value = helper.make_tensor_value_info(f"e{index}_{result}", TensorProto.FLOAT, None)
        branches["then_branch"] = helper.make_graph(inner.nodes, "then", [], [value])
        same = helper.make_node("Identity", [total], [f"e{index}_same"])
        value = helper.make_tensor_value_info(f"e{index}_same", TensorProto.FLOAT, None)
        branches["else_branch"] = helper.make_graph([same], "else", [], [value])
        total = g.op("If", g.op("Cast", there, to=TensorProto.BOOL), **branches)
    return str(total)


def _made(g: Graph) -> set[str]:
    return {name for node in g.nodes for name in node.output}


def unfused(config: MoeConfig, inputs: Arrays, form: str) -> bytes:
    g = Graph()
    ids, weights = router(g, config, inputs)
    routed = (gathered if form == "gather" else looped)(g, config, inputs, ids, weights)
    mixed = g.op("MatMul", "x", g.const(np.ascontiguousarray(inputs["shared_gate_up_weight"].T)))
    hidden = swiglu(g, mixed, 1, config.shared_intermediate_size)
    shared = g.op("MatMul", hidden, g.const(np.ascontiguousarray(inputs["shared_down_weight"].T)))
    g.nodes.append(helper.make_node("Add", [routed, shared], ["y"]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, config.hidden_size]) for n in ("x", "y")]
    graph = helper.make_graph(g.nodes, "block", ends[:1], ends[1:], g.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())


def fused(config: MoeConfig, inputs: Arrays, scheme: str) -> bytes:
    import onnx_ir as ir

    model = ir.from_proto(call_model(replace(config, has_ids=False), inputs, dynamic=False))
    if scheme != "float32":
        Quantize(parse_quantize(f"experts={scheme}")).call(model)
    return bytes(ir.to_proto(model).SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--experts", type=int, default=CONFIG.num_experts)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0, help="0: as onnxruntime chooses")
    options = parser.parse_args()
    config = replace(CONFIG, num_experts=options.experts)
    inputs = draw_inputs(config, 1, np.random.default_rng(0))

    def quiet() -> ort.SessionOptions:
        made = ort.SessionOptions()
        made.log_severity_level, made.intra_op_num_threads = 3, options.threads
        return made

    sessions = {}
    for form in ("gather", "loop"):
        sessions[form] = ort.InferenceSession(unfused(config, inputs, form), quiet(), ["CPUExecutionProvider"])
    for scheme in ("float32", "int4:128", "int8:128"):
        sessions[scheme] = deltafuse.session(fused(config, inputs, scheme), "cpu", strict=True, sess_options=quiet())
    rng = np.random.default_rng(1)
    tokens = [rng.standard_normal((1, config.hidden_size)).astype(np.float32) for _ in range(options.runs)]

    errors = {
        name: relative_error(session.run(None, {"x": tokens[0]})[0], sessions["gather"].run(None, {"x": tokens[0]})[0])
        for name, session in sessions.items()
    }
    limits = {"gather": 0.0, "loop": 1e-5, "float32": 1e-5, "int4:128": 0.3, "int8:128": 0.03}
    assert all(errors[name] <= limit for name, limit in limits.items()), errors

    times: dict[str, list[float]] = {name: [] for name in sessions}
    for x in tokens:
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, {"x": x})
            times[name].append(1e3 * (time.perf_counter() - start))
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "threads": options.threads or "default",
        "onnxruntime": ort.__version__,
        "experts": config.num_experts,
        "runs": options.runs,
        "milliseconds": {
            name: {"least": round(min(found), 3), "median": round(statistics.median(found), 3)}
            for name, found in times.items()
        },
        "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
    }
    least = {name: min(found) for name, found in times.items()}
    for form in ("gather", "loop"):
        result[f"int4_faster_than_{form}"] = round(least[form] / least["int4:128"], 2)
    result["bar"] = BAR
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
