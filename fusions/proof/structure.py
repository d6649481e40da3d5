"""The structure of a region as a hash: equal for layers that differ only in their parameters and names."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx_ir as ir

from ..candidate import Candidate
from ..dims import symbol
from ..graph import GraphView, subgraphs_of
from .extract import Extract


class _Numbers:
    """Values numbered in the order in which they are met."""

    def __init__(self) -> None:
        self._of: dict[ir.Value, int] = {}

    def __call__(self, value: ir.Value | None) -> str:
        if value is None:
            return "-"
        return str(self._of.setdefault(value, len(self._of)))


def structure_hash(view: GraphView, candidate: Candidate, extract: Extract) -> str:
    """A hash over the nodes, their attributes, how they hang together, all constants that are not parameters of the op,
    the candidate's configuration and how its operands and results are laid out."""
    number = _Numbers()
    digest = hashlib.blake2b(digest_size=16)

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode())

    parameters = {s for p in candidate.parameters.values() for s in p.sources}
    for value in extract.inputs:
        add("input", number(value), _dims(value), value.dtype)
    for value in extract.shape_inputs:
        add("shape", number(value), _dims(value))
    for value in extract.constants:
        number(value)
    for node in extract.nodes:
        _add_node(node, number, add)
    for value in extract.constants:
        tensor = value.const_value
        assert tensor is not None
        if value in parameters:
            add("parameter", number(value), tensor.dtype, tuple(tensor.shape))
        else:
            add("constant", number(value), tensor.dtype, tuple(tensor.shape))
            digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    add("outputs", [number(v) for v in extract.outputs], candidate.op.key, candidate.config, candidate.one_token)
    for name, operand in candidate.operands.items():
        add(name, operand.axis, operand.reshape)
        add([(number(p.value), p.permutation, p.reshape, p.axes, p.each_row_of is None) for p in operand.pieces])
    for name, parameter in candidate.parameters.items():
        add(name, [number(s) for s in parameter.sources], parameter.form)
    for name, result in candidate.results.items():
        add(name, [number(t) for t in result.targets], result.reshape, result.permutation, result.sizes)
    add(view.graph.opset_imports.get(""))
    return digest.hexdigest()


def _dims(value: ir.Value) -> object:
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else symbol(d) for d in value.shape)


def _add_node(node: ir.Node, number: _Numbers, add: object) -> None:
    write = add  # a function of any parts
    assert callable(write)
    write(node.domain, node.op_type, [number(v) for v in node.inputs])
    for name in sorted(node.attributes):
        attribute = node.attributes[name]
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            continue
        if attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            write(name, tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes())
        else:
            write(name, attribute.value)
    for graph in subgraphs_of(node):
        write("graph", [number(v) for v in graph.inputs])
        for value in graph.initializers.values():
            inner_tensor = value.const_value
            if inner_tensor is not None:
                shape = tuple(inner_tensor.shape)
                write("inner", number(value), inner_tensor.dtype, shape, inner_tensor.numpy().tobytes())
        for inner in graph:
            _add_node(inner, number, add)
        write("results", [number(v) for v in graph.outputs])
    write([number(v) for v in node.outputs])
