"""Small edits of a graph, by node and value names of a committed export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from exports import library
from onnx import helper, numpy_helper


class Editor:
    """Edits a copy of a model; :meth:`done` puts the nodes in order again and drops shapes that may have changed."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.graph = self.model.graph
        self.made = 0
        self.infos = {v.name: v for v in [*model.graph.value_info, *model.graph.input, *model.graph.output]}
        self.declared: list[onnx.ValueInfoProto] = []

    def node(self, name: str) -> onnx.NodeProto:
        """The node of that name, in the graph or a subgraph."""
        return next(node for node in _walk(self.graph) if node.name == name)

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        """A new initializer's name."""
        self.made += 1
        name = f"edited_{self.made}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def array(self, name: str) -> np.ndarray:
        """An initializer's value."""
        return numpy_helper.to_array(next(t for t in self.graph.initializer if t.name == name))

    def make(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A new node's output."""
        self.made += 1
        output = f"edited_{self.made}"
        self.graph.node.append(helper.make_node(op, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def read(self, node: str, index: int, value: str) -> None:
        """Let the node's input be that value."""
        self.node(node).input[index] = value

    def info(self, name: str, like: str) -> onnx.ValueInfoProto:
        """A declaration of the value with the type and shape of another, original one."""
        made = onnx.ValueInfoProto()
        made.CopyFrom(self.infos[like])
        made.name = name
        return made

    def expose(self, name: str, like: str = "") -> None:
        """Make the value a graph output, of the type and shape of ``like``."""
        self.graph.output.append(self.info(name, like or name))

    def declare(self, name: str, like: str) -> None:
        """State the type and shape of a value that nothing can infer."""
        self.declared.append(self.info(name, like))

    def after(self, value: str, op: str, *others: str, **attributes: Any) -> str:
        """Put an operator behind a value: all its readers read the operator's result, whose name is given back."""
        output = self.make(op, value, *others, **attributes)
        new = self.graph.node[-1]
        for node in _walk(self.graph):
            if node is not new and node.name != new.name:
                node.input[:] = [output if name == value else name for name in node.input]
        return output

    def skip(self, node: str, index: int = 0) -> None:
        """Let the node's readers read its input instead."""
        found = self.node(node)
        old, new = found.output[0], found.input[index]
        for other in _walk(self.graph):
            if other.name != node:
                other.input[:] = [new if name == old else name for name in other.input]

    def op(self, node: str, op: str, **attributes: Any) -> None:
        """Make it another operator on the same inputs."""
        found = self.node(node)
        found.op_type = op
        self.attributes(node, **attributes)

    def attributes(self, node: str, **attributes: Any) -> None:
        """Set attributes."""
        found = self.node(node)
        kept = [a for a in found.attribute if a.name not in attributes]
        del found.attribute[:]
        found.attribute.extend(kept)
        found.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())

    def done(self) -> onnx.ModelProto:
        """The edited model, valid and in topological order; nodes nobody reads are dropped."""
        del self.graph.value_info[:]
        self.graph.value_info.extend(self.declared)
        produced = {output: node for node in self.graph.node for output in node.output if output}
        order: list[onnx.NodeProto] = []
        seen: set[int] = set()
        stack = [(produced[o.name], False) for o in reversed(self.graph.output)]
        while stack:
            node, ready = stack.pop()
            if ready:
                order.append(node)
            elif id(node) not in seen:
                seen.add(id(node))
                stack.append((node, True))
                stack += [(produced[name], False) for name in _reads(node) if name in produced]
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        onnx.checker.check_model(self.model)
        return self.model


Edit = Callable[[Editor], None]


def edited(base: str, *edits: Edit) -> onnx.ModelProto:
    """An export with these edits."""
    editor = Editor(library.export(base).proto())
    for edit in edits:
        edit(editor)
    return editor.done()


def _walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _walk(attribute.g)


def _reads(node: onnx.NodeProto) -> list[str]:
    inner = [name for a in node.attribute if a.HasField("g") for n in a.g.node for name in _reads(n)]
    return [name for name in [*node.input, *inner] if name]
