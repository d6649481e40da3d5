"""The page in a real browser, at the widths of a phone and a desk, in light and dark, and printed.

Skipped where no browser is found (``browser.NAMES``). ``DELTAFUSE_SCREENSHOTS=FOLDER`` keeps the pictures.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import deltafuse
import pytest
from deltafuse import report_html
from deltafuse.fusions.result import FusionReport

from . import hostile
from .browser import Page

OPEN_ALL = "document.querySelectorAll('details').forEach(part => { part.open = true; })"
WIDTHS = (360, 768, 1280)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.html"
    report_html.write(path, hostile.report(), hostile.model(), measured=[hostile.bench()])
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kept = Path(os.environ.get("DELTAFUSE_SCREENSHOTS") or tmp_path)
    kept.mkdir(parents=True, exist_ok=True)
    return kept


def check(page: Page, path: Path, width: int, dark: bool) -> None:
    """Nothing asked for but the file, nothing on the console, nothing wider than the window, closed or open."""
    page.requests.clear()
    page.show(path, width, dark=dark)
    for script in ("0", OPEN_ALL):
        page.evaluate(script)
        size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert size == [width, width]
    assert page.requests == [path.resolve().as_uri()]
    assert page.complaints == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_report(page: Page, hybrid: tuple[Path, deltafuse.FusionReport], folder: Path, width: int) -> None:
    path, _ = hybrid
    check(page, path, width, dark=width == 768)
    page.show(path, width)
    picture = folder / f"report_{width}.png"
    page.screenshot(picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_names(page: Page, hostile_page: Path, width: int) -> None:
    check(page, hostile_page, width, dark=False)
    assert page.evaluate("typeof window.pwned") == "undefined"


def test_figures_are_in_sight_on_a_phone(page: Page, tmp_path: Path) -> None:
    """Times and nodes are read without scrolling a table sideways."""
    timed = {"phase": "prompt", "tokens": 16, "median_ms": 23.7, "error": 6.6e-7, "same": True}
    names = ("as it is", "fused, plugin", "fused, no plugin", "portable, no plugin")
    nodes = {"CPUExecutionProvider": 1263, "DeltaFuseExecutionProvider": 3}
    bench = {"variants": [{"name": name, "device": "cpu", "nodes": nodes, "timings": [timed]} for name in names]}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    path = tmp_path / "page.html"
    report_html.write(
        path, FusionReport(), hostile.model(), measured=report_html.read_measured([tmp_path / "bench.json"])
    )
    page.show(path, 390)
    for part in ("times", "placement", "operators"):
        hidden = f"[...document.querySelectorAll('#{part} .scroll')].map(e => e.scrollWidth - e.clientWidth)"
        found = page.evaluate(hidden)
        assert found and max(found) <= 0, (part, found)


def test_regions_open(page: Page, hybrid: tuple[Path, deltafuse.FusionReport]) -> None:
    path, _ = hybrid
    page.show(path, 360)
    opened = "[...document.querySelectorAll('details.region')].filter(part => part.open).length"
    height = "document.documentElement.scrollHeight"
    before = page.evaluate(height)
    assert page.evaluate(opened) == 0
    page.evaluate("document.querySelector('details.region > summary').click()")
    assert page.evaluate(opened) == 1 and page.evaluate(height) > before + 200
    # a block in the graph leads to its region and opens it
    page.show(path, 360)
    page.evaluate("document.querySelector('.block.fused a').click()")
    page.evaluate("new Promise(done => setTimeout(done, 50))")
    assert page.evaluate(opened) == 1
    page.evaluate("document.getElementById('open-all').click()")
    assert page.evaluate("[...document.querySelectorAll('details')].every(part => part.open)")
    page.evaluate("document.getElementById('open-all').click()")
    assert page.evaluate(opened) == 0


def test_colours_can_be_read(page: Page, hybrid: tuple[Path, deltafuse.FusionReport]) -> None:
    """Text stands out from what is behind it, 4.5 to 1 or more (WCAG AA), in light and dark."""
    path, _ = hybrid
    for dark in (False, True):
        page.show(path, 1280, dark=dark)
        page.evaluate(OPEN_ALL)
        worst = page.evaluate(CONTRAST)
        assert worst["ratio"] >= 4.5, (dark, worst)


CONTRAST = """(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return getComputedStyle(at).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  let worst = {ratio: 99};
  for (const element of document.querySelectorAll("body *")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    if (["SCRIPT", "STYLE"].includes(element.tagName) || element.closest("svg")) continue;
    const pair = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < worst.ratio) worst = {ratio, text: element.textContent.slice(0, 60), tag: element.tagName};
  }
  return worst;
})()"""


def test_print(page: Any, hybrid: tuple[Path, deltafuse.FusionReport], folder: Path) -> None:
    path, _ = hybrid
    page.show(path, 1280)
    page.evaluate(
        "addEventListener('beforeprint', () => setTimeout(() => 0)); window.printed = [];"
        "addEventListener('beforeprint', () => {"
        " window.printed = [...document.querySelectorAll('details')].map(part => part.open); })"
    )
    page.pdf(folder / "report.pdf")
    data = (folder / "report.pdf").read_bytes()
    assert data.startswith(b"%PDF-") and b"%%EOF" in data[-32:]
    printed = page.evaluate("window.printed")
    assert len(printed) > 5 and all(printed)  # open on paper
    assert not page.evaluate("[...document.querySelectorAll('details')].some(part => part.open)")  # and closed again
    assert page.complaints == []
