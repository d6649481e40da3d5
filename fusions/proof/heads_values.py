"""Heads through arithmetic: elementwise, sums, products, attention."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ..graph import attribute_int, attribute_ints, attribute_string
from .heads_base import Heads
from .spread import HeadsMix, Spread, shape_of


class Values(Heads):
    """Rules of nodes that compute."""

    def _elementwise(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        rank = len(shape_of(node.outputs[0]))
        spread = self._aligned(node, rank, node.inputs)
        for i, value in enumerate(node.inputs):
            if value is None or value in self.spreads:
                continue
            axis = spread.axis - rank + len(shape_of(value))
            if axis < 0 or shape_of(value)[axis] == 1:
                continue
            if not self.view.is_const(value):
                raise HeadsMix(f"{value.name!r} has entries for each head, but does not come from the operands")
            proto.input[i] = self.cut(value, spread, axis)
        self._give(node, spread)

    def _reduce(self, node: ir.Node) -> None:
        spread = self._only(node)
        rank = len(shape_of(node.inputs[0]))  # type: ignore[arg-type]
        if "axes" in node.attributes:
            axes = attribute_ints(node, "axes") or []
        else:
            axes = self._const_ints(node.inputs[1] if len(node.inputs) > 1 else None)
        axes = [a % rank for a in axes]
        if spread.axis in axes or not axes:
            raise HeadsMix("it reduces over the heads")
        dropped = 0 if attribute_int(node, "keepdims", 1) else sum(1 for a in axes if a < spread.axis)
        self._give(node, Spread(spread.axis - dropped, spread.owner))

    def _on_softmax(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        if attribute_int(node, "axis", -1) % len(shape_of(node.outputs[0])) == spread.axis:
            raise HeadsMix("it runs over the heads")
        self._give(node, spread)

    def _on_attention(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._aligned(node, 4, node.inputs[:3])
        if spread.axis != 1 or any(v not in self.spreads for v in node.inputs[:3]) or len(node.outputs) > 1:
            raise HeadsMix("its operands have their heads in different places")
        for value in node.inputs[3:]:
            if value is not None and (value in self.spreads or (len(shape := shape_of(value)) > 3 and shape[-3] != 1)):
                raise HeadsMix("a mask with entries for each head")
        self._give(node, spread)

    def _on_gemm(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        self._projection(node, proto, 0 if attribute_int(node, "transB", 0) else 1)

    def _projection(self, node: ir.Node, proto: onnx.NodeProto, columns: int) -> None:
        """A layer whose weight, a parameter, has columns for each head."""
        weight = node.inputs[1]
        if weight is None or node.inputs[0] in self.spreads or len(node.inputs) > 2:
            raise HeadsMix("it multiplies over the heads")
        spread = self.spreads[weight]
        if spread.axis != columns:
            raise HeadsMix("it multiplies over the heads")
        proto.input[1] = self.cut(weight, spread, columns)
        self._give(node, Spread(len(shape_of(node.outputs[0])) - 1, spread.owner))

    def _on_matmul(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        rank = len(shape_of(node.outputs[0]))
        if node.inputs[1] in self.spreads and node.inputs[1] in self.parameters:
            self._projection(node, proto, 1)
            return
        spread = self._aligned(node, rank, node.inputs)
        if spread.axis >= rank - 2:
            raise HeadsMix("it multiplies over the heads")
        for i, value in enumerate(node.inputs):
            if value is None or value in self.spreads:
                continue
            axis = spread.axis - rank + len(shape_of(value))
            if axis >= 0 and shape_of(value)[axis] != 1:
                if not self.view.is_const(value):
                    raise HeadsMix(f"{value.name!r} has entries for each head, but does not come from the operands")
                proto.input[i] = self.cut(value, spread, axis)
        self._give(node, spread)

    def _on_cumsum(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        axis = self._const_ints(node.inputs[1])[0] % len(shape_of(node.outputs[0]))
        if axis == spread.axis:
            raise HeadsMix("it sums over the heads")
        self._give(node, spread)

    def _on_conv(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        spread = self._only(node)
        if spread.axis != 1 or not self.view.is_depthwise(node):
            raise HeadsMix("it mixes channels")
        for i in range(1, len(node.inputs)):
            value = node.inputs[i]
            if value is not None:
                proto.input[i] = self.cut(value, spread, 0)
        for attribute in proto.attribute:
            if attribute.name == "group":
                attribute.i = self.kept_count(spread)
        self._give(node, spread)

    def _on_einsum(self, node: ir.Node, proto: onnx.NodeProto) -> None:
        equation = attribute_string(node, "equation", "").replace(" ", "")
        if "->" not in equation or "." in equation:
            raise HeadsMix("an equation without an explicit result")
        left, right = equation.split("->")
        terms = left.split(",")
        letters = {
            (terms[i][self.spreads[v].axis], self.spreads[v].owner)
            for i, v in enumerate(node.inputs)
            if v is not None and v in self.spreads
        }
        if len(letters) != 1:
            raise HeadsMix("its operands have their heads in different places")
        letter, owner = next(iter(letters))
        if letter not in right:
            raise HeadsMix("it sums over the heads")
        for i, value in enumerate(node.inputs):
            if value is not None and value not in self.spreads and letter in terms[i]:
                if not self.view.is_const(value):
                    raise HeadsMix(f"{value.name!r} does not come from the operands")
                proto.input[i] = self.cut(value, Spread(0, owner), terms[i].index(letter))
        self._give(node, Spread(right.index(letter), owner))
