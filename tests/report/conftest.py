"""Reports of small models, written once, and a browser where there is one."""

from __future__ import annotations

import contextlib
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltafuse
import pytest

from . import browser

DATA = Path(__file__).resolve().parents[1] / "data"


def unpack(name: str, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    path.write_bytes(lzma.decompress((DATA / f"{name}.onnx.xz").read_bytes()))
    return path


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, deltafuse.FusionReport]:
    """The page of a model with several kinds of layers, and what it was made from."""
    folder = tmp_path_factory.mktemp("hybrid")
    page = folder / "report.html"
    report = deltafuse.fuse(unpack("hybrid4_decode", folder), folder / "out.onnx", report=page)
    return page, report


@pytest.fixture(scope="session")
def chromium() -> Iterator[browser.Browser]:
    program = browser.find()
    if program is None:
        pytest.skip(f"no headless browser: {', '.join(browser.NAMES)}, or DELTAFUSE_BROWSER=PROGRAM")
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(browser.opened(program))
        except browser.BrowserError as error:
            if "DELTAFUSE_BROWSER" in os.environ:
                raise
            pytest.skip(f"the browser {program} does not start here: {error}")
        yield running


@pytest.fixture
def page(chromium: browser.Browser) -> Any:
    return chromium.page()
