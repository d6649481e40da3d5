"""Tensors of a model, and those of them whose bytes lie in files beside it: checked by size, read only where small."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from .errors import ExternalDataError

#: External tensors below this many bytes are read when a model is loaded: shapes, axes and scalars, whose values shape
#: inference and the recognisers need. Weights stay in their files.
SMALL_TENSOR = 4096

#: Attributes that hold tensors, or graphs with such attributes.
_HOLDERS = frozenset(
    {ir.AttributeType.TENSOR, ir.AttributeType.TENSORS, ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}
)


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """All tensors with external data: initializers and attributes, in the graph, its subgraphs and the functions."""
    for tensor in all_tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            yield tensor


def all_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """All tensors of the model: initializers and attributes, in the graph, its subgraphs and the functions."""
    bodies = [graph for function in model.functions.values() for graph in function.subgraphs()]
    for graph in (*model.graphs(), *bodies):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
    for _, attribute in tensor_attributes(model):
        yield from attribute.as_tensors() if attribute.type == ir.AttributeType.TENSORS else (attribute.as_tensor(),)


def tensor_attributes(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Attr]]:
    """The attributes that are tensors, each with its node, subgraphs and functions included."""
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    while graphs:
        for node in graphs.pop():
            for attribute in node.attributes.values():
                if attribute.type not in _HOLDERS or attribute.is_ref() or attribute.value is None:
                    continue
                if attribute.type == ir.AttributeType.GRAPH:
                    graphs.append(attribute.as_graph())
                elif attribute.type == ir.AttributeType.GRAPHS:
                    graphs.extend(attribute.as_graphs())
                else:
                    yield node, attribute


def check_external_data(model: ir.Model) -> None:
    """Check that every external tensor's bytes are there, without reading them.

    Raises:
        ExternalDataError: naming the tensor, the file, and the bytes that were expected and found.
    """
    sizes: dict[str, int] = {}
    for tensor in external_tensors(model):
        path = tensor.path
        if path not in sizes:
            sizes[path] = _data_file_size(tensor)
        offset = tensor.offset or 0
        length = tensor.nbytes if tensor.length is None else tensor.length
        if length < tensor.nbytes:
            raise ExternalDataError(
                f"tensor {tensor.name!r}: {length:,} bytes of external data in {path}, "
                f"but {tensor.dtype.name}{list(tensor.shape)} needs {tensor.nbytes:,}"
            )
        if offset < 0 or offset + length > sizes[path]:
            raise ExternalDataError(
                f"tensor {tensor.name!r}: expected bytes {offset:,} to {offset + length:,} of {path}, "
                f"which has {sizes[path]:,} (truncated, or of another model)"
            )


def _data_file_size(tensor: ir.ExternalTensor) -> int:
    path = Path(tensor.path)
    base = Path(tensor.base_dir or os.curdir)
    if not path.exists():
        raise ExternalDataError(
            f"tensor {tensor.name!r}: its external data file {path} is missing; it belongs in the model's folder"
        )
    if not path.is_file():
        raise ExternalDataError(f"tensor {tensor.name!r}: its external data file {path} is not a regular file")
    inside = path.resolve().is_relative_to(base.resolve())
    if tensor.base_dir and (not inside or path.stat().st_nlink > 1):
        found = "has several hard links" if inside else f"lies outside the model's folder, at {path.resolve()}"
        raise ExternalDataError(
            f"tensor {tensor.name!r}: its external data file {path} {found}, which onnx refuses; "
            "copy the model and its data into one folder (`cp -L`)"
        )
    return path.stat().st_size


def data_files(model: ir.Model) -> frozenset[str]:
    """The real paths of all files that hold external data of the model."""
    return frozenset(os.path.realpath(tensor.path) for tensor in external_tensors(model))


def has_small(model: ir.Model) -> bool:
    """Is there an external tensor that :func:`read_small` would read?"""
    return any(_is_small(tensor) for tensor in external_tensors(model))


def read_small(model: ir.Model) -> None:
    """Take external tensors below :data:`SMALL_TENSOR` into memory, in ``model`` itself."""
    bodies = [graph for function in model.functions.values() for graph in function.subgraphs()]
    for graph in (*model.graphs(), *bodies):
        for value in graph.initializers.values():
            if value.const_value is not None and _is_small(value.const_value):
                (value.const_value,) = ir.external_data.convert_tensors_from_external([value.const_value])
    attributes_to_memory(model, SMALL_TENSOR)


def attributes_to_memory(model: ir.Model, below: int | None = None) -> None:
    """Take external tensors in attributes (``Constant``) into memory, all or those below so many bytes.

    Attributes are shared between a model and its copies, so they are replaced, not changed.
    """

    def outside(tensor: ir.TensorProtocol) -> bool:
        return isinstance(tensor, ir.ExternalTensor) and (below is None or tensor.nbytes < below)

    for node, attribute in list(tensor_attributes(model)):
        many = attribute.type == ir.AttributeType.TENSORS
        tensors = list(attribute.as_tensors()) if many else [attribute.as_tensor()]
        if any(map(outside, tensors)):
            queue = iter(ir.external_data.convert_tensors_from_external([t for t in tensors if outside(t)]))
            tensors = [next(queue) if outside(t) else t for t in tensors]
            value = tuple(tensors) if many else tensors[0]
            node.attributes[attribute.name] = ir.Attr(attribute.name, attribute.type, value)


def _is_small(tensor: ir.TensorProtocol) -> bool:
    return isinstance(tensor, ir.ExternalTensor) and tensor.nbytes < SMALL_TENSOR
