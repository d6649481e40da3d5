"""Statistics of activations on sample inputs, for quantization that looks at them: what each channel's values are like.

What is looked at, in the main graph:

- **weight**: the activation that a weight multiplies: inputs of ``MatMul``, ``Gemm`` and ``MatMulNBits`` whose other
  operand comes from an initializer, and float inputs of fused (``deltafuse``) nodes that do not.
- **cache**: the states that a model carries (:func:`deltafuse.capture_states.pair_states`), as each step gives them:
  their last axis is the channel. A latent cache that is to be held in 8 bits takes its scales from these.

The sums are made inside the model: reductions are added to it as outputs, so that no activation is copied out, unless
rows of them are to be kept.

The file is a NumPy ``.npz``. Array ``index`` holds a JSON text: ``format`` ("deltafuse-calibration"), ``version`` (1),
``model``, ``sequences``, ``tokens``, ``seed`` and ``tensors``, a list in which entry i is ``name`` (of the value in the
model), ``kinds`` (of "weight", "cache"), ``users`` (the nodes that read it: ``op_type``, ``name``, ``input``),
``channels``, ``rows`` and ``aliases`` (values that it was moved from). For entry i there are the arrays ``amax.i``
(float32 [channels], the largest absolute value), ``mean_square.i`` (float32 [channels], the mean of the squares over
all rows), ``tensor_amax.i`` (float32 scalar) and, where rows were kept, ``samples.i`` (float32 [n, channels]).
:func:`load` reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from .api import require_ort
from .calibration_rows import Rows
from .capture import capture
from .custom_ops.kda.spec import DOMAIN
from .errors import DeltaFuseError, OptionError, OutputError
from .fallback import FOLDER_ENTRY
from .model_runs import sequence
from .model_save import check_target
from .sample_inputs import NPZ_ERRORS, SampleInputs, open_npz
from .signature import KEEPS_INDEX, Signature, read_signature

FORMAT, VERSION = "deltafuse-calibration", 1
_MARK = "deltafuse.calibration"
#: Ops whose first operand is multiplied by a weight in another one.
_WEIGHTED = {("", "MatMul"), ("", "Gemm"), ("com.microsoft", "MatMulNBits")}
#: Ops through which a weight stays a weight.
_KEEPS_WEIGHT = {
    *("Cast", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Identity", "DequantizeLinear"),
    *("Gather", "GatherND", "Slice", "Split", "Concat"),
}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)

Progress = Callable[[str, int, int], None]


@dataclass
class TensorStatistics:
    """One activation.

    Attributes:
        name: the value's name in the model.
        kinds: "weight" and "cache", what it is of interest for.
        users: the nodes that read it.
        amax: [channels] float32, the largest absolute value of each channel (the last axis).
        mean_square: [channels] float32, the mean square of each channel.
        rows: how many values of each channel were seen.
        aliases: values that this one was moved from without a change of its channels: their rows are the same.
        samples: [n, channels] float32, rows of it, where ``calibrate`` was asked to keep some.
    """

    name: str
    kinds: list[str]
    users: list[dict[str, Any]]
    amax: NDArray[np.float32]
    mean_square: NDArray[np.float32]
    rows: int
    aliases: list[str] = field(default_factory=list)
    samples: NDArray[np.float32] | None = None

    @property
    def tensor_amax(self) -> float:
        """The largest absolute value of all."""
        return float(self.amax.max(initial=0.0))


@dataclass
class Calibration:
    """Statistics by the value's name, and what they were taken from."""

    model: str
    sequences: int
    tokens: int
    seed: int
    tensors: dict[str, TensorStatistics] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)  # values that never held a number

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ``.npz`` file, in one step.

        Raises:
            OutputError: it cannot be written.
        """
        target = Path(path)
        check_target(target)
        arrays: dict[str, Any] = {}
        entries = []
        for number, found in enumerate(self.tensors.values()):
            entry = asdict(found)
            arrays[f"amax.{number}"] = entry.pop("amax")
            arrays[f"mean_square.{number}"] = entry.pop("mean_square")
            arrays[f"tensor_amax.{number}"] = np.float32(found.tensor_amax)
            samples = entry.pop("samples")
            if samples is not None:
                arrays[f"samples.{number}"] = samples
            entries.append(entry | {"channels": len(found.amax)})
        index = {"format": FORMAT, "version": VERSION, "model": self.model, "sequences": self.sequences}
        index |= {"tokens": self.tokens, "seed": self.seed, "tensors": entries}
        aside = target.with_name(f".{target.name}.part")
        try:
            with aside.open("wb") as file:
                np.savez_compressed(file, index=np.array(json.dumps(index)), **arrays)
            os.replace(aside, target)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise OutputError(f"{target} was not written: {error.strerror or error}") from error


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read what :meth:`Calibration.save` wrote.

    Raises:
        OptionError: no such file, or another kind of file.
    """
    try:
        with open_npz(Path(path)) as file:
            if "index" not in file:
                raise KeyError("it has no array 'index'; `deltafuse calibrate` writes such files")
            index = json.loads(str(file["index"]))
            if not isinstance(index, dict) or not {"format", "version"} <= index.keys():
                raise ValueError("its index names no format and version")
            if index["format"] != FORMAT or index["version"] != VERSION:
                raise OptionError(f"{path} is a {index['format']} of version {index['version']}: expected {VERSION}")
            made = Calibration(index["model"], index["sequences"], index["tokens"], index["seed"])
            for number, entry in enumerate(index["tensors"]):
                for kind in ("amax", "mean_square"):
                    found = file[f"{kind}.{number}"]
                    if found.dtype.kind != "f" or found.shape != (entry["channels"],):
                        expected = f"expected {entry['channels']} numbers"
                        raise ValueError(
                            f"array '{kind}.{number}' is of type {found.dtype}, shape {found.shape}: {expected}"
                        )
                made.tensors[entry["name"]] = TensorStatistics(
                    entry["name"],
                    entry["kinds"],
                    entry["users"],
                    file[f"amax.{number}"],
                    file[f"mean_square.{number}"],
                    entry["rows"],
                    list(entry.get("aliases", [])),
                    _samples(file, number, entry["channels"]),
                )
            return made
    except (*NPZ_ERRORS, KeyError, TypeError) as error:
        if isinstance(error, OptionError):
            raise
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise OptionError(f"{path} is no file of calibration statistics: {reason}") from error


