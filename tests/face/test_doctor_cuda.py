"""``deltafuse doctor`` on driver, GPU and ONNX Runtime's CUDA EP; and the README's list of all its messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deltafuse import doctor_gpu, elf

from .doctor_kit import SEEN, Machine, compile_library, only

#: What varies in the README's messages: what "..." stands for, versions, machines and architectures.
VARIES = re.compile(r"(\.\.\.|\d+\.\d+(?:\.\d+)?|aarch64|x86_64|sm_90a)")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


# The driver and the GPU


def test_no_driver(machine: Machine) -> None:
    machine.no_driver()
    machine.serves = ["cpu"]
    found = machine.look()
    problem = only(found, "cuda-driver-missing")
    assert "its driver's library is not found: libcuda_that_is_not_there.so.1: cannot open" in problem["message"]
    assert "--gpus all" in problem["next"]
    assert found["verdict"]["text"] == "Fused models run on the plugin's kernels, on the CPU; the GPU is left alone."


@pytest.mark.parametrize("says", ["", "no CUDA device: CUDA driver version is insufficient for CUDA runtime version"])
def test_old_driver(machine: Machine, says: str) -> None:
    machine.driver(cuda=12040)
    machine.plugin(status=says)
    machine.serves = ["cpu"]
    problem = only(machine.look(), "cuda-driver-old")
    wanted = "the driver 580.65.06 is too old: it supports CUDA 12.4, the plugin was built with CUDA 13.0"
    assert problem["message"] == wanted and problem["next"].startswith("update NVIDIA's driver")


def test_a_newer_minor_version_needs_no_newer_driver(machine: Machine) -> None:
    machine.driver(cuda=13000)
    machine.plugin(runtime=13020)
    assert machine.look()["problems"] == []


def test_driver_that_fails(machine: Machine) -> None:
    machine.driver(init=999)
    machine.serves = ["cpu"]
    problem = only(machine.look(), "cuda-driver-fails")
    assert problem["message"] == "the driver does not work: cuInit failed with CUDA error 999 (stand-in error)"


@pytest.mark.parametrize(("capability", "step"), [(75, "compute capability 8.0 or newer"), (120, "CUDA_ARCHS=120 ")])
def test_gpu_that_the_library_has_no_kernels_for(machine: Machine, capability: int, step: str) -> None:
    machine.driver(capability=capability)
    found = machine.look()
    problem = only(found, "gpu-unsupported")
    dotted = f"{capability // 10}.{capability % 10}"
    assert problem["message"] == (
        f"GPU 0 (Stand-in GPU) has compute capability {dotted}: the library has kernels for sm_80, sm_90a"
    )
    assert step in problem["next"]
    assert found["verdict"]["runs"] == "fallback" and found["verdict"]["exit_code"] == 1
    assert found["ops"][1]["reason"] == f"kernels for sm_80, sm_90a, compute capability {dotted}"


@pytest.mark.parametrize(
    ("arch", "runs"), [("80", {80, 86, 89}), ("86", {86, 89}), ("90a", {90}), ("90", {90}), ("x", set())]
)
def test_architectures(arch: str, runs: set[int]) -> None:
    assert {capability for capability in (75, 80, 86, 89, 90, 100, 120) if doctor_gpu.runs_on(arch, capability)} == runs


def test_build_without_cuda(machine: Machine) -> None:
    machine.plugin(archs="")
    machine.serves = ["cpu"]
    found = machine.look()
    problem = only(found, "no-cuda-kernels")
    assert problem["message"].startswith("there is an NVIDIA GPU, but the library has no CUDA kernels")
    assert "nvidia-cuda-nvcc" in problem["next"] and found["verdict"]["runs"] == "cpu"
    assert found["ops"][1]["reason"] == "the library has no CUDA kernels"


def test_gpus_from_nvidia_smi_where_the_library_is_missing(machine: Machine) -> None:
    machine.no_driver()
    machine.smi("echo '570.10, 0, NVIDIA H200, 9.0, 00000000:41:00.0, 143771'; echo garbage; echo '1, 2, 3, x, 5, 6'")
    found = machine.look()
    assert found["driver"]["version"] == "570.10"
    assert [(gpu["name"], gpu["compute_capability"]) for gpu in found["gpus"]] == [("NVIDIA H200", 90)]
    machine.smi("sleep 0; exit 3")
    assert machine.look()["gpus"] == []


# The CUDA EP


@pytest.mark.parametrize(
    ("missing", "title", "wheel"),
    [
        ("libcublas.so.12", "cuBLAS", "nvidia-cublas-cu12"),
        ("libcublasLt.so.13", "cuBLAS", "nvidia-cublas "),
        ("libcudnn.so.9", "cuDNN", "nvidia-cudnn-cu13"),
        ("libcurand.so.10", "CUDA", "nvidia-curand"),
    ],
)
def test_missing_cuda_library(machine: Machine, missing: str, title: str, wheel: str) -> None:
    machine.classic_library(missing)
    found = machine.look()
    problem = only(found, "cuda-library-missing")
    assert problem["message"] == (
        f"{title} is missing: onnxruntime's CUDAExecutionProvider needs {missing}; the loader says: {missing}: "
        "cannot open shared object file: No such file or directory"
    )
    assert problem["next"].startswith(f"pip install {wheel}") and "LD_LIBRARY_PATH" in problem["next"]
    assert found["verdict"]["runs"] == "cpu", "session() warns and leaves the GPU alone"


@pytest.mark.parametrize("name", ["libcudnn.so.9", "libcudnn"])
def test_cudnn_that_is_opened_later(machine: Machine, name: str) -> None:
    machine.classic_library(source=f'const char* name = "{name}";')
    found = machine.look()
    assert only(found, "cuda-library-missing")["message"].startswith("cuDNN is missing: ")
    assert found["verdict"]["runs"] == "cuda", "the CUDA EP loads without it"


def test_libraries_that_are_there(machine: Machine) -> None:
    """Found through the file's own search path."""
    folder = machine.folder / "cuda"
    other = compile_library(folder / "libcublas.so.13", "int other;", "-Wl,-soname,libcublas.so.13")
    path = machine.folder / "site/onnxruntime/capi/libonnxruntime_providers_cuda.so"
    compile_library(path, "int x;", "-Wl,--no-as-needed", str(other), "-Wl,-rpath,$ORIGIN/../../../cuda")
    assert elf.read_elf(path).needed[0] == "libcublas.so.13"
    assert machine.look()["problems"] == []


