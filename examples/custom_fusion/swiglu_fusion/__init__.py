"""A fusion from outside deltafuse: ``silu(gate) * up``, the middle of a SwiGLU block, becomes ``acme::SwiGlu``.

The package's entry point (``pyproject.toml``) names :class:`FuseSwiGlu`; with the package installed, ``deltafuse fuse``
finds it by itself, proves each place and reports it like its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_ir as ir
from deltafuse.custom_ops.common.function_call import attach_function
from deltafuse.custom_ops.common.graph_builder import GraphBuilder
from deltafuse.custom_ops.common.refusal import Refusal
from deltafuse.fusions.candidate import Candidate, Operand, Piece, Result
from deltafuse.fusions.fuse import FusePass, Place
from deltafuse.fusions.graph import GraphView, is_op, rank_of, static_dims
from deltafuse.fusions.match import match_silu
from deltafuse.fusions.op import Case, FusedOp
from deltafuse.fusions.proof import Prover
from deltafuse.fusions.region import backward
from deltafuse.fusions.result import RegionReport
from deltafuse.registry.ops import Op

DOMAIN, OP_TYPE, VERSION = "acme", "SwiGlu", 1
CASES = ("normal", "wide", "zeros")


class SwiGlu(FusedOp):
    """``y = gate * sigmoid(gate) * up``; all three are [..., channels] of one type."""

    key = "swiglu"

    def make_call(
        self,
        candidate: Candidate,
        inputs: Mapping[str, ir.Value],
        opset: int,
        dtype: ir.DataType,
        state_dtype: ir.DataType,
        name: str,
    ) -> tuple[ir.Function, ir.Node, dict[str, ir.Value]]:
        builder = GraphBuilder()
        gate, up = builder.value("gate"), builder.value("up")
        y = builder.mul(builder.mul(gate, builder.op("Sigmoid", gate)), up)
        graph = builder.graph([gate, up], [y], opset)
        function = ir.Function(DOMAIN, OP_TYPE, graph=graph, attributes=[])
        made = ir.Value(type=ir.TensorType(dtype), shape=inputs["gate"].shape)
        node = ir.node(OP_TYPE, [inputs["gate"], inputs["up"]], domain=DOMAIN, outputs=[made], name=name)
        return function, node, {"y": made}

    def attach(self, model: ir.Model, function: ir.Function) -> None:
        attach_function(model, function, VERSION)

    def plan(self, candidate: Candidate, bounds: Callable[[], list[int]]) -> list[Case]:
        """Each case once; sizes that the graph leaves open get a few values."""
        sizes = self.sizes(candidate)
        return [
            Case(name, {key: size if isinstance(size, int) else 2 + i for key, size in sizes.items()}, required=i == 0)
            for i, name in enumerate(CASES)
        ]

    def draw(self, candidate: Candidate, case: Case, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([seed, CASES.index(case.name)])
        shape = [case.sizes[f"d{axis}"] for axis in range(candidate.config["rank"])]
        scale = {"normal": 1.0, "wide": 30.0, "zeros": 0.0}[case.name]
        return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name in ("gate", "up")}

    def reference(self, candidate: Candidate, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        gate, up = (inputs[name].astype(np.float64) for name in ("gate", "up"))
        return {"y": gate / (1 + np.exp(-np.clip(gate, -700, 700))) * up}

    def describe(self, candidate: Candidate) -> dict[str, int]:
        return dict(candidate.config)


SWIGLU = SwiGlu()


class FuseSwiGlu(FusePass):
    """Find ``silu(gate) * up`` where neither is a constant."""

    name = "fuse-swiglu"
    needs = frozenset({"constants", "types"})
    gives = frozenset({"swiglu"})
    op = SWIGLU
    registration = Op(
        key="swiglu",
        domain=DOMAIN,
        op_type=OP_TYPE,
        version=VERSION,
        spec="",
        summary="the gated middle of a SwiGLU block",
    )

    def places(self, view: GraphView) -> list[Place]:
        found = []
        for node in view.graph:
            for silu, up in _factors(node):
                gate = None if silu is None else match_silu(view, silu)
                if gate is None or up is None or view.is_const(up) or view.is_const(gate):
                    continue
                ends = {gate, up}
                region = backward(view, [node.outputs[0]], stop=ends.__contains__)
                if set(region.borders) == ends:
                    found.append(Place(node.name or node.outputs[0].name or "", "silu-mul", region, [node]))
                break
        return found

    def candidates(
        self, view: GraphView, place: Place, prover: Prover, region: RegionReport
    ) -> Iterator[Candidate] | Refusal | None:
        y = place.region.outputs[0]
        (node,) = place.anchors
        silu, up = next(
            pair for pair in _factors(node) if pair[0] is not None and match_silu(view, pair[0]) is not None
        )
        assert silu is not None and up is not None
        gate = match_silu(view, silu)
        assert gate is not None
        if static_dims(gate) is None or static_dims(gate) != static_dims(up):
            return Refusal("shape", "gate and up are of different or unknown shapes", place.name)
        axes = tuple(f"d{axis}" for axis in range(rank_of(gate) or 0))
        operands = {name: Operand((Piece(value, axes=axes),)) for name, value in (("gate", gate), ("up", up))}
        candidate = Candidate(
            self.op, place.name, place.form, {"rank": len(axes)}, operands, {}, {"y": Result((y,))}, place.region
        )
        # A sigmoid saturates: two that differ far out look alike. This one is the op's own, known for what it is.
        candidate.explained = frozenset(place.region.nodes)
        return iter([candidate])


def _factors(node: ir.Node) -> Iterator[tuple[ir.Node | None, ir.Value | None]]:
    """The two ways to read a product: the node that makes one factor, and the other factor."""
    if is_op(node, "Mul"):
        a, b = node.inputs
        for one, other in ((a, b), (b, a)):
            yield (None if one is None else one.producer()), other
