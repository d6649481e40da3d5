"""Forms of one thing brought to the one that the recogniser reads; what is not fused gets its own form back.

- ``Where(hidden, -inf, scores)``, PyTorch's ``masked_fill``, becomes ``Where(not hidden, scores, -inf)``.
- A mask of two or three axes gets four.
- ``RotaryEmbedding``, which torch.onnx makes of rotations from opset 23 on, and ONNX Runtime's own, which onnxscript's
  fusions for it make, become their sums and products.
- An ``Einsum`` with a layer's weight of three axes becomes a ``MatMul`` with two and a ``Reshape``. One of three
  operands behind an attention, the last one such a weight, becomes two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ..graph import GraphView, attribute_int, attribute_string, is_op, rank_of, static_dims
from .core import leads_to_product
from .masks import nothing
from .plain_forms import feeds_attention, leads_to_softmax, operands_of, terms_of


class Plain:
    """Changes to one graph that can be taken back. No value changes by them."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._undo: list[Callable[[], None]] = []
        self._constants: set[ir.Value] = set()
        self._tables: dict[tuple[ir.Value, ir.Value | None, int], ir.Value] = {}  # rows of cosines and sines
        self._table_nodes: list[ir.Node] = []

    def make(self) -> None:
        """Bring the forms to the plain ones."""
        view = GraphView(self.graph)
        for node in list(self.graph):
            if is_op(node, "Where"):
                self._turn(view, node)
                self._widen(view, node, 0)
            elif is_op(node, "Add"):
                for i in (0, 1):
                    self._widen(view, node, i)
            elif is_op(node, "Einsum"):
                self._halve(view, node)
                self._flatten(view, node)
            elif node.op_type == "RotaryEmbedding" and (operands := operands_of(node)) is not None:
                self._spell(node, *operands)

    def restore(self) -> None:
        """Take back what still stands in the graph: it was not fused."""
        for undo in reversed(self._undo):
            undo()

    # --- masks ------------------------------------------------------------------------------------------------------

    def _turn(self, view: GraphView, node: ir.Node) -> None:
        """Let a fill of what is hidden be a choice of what is kept."""
        hidden, least, scores = node.inputs
        number = view.scalar(least)
        if hidden is None or least is None or scores is None or number is None or not number <= nothing(least.dtype):
            return
        if not leads_to_product(view, scores):
            return
        inner = hidden.producer()
        made: list[ir.Node] = []
        if is_op(inner, "Not") and inner is not None and inner.inputs[0] is not None:
            kept = inner.inputs[0]
        else:
            kept = self._add(made, f"{node.outputs[0].name}__kept", "Not", [hidden], ir.DataType.BOOL, hidden.shape)
            self.graph.insert_before(node, made)
        for i, value in enumerate((kept, scores, least)):
            node.replace_input_with(i, value)

        def undo() -> None:
            now = node.inputs[0]
            if node.graph is not None and node.inputs[1:] == (scores, least) and now is not None:
                value = hidden
                if inner is not None and inner.graph is None:  # nothing read it for a while
                    again: list[ir.Node] = []
                    value = self._add(again, hidden.name or "", "Not", [now], hidden.dtype, hidden.shape)
                    again[0].name, value.name = inner.name, hidden.name
                    self.graph.insert_before(node, again)
                for i, new in enumerate((value, least, scores)):
                    node.replace_input_with(i, new)
            self._drop(made)

        self._undo.append(undo)

    def _widen(self, view: GraphView, node: ir.Node, index: int) -> None:
        """Let a mask of scores have as many axes as they."""
        mask, scores = node.inputs[index], node.inputs[1 - index]
        rank = None if mask is None else rank_of(mask)
        if mask is None or rank not in (2, 3) or view.is_const(mask) or rank_of(node.outputs[0]) != 4:
            return
        if not leads_to_product(view, scores) or leads_to_product(view, mask):
            return
        made: list[ir.Node] = []
        stem = f"{node.outputs[0].name}__mask"
        front = self._constant(stem, range(4 - rank))
        shape = ir.Shape([1] * (4 - rank) + list(mask.shape or ()))
        wide = self._add(made, stem, "Unsqueeze", [mask, front], mask.dtype, shape)
        self.graph.insert_before(node, made)
        node.replace_input_with(index, wide)

        def undo() -> None:
            if node.graph is not None and node.inputs[index] is wide:
                node.replace_input_with(index, made[0].inputs[0])
            self._drop(made)

        self._undo.append(undo)

    # --- layers -----------------------------------------------------------------------------------------------------

    def _halve(self, view: GraphView, node: ir.Node) -> None:
        """Let a product of probabilities, values and a projection be two products."""
        equation = attribute_string(node, "equation", "")
        terms, right = terms_of(equation)
        if len(node.inputs) != 3 or len(terms) != 3 or not right or any(len(set(t)) != len(t) for t in terms):
            return
        a, b, weight = node.inputs
        if (
            a is None
            or b is None
            or weight is None
            or not view.is_const(weight)
            or view.is_const(a)
            or view.is_const(b)
        ):
            return
        if a.shape is None or b.shape is None or not leads_to_softmax(a):
            return
        kept = [c for c in dict.fromkeys(terms[0] + terms[1]) if c in terms[2] or c in right]
        sizes = dict(zip(terms[1], b.shape, strict=True))
        sizes |= {c: d for c, d in zip(terms[0], a.shape, strict=True) if d != 1 or c not in sizes}
        made: list[ir.Node] = []
        first: dict[str, object] = {"equation": f"{terms[0]},{terms[1]}->{''.join(kept)}"}
        shape = ir.Shape([sizes[c] for c in kept])
        product = self._add(made, f"{node.outputs[0].name}__first", "Einsum", [a, b], a.dtype, shape, first)
        self.graph.insert_before(node, made)

        def become(inputs: Sequence[ir.Value | None], text: str) -> None:
            node.resize_inputs(len(inputs))
            for i, value in enumerate(inputs):
                node.replace_input_with(i, value)
            node.attributes["equation"] = ir.AttrString("equation", text)

        become([product, weight], f"{''.join(kept)},{terms[2]}->{right}")

        def undo() -> None:
            if node.graph is not None and node.inputs[0] is product and made[0].graph is not None:
                become([*made[0].inputs, node.inputs[1]], equation)
            self._drop(made)

        self._undo.append(undo)

    def _flatten(self, view: GraphView, node: ir.Node) -> None:
        """Let a layer with a weight [channels, heads, channels of a head] be one with two axes."""
        equation = attribute_string(node, "equation", "")
        terms, right = terms_of(equation)
        if len(node.inputs) != 2 or len(terms) != 2 or not right:
            return
        x, weight = node.inputs
        dims = None if weight is None else static_dims(weight)
        if (
            x is None
            or weight is None
            or x.shape is None
            or dims is None
            or not view.is_const(weight)
            or view.is_const(x)
        ):
            return
        data, own = terms
        plain = len(data) == 3 and len(own) == 3 and len(set(data + own)) == 5 and own[0] == data[2]
        if not plain or right != data[:2] + own[1:] or None in dims or not feeds_attention(node):
            return
        _, heads, width = (d for d in dims if d is not None)
        made: list[ir.Node] = []
        stem, lead = f"{node.outputs[0].name}__layer", list(x.shape[:2])
        shape = self._constant(stem, (0, 0, heads, width))
        flat = self._flat(weight, dims[0] or 0, heads * width)
        product = self._add(made, stem, "MatMul", [x, flat], x.dtype, ir.Shape([*lead, heads * width]))
        self.graph.insert_before(node, made)

        def become(kind: str, inputs: Sequence[ir.Value | None]) -> None:
            node.op_type = kind
            node.attributes.clear()
            for i, value in enumerate(inputs):
                node.replace_input_with(i, value)

        become("Reshape", [product, shape])

        def undo() -> None:
            if node.graph is not None and node.inputs[0] is product and made[0].graph is not None:
                become("Einsum", [made[0].inputs[0], weight])
                node.attributes["equation"] = ir.AttrString("equation", equation)
                if not shape.uses():
                    self.graph.initializers.pop(str(shape.name), None)
            self._drop(made)

        self._undo.append(undo)

    # --- rotations --------------------------------------------------------------------------------------------------

    def _spell(self, node: ir.Node, x: ir.Value, cos: ir.Value, sin: ir.Value, places: ir.Value | None) -> None:
        """Write a rotation out as the sums and products that it is."""
        if node.outputs[0].is_graph_output() or not feeds_attention(node):
            return
        dims, width = static_dims(x), attribute_int(node, "rotary_embedding_dim", 0)
        heads = attribute_int(node, "num_heads", 0)
        if dims is None or dims[-1] is None or (len(dims) == 3 and not heads) or len(dims) not in (3, 4):
            return
        head = dims[-1] // heads if len(dims) == 3 else dims[-1]
        width = width or head
        if width % 2 or width > head or (len(dims) == 3 and dims[-1] % heads):
            return
        made: list[ir.Node] = []
        stem, dtype, shape = f"{node.outputs[0].name}__rope", x.dtype, list(x.shape or ())

        def add(kind: str, inputs: Sequence[ir.Value], dims: Sequence[object] | None, **attributes: object) -> ir.Value:
            known = None if dims is None else ir.Shape(dims)  # type: ignore[arg-type]
            return self._add(made, stem, kind, inputs, dtype, known, attributes)

        def ints(*numbers: int) -> ir.Value:
            return self._constant(stem, numbers)

        tables = []
        for table in (cos, sin):
            at = 2 if len(dims) == 3 else 1
            known = self._tables.get((table, places, at))
            if known is None:
                before, rows = len(made), table.shape
                value = table
                if places is not None:
                    value, rows = add("Gather", [table, places], None, axis=0), places.shape
                front = None if rows is None else list(rows if places is not None else rows[:-1])
                known = add(
                    "Unsqueeze", [value, ints(at)], None if front is None else [*front[:at], 1, *front[at:], width // 2]
                )
                for fresh in made[before:]:
                    fresh.outputs[0].type = None if table.dtype is None else ir.TensorType(table.dtype)
                if places is not None and front is not None:
                    value.shape = ir.Shape([*front, width // 2])
                self._tables[table, places, at] = known
                self._table_nodes += made[before:]
            tables.append(known)
        if len(dims) == 3:
            shape = [*shape[:2], heads, head]
            x = add("Reshape", [x, ints(0, 0, heads, head)], shape)
        half, lead = width // 2, shape[:-1]

        def cut(value: ir.Value, start: int, end: int, step: int = 1) -> ir.Value:
            size = (end - start + step - 1) // step
            return add("Slice", [value, ints(start), ints(end), ints(-1), ints(step)], [*lead, size])

        if attribute_int(node, "interleaved", 0):
            parts = [cut(x, 0, width, 2), cut(x, 1, width, 2)]
        else:
            parts = [cut(x, 0, half), cut(x, half, width)]
        (a, b), (c, s) = parts, tables
        pairs = [
            add(kind, [add("Mul", [u, v], [*lead, half]), add("Mul", [w, z], [*lead, half])], [*lead, half])
            for kind, u, v, w, z in (("Sub", a, c, b, s), ("Add", a, s, b, c))
        ]
        if attribute_int(node, "interleaved", 0):
            pairs = [add("Unsqueeze", [p, ints(-1)], [*lead, half, 1]) for p in pairs]
            both = add("Concat", pairs, [*lead, half, 2], axis=-1)
            turned = add("Reshape", [both, ints(*[0] * len(lead), width)], [*lead, width])
        else:
            turned = add("Concat", pairs, [*lead, width], axis=-1)
        if width < head:
            turned = add("Concat", [turned, cut(x, width, head)], [*lead, head], axis=-1)
        if len(dims) == 3:
            turned = add("Reshape", [turned, ints(0, 0, heads * head)], [*list(x.shape or ())[:2], heads * head])
        self.graph.insert_before(node, made)
        result, attributes = node.outputs[0], dict(node.attributes)
        given = [v for v in node.inputs if v is not None]
        readers = [*self._table_nodes, *made]
        slots = [next((n, i) for n in readers for i, v in enumerate(n.inputs) if v is value) for value in given]
        result.replace_all_uses_with(turned)
        self.graph.remove(node, safe=True)

        def undo() -> None:
            if made[-1].graph is not None and turned.uses():
                operands = [n.inputs[i] for n, i in slots]
                again = ir.node(node.op_type, operands, attributes, domain=node.domain, name=node.name)
                value = again.outputs[0]
                value.name, value.type, value.shape = result.name, result.type, result.shape
                again.metadata_props.update(node.metadata_props)
                self.graph.insert_after(made[-1], again)
                turned.replace_all_uses_with(value)
            self._drop(made)

        self._undo.append(undo)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _add(
        self,
        made: list[ir.Node],
        stem: str,
        kind: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType | None,
        shape: ir.Shape | None,
        attributes: dict[str, object] | None = None,
    ) -> ir.Value:
        name = stem if kind == "Not" else f"{stem}_{len(made)}"
        node = ir.node(kind, inputs, attributes or {}, name=name)  # type: ignore[arg-type]
        value = node.outputs[0]
        value.name, value.shape = f"{name}_0", shape
        value.type = None if dtype is None else ir.TensorType(dtype)
        made.append(node)
        return value

    def _constant(self, stem: str, numbers: Sequence[int]) -> ir.Value:
        name = f"{stem}_{'_'.join(map(str, numbers))}"
        known = self.graph.initializers.get(name)
        if known is not None:
            return known
        array = np.array(numbers, np.int64)
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        self.graph.register_initializer(value)
        self._constants.add(value)
        return value

    def _flat(self, weight: ir.Value, rows: int, columns: int) -> ir.Value:
        """A constant's numbers with two axes; they are read when they are wanted."""
        name = f"{weight.name}__{rows}_{columns}"
        known = self.graph.initializers.get(name)
        tensor = weight.const_value
        if known is not None or tensor is None:
            return weight if known is None else known

        def read() -> ir.TensorProtocol:
            return ir.tensor(tensor.numpy().reshape(rows, columns), dtype=tensor.dtype, name=name)

        lazy = ir.LazyTensor(read, tensor.dtype, ir.Shape([rows, columns]), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([rows, columns]), const_value=lazy)
        self.graph.register_initializer(value)
        self._constants.add(value)
        return value

    def _drop(self, nodes: Sequence[ir.Node]) -> None:
        """Remove nodes that nothing reads."""
        for node in reversed(nodes):
            if node.graph is None or any(v.uses() or v.is_graph_output() for v in node.outputs):
                continue
            inputs = [v for v in node.inputs if v is not None]
            self.graph.remove(node, safe=True)
            for value in inputs:
                if value in self._constants and not value.uses():
                    self.graph.initializers.pop(str(value.name), None)
