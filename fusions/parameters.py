"""The constants of a proof: the parameters' sources perturbed, each when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from .candidate import Candidate, Parameter
from .graph import GraphView

Arrays = dict[str, np.ndarray]
#: Arrays up to this many bytes are kept; larger ones are made again at every reading.
_KEEP = 64 << 20


class ProofImpossible(Exception):
    """The region can't be run on its own, or not within the budget."""


class Perturbed(Mapping[ir.Value, np.ndarray]):
    """The sources of a candidate's parameters, perturbed: other constants of the same kind, the same at every reading.

    A layer whose bias happens to be zero proves as much as any other that way. Floats become float32; integers (a
    quantized weight) become any of their type.
    """

    def __init__(self, view: GraphView, candidate: Candidate, seed: int) -> None:
        self._view, self._seed = view, seed
        self._of: dict[ir.Value, tuple[int, str, Parameter]] = {}
        self._kept: dict[ir.Value, np.ndarray] = {}
        positive = {s for p in candidate.parameters.values() if p.positive for s in p.sources}
        self._positive = positive
        for name, parameter in candidate.parameters.items():
            for source in parameter.sources:
                self._of.setdefault(source, (len(self._of), name, parameter))

    def __iter__(self) -> Iterator[ir.Value]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, value: object) -> bool:
        return value in self._of

    def __getitem__(self, value: ir.Value) -> np.ndarray:
        """The array.

        Raises:
            KeyError: not a source.
            ProofImpossible: a constant that can't be read.
        """
        if value in self._kept:
            return self._kept[value]
        place, name, parameter = self._of[value]
        array = self._view.array(value)
        if array is None:
            raise ProofImpossible(f"the constant {value.name!r} behind {name} can't be read")
        rng = np.random.default_rng([self._seed, place])
        made = _perturb(array, rng, value in self._positive, parameter.noise)
        if made.nbytes <= _KEEP:
            self._kept[value] = made
        return made


def _perturb(array: np.ndarray, rng: np.random.Generator, positive: bool, noise: float) -> np.ndarray:
    """Another constant of the same kind: a rate keeps its sign and its equal entries, the rest gets noise."""
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        return rng.integers(limits.min, limits.max, array.shape, array.dtype, endpoint=True)
    if not is_float(array.dtype):  # 4-bit integers, 8-bit floats
        return rng.permutation(array.reshape(-1)).reshape(array.shape)
    array = array.astype(np.float32)
    if positive:
        # entries that are equal (one rate, repeated over a head's channels) must stay equal
        values, inverse = np.unique(array, return_inverse=True)
        factors = np.exp(rng.uniform(-0.4, 0.4, values.shape))
        return (values * factors)[inverse].reshape(array.shape).astype(np.float32)
    return (array + noise * rng.standard_normal(array.shape)).astype(np.float32)


def parameter_arrays(
    view: GraphView, candidate: Candidate, arrays: Mapping[ir.Value, np.ndarray] | None = None
) -> Arrays:
    """The op's parameters from the graph's constants (or from ``arrays`` in their place), floats as float32.

    Raises:
        ProofImpossible: a constant that can't be the parameter it should be.
    """
    return {name: parameter_array(view, name, p, arrays) for name, p in candidate.parameters.items()}


def parameter_array(
    view: GraphView, name: str, parameter: Parameter, arrays: Mapping[ir.Value, np.ndarray] | None = None
) -> np.ndarray:
    """One of :func:`parameter_arrays`."""
    sources = [arrays[s] if arrays is not None and s in arrays else view.array(s) for s in parameter.sources]
    read = [s for s in sources if s is not None]
    if len(read) != len(sources):
        raise ProofImpossible(f"a constant behind {name} can't be read")
    array = read[0] if parameter.compute is None else parameter.compute(read)
    if array is None:
        raise ProofImpossible(f"the constants behind {name} do not have the form that {name} needs")
    return np.ascontiguousarray(array, np.float32 if is_float(array.dtype) else None)


def is_float(dtype: np.dtype) -> bool:
    """A float type that arithmetic is done in: 8-bit floats are storage, like integers."""
    return dtype.name in ("float32", "float16", "bfloat16", "float64")
