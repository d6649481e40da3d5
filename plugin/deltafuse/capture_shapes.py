"""The shapes of a runner's operands: those that the model takes, and the sizes that a step shares with its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .capture_states import first_shape, shape_text, sizes_agree
from .errors import OptionError

Shape = Sequence[int]


class Shapes:
    """What is declared of the operands of a session, and what its steps and states had in common at the start.

    Args:
        session: the ``InferenceSession``.
        states: its states, input name -> output name.
    """

    def __init__(self, session: Any, states: Mapping[str, str]) -> None:
        self._declared = {value.name: list(value.shape) for value in session.get_inputs()}
        made = {value.name: list(value.shape) for value in session.get_outputs()}
        self._states = tuple(states)
        #: Input, its axis, state, its axis: sizes of one name, such as the batch. A state's size that has another name
        #: in the output may grow with the steps, and is bound to nothing.
        self._bound: list[tuple[str, int, str, int]] = []
        for state, output in states.items():
            for axis, size in enumerate(self._declared[state]):
                if isinstance(size, str) and made[output][axis : axis + 1] == [size]:
                    self._bound += self._of_size(size, state, axis)

    def _of_size(self, size: str, state: str, state_axis: int) -> list[tuple[str, int, str, int]]:
        others = {name: shape for name, shape in self._declared.items() if name not in self._states}
        return [(n, i, state, state_axis) for n, shape in others.items() for i, s in enumerate(shape) if s == size]

    def check(self, name: str, shape: Shape) -> None:
        """Does the model take an operand of this shape? Of an input without a declared shape nothing is known.

        Raises:
            OptionError: another number of dimensions, or another size where one is fixed.
        """
        declared = self._declared[name]
        if declared and not (len(shape) == len(declared) and sizes_agree(shape, declared)):
            raise OptionError(f"{name} is of shape {shape_text(shape)}: expected {shape_text(declared)}")

    def start(self, inputs: Mapping[str, Shape], given: Mapping[str, Shape]) -> dict[str, tuple[int, ...]]:
        """The states' shapes before the first step on these inputs: as given, else as declared."""
        symbols: dict[str, int] = {}
        for name, shape in inputs.items():
            for declared, size in zip(self._declared[name], shape, strict=False):
                if isinstance(declared, str):
                    symbols.setdefault(declared, size)
        shapes = {
            name: tuple(given[name]) if name in given else first_shape(self._declared[name], symbols)
            for name in self._states
        }
        # Exporters give one name to sizes that are not the same: bound is what was so at the start.
        self._kept = [at for at in self._bound if inputs[at[0]][at[1]] == shapes[at[2]][at[3]]]
        return shapes

    def check_batch(self, inputs: Mapping[str, Shape], states: Mapping[str, Shape]) -> None:
        """Is a step on these inputs one of the same sequences?

        Raises:
            OptionError: it has another size of what it shares with the states.
        """
        for name, axis, state, state_axis in self._kept:
            size, had = inputs[name][axis], states[state][state_axis]
            if size != had:
                symbol = self._declared[name][axis]
                raise OptionError(f"{name} has {symbol} {size}, the states have {had} ({state}): reset() first")