def _samples(file: Any, number: int, channels: int) -> NDArray[np.float32] | None:
    if f"samples.{number}" not in file:
        return None
    found = file[f"samples.{number}"]
    if found.dtype.kind != "f" or found.ndim != 2 or found.shape[1] != channels:
        shape = f"of type {found.dtype}, shape {found.shape}"
        raise ValueError(f"array 'samples.{number}' is {shape}: expected rows of {channels} numbers")
    return found.astype(np.float32)


def check_fits(path: str | os.PathLike[str], model: ir.Model) -> None:
    """Check that statistics can be of this model: they name values of it, with as many channels.

    Raises:
        OptionError: they are of another model, or are none.
    """
    found = load(path)
    values = {value.name: value for value in (*model.graph.inputs, *(v for n in model.graph for v in n.outputs))}
    what = (
        f"{path} is of another model ({os.path.basename(found.model)})"
        if found.model
        else f"{path} is of another model"
    )
    known = [entry for entry in found.tensors.values() if entry.name in values]
    if not known:
        raise OptionError(f"calibration: {what}: this one has none of its {len(found.tensors)} values")
    for entry in known:
        shape = values[entry.name].shape
        size = shape[-1] if shape is not None and len(shape) else None
        if isinstance(size, int) and size != len(entry.mean_square):
            here = f"{len(entry.mean_square)} channels there and {size} here"
            raise OptionError(f"calibration: {what}: {entry.name!r} has {here}")


