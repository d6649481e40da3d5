"""The examples and the README run and say what they should."""

from __future__ import annotations

import lzma
import re
import subprocess
import sys
from pathlib import Path

import deltafuse
import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def decode_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "decode.onnx"
    packed = ROOT / "tests" / "data" / "bailing_wrap_decode_dyn_batched.onnx.xz"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path


def test_quickstart() -> None:
    done = run(ROOT / "examples" / "quickstart.py")
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "Everything is as it should be." in text
    assert re.search(r"100 fails", text) and re.search(r"64 \d", text)
    assert done.stdout.count("fused, no plugin") >= 3
    assert done.stderr == ""


def test_fuse_in_python(decode_model: Path, tmp_path: Path) -> None:
    done = run(ROOT / "examples" / "fuse_in_python.py", decode_model, tmp_path / "fused.onnx")
    assert done.returncode == 0, done.stderr
    assert "1 fused nodes: KimiDeltaAttention" in done.stdout and (tmp_path / "fused.onnx").exists()
    bad = run(ROOT / "examples" / "fuse_in_python.py", tmp_path / "absent.onnx", tmp_path / "fused.onnx")
    assert bad.returncode == 2 and bad.stderr.startswith("error: ") and "no such file" in bad.stderr


def test_session_with_plugin(decode_model: Path, tmp_path: Path) -> None:
    try:
        deltafuse.get_library_path()
    except deltafuse.DeltaFuseError as error:
        pytest.skip(f"the plugin was not built: {error}")
    deltafuse.fuse(decode_model, tmp_path / "fused.onnx", verify=False)
    done = run(ROOT / "examples" / "session_with_plugin.py", tmp_path / "fused.onnx")
    assert done.returncode == 0, done.stderr
    assert "DeltaFuseExecutionProvider" in done.stdout


def test_readme_names_what_is_there() -> None:
    """Links lead to files, options exist, and quoted messages are ones that the code can say."""
    readme = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / link).exists(), link
    helped = run("-c", "from deltafuse.cli import main; main()", "fuse", "--help").stdout
    for option in set(re.findall(r"`(?:-\w`, `)?(--[a-z-]+)", readme.split("## Python")[0])):
        assert option in helped, option
    code = "".join(p.read_text() for p in (ROOT / "plugin" / "deltafuse").glob("*.py"))
    for message in re.findall(
        r"^\| `([^`]+)` \|", readme.split("## Troubleshooting")[1].split("## Performance")[0], re.M
    ):
        longest = max(re.split(r"\.\.\.|\d+(?:\.\d+)?|kda=", message), key=len).strip(" ;")
        assert longest in code, message


def test_version_is_the_same_everywhere() -> None:
    for file, pattern in (("pyproject.toml", r'^version = "(.+)"'), ("CITATION.cff", r'^version: "(.+)"')):
        found = re.search(pattern, (ROOT / file).read_text(), re.M)
        assert found and found[1] == deltafuse.__version__, file
    assert f"## {deltafuse.__version__}" in (ROOT / "CHANGELOG.md").read_text()
