"""Fuse an export that you have from Python, and look at the report: on the terminal, and as a page beside the model.

python examples/fuse_in_python.py IN.onnx OUT.onnx
"""

from __future__ import annotations

import sys

import deltafuse


def main(source: str, output: str) -> int:
    try:
        report = deltafuse.fuse(source, output, report=f"{output}.html")
    except deltafuse.DeltaFuseError as error:  # bad input, no onnxruntime, ...: one clear line
        print(f"error: {error}", file=sys.stderr)
        return 2

    print(f"{source}: {report.nodes_before} nodes before, {report.nodes_after} after")
    for region in report.regions:
        if region.status == "fused" and region.proof is not None:
            print(f"{region.name}: fused; worst error {region.proof.error:.1e}, limit {region.proof.tolerance:.0e}")
        else:
            print(f"{region.name}: {region.status}: {region.refusal}")

    # The new model is in the report too, as onnx_ir.Model and, converted, as onnx.ModelProto.
    calls = [node for node in report.to_proto().graph.node if node.domain == "deltafuse"]
    print(f"{len(calls)} fused nodes: {', '.join(node.op_type for node in calls) or 'none'}")
    print(f"what was done, and why it can be trusted: {output}.html")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2]))
