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
    assert (
        "3 fused nodes: KimiDeltaAttention, LatentAttention, GroupedQMoE" in done.stdout
        and (tmp_path / "fused.onnx").exists()
    )
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


READMES = sorted(
    path
    for folder in (".", "custom_ops/*", "examples", "fusions", "plugin/*", "registry", "tests", "tests/*")
    for path in ROOT.glob(f"{folder}/README.md")
)


def anchors(readme: Path) -> set[str]:
    """The headings of a README, as links name them."""
    text = re.sub(r"```.*?```", "", readme.read_text(encoding="utf-8"), flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    found = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (readme.parent / path).resolve() if path else readme
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


def test_readme_begins_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```sh\n(.+?)\n```", text, re.S)[:2]
    assert "examples/quickstart.py" in first and "-m pytest" in second
    assert len(text.splitlines()) < 160


def test_readme_names_what_is_there() -> None:
    """Options exist, and quoted messages are ones that the code can say."""
    readme = (ROOT / "plugin" / "deltafuse" / "README.md").read_text(encoding="utf-8")
    helped = run("-c", "from deltafuse.cli import main; main()", "fuse", "--help").stdout
    for option in set(re.findall(r"`(?:-\w`, `)?(--[a-z-]+)", readme.split("### fuse")[1].split("### verify")[0])):
        assert option in helped, option
    code = "".join(p.read_text() for folder in ("plugin/deltafuse", "registry") for p in (ROOT / folder).glob("*.py"))
    messages = re.findall(
        r"^\| `([^`]+)` \|", readme.split("## Troubleshooting")[1].split("`deltafuse doctor`")[0], re.M
    )
    assert len(messages) > 8
    for message in messages:
        longest = max(re.split(r"\.\.\.|\d+(?:\.\d+)?|kda=", message), key=len).strip(" ;")
        assert longest in code, message
