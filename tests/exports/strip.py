"""Take all names and metadata off a model: what is left is structure, weights and the graph's interface.

Usage as a program: ``python -m exports.strip IN.onnx OUT.onnx [--drop-shapes]``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import onnx


def strip(model: onnx.ModelProto, *, shapes: bool = True) -> onnx.ModelProto:
    """A copy in which only the graph's inputs and outputs have names with a meaning.

    Every other value, initializers included, becomes ``v0``, ``v1``, ... in order of first appearance (anew in every
    subgraph's own scope); node names, doc strings and all ``metadata_props`` go.
    Without ``shapes`` value_info goes too.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.doc_string = copy.producer_name = copy.producer_version = ""
    del copy.metadata_props[:]
    keep = {v.name: v.name for v in [*copy.graph.input, *copy.graph.output]}
    numbers = (number for number in range(1 << 30))
    _graph(copy.graph, keep, numbers, shapes)
    copy.graph.name = "g"
    for function in copy.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        for node in function.node:
            _bare(node)
    return copy


def _bare(item: Any) -> None:
    item.doc_string = ""
    del item.metadata_props[:]
    if isinstance(item, onnx.NodeProto):
        item.name = ""


def _graph(graph: onnx.GraphProto, names: dict[str, str], numbers: Iterator[int], shapes: bool) -> None:
    """Rename in place; ``names`` maps outer values and gets this graph's own: ONNX forbids shadowing."""

    def fresh(name: str) -> str:
        if name and name not in names:
            names[name] = f"v{next(numbers)}"
        return names.get(name, "")

    _bare(graph)
    for value in [*graph.input, *graph.output]:
        _bare(value)
        value.name = fresh(value.name)
    for tensor in graph.initializer:
        tensor.name = fresh(tensor.name)
        tensor.doc_string = ""
        del tensor.metadata_props[:]
    for node in graph.node:
        _bare(node)
        inputs = [fresh(name) for name in node.input]
        del node.input[:]
        node.input.extend(inputs)
        outputs = [fresh(name) for name in node.output]
        del node.output[:]
        node.output.extend(outputs)
        for attribute in node.attribute:
            attribute.doc_string = ""
            if attribute.HasField("g"):
                attribute.g.name = "g"
                _graph(attribute.g, dict(names), numbers, shapes)
            if attribute.HasField("t"):
                attribute.t.name = attribute.t.doc_string = ""
    known = [value for value in graph.value_info if value.name in names] if shapes else []
    for value in known:
        _bare(value)
        value.name = names[value.name]
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in known]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    del graph.quantization_annotation[:]


if __name__ == "__main__":
    source, target = sys.argv[1:3]
    onnx.save(strip(onnx.load(source), shapes="--drop-shapes" not in sys.argv), target)