def test_gpu_without_a_cuda_ep(machine: Machine) -> None:
    machine.onnxruntime(classic=False)
    found = machine.look()
    problem = only(found, "no-cuda-ep")
    assert problem["message"] == "there is an NVIDIA GPU, but this onnxruntime has no CUDAExecutionProvider"
    assert problem["next"] == "pip uninstall onnxruntime, then pip install onnxruntime-gpu"
    assert found["verdict"]["runs"] == "cpu"


def test_cuda_plugin_that_is_named_and_not_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_CUDA_PLUGIN_EP_PATH", "/nowhere/cuda.so")
    found = machine.look()
    assert found["problems"][0]["id"] == "cuda-plugin-missing"
    SEEN.append(found["problems"][0]["message"])
    assert found["problems"][0]["message"] == "ORT_CUDA_PLUGIN_EP_PATH is /nowhere/cuda.so: there is no such file"
    assert found["problems"][0]["next"] == "correct ORT_CUDA_PLUGIN_EP_PATH, or unset it"
    assert not [line for line in found["problems"] if "is present and used" in line["message"]]
    assert found["verdict"]["runs"] == "cpu"


def test_another_cuda_plugin_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_library(machine.folder / "named" / "cuda.so", "int x;")
    monkeypatch.setenv("ORT_CUDA_PLUGIN_EP_PATH", str(library))
    found = machine.look()
    used, unused = found["problems"]
    SEEN.extend([used["message"], unused["message"]])
    assert {used["id"], unused["id"]} == {"other-cuda-plugin"} and used["level"] == unused["level"] == "note"
    assert used["message"] == (f"another CUDA plugin is present and used: {library} (ORT_CUDA_PLUGIN_EP_PATH names it)")
    assert unused["message"].endswith("is present and not used: the classic provider in onnxruntime's wheel")
    assert found["verdict"]["runs"] == "cuda" and found["verdict"]["next"] == ""


def test_another_cuda_plugin_lies_beside_the_runtime(machine: Machine) -> None:
    library = compile_library(machine.folder / "site/onnxruntime_ep_cuda/libonnxruntime_providers_cuda.so", "int x;")
    problem = only(machine.look(), "other-cuda-plugin")
    assert problem["message"] == f"another CUDA EP is present and not used: the plugin {library}"
    assert problem["next"] == "nothing; to use a plugin, set ORT_CUDA_PLUGIN_EP_PATH to its path"


def test_the_readme_has_the_messages() -> None:
    """Each message in the README's table is one that the doctor's tests have produced, but for what varies."""
    if len(SEEN) < 40:
        pytest.skip("needs the messages of the other tests of the doctor")
    readme = (Path(__file__).parents[2] / "plugin/deltafuse/README.md").read_text(encoding="utf-8")
    table = readme[readme.index("`deltafuse doctor` (`--json`") :]
    rows = [line.split("|")[1] for line in (table + "\n## ").split("\n## ")[0].splitlines() if line.startswith("| `")]
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) >= 22
    for message in messages:
        pattern = "".join(".+" if VARIES.fullmatch(part) else re.escape(part) for part in VARIES.split(message))
        assert any(re.search(pattern, seen) for seen in SEEN), message