def calibrate(
    model: str | os.PathLike[str],
    *,
    given: Sequence[Mapping[str, Any]] = (),
    token_ids: Sequence[Sequence[int]] = (),
    samples: int = 8,
    tokens: int = 64,
    steps: int = 4,
    batch: int = 1,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    vocabulary: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    rows: int = 0,
) -> Calibration:
    """Run a model on sample inputs and take the statistics of its activations.

    Args:
        model: a path; the model that is to be quantized, so that the values' names are its own.
        given: inputs by name, one mapping a sequence. What is missing is made up.
        token_ids: prompts, one a sequence. With neither, ``samples`` prompts of random tokens.
        tokens: a random prompt's length, where the model leaves that open.
        steps: random tokens after each prompt, for models that carry states.
        batch, seed, dims, vocabulary: as for :class:`deltafuse.sample_inputs.SampleInputs`.
        device: as for ``deltafuse.session``.
        rows: how many rows to keep of each input of a product with a weight, for quantization that feeds rounding
            errors back ("gptq"). They are drawn evenly from all that go by.

    Raises:
        OptionError: there is nothing to look at, or inputs cannot be made.
        DeltaFuseError: the model cannot be loaded or run, or gives values that are not finite.
    """
    require_ort("running models")
    signature = read_signature(model)
    proto = onnx.load(os.fspath(model), load_external_data=False)
    watched = _watched(proto, signature)
    if not watched:
        raise OptionError(f"{model} has no product with a weight and carries no state: there is nothing to look at")
    names = list(watched)
    kept = {
        name: Rows(rows, seed + number)
        for number, (name, (kinds, _)) in enumerate(watched.items())
        if rows > 0 and "weight" in kinds
    }
    _instrument(proto, names, frozenset(kept))

    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(FOLDER_ENTRY, os.path.abspath(Path(model).parent))
    made = Calibration(os.fspath(model), 0, 0, seed)
    totals: dict[str, list[Any]] = {name: [0.0, 0.0, 0] for name in names}
    with capture(
        proto.SerializeToString(), states=signature.states, device=device, graphs="never", sess_options=options
    ) as runner:
        works = list(_sequences(signature, given, token_ids, samples, tokens, steps, batch, seed, dims, vocabulary))
        for number, work in enumerate(works):
            if progress is not None:
                progress("calibrate", number, len(works))
            runner.reset(work.states)
            for step in work.steps:
                _add(totals, names, runner.run(step.feeds), kept)
                made.tokens += step.tokens * batch
            made.sequences += 1
    for name in names:
        amax, squares, seen = totals[name]
        if seen == 0:
            made.skipped.append(name)
            continue
        if not np.isfinite(amax).all():
            raise DeltaFuseError(
                f"{name} holds values that are not finite: no statistics can be taken from such inputs"
            )
        kinds, users = watched[name]
        square = (squares / seen).astype(np.float32)
        made.tensors[name] = TensorStatistics(
            *(name, sorted(kinds), users, amax.astype(np.float32), square, seen),
            aliases=_aliases(proto, name),
            samples=kept[name].kept() if name in kept else None,
        )
    return made


def _sequences(
    signature: Signature,
    given: Sequence[Mapping[str, Any]],
    token_ids: Sequence[Sequence[int]],
    samples: int,
    tokens: int,
    steps: int,
    batch: int,
    seed: int,
    dims: Mapping[str, int] | None,
    vocabulary: int | None,
) -> Iterator[Any]:
    def inputs(number: int, arrays: Mapping[str, Any] | None = None) -> SampleInputs:
        return SampleInputs(signature, batch=batch, seed=seed + number, dims=dims, vocabulary=vocabulary, given=arrays)

    for number, arrays in enumerate(given):
        made = inputs(number, arrays)
        yield sequence(made, "given", made.tokens(tokens), 0)
    for number, ids in enumerate(token_ids):
        yield sequence(inputs(number), "tokens", len(ids), 0, token_ids=ids)
    if not given and not token_ids:
        for number in range(samples):
            yield sequence(inputs(number), "random", tokens, steps)


