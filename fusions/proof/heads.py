"""A smaller, sound proof for frozen real-size exports: the same region with two of its heads.

Every value of the region is followed to see which of its axes, if any, runs over heads, and which index belongs to
which head. Each node must treat that axis as a batch axis: then heads do not mix, the region computes each head on its
own, and the region cut down to some heads gives exactly those heads' part of the whole region's results. An op without
a rule, or a node that mixes heads, stops the attempt with a reason.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from .heads_moves import Moves
from .heads_values import Values
from .spread import HeadsMix, Spread, shape_of

ELEMENTWISE = frozenset(
    "Abs Add And Cast Ceil Clip Div Equal Erf Exp Floor Greater GreaterOrEqual HardSigmoid Identity IsNaN Less "
    "LessOrEqual Log Max Min Mul Neg Not Or Pow QuickGelu Reciprocal Relu Sigmoid Sign Softplus Sqrt Sub Swish Tanh "
    "Where Xor".split()
)
REDUCTIONS = frozenset("ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare".split())
NORMS = frozenset("RMSNormalization SimplifiedLayerNormalization LpNormalization".split())


class HeadSlicer(Moves, Values):
    """Follows heads through nodes and writes the cut-down nodes.

    Args:
        view: the graph.
        keep: heads that stay.
        spreads: where heads lie in the region's inputs.
        constants: arrays of the constants, parameters perturbed already.
        parameters: constants that the op takes as parameters; all others must be the same for every head, or the heads
            that are cut away could differ from those that stay.
        shared: this many heads may share what an `Expand` gives each of them; 0: no `Expand` is cut for that.
    """

    def run(self, nodes: list[ir.Node], protos: list[onnx.NodeProto]) -> None:
        """Follow the heads through the nodes, in order, and change their protos in place."""
        for node, proto in zip(nodes, protos, strict=True):
            touched = [v for v in node.inputs if v is not None and v in self.spreads]
            if not touched:
                if self.shared and node.op_type == "Expand":
                    self._share(node, proto)
                continue
            try:
                self._node(node, proto)
            except HeadsMix as error:
                raise HeadsMix(f"{node.op_type} {node.name!r}: {error}") from None

    def _node(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        kind = node.op_type
        if kind in ELEMENTWISE:
            self._elementwise(node, proto)
        elif kind in REDUCTIONS:
            self._reduce(node)
        elif kind in NORMS:
            spread = self._only(node)
            if spread.axis == len(shape_of(node.outputs[0])) - 1:
                raise HeadsMix("it runs over the heads")
            self._give(node, spread)
        else:
            rule = getattr(self, f"_on_{kind.lower()}", None)
            if rule is None or node.domain not in ("", "ai.onnx"):
                raise HeadsMix("no rule for this op")
            rule(node, proto)

    def _share(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        """What is repeated for each head is cut where it is repeated."""
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])  # type: ignore[arg-type]
        before = [1] * (len(after) - len(before)) + before
        grown = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a == 1 and b == self.shared]
        if not grown:
            return
        axis = 1 if 1 in grown else grown[0]
        spread = Spread(axis, tuple(range(self.shared)))
        target = list(after)
        target[axis] = self.kept_count(spread)
        proto.input[1] = self.tensor("shape", np.array(target, np.int64))
        self.spreads[node.outputs[0]] = spread
