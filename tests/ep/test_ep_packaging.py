"""The build's decisions (through CMake, where it is there) and what ends up in the installed package."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import deltafuse
import pytest

ROOT = Path(__file__).parents[2]
CMAKE = shutil.which("cmake")
needs_cmake = pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")

PLACES = (
    "-DORT_INCLUDE_DIR or the environment variable ORT_INCLUDE_DIR",
    "the system's include folders (package libonnxruntime-dev)",
    "Debian's package libonnxruntime-dev from the suite experimental",
    "ONNX Runtime's release archive (-DORT_ARCHIVE",
)


def headers(folder: Path, api: int = 27, *, plugin_api: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "onnxruntime_c_api.h").write_text(f"#pragma once\n#define ORT_API_VERSION {api}\n")
    if plugin_api:
        (folder / "onnxruntime_ep_c_api.h").write_text("#pragma once\n")
    return folder


def find_headers(tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the search for headers on a machine with no apt-get and no headers of its own."""
    assert CMAKE
    script = tmp_path / "find.cmake"
    lines = [
        f"set(CMAKE_CURRENT_BINARY_DIR {tmp_path}/build)",
        "set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)",
        "set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)",
        *(f'set({name} "{value}")' for name, value in settings.items()),
        f"include({ROOT}/cmake/OrtHeaders.cmake)",
        "df_find_ort_headers(folder source missing)",
        'message("FOUND=${folder}|${source}|${missing}")',
    ]
    script.write_text("\n".join(lines))
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for tool in ("sh", "gzip"):
        found = shutil.which(tool)
        if found and not (tools / tool).exists():
            (tools / tool).symlink_to(found)
    return subprocess.run(
        [CMAKE, "-P", str(script)], cwd=ROOT, env={"PATH": str(tools)}, capture_output=True, text=True
    )


@needs_cmake
def test_no_headers_names_all_four_places(tmp_path: Path) -> None:
    done = find_headers(tmp_path, ORT_ARCHIVE=str(tmp_path / "none.tgz"))
    assert done.returncode == 0, done.stderr
    assert "FOUND=||ONNX Runtime's C headers (1.27 or newer) are in none of these places:" in done.stderr
    assert all(place in done.stderr for place in PLACES), done.stderr
    assert "apt-get is not there" in done.stderr


@needs_cmake
def test_given_headers_come_first(tmp_path: Path) -> None:
    given = headers(tmp_path / "given")
    done = find_headers(tmp_path, ORT_INCLUDE_DIR=str(given))
    assert f"FOUND={given}|given|" in done.stderr


@needs_cmake
@pytest.mark.parametrize(
    ("api", "plugin_api", "says"), [(26, True, "API version 26, 27 or newer"), (27, False, "no onnxruntime_ep_c_api.h")]
)
def test_given_headers_that_are_no_use(tmp_path: Path, api: int, plugin_api: bool, says: str) -> None:
    given = headers(tmp_path / "given", api, plugin_api=plugin_api)
    done = find_headers(tmp_path, ORT_INCLUDE_DIR=str(given))
    assert done.returncode != 0
    assert says in " ".join(done.stderr.split())


@needs_cmake
def test_release_archive(tmp_path: Path) -> None:
    headers(tmp_path / "onnxruntime-linux-x64-1.27.1" / "include")
    archive = tmp_path / "ort.tgz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "onnxruntime-linux-x64-1.27.1", "onnxruntime-linux-x64-1.27.1")
    done = find_headers(tmp_path, ORT_ARCHIVE=str(archive))
    assert "|archive|" in done.stderr, done.stderr


@needs_cmake
@pytest.mark.skipif(shutil.which("make") is None and shutil.which("ninja") is None, reason="no make and no ninja")
@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"CXX": "/nonexistent/c++"}, "no C++ compiler was found"),
        ({"DELTAFUSE_NATIVE": "off"}, "switched off (DELTAFUSE_NATIVE=OFF)"),
    ],
)
def test_without_a_native_build_the_reason_is_kept(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    assert CMAKE
    given = headers(tmp_path / "given")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    base = {name: value for name, value in os.environ.items() if not name.startswith(("DELTAFUSE", "ORT_", "CXX"))}
    command = [CMAKE, "-S", str(ROOT), "-B", str(tmp_path / "build"), *generator, f"-DORT_INCLUDE_DIR={given}"]
    done = subprocess.run(command, env=base | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    info = json.loads((tmp_path / "build" / "_build_info.json").read_text())
    assert info["native"] is False and says in info["missing"]
    required = subprocess.run(
        [*command, "-DDELTAFUSE_NATIVE=ON"], env=base | {"CXX": "/nonexistent/c++"}, capture_output=True, text=True
    )
    assert required.returncode != 0 and "the plugin EP cannot be built" in required.stderr


@needs_cmake
def test_settings_are_checked(tmp_path: Path) -> None:
    assert CMAKE
    command = [CMAKE, "-S", str(ROOT), "-B", str(tmp_path / "build"), "-DDELTAFUSE_CUDA=MAYBE"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "DELTAFUSE_CUDA is 'MAYBE': expected AUTO, ON or OFF" in " ".join(done.stderr.split())


def test_build_info_and_library_agree() -> None:
    info = deltafuse.build_info()
    assert set(info) == {"version", "native", "missing", "ort_headers", "cuda_archs", "cuda_note"}
    assert info["native"] is (info["missing"] == "")
    assert not (info["cuda_archs"] and info["cuda_note"])


def test_installed_package() -> None:
    try:
        files = importlib.metadata.files("deltafuse") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("deltafuse runs from its source tree here")
    names = [str(file) for file in files]
    if not any(name == "deltafuse/__init__.py" for name in names):
        pytest.skip("an editable install")
    assert not [name for name in names if name.endswith((".cu", ".cuh", ".cc", ".h"))]
    for part in (
        "fusions/__init__.py",
        "custom_ops/kda/spec.py",
        "registry/__init__.py",
        "py.typed",
        "_build_info.json",
    ):
        assert f"deltafuse/{part}" in names
    scripts = importlib.metadata.entry_points(group="console_scripts", name="deltafuse")
    assert [script.value for script in scripts] == ["deltafuse.cli:main"]
