"""The page as text: what stands in it, what may not, and when it is written."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import deltafuse
import onnx_ir as ir
import pytest
from deltafuse import report_html, show
from deltafuse.assigned import Assignment, NodeAssignment
from deltafuse.cli import app
from deltafuse.fusions.result import FusionReport, QuantizationReport, QuantizedTensor
from deltafuse.report_html_picture import picture
from typer.testing import CliRunner

from . import hostile
from .conftest import unpack

#: Elements that never have an end.
VOID = {"meta", "link"}


class Outline(HTMLParser):
    """Checks that elements are nested, and collects them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.scripts += data
        else:
            self.text.append(data)


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    found.close()
    assert not found.open
    ids = [attributes["id"] for _, attributes in found.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {a["href"] for tag, a in found.seen if tag == "a"}
    assert links <= {f"#{name}" for name in ids}
    return found


def test_the_page_says_what_was_done(hybrid: tuple[Path, deltafuse.FusionReport]) -> None:
    path, report = hybrid
    found = outline(path.read_text(encoding="utf-8"))
    said = " ".join(" ".join(found.text).split())
    for part in ("hybrid4_decode.onnx", "KimiDeltaAttention", "each proved first", "Operators", "gate-near-zero"):
        assert part in said, part
    for region in report.regions:
        assert region.name in said
        for name in (*region.absorbed, *(refusal.reason for refusal in region.not_absorbed)):
            assert name in said
    assert f"before {report.nodes_before:,}" in said and f"after {report.nodes_after:,}" in said


def test_every_node_is_in_one_block(hybrid: tuple[Path, deltafuse.FusionReport]) -> None:
    path, report = hybrid
    source = ir.load(path.with_name("hybrid4_decode.onnx"))
    shown = picture(source, report)
    assert shown.before.total() == report.nodes_before
    assert shown.after.total() == report.nodes_after
    assert sum(block.before for block in shown.blocks) == report.nodes_before
    fused = [block for block in shown.blocks if block.region is not None]
    assert [block.region for block in fused] != [] and len(fused) == len(report.regions)
    for block in fused:
        region = report.regions[block.region or 0]
        assert block.before >= len(region.members) > 20 > block.after >= 1
        assert any(op.startswith("deltafuse::") for op in block.parts[""].after)


@pytest.mark.parametrize("target", ["portable", "plugin"])
def test_bodies_written_out_count_as_the_regions(tmp_path: Path, target: str) -> None:
    source = ir.load(unpack("kda_scan_dynT", tmp_path))
    report = deltafuse.fuse(source, target=target)
    shown = picture(source, report)
    assert shown.after.total() == report.nodes_after and shown.before.total() == report.nodes_before
    (block,) = (block for block in shown.blocks if block.region is not None)
    others = sum(b.after for b in shown.blocks if b.region is None)
    assert others <= sum(b.before for b in shown.blocks if b.region is None)
    assert block.after == report.nodes_after - others


def test_a_dry_run_shows_what_would_be(tmp_path: Path) -> None:
    path = unpack("hybrid4_decode", tmp_path)
    report = deltafuse.inspect(path, report=tmp_path / "r.html")
    said = " ".join(outline((tmp_path / "r.html").read_text(encoding="utf-8")).text)
    assert "recognised; nothing changed" in said and "would be" in said
    shown = picture(ir.load(path), report)
    assert shown.before.total() == report.nodes_before > shown.after.total()


def test_layers_are_folded() -> None:
    from deltafuse.report_html_picture import Block, fold

    pattern = "kgkgkgmg" * 12
    (run,) = fold([Block(None) for _ in pattern], list(pattern))
    assert run.times == 12 and [item.times for item in run.items] == [3, 1, 1]
    assert [len(item.blocks) for item in run.items[0].items] == [36, 36]
    assert [item.key for item in fold([Block(None)] * 3, list("abc"))] == ["a", "b", "c"]
    assert fold([], []) == []


def test_names_out_of_the_model_are_text_only() -> None:
    report = hostile.report()
    shown = picture(hostile.model(), report)
    text = report_html.page(report, shown, measured=[hostile.bench()])
    text.encode("utf-8")  # no lone surrogates
    found = outline(text)
    assert [tag for tag, _ in found.seen].count("script") == 1
    assert not {tag for tag, _ in found.seen} & {"img", "iframe", "object", "embed", "form", "base"}
    assert not [name for _, attributes in found.seen for name in attributes if name.startswith("on")]
    assert "pwned" not in found.scripts and "window.pwned" in "".join(found.text)
    assert "x" * 601 not in text and "(3,000 characters)" in text
    assert "\u202e" not in text and "\x00" not in text and "\\u202e" in text


def test_nothing_is_fetched() -> None:
    report = hostile.report(["a", "b"])
    text = report_html.page(report, picture(hostile.model(["a"]), report))
    found = outline(text)
    for tag, attributes in found.seen:
        assert not {"src", "srcset", "data", "action", "poster", "style"} & set(attributes), tag
        assert attributes.get("href", "#").startswith(("#", "data:"))
    assert not re.search(r"@import|url\(|fetch|XMLHttpRequest|http", found.scripts)
    policy = next(a["content"] or "" for _, a in found.seen if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_numbers_that_are_none_do_not_break_it(tmp_path: Path) -> None:
    report = hostile.report(["a"])
    report.regions[0].proof = None
    report.quantization = QuantizationReport({"experts": "int4:128"}, tensors=[])
    shown = picture(hostile.model(["a"]), report)
    outline(report_html.page(report, shown))
    tensors = [
        QuantizedTensor(f"w{i}<", "experts", "int4:128", error, 100, 30)
        for i, error in enumerate((0.1, 0.0, float("nan"), float("inf"), 1e-12, 2.0))
    ]
    report.quantization = QuantizationReport({"experts": "int4:128"}, "c.npz", tensors, ["left alone: <b>"], 100, 30)
    text = report_html.page(report, shown)
    found = outline(text)
    assert [tag for tag, _ in found.seen].count("circle") == 4
    assert all(0 <= float(a[key] or 0) <= 640 for tag, a in found.seen if tag == "circle" for key in ("cx", "cy"))
    assert html.escape("left alone: <b>") in text
    # of products only what a calibration has measured
    assert "error of products" not in text
    tensors[0].product_error = 0.0321
    text = report_html.page(report, shown)
    assert "error of products" in text and "3.2e-02" in text


def test_the_name_decides_the_kind(tmp_path: Path) -> None:
    path = unpack("decode_bare", tmp_path)
    deltafuse.fuse(path, report=tmp_path / "r.JSON")
    assert json.loads((tmp_path / "r.JSON").read_text(encoding="utf-8"))["regions"]
    deltafuse.fuse(path, report=tmp_path / "r.HTM")
    assert (tmp_path / "r.HTM").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_is_written_where_too_few_were_fused(tmp_path: Path) -> None:
    path = unpack("decode_bare", tmp_path)
    with pytest.raises(deltafuse.RequirementError):
        deltafuse.fuse(path, report=tmp_path / "r.html", require={"kda": 9})
    assert "KimiDeltaAttention" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_times(tmp_path: Path) -> None:
    path = unpack("decode_bare", tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps(hostile.bench(["before", "after"])))
    (tmp_path / "run.json").write_text(json.dumps({"nodes": {"SomeEP": 12}, "device": "cpu", "note": "a note"}))
    files = [tmp_path / "bench.json", tmp_path / "run.json"]
    deltafuse.fuse(path, report=tmp_path / "r.html", times=files)
    said = " ".join(outline((tmp_path / "r.html").read_text(encoding="utf-8")).text)
    for part in ("One token", "1.5 ms", "SomeEP", "a note", "Who runs what"):
        assert part in said, part
    for bad in ("[]", "{}", "no json", '{"variants": '):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(deltafuse.DeltaFuseError, match=r"bad\.json.*bench --json"):
            deltafuse.fuse(path, report=tmp_path / "r.html", times=[tmp_path / "bad.json"])
    with pytest.raises(deltafuse.DeltaFuseError, match="absent"):
        deltafuse.fuse(path, report=tmp_path / "r.html", times=[tmp_path / "absent.json"])
    with pytest.raises(deltafuse.DeltaFuseError, match=r"ends in \.html"):
        deltafuse.fuse(path, report=tmp_path / "r.json", times=files)


def test_the_command_line_writes_it(tmp_path: Path) -> None:
    path = unpack("decode_bare", tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps(hostile.bench(["before", "after"])))
    call = CliRunner().invoke
    arguments = ["inspect", str(path), "--report", str(tmp_path / "r.html"), "--times", str(tmp_path / "bench.json")]
    done = call(app, [*arguments, "-q"])
    assert done.exit_code == 0, done.output
    said = " ".join(outline((tmp_path / "r.html").read_text(encoding="utf-8")).text)
    assert "nothing changed" in said and "One token" in said
    wrong = call(app, ["fuse", str(path), "--dry-run", "--times", str(tmp_path / "bench.json")])
    assert wrong.exit_code == 2 and "ends in .html" in wrong.output


def test_the_model_is_of_any_kind(tmp_path: Path) -> None:
    """As for ``fuse``; what is none is a DeltaFuseError."""
    model = hostile.model(["a"])
    path = tmp_path / "m.onnx"
    ir.save(model, str(path))
    pages = []
    for source in (model, path, str(path), ir.to_proto(model)):
        report_html.write(tmp_path / "page.html", FusionReport(), source)
        pages.append((tmp_path / "page.html").read_text())
    assert len(set(pages)) == 1
    with pytest.raises(deltafuse.DeltaFuseError, match="no such file"):
        report_html.write(tmp_path / "page.html", FusionReport(), tmp_path / "absent.onnx")


def test_sizes_before_are_those_of_the_source(tmp_path: Path) -> None:
    """Also where the output took its place, and with weights beside it."""
    path = unpack("mla_two", tmp_path)
    ir.save(ir.load(path), str(path), external_data="weights", size_threshold_bytes=1024)
    before = path.stat().st_size, (tmp_path / "weights").stat().st_size
    report = deltafuse.fuse(path, path, report=tmp_path / "page.html")
    assert (report.source_bytes, report.source_data_bytes) == before
    assert report.output_bytes == path.stat().st_size != before[0]
    text = (tmp_path / "page.html").read_text()
    assert all(show.size(count) in text for count in (*before, report.output_bytes))


def test_who_runs_what() -> None:
    nodes = [
        NodeAssignment("CPUExecutionProvider", "", "Add", "a"),
        NodeAssignment("DeltaFuseExecutionProvider", "deltafuse", "KimiDeltaAttention", "kda_0"),
        NodeAssignment("", "deltafuse", "LatentAttention", "mla_1", "head_dim 7: <b>no kernel</b>"),
        NodeAssignment("", "deltafuse", "KimiDeltaAttention", "kda_2", "too wide", "com.microsoft::LinearAttention"),
    ]
    report = hostile.report(["a"])
    shown = picture(hostile.model(["a"]), report)
    text = report_html.page(report, shown, assignment=Assignment(nodes, note="no GPU: a note"))
    said = " ".join(" ".join(outline(text).text).split())
    for part in ("kda_0", "head_dim 7: <b>no kernel</b>", "com.microsoft::LinearAttention", "its ONNX body", "a note"):
        assert part in said, part
