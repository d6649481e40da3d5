"""The shared library itself: what it exports, old versions of ORT, and a long life in one process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import deltafuse
import onnxruntime as ort
import pytest
from deltafuse import discovery


def test_exports_nothing_else(library: str) -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    listing = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    others = [name for name in names if not name.startswith("deltafuse_")]
    assert sorted(others) == ["CreateEpFactories", "ReleaseEpFactory"]


def test_depends_on_no_cuda_and_no_onnxruntime(library: str) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = [line for line in dynamic.splitlines() if "NEEDED" in line]
    assert needed and not [line for line in needed if "cuda" in line or "onnxruntime" in line]


def test_says_what_it_is(library: str) -> None:
    loaded = discovery.load_library(library)
    info = deltafuse.build_info()
    # what is recorded is told of the package's own library; a sanitizer's run brings another
    if info["native"] and Path(deltafuse.__file__).parent in Path(library).parents:
        assert loaded.deltafuse_version().decode() == info["version"]
        assert loaded.deltafuse_cuda_archs().decode() == ";".join(info["cuda_archs"])
    if not loaded.deltafuse_cuda_archs():
        assert discovery.cuda_status() == "this build of deltafuse has no CUDA kernels"


def test_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTAFUSE_EP_PATH", str(tmp_path / "none.so"))
    with pytest.raises(discovery.PluginError, match="there is no such file"):
        deltafuse.get_library_path()
    not_a_library = tmp_path / "text.so"
    not_a_library.write_text("no ELF")
    monkeypatch.setenv("DELTAFUSE_EP_PATH", str(not_a_library))
    assert deltafuse.get_library_path() == str(not_a_library)
    with pytest.raises(discovery.PluginError, match="cannot be loaded"):
        discovery.cuda_status()


def test_onnxruntime_without_this_api_gets_an_error(library: str) -> None:
    """An ORT that has no API 27 must get a status that says so, not a crash."""
    cores = sorted((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so*"))
    if not cores:
        pytest.skip("this onnxruntime has no libonnxruntime.so beside it")
    core = ctypes.CDLL(str(cores[0]))
    get_api_type = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_uint32)
    get_version_type = ctypes.CFUNCTYPE(ctypes.c_size_t)
    version = ctypes.create_string_buffer(b"1.26.0")

    class ApiBase(ctypes.Structure):
        _fields_ = (("get_api", get_api_type), ("get_version", get_version_type))

    core.OrtGetApiBase.restype = ctypes.POINTER(ApiBase)
    real = core.OrtGetApiBase().contents
    asked: list[int] = []

    def get_api(version: int) -> int:
        asked.append(version)
        return int(real.get_api(version)) if version <= 26 else 0

    old = ApiBase(get_api_type(get_api), get_version_type(lambda: ctypes.addressof(version)))
    plugin = ctypes.CDLL(library)
    plugin.CreateEpFactories.restype = ctypes.c_void_p
    factories, count = (ctypes.c_void_p * 1)(), ctypes.c_size_t(7)
    status = plugin.CreateEpFactories(b"x", ctypes.byref(old), None, factories, ctypes.c_size_t(1), ctypes.byref(count))
    assert status and count.value == 0 and asked[0] == 27
    table = ctypes.cast(real.get_api(1), ctypes.POINTER(ctypes.c_void_p))  # CreateStatus, GetErrorCode, GetErrorMessage
    message = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(table[2])(status)
    assert message == b"deltafuse needs ONNX Runtime 1.27 or newer, this is 1.26.0"


def in_a_process(code: str) -> str:
    """Run code in a Python of its own: a crash there is a failure here."""
    setup = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
    done = subprocess.run([sys.executable, "-c", setup + textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_sessions_come_and_go(library: str) -> None:
    out = in_a_process(
        """
        import resource
        import deltafuse
        from ep.call import SMALL, call_model, draw, quiet, run
        inputs = draw(SMALL, 2, 20)
        model = call_model(SMALL, inputs).SerializeToString()
        peaks = []
        for i in range(120):
            made = deltafuse.session(model, device="cpu", sess_options=quiet(), strict=True)
            for _ in range(3):
                run(made, SMALL, inputs)
            del made
            if i in (39, 119):
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        print(peaks[1] - peaks[0])
        """
    )
    assert int(out) < 20_000, f"peak memory grew by {out.strip()} KiB over 80 sessions"


def test_register_run_and_unregister_again_and_again(library: str) -> None:
    out = in_a_process(
        """
        import deltafuse, onnxruntime as ort
        from deltafuse.session import REGISTRATION_NAME
        from ep.call import SMALL, call_model, draw, quiet, run
        inputs = draw(SMALL, 1, 5)
        model = call_model(SMALL, inputs).SerializeToString()
        for _ in range(5):
            deltafuse.register()
            made = deltafuse.session(model, device="cpu", sess_options=quiet(), strict=True)
            run(made, SMALL, inputs)
            del made
            ort.unregister_execution_provider_library(REGISTRATION_NAME)
            assert not [d for d in ort.get_ep_devices() if d.ep_name == deltafuse.get_ep_name()]
        print("done")
        """
    )
    assert out.strip() == "done"


def test_session_alive_at_exit(library: str) -> None:
    in_a_process(
        """
        import deltafuse
        from ep.call import SMALL, call_model, draw, quiet, run
        inputs = draw(SMALL, 1, 5)
        kept = deltafuse.session(call_model(SMALL, inputs).SerializeToString(), sess_options=quiet())
        run(kept, SMALL, inputs)
        """
    )


def test_importing_deltafuse_loads_no_onnxruntime() -> None:
    in_a_process(
        """
        import deltafuse, deltafuse.discovery, deltafuse.session
        assert "onnxruntime" not in sys.modules and "onnx" not in sys.modules
        deltafuse.build_info(), deltafuse.get_ep_names()
        assert "onnxruntime" not in sys.modules
        """
    )
