"""Inputs that fit a model's signature: token ids within the vocabulary, positions counted on, masks of ones, states.

One place for the commands that run models: ``verify``, ``bench``, ``run``, ``calibrate``.
"""

from __future__ import annotations

import ast
import operator
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from .errors import OptionError
from .signature import Dim, Port, Signature, size_names

Array = NDArray[Any]
Arrays = dict[str, Array]

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_WORDS = {"batch": "batch", "past": "past", "total": "total", "seq": "tokens", "token": "tokens"}


class SampleInputs:
    """Makes the inputs of a model's steps.

    Args:
        signature: the model's.
        batch: how many sequences, where the model leaves that open.
        seed: of the random numbers.
        dims: sizes of symbolic dimensions, by name, where they cannot be guessed or are to be others.
        vocabulary: token ids are below this, where the model does not tell.
        given: arrays by input name, to use as they are (in the first step).

    Raises:
        OptionError: an unknown name among ``dims`` or ``given``, or arrays of another type or shape.
    """

    def __init__(
        self,
        signature: Signature,
        *,
        batch: int = 1,
        seed: int = 0,
        dims: Mapping[str, int] | None = None,
        vocabulary: int | None = None,
        given: Mapping[str, Array] | None = None,
    ) -> None:
        self.signature, self.batch, self._vocabulary = signature, batch, vocabulary
        self._random = np.random.default_rng(seed)
        self._dims = dict(dims or {})
        self.given = {name: _as_declared(signature, name, array) for name, array in (given or {}).items()}
        symbols = {size for port in signature.inputs.values() for size in port.shape if isinstance(size, str)}
        unknown = sorted(set(self._dims) - signature.symbols())
        if unknown:
            known = ", ".join(sorted(symbols)) or "none"
            raise OptionError(f"--dim {unknown[0]}: the model has no dimension of that name, it has {known}")
        self._roles = self._symbol_roles()
        for name, array in self.given.items():
            for size, found in zip(signature.inputs[name].shape, array.shape, strict=True):
                if isinstance(size, str) and size.isidentifier():
                    self._dims.setdefault(size, found)
                    if self._roles.get(size) == "batch":
                        self.batch = found

    def tokens(self, wanted: int) -> int:
        """How many tokens a step takes: the model's own number where that is fixed, else what is wanted."""
        port = self.signature.leading
        if port is None or not port.shape:
            return 1
        if port.name in self.given:
            return int(self.given[port.name].shape[self._token_axis(port)])
        size = port.shape[self._token_axis(port)]
        if isinstance(size, int):
            return size
        return self._dims.get(size, wanted) if isinstance(size, str) else wanted

    @property
    def fixed(self) -> bool:
        """Does the model take one number of tokens only?"""
        port = self.signature.leading
        return port is None or not port.shape or isinstance(port.shape[self._token_axis(port)], int)

    def past(self, wanted: int = 0) -> int:
        """How many positions there are before the first step: as the states have them where that is fixed or given."""
        for symbol, role in self._roles.items():
            if role == "past" and symbol in self._dims:
                return self._dims[symbol]
        return wanted if any(role == "past" for role in self._roles.values()) else 0

    def step(self, tokens: int, past: int, token_ids: Sequence[int] | None = None, *, first: bool = False) -> Arrays:
        """The inputs of one step without the states.

        Args:
            tokens: how many, where the model leaves that open (:meth:`tokens`).
            past: how many positions are before them.
            token_ids: the ids to give, for each sequence the same; random ones by default.
            first: the step that ``given`` is for.

        Raises:
            OptionError: an input whose size or range cannot be guessed, with what to say.
        """
        sizes = {"batch": self.batch, "tokens": tokens, "past": past, "total": past + tokens}
        made: Arrays = {}
        for port in self.signature.inputs.values():
            if port.role == "state":
                continue
            made[port.name] = (
                self.given[port.name] if first and port.name in self.given else self._make(port, sizes, token_ids)
            )
        return made

    def states(self, past: int, *, random: bool = False) -> Arrays:
        """The states before the first step: zeros or random numbers, for ``past`` positions, or as ``given``."""
        sizes = {"batch": self.batch, "tokens": 1, "past": past, "total": past + 1}
        made: Arrays = {}
        for port in self.signature.of("state"):
            if port.name in self.given:
                made[port.name] = self.given[port.name]
                continue
            shape = self._shape(port, sizes)
            made[port.name] = self._random_state(port, shape) if random else np.zeros(shape, port.dtype)
        return made

    def _random_state(self, port: Port, shape: tuple[int, ...]) -> Array:
        if port.dtype == np.int8:  # codes of a cache
            return self._random.integers(-127, 128, shape).astype(np.int8)
        return (0.5 * self._random.standard_normal(shape)).astype(port.dtype)

    # -- making -------------------------------------------------------------------------------------------------------

    def _make(self, port: Port, sizes: Mapping[str, int], token_ids: Sequence[int] | None) -> Array:
        shape = self._shape(port, sizes)
        past, tokens = sizes["past"], sizes["tokens"]
        if port.role == "tokens":
            return self._token_ids(port, shape, token_ids)
        if port.role == "positions":
            counted = np.arange(past, past + (shape[-1] if shape else 1))
            return np.broadcast_to(counted if shape else counted[0], shape).astype(port.dtype)
        if port.role == "length":
            name = port.name.lower()
            value = past if "past" in name else past + tokens - (1 if "seqlens" in name else 0)
            return np.full(shape, value).astype(port.dtype)
        if port.role == "mask":
            return _mask(port, shape, past)
        drawn = 0.5 * self._random.standard_normal(shape)
        return (-np.abs(drawn) if "decay" in port.name.lower() else drawn).astype(port.dtype)

    def _token_ids(self, port: Port, shape: tuple[int, ...], token_ids: Sequence[int] | None) -> Array:
        limit = self._vocabulary or self.signature.vocabulary.get(port.name)
        if token_ids is None:
            if limit is None:
                untold = f"{port.name} ({port.dtype}): the model does not tell how many values it may have; give "
                if port.name in self.given:
                    raise OptionError(f"{untold}--vocabulary N for the steps behind the given one, or --steps 0")
                raise OptionError(f"{untold}--vocabulary N, or the input itself in an --input FILE.npz")
            return self._random.integers(0, limit, shape).astype(port.dtype)
        bad = [token for token in token_ids if token < 0 or (limit is not None and token >= limit)]
        if bad:
            raise OptionError(f"token {bad[0]}: {port.name} takes 0 to {(limit or 1 << 31) - 1}")
        if not shape or shape[-1] != len(token_ids):
            raise OptionError(f"{len(token_ids)} tokens: {port.name} takes {list(shape)}")
        return np.broadcast_to(np.asarray(token_ids), shape).astype(port.dtype)

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _shape(self, port: Port, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(self._size(port, size, sizes) for size in port.shape)

    def _size(self, port: Port, size: Dim, sizes: Mapping[str, int]) -> int:
        if isinstance(size, int):
            return size
        if size is None:
            raise OptionError(
                f"{port.name}: the model leaves a size open without a name; give the input in a .npz file"
            )
        values: dict[str, int] = {}
        for name in size_names(size):
            role = self._roles.get(name)
            if role == "past":  # grows with the steps, whatever it began with
                values[name] = sizes["past"]
            elif name in self._dims:
                values[name] = self._dims[name]
            elif role is not None:
                values[name] = sizes[role]
            else:
                raise OptionError(f"{port.name}: the size {name!r} cannot be guessed; give --dim {name}=N")
        return _evaluate(size, values)

    def _symbol_roles(self) -> dict[str, str]:
        """Symbol -> "batch", "tokens", "past" or "total", from where it stands, else from its name."""
        roles: dict[str, str] = {}

        def put(size: Dim, role: str) -> None:
            if isinstance(size, str) and size.isidentifier():
                roles.setdefault(size, role)

        leading = self.signature.leading
        if leading is not None and leading.shape:
            axis = self._token_axis(leading)
            put(leading.shape[axis], "tokens")
            if axis:
                put(leading.shape[0], "batch")
        for port in self.signature.inputs.values():
            if port.role == "positions" and port.shape:
                put(port.shape[-1], "tokens")
            elif port.role == "length":
                for size in port.shape:
                    put(size, "batch")
            elif port.role == "mask" and len(port.shape) == 4:
                put(port.shape[2], "tokens")
            if port.role == "mask" and port.shape:
                put(port.shape[-1], "total")
            if port.role in ("mask", "positions", "state") and len(port.shape) > 1:
                put(port.shape[0], "batch")
            if port.role == "state":
                self._state_roles(port, put)
        for port in self.signature.inputs.values():
            for size in port.shape:
                word = next(
                    (role for word, role in _WORDS.items() if isinstance(size, str) and word in size.lower()), None
                )
                if word is not None:
                    put(size, word)
        return roles

    def _state_roles(self, port: Port, put: Any) -> None:
        """A size that another name stands for in the state's output grows; one that keeps its name is not known."""
        made = self.signature.outputs.get(self.signature.states.get(port.name, ""))
        for axis, size in enumerate(port.shape[1:], start=1):
            if made is None or axis >= len(made.shape) or made.shape[axis] != size:
                put(size, "past")

    @staticmethod
    def _token_axis(port: Port) -> int:
        """Axis 1 of [batch, tokens] and [batch, tokens, channels]; axis 0 of [tokens] and of [tokens, channels]."""
        least = 2 if port.role == "tokens" else 3
        return 1 if len(port.shape) >= least else 0


def _mask(port: Port, shape: tuple[int, ...], past: int) -> Array:
    """All positions visible; of three dimensions or more, none that comes later. Floats are added: 0 is visible."""
    visible = np.ones(shape, np.bool_)
    if len(shape) >= 3:
        visible &= np.arange(shape[-1]) <= past + np.arange(shape[-2])[:, None]
    if port.dtype.kind in "biu" or len(shape) < 3:
        return visible.astype(port.dtype)
    return np.where(visible, 0.0, -1e4).astype(port.dtype)


def _evaluate(size: str, values: Mapping[str, int]) -> int:
    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return values[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise OptionError(f"the size {size!r} is no sum or product of names: give the input in a .npz file")

    if size in values:
        return values[size]
    return value(ast.parse(size, mode="eval").body)


def _as_declared(signature: Signature, name: str, array: Array) -> Array:
    port = signature.inputs.get(name)
    if port is None:
        raise OptionError(f"input {name!r}: the model has no such input, it has {', '.join(signature.inputs)}")
    if array.dtype != port.dtype:
        kinds = "iub" if array.dtype.kind in "iub" else "f"
        if port.dtype.kind not in kinds and not (kinds == "f" and port.dtype.kind == "V"):
            raise OptionError(f"input {name!r} is a {array.dtype}: expected {port.dtype}")
        array = array.astype(port.dtype)
    fits = len(array.shape) == len(port.shape) and all(
        not isinstance(size, int) or size == found for size, found in zip(port.shape, array.shape, strict=True)
    )
    if not fits:
        raise OptionError(f"input {name!r} is of shape {list(array.shape)}: expected {port.shape}")
    return array


#: What reading a .npz file may raise, at any array, where it is damaged or none.
NPZ_ERRORS = (OSError, ValueError, EOFError, BadZipFile, zlib.error)


def open_npz(path: Path) -> NpzFile:
    """A .npz file; its arrays are read when they are asked for.

    Raises:
        OptionError: it is a .npy file, or no file of NumPy's.
        one of ``NPZ_ERRORS``: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(6)
    if start == b"\x93NUMPY":
        raise OptionError(f"{path} holds one array: expected a .npz file of named arrays")
    if not start.startswith(b"PK"):
        raise ValueError("it is no zip archive of arrays")
    opened = np.load(path, allow_pickle=False)
    assert isinstance(opened, NpzFile)
    return opened


def load_inputs(path: str | os.PathLike[str]) -> Arrays:
    """The arrays of a .npz file, by input name.

    Raises:
        OptionError: the file cannot be read, or holds Python objects.
    """
    try:
        with open_npz(Path(path)) as file:
            return {name: file[name] for name in file.files}
    except OptionError:
        raise
    except NPZ_ERRORS as error:
        raise OptionError(f"{path} cannot be read as a .npz file of arrays: {error}") from error
