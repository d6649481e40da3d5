"""One set of shapes of a runner: its fixed buffers, its bindings, and its captured graphs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .capture_device import Graph, HostDevice

SYNCHRONISE_ENTRY = "disable_synchronize_execution_providers"
#: -1: none of ORT's own graphs. Where the entry is absent, ORT's Python side meets an exception in each run.
GRAPH_ENTRY = "gpu_graph_id"


class Slots:
    """The memory of states whose shape does not change: a run reads one side and writes the other.

    ``sides[0]`` and ``sides[1]`` are the two sides, by input name. In place they are the same values.
    """

    def __init__(self, device: HostDevice, states: Mapping[str, Any], *, in_place: bool) -> None:
        other = {name: device.empty(value.shape(), value.element_type()) for name, value in states.items()}
        self.sides: tuple[Mapping[str, Any], Mapping[str, Any]]
        self.sides = (dict(states), dict(states) if in_place else other)
        self.in_place = in_place

    @property
    def count(self) -> int:
        """How many ways there are to run a step: from either side, or in place."""
        return 1 if self.in_place else 2

    def after(self, side: int) -> int:
        return side if self.in_place else 1 - side


class Plan:
    """Buffers of the inputs and outputs of one set of shapes, and a binding for each side of the states."""

    def __init__(
        self,
        session: Any,
        device: HostDevice,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        pairs: Mapping[str, str],
        slots: Slots,
    ) -> None:
        self.session, self.device, self.slots, self._pairs = session, device, slots, dict(pairs)
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self.eager_runs = [0] * slots.count
        self._thread = 0
        self.graphs: list[Graph] = []
        #: Why this set of shapes is not captured, "" while it may be.
        self.refusal = ""
        #: Inputs that ONNX Runtime copies to the host when they are bound: they are bound again for each run.
        self.on_host = host_inputs(session) if device.name != "cpu" else []
        self.options = run_options(device)
        self._bindings = [self._bind(side) for side in range(slots.count)]

    def _bind(self, side: int) -> Any:
        binding = self.session.io_binding()
        before, after = self.slots.sides[side], self.slots.sides[self.slots.after(side)]
        for name, value in {**self.inputs, **before}.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in {**self.outputs, **{made: after[given] for given, made in self._pairs.items()}}.items():
            binding.bind_ortvalue_output(name, value)
        return binding

    def run_eager(self, side: int) -> None:
        if self._thread != threading.get_ident():
            # ONNX Runtime keeps some handles for each thread; a capture must not be the first to need them.
            self._thread, self.eager_runs = threading.get_ident(), [0] * self.slots.count
        if self.on_host:
            self._bindings[side] = self._bind(side)
        self.session.run_with_iobinding(self._bindings[side], self.options)
        self.eager_runs[side] += 1

    def is_warm(self, steps: int) -> bool:
        """Did this thread run so many steps eagerly, and at least one from each side?"""
        return self._thread == threading.get_ident() and min(self.eager_runs) >= 1 and sum(self.eager_runs) >= steps

    def replay(self, side: int) -> None:
        self.graphs[side].launch()

    def capture(self) -> None:
        """Capture the step from each side. Nothing runs. Raises what the session or the device raises."""
        graphs: list[Graph] = []
        try:
            for binding in self._bindings:
                work = partial(self.session.run_with_iobinding, binding, self.options)
                graphs.append(self.device.capture(work))
        except BaseException:
            for graph in graphs:
                graph.close()
            raise
        self.graphs = graphs

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()
        self.graphs = []


def host_inputs(session: Any) -> list[str]:
    """The inputs that a session on a GPU wants in host memory, for nodes on the CPU."""
    pairs = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return [value.name for value, info in pairs if info is not None and str(info.name).lower() == "cpu"]


def run_options(device: HostDevice) -> Any:
    """Run options under which a run only queues its work, where the device can do so."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry(GRAPH_ENTRY, "-1")
    if device.asynchronous:
        options.add_run_config_entry(SYNCHRONISE_ENTRY, "1")
    return options


def run_unplanned(
    session: Any, device: HostDevice, inputs: Mapping[str, Any], output_names: Sequence[str]
) -> dict[str, Any]:
    """One eager run with outputs that ONNX Runtime allocates on the device, for shapes that are not known yet."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name in output_names:
        binding.bind_output(name, device.name, device.index)
    session.run_with_iobinding(binding, run_options(device))
    return dict(zip(output_names, binding.get_outputs(), strict=True))
