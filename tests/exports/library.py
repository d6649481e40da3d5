"""The exports in ``tests/data`` for tests: their models, feeds, truths, and running them in stock ORT.

``expected.json`` says of each how it was made, how many KDA layers it holds and where it is valid (see ``pack.py``).
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

DATA = Path(__file__).resolve().parents[1] / "data"
Arrays = dict[str, np.ndarray]

NUMPY_TYPES: dict[int, Any] = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.FLOAT16: np.float16,
    onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    onnx.TensorProto.DOUBLE: np.float64,
    onnx.TensorProto.INT64: np.int64,
    onnx.TensorProto.INT32: np.int32,
    onnx.TensorProto.BOOL: np.bool_,
}


@dataclass(frozen=True)
class Export:
    """One entry of ``expected.json``; the fields are those of ``pack.pack``."""

    name: str
    file: str
    made: str
    opset: int
    nodes: int
    kda: int
    moe: int = 0
    mla: int = 0
    form: str = ""
    bindings: list[dict[str, int]] = field(default_factory=list)
    beyond: list[dict[str, int]] = field(default_factory=list)
    shapes: dict[str, list[int | str]] = field(default_factory=dict)
    truth: str = ""
    loads: bool = True
    tolerance: float = 1e-4
    tags: list[str] = field(default_factory=list)

    def proto(self) -> onnx.ModelProto:
        """A fresh copy of the model."""
        model = onnx.ModelProto()
        model.ParseFromString(_bytes(self.file))
        return model

    def model(self) -> ir.Model:
        """A fresh copy of the model, as onnx-ir."""
        return ir.from_proto(self.proto())

    def truths(self) -> dict[str, tuple[Arrays, Arrays]]:
        """Inputs and PyTorch's outputs for each case of the truth file; empty where there is none."""
        cases: dict[str, tuple[Arrays, Arrays]] = {}
        if self.truth:
            with np.load(DATA / self.truth) as arrays:
                for key in arrays.files:
                    case, side, name = key.split("|", 2)
                    cases.setdefault(case, ({}, {}))[0 if side == "in" else 1][name] = arrays[key]
        return cases

    def feeds(self, binding: dict[str, int] | None = None, seed: int = 0) -> Arrays:
        """Random inputs for the graph with its symbolic dimensions bound (the first of ``bindings`` by default)."""
        return feeds_for(self.proto(), binding if binding is not None else self.bindings[0], self.shapes, seed)


@lru_cache(maxsize=8)
def _bytes(file: str) -> bytes:
    return lzma.decompress((DATA / file).read_bytes())


@lru_cache(maxsize=1)
def all_exports() -> dict[str, Export]:
    """Every export by name."""
    index = json.loads((DATA / "expected.json").read_text())
    return {name: Export(name=name, **entry) for name, entry in index.items()}


def export(name: str) -> Export:
    """The export of that name."""
    return all_exports()[name]


def names(tag: str = "", *, kda: bool | None = None) -> list[str]:
    """Names of the exports, all or those with this tag; ``kda`` picks those with or without KDA layers."""
    return [
        e.name for e in all_exports().values() if (not tag or tag in e.tags) and (kda is None or bool(e.kda) == kda)
    ]


def shape_of(value: onnx.ValueInfoProto) -> list[int | str]:
    """The declared shape: numbers, and names for what is symbolic."""
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def feeds_for(
    model: onnx.ModelProto,
    binding: dict[str, int],
    shapes: dict[str, list[int | str]] | None = None,
    seed: int = 0,
) -> Arrays:
    """Random inputs: token ids below 60 for integers, normal numbers times 0.5 for floats, negative for a log decay.

    A dimension may be a sum such as ``past + 1``; its parts are bound by name.
    """
    rng = np.random.default_rng(seed)
    given = {i.name for i in model.graph.initializer}
    result: Arrays = {}
    for value in model.graph.input:
        if value.name in given:
            continue
        declared = (shapes or {}).get(value.name) or shape_of(value)
        shape = [d if isinstance(d, int) else int(eval(d, {"__builtins__": {}}, dict(binding))) for d in declared]
        dtype = NUMPY_TYPES[value.type.tensor_type.elem_type]
        if np.issubdtype(dtype, np.integer):
            result[value.name] = rng.integers(3, 60, shape).astype(dtype)
        elif dtype is np.bool_:
            result[value.name] = np.ones(shape, np.bool_)
        else:
            drawn = 0.5 * rng.standard_normal(shape)
            result[value.name] = (-np.abs(drawn) if "decay" in value.name else drawn).astype(dtype)
    return result


