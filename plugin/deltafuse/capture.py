"""``deltafuse.capture``: run a model step by step with its states on the device, on a GPU as replayed CUDA graphs.

A step of a decoder is hundreds of small kernels, and launching them takes longer than running them. The runner binds
inputs, outputs and states to fixed memory, runs a few steps as usual, then captures a whole step, over ONNX Runtime's
CUDA EP and the plugin EP, into a CUDA graph and replays that. On the CPU, and where a step cannot be captured, the same
runner runs eagerly, with the states where they are.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from .capture_device import Array, HostDevice, element_type
from .capture_feeds import Feeds, shape_of
from .capture_plan import Plan, Slots, run_unplanned
from .capture_session import cpu_nodes, device_of, make_session
from .capture_shapes import Shapes
from .capture_states import pair_states
from .errors import DeltaFuseError, ModelKindError, OptionError
from .model_arg import for_ort

GRAPHS = ("auto", "always", "never")


class CaptureError(DeltaFuseError):
    """A step could not be captured, and ``graphs="always"`` asked for it."""


def capture(
    model: Any,
    *,
    states: Mapping[str, str] | str = "auto",
    device: str = "auto",
    graphs: str = "auto",
    in_place: bool = False,
    warmup: int = 2,
    cache: int = 4,
    sess_options: Any = None,
    provider_options: Mapping[str, Mapping[str, Any]] | None = None,
    strict: bool = False,
) -> Runner:
    """A runner of a model's steps.

    Args:
        model: a path, bytes, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, of which a session is made as by
            :func:`deltafuse.session`; or a session. Of a session on a GPU, steps can be captured only if it was made
            with a ``user_compute_stream``, not the default stream.
        states: input name -> name of the output that continues it, or "auto" (``Runner.states`` tells what was found).
        device, sess_options, provider_options, strict: as for ``deltafuse.session``; not with a session.
        graphs: "auto": capture where possible, else run eagerly, warn once, and say why in ``Runner.not_captured``;
            "always": raise where a step cannot be captured; "never": run eagerly.
        in_place: let each new state have the memory of the old one. Right if every operator that reads a state
            does so before the new one is written, as deltafuse's own do; half the memory, and one graph instead of two.
        warmup: eager steps of a set of shapes before it is captured, 1 or more (one from either side of the states).
        cache: sets of shapes that are kept, with their buffers and graphs; the least recently used goes first.

    Raises:
        OptionError: an argument that is not understood, or a state whose input and output cannot match.
        CaptureError: with ``graphs="always"``, a session whose steps can never be captured.
        DeltaFuseError: whatever :func:`deltafuse.session` raises.
    """
    if graphs not in GRAPHS:
        raise OptionError(f"graphs {graphs!r}: expected one of {', '.join(GRAPHS)}")
    for name, value in (("warmup", warmup), ("cache", cache)):
        if not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} {value!r}: expected 1 or more")
    if isinstance(model, type) or not all(hasattr(model, name) for name in ("get_providers", "io_binding")):
        try:
            given = for_ort(model)
        except ModelKindError as error:
            raise ModelKindError(f"{error}; an InferenceSession is taken too") from error
        session, place = make_session(given, device, graphs, sess_options, provider_options, strict)
    else:
        if device != "auto" or sess_options is not None or provider_options is not None or strict:
            raise OptionError("device, sess_options, provider_options and strict are for a path, not for a session")
        session, place = model, device_of(model)
    if graphs == "always" and place.refusal:
        raise CaptureError(f"the step cannot be captured: {place.refusal}")
    return Runner(session, place, pair_states(session, states), graphs, in_place, warmup, cache)


class Runner:
    """Runs a model's steps; made by :func:`capture`. One step at a time: calls from several threads take turns.

    While steps are captured, run the session through the runner only: a captured step works in memory of ONNX Runtime's
    arena that another run may have been given.

    Attributes:
        session: the ``InferenceSession``.
        states: the states, input name -> output name.
        inputs, outputs: names of the other inputs and outputs.
        not_captured: why sets of shapes are not captured, by what :meth:`describe` says of them.
    """

    def __init__(
        self,
        session: Any,
        device: HostDevice,
        states: Mapping[str, str],
        graphs: str,
        in_place: bool,
        warmup: int,
        cache: int,
    ) -> None:
        self.session, self.device, self.states = session, device, dict(states)
        self._graphs, self._in_place, self._warmup, self._cache = graphs, in_place, warmup, cache
        self._types = {value.name: element_type(value.name, value.type) for value in session.get_inputs()}
        self._shapes = Shapes(session, self.states)
        self.inputs = tuple(name for name in self._types if name not in self.states)
        self._feeds = Feeds(self.inputs, self._types, self._shapes, device)
        made = set(self.states.values())
        self.outputs = tuple(value.name for value in session.get_outputs() if value.name not in made)
        self.not_captured: dict[str, str] = {}
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._slots: dict[Any, Slots] = {}
        self._current: Mapping[str, Any] | None = None
        self._state_shapes: tuple[Any, ...] = ()
        self._given: dict[str, Array] = {}
        self._side = 0
        self._lock = threading.Lock()
        self._warned = False
        self._closed = False

    # -- running ------------------------------------------------------------------------------------------------------

    def __call__(self, **feeds: Any) -> dict[str, Array]:
        """One step: ``run(feeds)`` with the inputs as named arguments."""
        return self.run(feeds)

    def run(self, feeds: Mapping[str, Any], *, values: bool = False) -> dict[str, Any]:
        """One step from the current states, which it moves on.

        Args:
            feeds: input name -> array, ``OrtValue`` or anything with DLPack (a tensor on the session's GPU is copied
                there, after waiting for everything that is queued on that GPU). All inputs but the states.
            values: return outputs as ``OrtValue`` on the device, not as arrays: the runner's own memory, which the next
                step of the same shapes overwrites. On a GPU they are queued on the session's stream, not finished:
                :meth:`synchronize` waits. ``__dlpack__`` on them gives them to other libraries without a copy.

        Returns:
            Output name -> array (bfloat16 as ``ml_dtypes.bfloat16``), without the states.

        Raises:
            OptionError: a missing or unknown input, one of another type or shape, or one of another batch than the
                states: :meth:`reset` first.
            DeltaFuseError: ONNX Runtime cannot run the step. The states are as before it.
            CaptureError: with ``graphs="always"``, a step that cannot be captured, naming what stands in the way.
        """
        with self._lock:
            outputs = self._step(self._sources(feeds))
            if values:
                return outputs
            return {name: self.device.read(value) for name, value in outputs.items()}

    def prepare(self, feeds: Mapping[str, Any]) -> bool:
        """Warm up and capture the shapes of ``feeds`` now, and leave the states as they were.

        Returns:
            Whether the next step of these shapes is a replay.
        """
        with self._lock:
            sources = self._sources(feeds)
            self._start(sources)
            kept = {name: self.device.read(value) for name, value in (self._current or {}).items()}
            plan = None
            try:
                for _ in range(2 * (self._warmup + 1) + 1):
                    self._step(sources)
                    plan = self._plans.get(self._key(sources))
                    if plan is None or plan.graphs or plan.refusal:
                        break
            finally:
                self._set_states({name: array.shape for name, array in kept.items()}, kept)
            return plan is not None and bool(plan.graphs)

    def synchronize(self) -> None:
        """Wait for the steps that are queued."""
        self.device.synchronize()

    # -- states -------------------------------------------------------------------------------------------------------

    def reset(self, states: Mapping[str, Any] | None = None) -> None:
        """Begin anew: states as given by input name, the others zeros (of no tokens, where their length is open).

        Raises:
            OptionError: a name that is no state, or another type or shape.
        """
        with self._lock:
            if not isinstance(states or {}, Mapping):
                raise OptionError(f"states {states!r}: expected arrays by input name")
            unknown = sorted(str(name) for name in states or {} if name not in self.states)
            if unknown:
                raise OptionError(f"{', '.join(unknown)}: no state, the states are {', '.join(self.states) or 'none'}")
            given = {name: self._feeds.array(name, value) for name, value in (states or {}).items()}
            for name, array in given.items():
                self._shapes.check(name, array.shape)
            self._given, self._current = given, None

    def state_values(self) -> dict[str, Any]:
        """The current states as ``OrtValue`` on the device, by input name; valid until the next step."""
        return dict(self._current or {})

    def state_arrays(self) -> dict[str, Array]:
        """Copies of the current states, by input name: what :meth:`reset` takes."""
        with self._lock:
            return {name: self.device.read(value) for name, value in (self._current or {}).items()}

    # -- what was captured --------------------------------------------------------------------------------------------

    @property
    def captured(self) -> list[str]:
        """The sets of shapes that are replayed."""
        return [self.describe(key) for key, plan in self._plans.items() if plan.graphs]

    @staticmethod
    def describe(key: Any) -> str:
        """A set of shapes in words."""
        return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in key)

    def close(self) -> None:
        """Give back graphs, buffers and the stream. The session must not run on the runner's stream afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.device.synchronize()
            for plan in self._plans.values():
                plan.close()
            self._plans.clear()
            self._slots.clear()
            self._current = None
            self.device.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _sources(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        if self._closed:
            raise DeltaFuseError("the runner is closed")
        return self._feeds.sources(feeds)

    def _key(self, sources: Mapping[str, Any]) -> Any:
        return (*((name, shape_of(source)) for name, source in sources.items()), *self._state_shapes)

    def _hold(self, states: Mapping[str, Any]) -> None:
        """Take these values as the current states, of shapes that may be new."""
        self._current = dict(states)
        self._state_shapes = tuple((name, tuple(value.shape())) for name, value in states.items())

    def _start(self, sources: Mapping[str, Any]) -> None:
        """Make the first states, once the inputs' shapes are known."""
        if self._current is not None:
            return
        shapes = {name: shape_of(source) for name, source in sources.items()}
        given = {name: array.shape for name, array in self._given.items()}
        self._set_states(self._shapes.start(shapes, given), self._given)

    def _set_states(self, shapes: Mapping[str, tuple[int, ...]], arrays: Mapping[str, Array]) -> None:
        """Put the states, zeros where no array is given, into the first side of their slots or what becomes it."""
        slots = self._slots.get(tuple(shapes.items()))
        self._side = 0
        if slots is not None:
            held: Mapping[str, Any] = slots.sides[0]
        else:
            held = {name: self.device.empty(shape, self._types[name]) for name, shape in shapes.items()}
        self._hold(held)
        for name, value in held.items():
            if name in arrays:
                self.device.write(value, arrays[name])
            else:
                self.device.zero(value)

    def _put(self, buffers: Mapping[str, Any], sources: Mapping[str, Any]) -> None:
        for name, source in sources.items():
            if isinstance(source, np.ndarray):
                self.device.write(buffers[name], source)
            else:
                self.device.copy(buffers[name], source)

    @contextmanager
    def _clear_errors(self, key: Any) -> Iterator[None]:
        try:
            yield
        except DeltaFuseError:
            raise
        except Exception as error:  # onnxruntime has no common base for its errors
            text = " ".join(str(error).split())
            raise DeltaFuseError(f"the step ({self.describe(key)}) failed: {text}") from error

    def _step(self, sources: Mapping[str, Any]) -> dict[str, Any]:
        fresh = self._current is None
        try:
            return self._moved(sources)
        except BaseException:
            if fresh:  # the next one begins anew too, of whatever batch
                self._current = None
            raise

    def _moved(self, sources: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a step, with the states moved on."""
        self._start(sources)
        key = self._key(sources)
        plan = self._plans.get(key)
        if plan is None:
            return self._first_step(key, sources)
        self._plans.move_to_end(key)
        self._put(plan.inputs, sources)
        if not plan.graphs and not plan.refusal and plan.is_warm(self._warmup):
            self._capture(key, plan)
        with self._clear_errors(key):
            if plan.graphs:
                plan.replay(self._side)
            else:
                plan.run_eager(self._side)
        self._side = plan.slots.after(self._side)
        self._current = plan.slots.sides[self._side]  # the same shapes
        return plan.outputs

    def _first_step(self, key: Any, sources: Mapping[str, Any]) -> dict[str, Any]:
        """A step of shapes that were not seen before: it tells the outputs' shapes."""
        assert self._current is not None
        shapes = {name: shape_of(source) for name, source in sources.items()}
        self._shapes.check_batch(shapes, dict(self._state_shapes))
        inputs = {name: self.device.empty(shape, self._types[name]) for name, shape in shapes.items()}
        self._put(inputs, sources)
        names = (*self.outputs, *self.states.values())
        with self._clear_errors(key):
            made = run_unplanned(self.session, self.device, {**inputs, **self._current}, names)
        news = {given: made[output] for given, output in self.states.items()}
        if any(news[name].shape() != self._current[name].shape() for name in self.states):
            self._note(key, "the states grow with every step, so that no two steps have the same shapes")
            self._hold(news)
            return {name: made[name] for name in self.outputs}
        outputs = {}
        for name in self.outputs:
            # Not kept in ORT's arena: a captured graph works in arena memory that was free when it was captured.
            outputs[name] = self.device.empty(made[name].shape(), made[name].element_type())
            self.device.copy(outputs[name], made[name])
        shape_key = self._state_shapes
        if shape_key not in self._slots:
            self._slots[shape_key] = Slots(self.device, self._current, in_place=self._in_place)
            self._side = 0
        slots = self._slots[shape_key]
        self._side = slots.after(self._side)
        for name, value in news.items():
            self.device.copy(slots.sides[self._side][name], value)
        self._current = slots.sides[self._side]
        plan = Plan(self.session, self.device, inputs, outputs, self.states, slots)
        self._plans[key] = plan
        self._choose(key, plan)
        self._evict()
        return outputs

    def _choose(self, key: Any, plan: Plan) -> None:
        """What is known to stand in the way of a capture before one is tried."""
        if self._graphs == "never":
            plan.refusal = 'graphs="never"'
        elif self.device.refusal:
            plan.refusal = self.device.refusal
        elif plan.on_host:
            plan.refusal = f"input {', '.join(plan.on_host)} is wanted in host memory{cpu_nodes(self.session)}"
        if plan.refusal:
            self._note(key, plan.refusal)

    def _capture(self, key: Any, plan: Plan) -> None:
        try:
            plan.capture()
        except Exception as error:  # onnxruntime has no common base for its errors
            plan.refusal = f"{error}{cpu_nodes(self.session)}"
            self._note(key, plan.refusal)

    def _note(self, key: Any, reason: str) -> None:
        if self._graphs == "always":
            raise CaptureError(f"the step ({self.describe(key)}) cannot be captured: {reason}")
        if len(self.not_captured) < 64:  # growing states: each step has shapes of its own
            self.not_captured[self.describe(key)] = reason
        if self._graphs == "auto" and self.device.name != "cpu" and not self._warned:
            self._warned = True
            warnings.warn(f"steps run eagerly, not as CUDA graphs: {reason}", RuntimeWarning, stacklevel=4)

    def _evict(self) -> None:
        while len(self._plans) > self._cache:
            self.device.synchronize()
            _, oldest = self._plans.popitem(last=False)
            oldest.close()
        used = {id(plan.slots) for plan in self._plans.values()}
        self._slots = {key: slots for key, slots in self._slots.items() if id(slots) in used}
