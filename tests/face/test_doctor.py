"""``deltafuse doctor``: every failure is made here, with stand-ins, and its line and next step are checked."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import deltafuse
import pytest
from deltafuse import cli_doctor, discovery, elf
from deltafuse.cli import app
from deltafuse.elf import this_machine
from deltafuse.registry.ops import OPS

from .doctor_kit import BUS_ID, Machine, compile_library, linked_with, only, runner


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_all_is_well_on_a_gpu(machine: Machine) -> None:
    found = machine.look()
    assert found["problems"] == []
    assert found["verdict"] == {
        "runs": "cuda",
        "text": "Fused models run on the plugin's kernels, on cuda:0.",
        "next": "",
        "exit_code": 0,
    }
    assert found["driver"]["version"] == "580.65.06" and found["driver"]["cuda"] == 13020
    gpu = {"index": 0, "name": "Stand-in GPU", "compute_capability": 90, "pci_bus_id": BUS_ID, "memory_bytes": 80 << 30}
    assert found["gpus"] == [gpu]
    assert found["plugin"]["cuda_archs"] == ["80", "90a"] and found["plugin"]["cuda_runtime"] == 13000
    assert found["cuda_ep"]["form"] == "classic"
    assert {(op["op"], op["device"]) for op in found["ops"] if op["runs"]} == {
        (op, device) for op in OPS for device in ("cpu", "cuda:0")
    }
    text = runner.invoke(app, ["doctor"], env={"COLUMNS": "200"}).stdout
    for line in (
        "Stand-in GPU, 9.0, 0000:41:00.0, 80 GiB",
        "580.65.06, supports CUDA 13.2",
        "CUDA kernels: sm_80, sm_90a; CUDA runtime 13.0",
        "kda on cuda:0: has a kernel (head dims 64, 128, 192, 256)",
        "ORT Build Info: build type=Release",
    ):
        assert line in text, text


def test_json_and_exit_codes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    done = runner.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["verdict"]["runs"] == "cuda"
    monkeypatch.setenv("DELTAFUSE_EP_PATH", "/nowhere/ep.so")
    done = runner.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["verdict"]["runs"] == "fallback"
    assert runner.invoke(app, ["doctor"]).exit_code == 1


def test_all_is_well_without_a_gpu(machine: Machine) -> None:
    machine.no_gpu()
    machine.onnxruntime(classic=False)
    found = machine.look()
    assert found["problems"] == [] and found["verdict"]["runs"] == "cpu" and found["verdict"]["exit_code"] == 0
    assert found["verdict"]["text"] == "Fused models run on the plugin's kernels, on the CPU."


# The library


def test_no_library(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTAFUSE_EP_PATH")
    monkeypatch.setattr(discovery, "_package_folders", lambda: iter([machine.folder]))
    monkeypatch.setattr(discovery, "_application_folders", lambda: iter([machine.folder / "bin"]))
    found = machine.look()
    problem = only(found, "no-library")
    assert problem["message"].startswith("the plugin EP's library libdeltafuse_ep.so is not installed: ")
    assert f"nor is one beside the application: {machine.folder / 'bin'}" in problem["message"]
    assert "apt-get install g++" in problem["next"]
    assert found["plugin"]["searched"] == [str(machine.folder / part / discovery.LIBRARY_NAME) for part in (".", "bin")]
    assert found["verdict"]["exit_code"] == 1 and "ONNX bodies" in found["verdict"]["text"]


def test_explicit_path_to_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAFUSE_EP_PATH", "/nowhere/ep.so")
    problem = only(machine.look(), "no-library")
    assert problem["message"] == "DELTAFUSE_EP_PATH is /nowhere/ep.so: there is no such file"
    assert problem["next"] == "correct that path, or unset it to use the installed library"


@pytest.mark.parametrize(("number", "name"), [(183, "aarch64"), (21, "ppc64le"), (999, "machine number 999")])
def test_wrong_architecture(machine: Machine, number: int, name: str) -> None:
    library = machine.plugin()
    data = bytearray(library.read_bytes())
    data[18:20] = number.to_bytes(2, "little")
    library.write_bytes(data)
    problem = only(machine.look(), "library-architecture")
    wanted = f"{library} is built for {name}, this machine is {this_machine()}; the loader says: "
    assert problem["message"].startswith(wanted) and len(problem["message"]) > len(wanted) + 10
    assert "build it on this machine" in problem["next"]


@pytest.mark.parametrize("content", [b"", b"not a library" * 20, b"version https://git-lfs.github.com/spec/v1\n" * 3])
def test_file_that_is_no_library(machine: Machine, content: bytes) -> None:
    library = machine.plugin()
    library.write_bytes(content)
    problem = only(machine.look(), "library-damaged")
    assert problem["message"] == f"{library} is no library: it is not an ELF file"


@pytest.mark.parametrize("cut", [70, 300, 5000])
def test_truncated_library(machine: Machine, cut: int) -> None:
    """The loader would kill the process: it is not asked, by the doctor or anybody else."""
    library = machine.plugin()
    library.write_bytes(library.read_bytes()[:cut])
    problem = only(machine.look(), "library-damaged")
    assert problem["message"] == f"{library} is no library: it is truncated or damaged"
    assert problem["next"].startswith("copy it again")
    for load in (deltafuse.register, discovery.cuda_status):
        with pytest.raises(discovery.PluginError, match=r"cannot be loaded: .* is truncated or damaged"):
            load()


def test_library_that_kills_the_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage behind the headers: another process tries it first, and this one lives to tell."""
    crash = "#include <signal.h>\n__attribute__((constructor)) static void crash(void) { raise(SIGSEGV); }"
    library = compile_library(machine.folder / "deadly" / "libdeltafuse_ep.so", crash)
    monkeypatch.setenv("DELTAFUSE_EP_PATH", str(library))
    problem = only(machine.look(), "library-damaged")
    assert problem["message"] == f"{library} is no library: it is damaged, loading it ends the process (SIGSEGV)"
    for executable in ("/opt/application", "", None):  # Python inside another program
        monkeypatch.setattr("sys.executable", executable)
        assert elf.killed_by_loading(library) == ""


