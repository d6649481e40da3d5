"""What a step is fed, as a runner takes it: arrays of the right type, or values that lie on its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .capture_device import Array, HostDevice, as_array, numpy_type
from .capture_shapes import Shapes
from .errors import OptionError


class Feeds:
    """Checks and brings the inputs of a session's steps."""

    def __init__(self, inputs: Sequence[str], types: Mapping[str, int], shapes: Shapes, device: HostDevice) -> None:
        self._inputs, self._types, self._shapes, self._device = inputs, types, shapes, device

    def sources(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Each input as an array of the right type, or as an ``OrtValue`` on the device.

        Raises:
            OptionError: inputs that are missing, unknown, of another type or shape, or on another device.
        """
        if not isinstance(feeds, Mapping):
            raise OptionError(f"inputs {feeds!r}: expected values by input name, {', '.join(self._inputs)}")
        missing = [name for name in self._inputs if name not in feeds]
        unknown = sorted(str(name) for name in feeds if name not in self._inputs)
        if missing or unknown:
            named = (("missing", missing), ("unknown", unknown))
            what = ", ".join(f"{kind}: {', '.join(names)}" for kind, names in named if names)
            raise OptionError(f"inputs {what}; expected {', '.join(self._inputs)}")
        sources = {name: self._source(name, feeds[name]) for name in self._inputs}
        for name, source in sources.items():
            self._shapes.check(name, shape_of(source))
        return sources

    def array(self, name: str, given: Any) -> Array:
        """A value as an array of the input's type."""
        return as_array(name, given, self._types[name])

    def _source(self, name: str, given: Any) -> Any:
        import onnxruntime as ort

        value = given
        if not isinstance(given, (ort.OrtValue, np.ndarray)) and hasattr(given, "__dlpack__"):
            value = ort.OrtValue.from_dlpack(given)
        if not isinstance(value, ort.OrtValue):
            return self.array(name, value)
        if value.device_name() == "cpu":
            return self.array(name, HostDevice().read(value))
        if value.element_type() != self._types[name]:
            raise OptionError(f"{name} is a {value.data_type()}: expected {np.dtype(numpy_type(self._types[name]))}")
        here = (self._device.name, self._device.index)
        if (value.device_name(), value.__dlpack_device__()[1]) != here:
            lies = f"{value.device_name()}:{value.__dlpack_device__()[1]}"
            raise OptionError(f"{name} lies on {lies}: the session is on {self._device.name}:{self._device.index}")
        self._device.settle()
        return value


def shape_of(source: Any) -> tuple[int, ...]:
    """An array's shape, or an ``OrtValue``'s."""
    return tuple(source.shape if isinstance(source, np.ndarray) else source.shape())
