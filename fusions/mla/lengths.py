"""Lengths of caches said without the new caches: a mask that is cut to the length of the keys would otherwise be made
from what the block itself gives."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..dims import symbol
from ..graph import GraphView, attribute_int, is_op, rank_of
from .joins import Join, join_of


def spell_lengths(graph: ir.Graph) -> int:
    """Let `Shape` of a cache with new tokens behind it be the cache's shape and how many they are; gives how often. No
    value changes."""
    _ask_caches(graph)
    view, count = GraphView(graph), 0
    for node in list(graph):
        source = node.inputs[0] if is_op(node, "Shape") and node.inputs else None
        producer, rank = (None, None) if source is None else (source.producer(), rank_of(source))
        join = join_of(view, producer) if producer is not None and is_op(producer, "Concat") else None
        if join is None or rank is None or join.past.producer() is not None or node.outputs[0].is_graph_output():
            continue
        start, end, _ = slice(attribute_int(node, "start", 0), attribute_int(node, "end", rank)).indices(rank)
        if start <= join.axis < end:
            count += _spell(graph, node, join, start, end)
    return count


def _ask_caches(graph: ir.Graph) -> None:
    """Let what reads one size of keys read it off the cache that they are made of: it has that size, by name."""
    view = GraphView(graph)
    caches: dict[str, tuple[ir.Value, int]] = {}
    for node in graph:
        join = join_of(view, node) if is_op(node, "Concat") else None
        dim = None if join is None or join.present.shape is None else join.present.shape[join.axis]
        if join is None or dim is None or isinstance(dim, int) or join.past.producer() is not None:
            continue
        caches.setdefault(symbol(dim) or "", (join.present, join.axis))
    for node in list(graph) if caches else ():
        shape = node.inputs[0].producer() if is_op(node, "Gather") and node.inputs[0] is not None else None
        place = view.ints(node.inputs[1]) if is_op(shape, "Shape") else None
        source = None if shape is None or not place or len(place) != 1 else shape.inputs[0]
        if shape is None or source is None or source.shape is None or not place or shape.attributes:
            continue
        dim = source.shape[place[0]]
        cache, axis = caches.get(("" if isinstance(dim, int) else symbol(dim)) or "", (None, 0))
        if cache is None or cache is source or source.is_graph_output() or not _made_of(source, cache):
            continue
        asked = ir.node("Shape", [cache], {"start": axis, "end": axis + 1}, name=f"{node.outputs[0].name}__keys")
        asked.outputs[0].name = f"{asked.name}_0"
        asked.outputs[0].type, asked.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
        zero = ir.Value(
            name=f"{asked.name}_at",
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape([] if rank_of(node.inputs[1]) == 0 else [1]),  # type: ignore[arg-type]
            const_value=ir.tensor(np.zeros(() if rank_of(node.inputs[1]) == 0 else (1,), np.int64)),  # type: ignore[arg-type]
        )
        graph.register_initializer(zero)
        graph.insert_before(node, asked)
        node.replace_input_with(0, asked.outputs[0])
        node.replace_input_with(1, zero)


def _made_of(value: ir.Value, cache: ir.Value) -> bool:
    """Does a value come from a cache?"""
    stack, seen = [value], {value}
    while stack and len(seen) < 200:
        producer = stack.pop().producer()
        for source in producer.inputs if producer is not None else ():
            if source is cache:
                return True
            if source is not None and source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def _spell(graph: ir.Graph, node: ir.Node, join: Join, start: int, end: int) -> bool:
    """Put the sum in the place of a `Shape` of axes ``start`` to ``end``."""
    dim = None if join.new.shape is None else join.new.shape[join.axis]
    alike = None if isinstance(dim, int) else _axis_like(graph, dim)
    if not isinstance(dim, int) and alike is None:
        return False
    place = np.zeros(end - start, np.int64)
    place[join.axis - start] = dim if isinstance(dim, int) else 1
    total = node.outputs[0]
    stem = f"{total.name}__length"
    more = ir.Value(
        name=f"{stem}_more",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape(place.shape),
        const_value=ir.tensor(place, name=f"{stem}_more"),
    )
    graph.register_initializer(more)
    made: list[ir.Node] = []

    def add(kind: str, inputs: list[ir.Value], size: int, attributes: dict[str, int]) -> ir.Value:
        new = ir.node(kind, inputs, attributes, name=f"{stem}_{len(made)}")
        new.outputs[0].name = f"{stem}_{len(made)}_0"
        new.outputs[0].type, new.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([size])
        made.append(new)
        return new.outputs[0]

    count = more
    if alike is not None:
        value, axis = alike
        tokens = add("Shape", [value], 1, {"start": axis, "end": axis + 1})
        count = add("Mul", [more, tokens], end - start, {})
    there = add("Shape", [join.past], end - start, {"start": start, "end": end})
    result = add("Add", [there, count], end - start, {})
    graph.insert_before(node, made)
    total.replace_all_uses_with(result)
    graph.remove(node, safe=True)
    return True


def _axis_like(graph: ir.Graph, dim: ir.SymbolicDim | None) -> tuple[ir.Value, int] | None:
    """An axis of a graph input that has this size by name."""
    name = None if dim is None else symbol(dim)
    for value in graph.inputs if name is not None else ():
        for axis, own in enumerate(value.shape or ()):
            if not isinstance(own, int) and symbol(own) == name:
                return value, axis
    return None
