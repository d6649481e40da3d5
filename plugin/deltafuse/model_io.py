"""Loading: a path, ``onnx.ModelProto``, ``onnx_ir.Model`` or graph-surgeon ``Graph`` becomes an ``onnx_ir.Model``.

Weights in external files stay there; they are checked against the files' sizes, not read. Small tensors are read.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from .errors import DeltaFuseError, ExternalDataError, ModelKindError, NotOnnxError, OpsetError, OutputError
from .external_data import all_tensors, check_external_data, data_files, external_tensors, has_small, read_small
from .onnx_file import TEXT_SUFFIXES, check_file

logger = logging.getLogger(__name__)

OLDEST_OPSET = 18
NEWEST_OPSET = 27


@dataclass
class LoadedModel:
    """A model as ``onnx_ir.Model``, with what it was: ``kind`` is "path", "proto", "ir" or "graphsurgeon".

    ``data_files`` are the real paths of its external data.
    """

    model: ir.Model
    kind: str
    path: Path | None = None
    warnings: list[str] = field(default_factory=list)
    data_files: frozenset[str] = frozenset()


def load(source: Any, base_dir: str | os.PathLike[str] | None = None) -> LoadedModel:
    """Make an ``onnx_ir.Model`` of ``source`` and check that it is one that can be worked on.

    Args:
        source: a path, ``onnx.ModelProto``, ``onnx_ir.Model`` or onnx-graphsurgeon ``Graph``. It is not changed.
        base_dir: the folder that a ``ModelProto``'s external data are relative to (default: the current one).

    Raises:
        ModelKindError, ModelFileError, ExternalDataError, OpsetError: see :mod:`deltafuse.errors`.
    """
    path: Path | None = None
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        model, kind = _load_path(path), "path"
    elif isinstance(source, onnx.ModelProto):
        model, kind = _from_proto(source, "the ModelProto", base_dir), "proto"
    elif isinstance(source, ir.Model):
        model, kind = source, "ir"
    elif is_graphsurgeon(source):
        model, kind = _from_graphsurgeon(source, base_dir), "graphsurgeon"
    else:
        raise ModelKindError(
            "expected a path, an onnx.ModelProto, an onnx_ir.Model or an onnx_graphsurgeon.Graph, "
            f"got {type(source).__module__}.{type(source).__qualname__}"
        )
    what = str(path) if path is not None else "the model"
    loaded = LoadedModel(model, kind, path)
    _check_graph(model, what)
    _check_opset(model, what, loaded.warnings)
    replaceable = [v.name or "" for v in model.graph.inputs if v.name in model.graph.initializers]
    if replaceable:
        loaded.warnings.append(
            f"{len(replaceable)} of the weights are graph inputs too (such as {replaceable[0]!r}): a caller may "
            "replace them, so they are no constants, and blocks that need them as such stay. "
            "python -m onnxruntime.tools.remove_initializer_from_input takes them out of the inputs"
        )
    check_external_data(model)
    loaded.data_files = data_files(model)
    if has_small(model):
        if kind == "ir":  # the caller's own, which must not change
            loaded.model = model = model.clone()
        try:
            read_small(model)
        except (OSError, ValueError) as error:
            raise ExternalDataError(f"{what}: its external data cannot be read: {one_line(error)}") from error
    return loaded


def _load_path(path: Path) -> ir.Model:
    check_file(path)
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError and text parsers' errors have no common base
        raise NotOnnxError(f"{path} is not an ONNX model, or is damaged: {one_line(error)}") from error
    return _from_proto(proto, str(path), path.parent)


def _from_proto(proto: onnx.ModelProto, what: str, base_dir: str | os.PathLike[str] | None) -> ir.Model:
    if not proto.HasField("graph"):
        raise NotOnnxError(f"{what} is not an ONNX model: it holds no graph")
    if proto.ir_version < 1:
        raise NotOnnxError(f"{what} is not an ONNX model: it has no ir_version")
    complaints = logging.getLogger("onnx_ir.serde")  # of damaged models, which _check_graph names in one line
    level = complaints.level
    complaints.setLevel(logging.ERROR)
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx-ir raises many kinds for malformed graphs
        raise NotOnnxError(f"{what} is damaged: {one_line(error)}") from error
    finally:
        complaints.setLevel(level)
    # Absolute, so that weights which are read later are found from any current folder; and an empty base_dir would
    # switch off onnx-ir's check that data files lie in the model's folder.
    folder = os.path.abspath(base_dir or os.curdir)
    for tensor in external_tensors(model):
        tensor.base_dir = folder
    return model


def _check_graph(model: ir.Model, what: str) -> None:
    graph = model.graph
    if len(graph) == 0 or not graph.outputs:
        found = f"{len(graph)} nodes and {len(graph.outputs)} outputs"
        raise NotOnnxError(f"{what} holds an empty graph ({found}): nothing to fuse")
    _check_order(graph, set(), what)
    for tensor in all_tensors(model):
        _check_size(tensor, what)


def _check_order(graph: ir.Graph, defined: set[ir.Value], what: str) -> None:
    """Every value is defined before it is used, in the graph and in the subgraphs of its nodes."""
    defined.update(graph.inputs)
    defined.update(graph.initializers.values())
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in defined:
                found = "nothing defines" if value.producer() is None else "only a later node defines"
                raise NotOnnxError(
                    f"{what} is damaged: node {node.name!r} ({node.op_type}) uses {value.name!r}, which {found}"
                )
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                _check_order(attribute.as_graph(), defined, what)
            elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
                for body in attribute.as_graphs():
                    _check_order(body, defined, what)
        defined.update(node.outputs)
    for value in graph.outputs:
        if value not in defined:
            raise NotOnnxError(f"{what} is damaged: nothing defines its output {value.name!r}")


def _check_size(tensor: ir.TensorProtocol, what: str) -> None:
    """A tensor that was read from a file holds as many bytes as its shape and type say."""
    if not isinstance(tensor, ir.TensorProtoTensor):
        return
    raw = tensor.raw
    typed = (raw.float_data, raw.int32_data, raw.int64_data, raw.double_data, raw.uint64_data, raw.string_data)
    if tensor.size and not raw.HasField("raw_data") and not any(map(len, typed)):
        raise NotOnnxError(f"{what} is damaged: tensor {tensor.name!r} has no data")
    if raw.HasField("raw_data") and len(raw.raw_data) != tensor.nbytes:
        raise NotOnnxError(
            f"{what} is damaged: tensor {tensor.name!r} has {len(raw.raw_data):,} bytes, "
            f"but {tensor.dtype.name}{list(tensor.shape)} needs {tensor.nbytes:,}"
        )


def explain_failure(loaded: LoadedModel, error: Exception) -> DeltaFuseError | None:
    """Work on the model failed in an unexpected way: is it because the model is not valid?

    Asked only then: the check takes time, and some models that onnx does not know in full are served all the same.
    """
    path = loaded.path
    try:
        proto = to_proto(loaded.model)  # fails by itself where fields hold what they must not
        if path is not None and path.suffix.lower() not in TEXT_SUFFIXES:
            onnx.checker.check_model(str(path))
        elif not loaded.data_files:  # of a proto, the checker would look for them in the current folder
            onnx.checker.check_model(proto)
        # Not the checker's own full check: it does not read the small tensors that the file keeps outside.
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    except OutputError:  # too large for the checks
        return None
    except Exception as problem:
        what = str(loaded.path) if loaded.path else "the model"
        return NotOnnxError(f"{what} is not valid ONNX: {one_line(problem)} (so fusing it failed: {one_line(error)})")
    return None


def _check_opset(model: ir.Model, what: str, warnings: list[str]) -> None:
    expected = f"expected opset {OLDEST_OPSET} to {NEWEST_OPSET}"
    opset = model.opset_imports.get("")
    if opset is None:
        others = ", ".join(sorted(model.opset_imports)) or "none at all"
        raise OpsetError(f"{what} imports no opset of the default ONNX domain (imported: {others}); {expected}")
    if opset < OLDEST_OPSET:
        raise OpsetError(
            f"{what} has opset {opset}; {expected}. "
            f"Export it again with opset_version={OLDEST_OPSET} or more, or convert it with onnx.version_converter"
        )
    if opset > NEWEST_OPSET:
        known = onnx.defs.onnx_opset_version()
        if opset > known:
            raise OpsetError(f"{what} has opset {opset}, newer than the installed onnx knows ({known}); {expected}")
        warnings.append(
            f"opset {opset} is newer than deltafuse was tested with ({NEWEST_OPSET}): "
            "what it does not recognise is left alone"
        )


def is_graphsurgeon(value: Any) -> bool:
    """Is it an ``onnx_graphsurgeon.Graph``? Only who has imported that package can hold one."""
    module = sys.modules.get("onnx_graphsurgeon")
    return module is not None and isinstance(value, module.Graph)


def _from_graphsurgeon(graph: Any, base_dir: str | os.PathLike[str] | None) -> ir.Model:
    import onnx_graphsurgeon as gs

    try:
        proto = gs.export_onnx(graph)
    except Exception as error:
        raise NotOnnxError(f"the graph-surgeon graph cannot be exported to ONNX: {one_line(error)}") from error
    return _from_proto(proto, "the graph-surgeon graph", base_dir)


def to_graphsurgeon(model: ir.Model) -> Any:
    """The model as an ``onnx_graphsurgeon.Graph``.

    graph-surgeon keeps no function overloads. One body of a fused op is kept under the op's plain name; a model with
    several different bodies of one op cannot be held by it.

    Raises:
        OutputError: onnx-graphsurgeon is not installed, or the model has several overloads of one function.
    """
    try:
        import onnx_graphsurgeon as gs
    except ImportError as error:
        raise OutputError(
            "onnx-graphsurgeon is not installed: `pip install onnx-graphsurgeon`, or use to_proto()"
        ) from error
    proto = to_proto(model)
    names = [(f.domain, f.name) for f in proto.functions]
    twice = sorted({name for domain, name in names if names.count((domain, name)) > 1})
    if twice:
        raise OutputError(
            f"graph-surgeon drops function overloads, and this model has several of {', '.join(twice)}: use to_proto()"
        )
    for function in proto.functions:
        function.overload = ""
    stacks = [proto.graph.node, *(f.node for f in proto.functions)]
    while stacks:
        for node in stacks.pop():
            if (node.domain, node.op_type) in names:
                node.overload = ""
            for attribute in node.attribute:
                stacks.extend(g.node for g in (attribute.g, *attribute.graphs) if g.node)
    return gs.import_onnx(proto)


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as an ``onnx.ModelProto``. External tensors stay references, relative to the source's folder.

    Raises:
        OutputError: the weights in memory exceed what a protobuf message can hold.
    """
    in_memory = sum(t.nbytes for t in all_tensors(model) if not isinstance(t, ir.ExternalTensor))
    if in_memory >= onnx.checker.MAXIMUM_PROTOBUF:
        raise OutputError(
            f"{in_memory:,} bytes of weights do not fit a ModelProto (2 GiB): save the model to a file instead"
        )
    return ir.to_proto(model)


def one_line(error: BaseException) -> str:
    """An error's text on one line, shortened, for a message."""
    while isinstance(error, ir.serde.SerdeError) and error.__cause__ is not None:
        error = error.__cause__  # the outer ones only say which part was being read
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
