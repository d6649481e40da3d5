"""The model as a column of blocks, before on the left and after on the right; equal layers are folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from .report_html_parts import Html, bar, details, join, number, paragraph, span, table, tag, text
from .report_html_picture import Block, Fold, Part, Picture, call_of, fold

if TYPE_CHECKING:
    from .fusions.result import FusionReport

#: Operators of the histogram that are shown at once.
SHOWN_OPS = 24


def graph(shown: Picture, report: FusionReport, group_of: Sequence[int]) -> Html:
    """The blocks. ``group_of``: for each region, the number of the group whose details are shown."""
    keys = [_key(block, report, group_of) for block in shown.blocks]
    folds = fold(shown.blocks, keys)
    largest = max((max(block.before, block.after) for block in shown.blocks), default=1) or 1
    heads = [
        tag("span", join([text("before"), Html(" "), tag("b", number(shown.before.total()))])),
        tag("span", join([text("after" if not report.dry_run else "would be"), Html(" "), _total(shown, report)])),
    ]
    note = "Nodes of each block, in the graph's order; those in subgraphs are counted."
    if report.dry_run:
        note += " Nothing was changed: what would remain outside the fused blocks is shown as it stands."
    return join(
        [
            tag("div", join(heads), class_="sides"),
            tag("ol", join(_fold(item, report, group_of, largest) for item in folds), class_="flow"),
            paragraph(note, "note"),
        ]
    )


def _total(shown: Picture, report: FusionReport) -> Html:
    return tag("b", number(shown.after.total() if report.dry_run else report.nodes_after))


def _key(block: Block, report: FusionReport, group_of: Sequence[int]) -> Hashable:
    if block.region is not None:
        return group_of[block.region]
    return tuple((part.name, tuple(sorted(part.after.items()))) for part in block.parts.values())


def _fold(item: Fold, report: FusionReport, group_of: Sequence[int], largest: int) -> Html:
    if item.items:
        inner = tag("ol", join(_fold(part, report, group_of, largest) for part in item.items))
        times = tag("span", text(f"{item.times} ×"), class_="times", title=f"{item.times} times in a row")
        return tag("li", join([times, inner]), class_="run")
    block = item.blocks[0]
    if block.region is None:
        return tag("li", _between(item.blocks, largest), class_="block")
    return _region(item.blocks, report, group_of[block.region], largest)


def _region(blocks: list[Block], report: FusionReport, group: int, largest: int) -> Html:
    region = report.regions[blocks[0].region or 0]
    fused = region.status != "refused"
    op = call_of(region).rpartition(":")[2]
    name = op if fused else f"looks like {op}"
    title = tag("a", text(name), href=f"#group-{group + 1}")
    before, after = ([getattr(block, side) for block in blocks] for side in ("before", "after"))
    left = _side(before, largest, region.form)
    right = _side(after, largest, "" if fused else "left as it is")
    return tag(
        "li",
        join([tag("div", title, class_="name"), tag("div", join([left, right]), class_="sides")]),
        class_="block fused" if fused else "block refused",
    )


def _side(counts: list[int], largest: int, remark: str) -> Html:
    said = span(min(counts), max(counts)) + (" node" if counts[0] == counts[-1] == 1 else " nodes")
    inner = [tag("b", text(said)), bar(max(counts) / largest)]
    if remark:
        inner.insert(1, tag("small", text(f" {remark}")))
    return tag("div", join(inner), class_="side")


def _between(blocks: list[Block], largest: int) -> Html:
    first = blocks[0]
    names = list(first.parts)
    if names == [""]:
        title = "other nodes"
    else:
        title = ", ".join(name or "others" for name in names[:4]) + (f" and {len(names) - 4} more" * (len(names) > 4))
    before, after = ([getattr(block, side) for block in blocks] for side in ("before", "after"))
    sides = tag("div", join([_side(before, largest, ""), _side(after, largest, "")]), class_="sides")
    rows = [
        [
            text(name or "others"),
            text(_counts(blocks, name, "before")),
            text(_counts(blocks, name, "after")),
            text(_ops(part.after)),
        ]
        for name, part in first.parts.items()
    ]
    inner = table(["module", "before", "after", "operators after"], rows, (1, 2))
    return join([details(tag("span", text(title), class_="name"), inner), sides])


def _counts(blocks: list[Block], name: str, side: str) -> str:
    counts = [getattr(block.parts.get(name, Part(name)), side).total() for block in blocks]
    return span(min(counts), max(counts))


def _ops(counts: Counter[str]) -> str:
    most = counts.most_common(6)
    rest = len(counts) - len(most)
    return ", ".join(f"{op} {count}" for op, count in most) + (f" and {rest} more" if rest > 0 else "")


def histogram(shown: Picture) -> Html:
    """How often each operator stood in the model, and stands now."""
    ops = sorted({*shown.before, *shown.after}, key=lambda op: (-max(shown.before[op], shown.after[op]), op))
    largest = max((max(shown.before[op], shown.after[op]) for op in ops), default=1)

    def rows(chosen: Sequence[str]) -> list[list[Html]]:
        return [
            [
                tag("span", text(op), class_="op"),
                join([bar(shown.before[op] / largest, "was"), bar(shown.after[op] / largest, "now")]),
                number(shown.before[op]),
                number(shown.after[op]),
            ]
            for op in chosen
        ]

    headings = ["operator", "", "before", "after"]
    most = tag("div", table(headings, rows(ops[:SHOWN_OPS]), (2, 3)), class_="histogram")
    if len(ops) <= SHOWN_OPS:
        return most
    rest = table(headings, rows(ops[SHOWN_OPS:]), (2, 3))
    return join([most, details(text(f"{len(ops) - SHOWN_OPS} more operators"), tag("div", rest, class_="histogram"))])
