"""Tensors that are made part by part: a stack of experts' weights is never in memory as a whole."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]


class PartsTensor(ir.LazyTensor):
    """A tensor ``[n, ..]`` whose parts along the first axis are made when they are asked for.

    Writing it to a file (``tofile``, which saving a model calls) makes one part at a time.
    """

    def __init__(
        self, make: Callable[[int], Array], dtype: ir.DataType, shape: Sequence[int], *, name: str | None = None
    ) -> None:
        """``make(i)`` gives part i, of shape ``shape[1:]`` and the NumPy type of ``dtype``."""
        super().__init__(self._whole, dtype, ir.Shape(shape), name=name)
        self._make, self._dims = make, tuple(shape)

    def part(self, index: int) -> Array:
        """One part.

        Raises:
            ValueError: what ``make`` gave is not of the tensor's type and shape.
        """
        array = np.ascontiguousarray(self._make(index))
        dtype = self.dtype.numpy()
        if array.shape != self._dims[1:] or array.dtype != dtype:
            raise ValueError(
                f"part {index} of {self.name!r} is {array.dtype} {list(array.shape)}: "
                f"expected {dtype} {list(self._dims[1:])}"
            )
        return array

    def _whole(self) -> ir.TensorProtocol:
        whole = np.empty(self._dims, self.dtype.numpy())
        for index in range(self._dims[0]):
            whole[index] = self.part(index)
        return ir.tensor(whole)

    def tofile(self, file: Any) -> None:
        """Write the tensor's bytes at the file's position."""
        for index in range(self._dims[0]):
            file.write(self.part(index).view(np.uint8).reshape(-1).data)


def part_of(tensor: ir.TensorProtocol, index: int) -> Array:
    """Part ``index`` along the first axis of any tensor; only that part is read where the tensor allows it."""
    if isinstance(tensor, PartsTensor):
        return tensor.part(index)
    if isinstance(tensor, ir.ExternalTensor) and tensor.dtype.bitwidth >= 8:
        # not tensor.numpy(), which maps the file: what was read of a map stays in the process's memory
        shape = tuple(tensor.shape.numpy()[1:])
        dtype = tensor.dtype.numpy()
        count = int(np.prod(shape))
        start = (tensor.offset or 0) + index * count * dtype.itemsize
        return np.fromfile(tensor.path, np.uint8, count * dtype.itemsize, offset=start).view(dtype).reshape(shape)
    return np.asarray(tensor.numpy()[index])


class SpillFile:
    """Arrays put on disk until a model is saved. The file has no name any more and goes with its last user."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """``folder``: where the file is made; else ``TMPDIR``, else /var/tmp (/tmp may be memory)."""
        if folder is None and "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK):
            folder = "/var/tmp"
        self._file = tempfile.TemporaryFile(dir=folder)
        self._end = 0
        self._lock = threading.Lock()

    def append(self, array: Array) -> int:
        """Write the array's bytes; returns where."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        with self._lock:
            start = self._end
            self._end += data.nbytes
        self._pwrite(data.data, start)
        return start

    def _pwrite(self, data: memoryview, start: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], start + done)

    def read(self, start: int, shape: Sequence[int], dtype: Any) -> Array:
        """The array that was written there."""
        array = np.empty(tuple(shape), dtype)
        target = array.view(np.uint8).reshape(-1).data
        done = 0
        while done < len(target):
            got = os.preadv(self._file.fileno(), [target[done:]], start + done)
            if got == 0:
                raise OSError("the temporary file of quantized weights is shorter than what was written to it")
            done += got
        return array

    def tensor(self, starts: Sequence[int], dtype: ir.DataType, part_shape: Sequence[int]) -> PartsTensor:
        """The tensor whose parts were written at ``starts``."""
        shape, numpy_type = tuple(part_shape), dtype.numpy()
        return PartsTensor(lambda i: self.read(starts[i], shape, numpy_type), dtype, (len(starts), *shape))