def _watched(proto: onnx.ModelProto, signature: Signature) -> dict[str, tuple[set[str], list[dict[str, Any]]]]:
    """Value name -> what it is of interest for, and the nodes that read it."""
    graph = proto.graph
    weights = {tensor.name for tensor in graph.initializer}
    small = {tensor.name for tensor in graph.initializer if len(tensor.dims) < 2}
    ids = {port.name for port in signature.inputs.values() if port.role in ("tokens", "positions")}
    floats = {v.name: v.type.tensor_type.elem_type in _FLOATS for v in (*graph.value_info, *graph.input)}
    found: dict[str, tuple[set[str], list[dict[str, Any]]]] = {}

    def watch(node: onnx.NodeProto, index: int) -> None:
        name = node.input[index]
        kinds, users = found.setdefault(name, (set(), []))
        kinds.add("weight")
        users.append({"op_type": node.op_type, "name": node.name, "input": index})

    for node in graph.node:
        if node.op_type == "Constant":
            weights.update(node.output)
            small.update(node.output)
        elif node.op_type in KEEPS_INDEX and node.input and node.input[0] in ids:
            ids.update(node.output)
        elif node.op_type == "Gather" and node.input[1] in ids:
            continue  # an embedding: activations
        elif node.op_type in _KEEPS_WEIGHT and node.input and node.input[0] in weights:
            weights.update(node.output)
            small.update(node.output if node.input[0] in small else ())
        elif (node.domain, node.op_type) in _WEIGHTED:
            for index, other in ((0, 1), (1, 0)) if node.op_type == "MatMul" else ((0, 1),):
                turned = node.op_type == "Gemm" and any(a.name == "transA" and a.i for a in node.attribute)
                multiplied = node.input[other] in weights and node.input[other] not in small
                # Channels are the last axis: of a right operand, or a turned left one, they are not.
                if index == 0 and multiplied and node.input[0] not in weights and not turned:
                    watch(node, 0)
        elif node.domain == DOMAIN:
            for index, name in enumerate(node.input):
                if name and name not in weights and floats.get(name, True):
                    watch(node, index)
    for output in signature.states.values():
        found.setdefault(output, (set(), []))[0].add("cache")
    for name, (_, users) in found.items():
        if not users:
            users += [
                {"op_type": node.op_type, "name": node.name, "input": index}
                for node in graph.node
                for index, read in enumerate(node.input)
                if read == name
            ]
    return found


#: Ops that move whole rows, in the graphs that exporters write: what they read has the channels of what they give.
_MOVES_ROWS = {"Reshape", "Cast", "Identity", "Flatten", "Squeeze", "Unsqueeze"}


def _aliases(proto: onnx.ModelProto, name: str) -> list[str]:
    """Values that a value was moved from. Whether they have the same channels, who asks for them sees by the number."""
    makers = {output: node for node in proto.graph.node for output in node.output}
    found: list[str] = []
    while (node := makers.get(name)) is not None and node.op_type in _MOVES_ROWS and not node.domain:
        name = node.input[0]
        found.append(name)
    return found


def _instrument(proto: onnx.ModelProto, names: Sequence[str], kept: frozenset[str] = frozenset()) -> None:
    """Add three outputs for each value: the largest absolute value and the sum of squares of each channel, the number
    of rows; and the rows, of those that are to be kept."""
    graph = proto.graph
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))

    def constant(name: str, values: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.int64), f"{_MARK}.{name}"))
        return f"{_MARK}.{name}"

    axis, one_row = constant("axis", [0]), constant("row", [1, 0, 0, 0])

    def node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        graph.node.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def reduced(op_type: str, source: str, output: str) -> str:
        if opset >= 18 or op_type == "ReduceSum":
            return node(op_type, [source, axis], output, keepdims=0)
        return node(op_type, [source], output, axes=[0], keepdims=0)

    for number, name in enumerate(names):
        mark = f"{_MARK}.{number}"
        rows = node("Flatten", [node("Cast", [name], f"{mark}.float", to=TensorProto.FLOAT)], f"{mark}.rows", axis=-1)
        # A row of zeros in front, which changes neither: an expert that got no token has no rows to reduce.
        padded = node("Pad", [rows, one_row], f"{mark}.padded")
        reduced("ReduceMax", node("Abs", [padded], f"{mark}.abs"), f"{mark}.amax")
        reduced("ReduceSum", node("Mul", [padded, padded], f"{mark}.squares"), f"{mark}.square")
        node("Shape", [rows], f"{mark}.shape")
        for part, kind in (("amax", TensorProto.FLOAT), ("square", TensorProto.FLOAT), ("shape", TensorProto.INT64)):
            graph.output.append(helper.make_tensor_value_info(f"{mark}.{part}", kind, [None]))
        if name in kept:
            graph.output.append(helper.make_tensor_value_info(rows, TensorProto.FLOAT, [None, None]))


def _add(
    totals: dict[str, list[Any]], names: Sequence[str], outputs: Mapping[str, Any], kept: Mapping[str, Rows]
) -> None:
    for number, name in enumerate(names):
        mark = f"{_MARK}.{number}"
        total = totals[name]
        total[0] = np.maximum(total[0], outputs[f"{mark}.amax"].astype(np.float64))
        total[1] = total[1] + outputs[f"{mark}.square"].astype(np.float64)
        total[2] += int(outputs[f"{mark}.shape"][0])
        if name in kept:
            kept[name].add(outputs[f"{mark}.rows"])