def test_library_that_needs_another(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    library = linked_with(machine.folder / "needy" / "libdeltafuse_ep.so", "libgone.so.3")
    monkeypatch.setenv("DELTAFUSE_EP_PATH", str(library))
    problem = only(machine.look(), "library-load")
    assert "the library does not load: libgone.so.3: cannot open shared object file" in problem["message"]
    assert problem["next"].startswith("install what provides libgone.so.3")


def test_library_of_something_else(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_library(machine.folder / "other" / "libdeltafuse_ep.so", "int other;")
    monkeypatch.setenv("DELTAFUSE_EP_PATH", str(library))
    problem = only(machine.look(), "library-load")
    assert "undefined symbol: deltafuse_" in problem["message"] and "build it on this machine" in problem["next"]


def test_library_that_onnxruntime_refuses(machine: Machine) -> None:
    machine.refuses = "its API version is unknown"
    problem = only(machine.look(), "library-refused")
    assert "onnxruntime 1.32.0 does not take" in problem["message"] and machine.refuses in problem["message"]


def test_already_registered_from_another_path(machine: Machine) -> None:
    machine.add_devices(discovery.EP_NAME, "/elsewhere/libdeltafuse_ep.so", ["cpu", "cuda:0"])
    found = machine.look()
    problem = only(found, "already-registered")
    assert "the EP is already registered in onnxruntime, from /elsewhere/libdeltafuse_ep.so, not " in problem["message"]
    assert "deltafuse.unregister() first" in problem["next"] and found["verdict"]["runs"] == "cuda"


def test_name_taken_by_another_library(machine: Machine) -> None:
    machine.refuses = "EP library is already registered under deltafuse"
    found = machine.look()
    problem = only(found, "already-registered")
    assert "onnxruntime has another library under the name 'deltafuse'" in problem["message"]
    assert "unregister_execution_provider_library('deltafuse')" in problem["next"]
    assert found["verdict"]["exit_code"] == 1


# onnxruntime


def test_no_onnxruntime(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = machine.look()
    problem = only(found, "ort-missing")
    assert problem["message"].startswith("onnxruntime is not installed: ")
    assert problem["next"] == "pip install onnxruntime-gpu"
    assert found["verdict"]["runs"] == "nothing" and found["verdict"]["exit_code"] == 1
    machine.no_gpu()
    assert only(machine.look(), "ort-missing")["next"] == "pip install onnxruntime"


def test_onnxruntime_that_cannot_be_imported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    package = machine.folder / "broken" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libbroken.so: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.syspath_prepend(str(package.parent))
    problem = only(machine.look(), "ort-broken")
    assert problem["message"] == "onnxruntime cannot be imported: libbroken.so: cannot open shared object file"


def test_old_onnxruntime(machine: Machine) -> None:
    machine.onnxruntime("1.26.3")
    found = machine.look()
    problem = only(found, "ort-old")
    assert problem["message"] == "onnxruntime 1.26.3 is too old: deltafuse needs 1.27 or newer"
    assert problem["next"] == "pip install -U onnxruntime-gpu" and found["verdict"]["runs"] == "nothing"


def test_two_wheels(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    both = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.32.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: both.get(name) or real(name))
    problem = only(machine.look(), "ort-two-wheels")
    assert problem["message"].endswith("installed over one another: onnxruntime, onnxruntime-gpu")
    assert problem["next"] == "pip uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"


def test_the_real_one_never_raises_and_agrees_with_a_session() -> None:
    """In a process of its own: the verdict against what a session of a fused node does here."""
    code = (
        "import json, sys, warnings; sys.path.insert(0, sys.argv[1]); warnings.simplefilter('ignore')\n"
        "from deltafuse.cli_doctor import examine\n"
        "found = examine()\n"
        "import deltafuse\n"
        "from ep.call import SMALL, call_model, draw, quiet\n"
        "from dataclasses import replace\n"
        "config = replace(SMALL, head_dim=64, head_v_dim=64)\n"
        "made = deltafuse.session(call_model(config, draw(config, 1, 3)).SerializeToString(), sess_options=quiet())\n"
        "fused = bool(deltafuse.assignment(made).fused)\n"
        "print(json.dumps([found['verdict'], fused, 'CUDAExecutionProvider' in made.get_providers()]))\n"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code, str(tests)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verdict, fused, on_gpu = json.loads(done.stdout.strip().splitlines()[-1])
    assert (verdict["exit_code"] == 0) is fused
    assert (verdict["runs"] == "cuda") is (fused and on_gpu)


def test_a_real_registration_from_another_path(tmp_path: Path) -> None:
    try:
        library = Path(deltafuse.get_library_path())
    except discovery.PluginError as error:
        pytest.skip(str(error))
    copy = tmp_path / discovery.LIBRARY_NAME
    copy.write_bytes(library.read_bytes())
    code = (
        "import json, sys, deltafuse\n"
        "from deltafuse.cli_doctor import examine\n"
        "deltafuse.register(sys.argv[1]); deltafuse.register(); deltafuse.register(sys.argv[1])\n"
        "try: deltafuse.register(sys.argv[2])\n"
        "except deltafuse.DeltaFuseError as error: print(error)\n"
        "print(json.dumps([p for p in examine()['problems'] if p['id'] == 'already-registered']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused, problems = done.stdout.strip().splitlines()
    assert f"is already registered from {copy}: deltafuse.unregister() before {library}" in refused
    assert len(json.loads(problems)) == 1 and str(copy) in json.loads(problems)[0]["message"]


def test_importing_the_doctor_loads_no_onnxruntime() -> None:
    code = "import sys, deltafuse.cli_doctor; assert 'onnxruntime' not in sys.modules and 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert cli_doctor.examine.__doc__


def test_onnxruntime_that_knows_no_plugins(machine: Machine) -> None:
    del machine.ort.get_ep_devices
    problem = only(machine.look(), "ort-old")
    assert problem["message"].startswith("onnxruntime 1.32.0 cannot be asked for its EP devices: ")
