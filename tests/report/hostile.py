"""A model whose names, and a report whose texts, try to be more than text."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from deltafuse.custom_ops.common.refusal import Refusal
from deltafuse.fusions.result import FusionReport, PassReport, ProofReport, RegionReport

#: Each does something on a page that does not escape it: sets a variable, asks for a file, or ends an element.
NAMES = (
    "<script>window.pwned = 1</script>",
    '"><img src="http://deltafuse.invalid/x.png" onerror="window.pwned = 1">',
    "'><svg onload=window.pwned=1>",
    "</code></style></script><script>window.pwned = 1</script>",
    "a&lt;b&amp;c",
    "javascript:window.pwned=1",
    "\u202egnp.exe\u2066",
    "line\none\ttwo\x00\x1b[31m\u2028\ud800",
    "x" * 3000,
    "",
)


def model(names: Sequence[str] = NAMES) -> ir.Model:
    """A chain of nodes, each with a hostile name, module and operator."""
    value = first = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    nodes = []
    for i, name in enumerate(names):
        node = ir.node("Identity", [value], name=name)
        node.op_type = f"Op{name}"
        node.metadata_props["pkg.torch.onnx.name_scopes"] = f"['', 'm.layers.{i}.{name}', 'op']"
        value = node.outputs[0]
        value.name = f"v{i}{name}"
        nodes.append(node)
    return ir.Model(ir.Graph([first], [value], nodes=nodes, opset_imports={"": 20}, name="g"), ir_version=10)


def report(names: Sequence[str] = NAMES) -> FusionReport:
    """A report with a hostile name in each of its texts."""
    made = FusionReport(source="m/" + names[0].replace("/", "_"), output=names[-1], output_bytes=1, nodes_before=10)
    made.model, made.nodes_after = model(names), 10
    for number, name in enumerate(names):
        proof = ProofReport(True, 1e-7, 1e-4, structure=name, reason=name)
        proof.cases = [{"case": name, "tokens": 3, "errors": [1e-7, float("nan")], "original": name}]
        region = RegionReport("kda", name, ("fused", "refused")[number % 2], 3, name, Refusal(name, name, name))
        region.config, region.absorbed, region.notes = {name: name}, [name], [f"repaired: {name}"]
        region.not_absorbed, region.proof = [Refusal(name, name, name)], proof
        region.members = [(f"Op{name}", name, (f"v{number}{name}",))]
        made.regions.append(region)
    made.passes = [PassReport(name, True, 1, 0.1, [Refusal(name, f"why {name}", name)], [name]) for name in names]
    made.repairs, made.warnings, made.opsets = [*names], [*names], {names[0]: 1}
    made.target = made.deltafuse_version = names[0]
    return made


def bench(names: Sequence[str] = NAMES) -> dict[str, object]:
    """Times with hostile names."""
    timing = {"phase": "decode", "tokens": 1, "median_ms": 1.5, "error": 0.0, "same": True}
    variants = [
        {"name": n, "device": n, "timings": [timing], "failed": n, "notes": [n], "nodes": {n: 3}} for n in names
    ]
    return {"variants": variants, "onnxruntime": names[0]}
