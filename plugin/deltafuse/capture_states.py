"""Which output of a model continues which of its inputs: the states of a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import OptionError

#: How the names of a state's input and output differ, in exports of transformers, of ONNX Runtime GenAI and in ours.
_RENAMED = (
    ("past_key_values", "present"),
    ("past", "present"),
    ("input.", "output."),
    ("initial_state", "final_state"),
    ("conv_state", "present_conv_state"),
)
_PREFIXES = ("present_", "new_", "next_", "updated_", "out_")
_SUFFIXES = ("_out", "_output", "_next", "_new")
_STATE_TYPES = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(int8)", "tensor(float8e4m3fn)")


def pair_states(session: Any, states: Mapping[str, str] | str) -> dict[str, str]:
    """The session's states, input name to output name.

    Args:
        session: the ``InferenceSession``.
        states: the pairs, or "auto": by name where inputs and outputs are named alike ("past.0.key", "present.0.key";
            "input.cache...", "output.cache..."; "s", "new_s"), else by position: the last inputs and the last outputs
            that have the same types and ranks and no contradicting sizes, three dimensions or more, while at least one
            other input and one other output are left.

    Raises:
        OptionError: a name that the session does not have, types or shapes that cannot match, or another word than
            "auto".
    """
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    if isinstance(states, str):
        if states != "auto":
            raise OptionError(f"states {states!r}: expected 'auto' or pairs of input and output names")
        return _by_name(inputs, outputs) or _by_position(list(inputs.values()), list(outputs.values()))
    if not isinstance(states, Mapping):
        raise OptionError(f"states {states!r}: expected 'auto' or pairs of input and output names")
    for given, made in states.items():
        if given not in inputs or made not in outputs:
            kind, name, have = ("input", given, inputs) if given not in inputs else ("output", made, outputs)
            raise OptionError(f"states: the model has no {kind} {name!r}, it has {', '.join(have)}")
        if inputs[given].type != outputs[made].type:
            raise OptionError(f"states: {given} is a {inputs[given].type}, {made} a {outputs[made].type}")
        if not can_continue(inputs[given], outputs[made]):
            shapes = f"{shape_text(inputs[given].shape)}, {made} of shape {shape_text(outputs[made].shape)}"
            raise OptionError(f"states: {given} is of shape {shapes}: the one cannot continue the other")
    if len(set(states.values())) < len(states):
        raise OptionError("states: an output is named twice")
    return dict(states)


def _by_name(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for name, value in inputs.items():
        candidates = [name.replace(old, new, 1) for old, new in _RENAMED if old in name]
        candidates += [prefix + name for prefix in _PREFIXES] + [name + suffix for suffix in _SUFFIXES]
        for candidate in candidates:
            made = outputs.get(candidate)
            fits = made is not None and made.type == value.type and can_continue(value, made)
            if fits and candidate not in pairs.values():
                pairs[name] = candidate
                break
    return pairs


def can_continue(given: Any, made: Any) -> bool:
    """Can an output be the next step's input? Of a shape that is not declared, ONNX Runtime says that it is empty."""
    if not given.shape or not made.shape:
        return True
    return len(given.shape) == len(made.shape) and sizes_agree(given.shape, made.shape)


def sizes_agree(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(one, other, strict=True))


def shape_text(shape: Sequence[Any]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _by_position(inputs: list[Any], outputs: list[Any]) -> dict[str, str]:
    for count in range(min(len(inputs), len(outputs)) - 1, 0, -1):
        pairs = list(zip(inputs[-count:], outputs[-count:], strict=True))
        if all(_alike(given, made) for given, made in pairs):
            return {given.name: made.name for given, made in pairs}
    return {}


def _alike(given: Any, made: Any) -> bool:
    if given.type != made.type or given.type not in _STATE_TYPES or len(given.shape) != len(made.shape):
        return False
    return len(given.shape) >= 3 and sizes_agree(given.shape, made.shape)


def first_shape(shape: list[int | str | None], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """A state's shape before the first token: symbols as the other inputs have them, an unknown length is 0."""
    sizes = []
    for size in shape:
        if isinstance(size, int):
            sizes.append(size)
        else:
            text = str(size)
            sizes.append(int(text) if text.isdigit() else symbols.get(text, 0))
    return tuple(sizes)
