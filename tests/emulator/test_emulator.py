"""The CPU emulator of CUDA kernels: what small kernels compute on it, and that it finds the mistakes they make.

Builds the emulator and the kernels of check.cu into build/emulator. Needs g++, make and nvcc, no GPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from . import build

Array = NDArray[Any]
MISTAKES = (
    *("none", "no wait", "early sums", "no expect", "past global", "past shared", "no barrier", "misaligned"),
    *("half barrier", "no fence"),
)

HAS_TOOLS = all(shutil.which(tool) for tool in ("nvcc", "make", "g++")) and (build.CUDA / "cuda.h").exists()
if sys.platform != "linux" or platform.machine() != "x86_64" or not HAS_TOOLS:
    pytest.skip("the emulator of CUDA kernels: no nvcc, its headers, make or g++ here", allow_module_level=True)


class Device:
    """The emulator's memory and the kernels of check.cu."""

    def __init__(self, folder: Path) -> None:
        self.runtime = ctypes.CDLL(str(build.emulator()), mode=ctypes.RTLD_GLOBAL)
        self.runtime.emulator_malloc.restype = ctypes.c_void_p
        self.runtime.emulator_malloc.argtypes = [ctypes.c_size_t]
        self.runtime.emulator_free.argtypes = [ctypes.c_void_p]
        source = Path(__file__).with_name("check.cu")
        self.kernels = ctypes.CDLL(str(build.link([build.compile_one(source)], folder / "libcheck.so")))
        self.kernels.check_error.restype = ctypes.c_char_p
        self._held: list[int] = []

    def put(self, x: Array) -> ctypes.c_void_p:
        address = self.runtime.emulator_malloc(x.nbytes)
        ctypes.memmove(address, x.ctypes.data, x.nbytes)
        self._held.append(address)
        return ctypes.c_void_p(address)

    def get(self, at: ctypes.c_void_p, like: Array) -> Array:
        out = np.empty_like(like)
        ctypes.memmove(out.ctypes.data, at, out.nbytes)
        return out

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(self.kernels.check_error(status).decode())

    def free(self) -> None:
        for address in self._held:
            self.runtime.emulator_free(address)
        self._held.clear()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Device:
    return Device(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def device(loaded: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    for name in [name for name in os.environ if name.startswith("EMU_")]:
        monkeypatch.delenv(name)
    yield loaded
    loaded.free()


def test_lanes_that_go_apart_meet_again(device: Device) -> None:
    x = np.random.default_rng(0).integers(1, 10000, 192).astype(np.int32)
    inputs, outputs = device.put(x), device.put(np.zeros_like(x))
    device.check(device.kernels.check_lanes(inputs, outputs, 3))

    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return count

    value = np.array([steps(n) if n % 3 == 0 else -steps(n) if n % 3 == 1 else 1000 for n in x.tolist()]).reshape(
        -1, 32
    )
    want = value + 7 * (value % 2).sum(1, keepdims=True) + 3 * value.sum(1, keepdims=True)
    want[:, 1:] += value[:, :-1]
    np.testing.assert_array_equal(device.get(outputs, x), want.reshape(-1))


def test_mma(device: Device) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((16, 16), (16, 8)))
    c = np.zeros((16, 8), np.float32)
    out = device.put(c)
    device.check(device.kernels.check_mma(device.put(a), device.put(b), out))
    np.testing.assert_allclose(device.get(out, c), a.astype(np.float32) @ b.astype(np.float32), rtol=1e-5, atol=1e-5)


def wgmma(device: Device, mistake: str) -> tuple[Array, Array]:
    """The product that the kernel made, and the right one."""
    rng = np.random.default_rng(2)
    a, b = (rng.normal(size=(rows, 16)).astype(ml_dtypes.bfloat16) for rows in (64, 8))
    tiled = [np.ascontiguousarray(x.reshape(-1, 2, 8).transpose(1, 0, 2)) for x in (a, b)]
    c = np.zeros((64, 8), np.float32)
    out = device.put(c)
    device.check(device.kernels.check_wgmma(device.put(tiled[0]), device.put(tiled[1]), out, MISTAKES.index(mistake)))
    return device.get(out, c), 2 * a.astype(np.float32) @ b.astype(np.float32).T


@pytest.mark.parametrize("switch", [None, "EMU_LATE", "EMU_RACES", "EMU_SHUFFLE", "EMU_STATS"])
def test_wgmma_and_bulk_copies(device: Device, monkeypatch: pytest.MonkeyPatch, switch: str | None) -> None:
    if switch:
        monkeypatch.setenv(switch, "1")
    got, want = wgmma(device, "none")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mistake", ["no wait", "early sums"])
def test_late_work_shows_missing_waits(device: Device, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    got, want = wgmma(device, mistake)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # work that is done at once hides it
    monkeypatch.setenv("EMU_LATE", "1")
    try:
        got, _ = wgmma(device, mistake)
    except RuntimeError as error:
        assert "bulk copy was on its way" in str(error)
    else:
        assert np.isnan(got).any()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("no expect", "deadlock: no warp .*\n.*waiting for an mbarrier .*-2304 bytes"),
        ("past global", "illegal read of 2 bytes.*past the end"),
        ("past shared", "shared offset .* of "),
        ("misaligned", "misaligned address"),
        ("half barrier", "do not come"),
    ],
)
def test_faults(device: Device, mistake: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        wgmma(device, mistake)


def test_races(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMU_RACES", "1")
    with pytest.raises(RuntimeError, match=r"race: .*no barrier between"):
        wgmma(device, "no barrier")


def test_missing_proxy_fence(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMU_RACES", "1")
    with pytest.raises(RuntimeError, match=r"written by st.* with no fence\.proxy\.async between"):
        wgmma(device, "no fence")


def test_launches_that_overlap(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.zeros(64, np.int32)
    at = device.put(numbers)
    monkeypatch.setenv("EMU_PDL", "1")
    device.check(device.kernels.check_launches(at, MISTAKES.index("none")))
    np.testing.assert_array_equal(device.get(at, numbers)[:32], 2 * np.arange(32))
    for mistake in ("no wait", "no fence"):
        with pytest.raises(RuntimeError, match=r"launch .*first_kernel.* no griddepcontrol\.wait"):
            device.check(device.kernels.check_launches(at, MISTAKES.index(mistake)))


def test_statistics(device: Device, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EMU_STATS", "lines")
    wgmma(device, "none")
    said = capfd.readouterr().err
    assert "bulk copies 2304 bytes" in said
    assert "tensor cores: 16384 operations" in said  # 2 * 64 * 8 * 16
    assert "check.cu:" in said
