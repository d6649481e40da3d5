"""Putting new weights into a graph, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

Names = Callable[[str], str]


def names_of(model: ir.Model) -> Names:
    """Makes a name that no value of the model's graphs has."""
    taken = {value.name for value in model.graph.inputs} | set(model.graph.initializers)
    for node in model.graph.all_nodes():
        taken.update(output.name for output in node.outputs)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                taken.update(value.name for value in attribute.as_graph().inputs)
                taken.update(attribute.as_graph().initializers)

    def fresh(stem: str) -> str:
        name, number = stem, 0
        while name in taken:
            number += 1
            name = f"{stem}_{number}"
        taken.add(name)
        return name

    return fresh


def add_initializer(model: ir.Model, names: Names, stem: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer of the main graph that holds ``tensor``."""
    name = names(stem)
    tensor.name = name
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Of all initializers of the main graph and its subgraphs."""
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        yield from (v.const_value for v in graph.initializers.values() if v.const_value is not None)
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    graphs.append(attribute.as_graph())


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers of the main graph and its subgraphs."""
    return sum(tensor.nbytes for tensor in _tensors(model))


class Sources:
    """The files that a model's weights are in, as it was before weights were put together in new ways.

    Reading a tensor maps its file, and what was read of a map counts as the process's memory until it is unmapped.
    """

    def __init__(self, model: ir.Model) -> None:
        self._external = [tensor for tensor in _tensors(model) if isinstance(tensor, ir.ExternalTensor)]

    def unmap(self) -> None:
        """Unmap what is mapped. The next reading maps it again."""
        for tensor in self._external:
            try:
                tensor.release()
            except BufferError:  # somebody holds an array of it
                continue
