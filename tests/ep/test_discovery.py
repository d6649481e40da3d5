"""The order in which the plugin EP's library is looked for. Nothing here needs a built library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deltafuse
import pytest
from deltafuse import discovery
from deltafuse.discovery import LIBRARY_NAME, LIBRARY_VARIABLES, PluginError, find_library, places


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """A folder for each kind of place, all empty."""
    made = {name: tmp_path / name for name in ("argument", *LIBRARY_VARIABLES, "package", "application")}
    for folder in made.values():
        folder.mkdir()
    for variable in LIBRARY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(discovery, "_package_folders", lambda: iter([made["package"]]))
    monkeypatch.setattr(discovery, "_application_folders", lambda: iter([made["application"]]))
    yield made


def put(folder: Path) -> Path:
    library = folder / LIBRARY_NAME
    library.write_bytes(b"")
    return library


def test_each_place_in_its_turn(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last place to the first: each new one wins over all that were there before."""
    for source in ("application", "package", *reversed(LIBRARY_VARIABLES)):
        library = put(folders[source])
        if source in LIBRARY_VARIABLES:
            monkeypatch.setenv(source, str(library))
        found = find_library()
        assert (found.path, found.source) == (library.resolve(), source)
        assert deltafuse.get_library_path() == str(library.resolve())
    library = put(folders["argument"])
    assert deltafuse.get_library_path(library) == str(library.resolve())
    assert deltafuse.get_library_path(str(library)) == str(library.resolve())
    assert LIBRARY_VARIABLES[0] == "DELTAFUSE_EP_PATH"


def test_a_folder_is_as_good_as_the_library(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    library = put(folders["argument"])
    assert deltafuse.get_library_path(folders["argument"]) == str(library.resolve())
    monkeypatch.setenv("DELTAFUSE_EP_PATH", str(folders["argument"]))
    assert deltafuse.get_library_path() == str(library.resolve())


def test_an_explicit_path_to_nothing_ends_the_search(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("package", "application"):
        put(folders[name])
    for variable in LIBRARY_VARIABLES:
        monkeypatch.setenv(variable, str(folders[variable]))  # a folder without the library
        wanted = f"{LIBRARY_VARIABLES[0]} is {folders[LIBRARY_VARIABLES[0]] / LIBRARY_NAME}: there is no such file"
        with pytest.raises(PluginError) as caught:
            deltafuse.get_library_path()
        assert str(caught.value) == wanted
    with pytest.raises(PluginError, match=r"^argument is /nowhere/ep\.so: there is no such file$"):
        deltafuse.get_library_path("/nowhere/ep.so")
    assert [place.source for place in places()] == [LIBRARY_VARIABLES[0]]


def test_nothing_anywhere(folders: dict[str, Path]) -> None:
    with pytest.raises(PluginError) as caught:
        find_library()
    text = str(caught.value)
    assert text.startswith(f"the plugin EP's library {LIBRARY_NAME} is not installed: ")
    assert text.endswith(f" (nor is one beside the application: {folders['application']})")
    assert [place.source for place in places()] == ["package", "application"]


def test_an_empty_variable_is_none(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    library = put(folders["application"])
    monkeypatch.setenv("DELTAFUSE_EP_PATH", "")
    assert find_library().path == library.resolve()


def test_home(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    library = put(folders["argument"])
    monkeypatch.setenv("HOME", str(folders["argument"]))
    assert deltafuse.get_library_path(f"~/{LIBRARY_NAME}") == str(library.resolve())


APPLICATION = "from deltafuse.discovery import places\nfor place in places(): print(place.source, place.path.parent)\n"


def searched(command: list[str], folder: Path) -> list[Path]:
    """The application's folders as a program of its own sees them."""
    environment = {name: value for name, value in os.environ.items() if name not in LIBRARY_VARIABLES}
    package = Path(deltafuse.__file__).parent.parent
    python_path = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(package))))
    environment |= {"PYTHONPATH": python_path, "PYTHONSAFEPATH": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pairs = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [source for source, _ in pairs] == sorted((source for source, _ in pairs), reverse=True), "package first"
    return [Path(path) for source, path in pairs if source == "application"]


def test_beside_a_script(tmp_path: Path) -> None:
    """The script's folder as it was given, then where its links lead, then the interpreter's; not where we stand."""
    real, linked, elsewhere = (tmp_path / name for name in ("real", "linked", "elsewhere"))
    for folder in (real, linked, elsewhere):
        folder.mkdir()
    (real / "app.py").write_text(APPLICATION)
    (linked / "app.py").symlink_to(real / "app.py")
    found = searched([sys.executable, str(linked / "app.py")], elsewhere)
    assert found[:2] == [linked, real]
    assert Path(sys.executable).parent in found
    assert elsewhere not in found


@pytest.mark.parametrize("how", ["-c", "stdin", "-m"])
def test_never_the_working_directory(tmp_path: Path, how: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    module = tmp_path / "modules"
    module.mkdir()
    (module / "application_of_a_test.py").write_text(APPLICATION)
    if how == "-m":
        code = f"import sys, runpy; sys.path.insert(0, {str(module)!r}); runpy.run_module('application_of_a_test')"
        found = searched([sys.executable, "-c", code], tmp_path / "elsewhere")
    elif how == "-c":
        found = searched([sys.executable, "-c", APPLICATION], tmp_path / "elsewhere")
    else:
        shell = shutil.which("sh")
        if shell is None:
            pytest.skip("there is no shell")
        script = f"exec {sys.executable} - <<'EOF'\n{APPLICATION}EOF"
        found = searched([shell, "-c", script], tmp_path / "elsewhere")
    assert found and tmp_path / "elsewhere" not in found


def test_frozen_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_MEIPASS", str(tmp_path), raising=False)
    assert tmp_path.resolve() in list(discovery._application_folders())


def test_import_is_fast_and_light() -> None:
    """Nothing heavy comes along with the package, discovery or the choice of a CUDA EP."""
    code = (
        "import sys; import deltafuse, deltafuse.discovery, deltafuse.cuda_ep, deltafuse.session\n"
        "print([name for name in ('onnxruntime', 'onnx', 'numpy', 'rich', 'typer', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.strip()
    assert "'onnxruntime'" not in loaded and "'onnx'" not in loaded and "torch" not in loaded, loaded


@pytest.mark.parametrize("path", [5, object(), ["x"]])
def test_what_is_no_path(path: object) -> None:
    for look in (deltafuse.get_library_path, deltafuse.register):
        with pytest.raises(PluginError, match="expected a path"):
            look(path)  # type: ignore[operator]
