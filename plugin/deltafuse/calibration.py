"""Statistics of activations on sample inputs, for quantization that looks at them: what each channel's values are like.

What is looked at, in the main graph:

- **weight**: the activation that a weight multiplies: inputs of ``MatMul``, ``Gemm`` and ``MatMulNBits`` whose other
  operand comes from an initializer, and float inputs of fused (``deltafuse``) nodes that do not.
- **cache**: the states that a model carries (:func:`deltafuse.capture_states.pair_states`), as each step gives them:
  their last axis is the channel. A latent cache that is to be held in 8 bits takes its scales from these,
- **latent**: what fused latent attention (``deltafuse::LatentAttention``) is about to cache, after its norm. It is no
  value of the model: it goes by the name of the node's first output and ``.latent``. Caches of keys and values that are
  to become caches of latents in 8 bits need it; in a model that is not fused, the input of kv_b's product is the same.

The sums are made inside the model: reductions are added to it as outputs, so that no activation is copied out, unless
rows of them are to be kept.

The file is a NumPy ``.npz``. Array ``index`` holds a JSON text: ``format`` ("deltafuse-calibration"), ``version`` (1),
``model``, ``sequences``, ``tokens``, ``seed`` and ``tensors``, a list in which entry i is ``name`` (of the value in the
model), ``kinds`` (of those above), ``users`` (the nodes that read it: ``op_type``, ``name``, ``input``), ``channels``,
``rows`` and ``aliases`` (values that it was moved from). For entry i there are the arrays ``amax.i`` (float32
[channels], the largest absolute value), ``mean_square.i`` (float32 [channels], the mean of the squares over all rows),
``tensor_amax.i`` (float32 scalar) and, where rows were kept, ``samples.i`` (float32 [n, channels]).
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

from .api import require_ort
from .calibration_graph import MARK, aliases_of, instrument, watched_values
from .calibration_latents import add_latents
from .calibration_rows import Rows
from .capture import capture
from .errors import DeltaFuseError, OptionError, OutputError
from .fallback import FOLDER_ENTRY
from .model_runs import Steps, sequence
from .model_save import check_target
from .sample_inputs import NPZ_ERRORS, SampleInputs, open_npz
from .signature import Signature, read_signature

FORMAT, VERSION = "deltafuse-calibration", 1
Progress = Callable[[str, int, int], None]


@dataclass
class TensorStatistics:
    """One activation.

    Attributes:
        name: the value's name in the model.
        kinds: of "weight", "cache" and "latent", what it is of interest for.
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
            errors back ("gptq"), and of latents. They are drawn evenly from all that go by.

    Raises:
        OptionError: there is nothing to look at, or inputs cannot be made.
        DeltaFuseError: the model cannot be loaded or run, or gives values that are not finite.
    """
    require_ort("running models")
    signature = read_signature(model)
    proto = onnx.load(os.fspath(model), load_external_data=False)
    watched = watched_values(proto, signature)
    for name, users in add_latents(proto).items():
        watched[name] = ({"latent"}, users)
    if not watched:
        raise OptionError(f"{model} has no product with a weight and carries no state: there is nothing to look at")
    names = list(watched)
    kept = {
        name: Rows(rows, seed + number)
        for number, (name, (kinds, _)) in enumerate(watched.items())
        if rows > 0 and kinds != {"cache"}
    }
    instrument(proto, names, frozenset(kept))

    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # what fails is raised: no second word of it in the log
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
            before = 0
            for step in work.steps:
                try:
                    outputs = runner.run(step.feeds)
                except DeltaFuseError as error:
                    if given or token_ids:
                        raise
                    raise DeltaFuseError(f"{error}. {_shorter(before, step.tokens, work)}") from error
                _add(totals, names, outputs, kept)
                before += step.tokens
                made.tokens += step.tokens * batch
            made.sequences += 1
    for name in names:
        amax, squares, seen = totals[name]
        if seen == 0:
            made.skipped.append(name)
            continue
        if not np.isfinite(amax).all() or np.isnan(squares).any():  # ONNX Runtime's ReduceMax passes over NaN
            raise DeltaFuseError(
                f"{name} holds values that are not finite: no statistics can be taken from such inputs"
            )
        kinds, users = watched[name]
        square = (squares / seen).astype(np.float32)
        made.tensors[name] = TensorStatistics(
            *(name, sorted(kinds), users, amax.astype(np.float32), square, seen),
            aliases=aliases_of(proto, name),
            samples=kept[name].kept() if name in kept else None,
        )
    return made


def _shorter(before: int, now: int, work: Steps) -> str:
    """What to do where a random sequence goes beyond the rows of a model's tables, for example of its rotation."""
    prompt, steps = work.steps[0].tokens, len(work.steps) - 1
    took = f"{before} tokens went through" if before else f"it was the first step, of {now} tokens"
    return (
        f"{took[0].upper()}{took[1:]}: if the model takes no more positions, give --length and --steps that make fewer "
        f"({prompt} and {steps} were tried)"
    )


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


def _add(
    totals: dict[str, list[Any]], names: Sequence[str], outputs: Mapping[str, Any], kept: Mapping[str, Rows]
) -> None:
    for number, name in enumerate(names):
        mark = f"{MARK}.{number}"
        total = totals[name]
        total[0] = np.maximum(total[0], outputs[f"{mark}.amax"].astype(np.float64))
        total[1] = total[1] + outputs[f"{mark}.square"].astype(np.float64)
        total[2] += int(outputs[f"{mark}.shape"][0])
        if name in kept:
            kept[name].add(outputs[f"{mark}.rows"])