def session(model: onnx.ModelProto | ir.Model | str | Path, *, optimize: bool = True) -> ort.InferenceSession:
    """A session of stock ORT on the CPU, from a file or a model in memory. It never tries another provider."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if isinstance(model, ir.Model):
        model = ir.to_proto(model)
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    made = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    made.disable_fallback()
    return made


def run(model: onnx.ModelProto | ir.Model | str | Path | ort.InferenceSession, feeds: Arrays) -> Arrays:
    """Outputs by name. ``feeds`` may hold more than the model takes; they are cast to the types it takes."""
    made = model if isinstance(model, ort.InferenceSession) else session(model)
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
    taken = {i.name: feeds[i.name].astype(kinds.get(i.type, feeds[i.name].dtype)) for i in made.get_inputs()}
    return dict(zip([o.name for o in made.get_outputs()], made.run(None, taken), strict=True))


def error(result: np.ndarray, truth: np.ndarray) -> float:
    """Relative L2 norm of the difference; infinite where either is not finite or the shapes differ."""
    if result.shape != truth.shape:
        return float("inf")
    a, b = result.astype(np.float64), truth.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12)) if a.size else 0.0


def worst(results: Arrays, truths: Arrays) -> tuple[float, str]:
    """The largest error over the outputs named in ``truths``, and whose it is."""
    return max((error(results[name], truth), name) for name, truth in truths.items())


def real_layer(name: str, seed: int = 0, *, zeros: bool = False) -> onnx.ModelProto:
    """A real-size layer, float16, hidden 2560, frozen at some tokens: ``kda_512``, ``kda_2048``
    or ``mla_2048`` (32 heads), ``moe_1`` or ``moe_64`` (64 experts); ``mla_step``: one token, any batch and past.

    Its large weights are not stored; random float16 numbers of size 0.02 take their places, or zeros.
    """
    model = onnx.ModelProto()
    model.ParseFromString(_bytes(f"{name}.skel.onnx.xz"))
    rng = np.random.default_rng(seed)
    for tensor in model.graph.initializer:
        count = int(np.prod(tensor.dims)) if tensor.dims else 1
        if count > 65536 and tensor.data_type == onnx.TensorProto.FLOAT16 and not tensor.raw_data:
            if zeros:
                tensor.raw_data = bytes(2 * count)
                continue
            tensor.raw_data = (0.02 * rng.standard_normal(count, dtype=np.float32)).astype(np.float16).tobytes()
    return model


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with every float16 and bfloat16 made float32: ORT's CPU has few kernels for bfloat16.

    Weights keep their rounded values; what is left of half precision is nothing, so results are those of exact weights.
    """
    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    wide = onnx.ModelProto()
    wide.CopyFrom(model)

    def values(items: Any) -> None:
        for value in items:
            if value.type.tensor_type.elem_type in half:
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT

    def tensor(item: onnx.TensorProto) -> None:
        if item.data_type in half:
            array = onnx.numpy_helper.to_array(item).astype(np.float32)
            item.CopyFrom(onnx.numpy_helper.from_array(array, item.name))

    def nodes(items: Any) -> None:
        for node in items:
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in half:
                    attribute.i = onnx.TensorProto.FLOAT
                if attribute.HasField("t"):
                    tensor(attribute.t)
                if attribute.HasField("g"):
                    graph(attribute.g)

    def graph(item: onnx.GraphProto) -> None:
        for initializer in item.initializer:
            tensor(initializer)
        values(item.input)
        values(item.output)
        del item.value_info[:]
        nodes(item.node)

    graph(wide.graph)
    for function in wide.functions:
        del function.value_info[:]
        nodes(function.node)
    return wide
