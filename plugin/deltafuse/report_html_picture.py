"""A model before and after at block level: which nodes became which, and runs of equal layers folded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .fusions.graph import subgraphs_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from .fusions.result import FusionReport, RegionReport

#: The exporter's module path of a node, as torch.onnx writes it: the text of a Python list.
_SCOPES = "pkg.torch.onnx.name_scopes"
_QUOTED = re.compile(r"'((?:[^'\\]|\\.){0,300})'")
_LAYER = re.compile(r"(?:^|[./])(?:layers?|blocks?|h|decoder)[._]?(\d{1,6})(?:[./]([^./]{1,80}))?")
#: The longest run of different blocks that is looked for when equal ones are folded.
_LONGEST_PERIOD = 64


@dataclass
class Part:
    """Nodes outside the regions that share a module."""

    name: str
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)


@dataclass
class Block:
    """A region, or what stands between two of them.

    Attributes:
        region: its index in the report's regions; None for what stands between.
        parts: one for a region; one for each module for what stands between.
    """

    region: int | None
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def before(self) -> int:
        return sum(part.before.total() for part in self.parts.values())

    @property
    def after(self) -> int:
        return sum(part.after.total() for part in self.parts.values())


@dataclass
class Fold:
    """One block that stands for equal ones (``items`` empty), or a sequence of folds that repeats.

    Attributes:
        key: equal for blocks and sequences that look the same.
        times: how often the sequence comes in a row.
        blocks: all blocks that this one stands for, in order.
    """

    key: Hashable
    blocks: list[Block] = field(default_factory=list)
    items: list[Fold] = field(default_factory=list)
    times: int = 1


@dataclass
class Picture:
    """The blocks in order, and all nodes by operator, those in subgraphs counted too."""

    blocks: list[Block]
    before: Counter[str]
    after: Counter[str]


def picture(source: ir.Model, report: FusionReport) -> Picture:
    """Say for each node of ``source`` which block of the fused model it went into.

    A node that the fused model still has went into it as itself; one whose values a region has, into the region; one
    that clean-up removed went where all its users went. After a dry run, what would stay is taken to stay as it is.
    """
    nodes = list(source.graph)
    region_of = _regions_by_output(report.regions)
    kept = _outputs(report.model) if report.model is not None else None
    label = _labels(nodes, region_of, kept)
    last = {region: i for i, region in enumerate(label) if region is not None}
    order = sorted(last, key=last.__getitem__)
    place = {region: number for number, region in enumerate(order)}
    between = [Block(None) for _ in range(len(order) + 1)]
    inside = {region: Block(region, {"": Part("")}) for region in order}
    home: dict[str, Part] = {}  # by output name
    done = 0
    for i, node in enumerate(nodes):
        region = label[i]
        if region is not None:
            part = inside[region].parts[""]
        else:
            scope = _module(node)
            part = between[done].parts.setdefault(scope, Part(scope))
        part.before.update(_ops(node))
        for output in node.outputs:
            home[output.name or ""] = part
        if region is not None and last[region] == i:
            done = max(done, place[region] + 1)
    _count_after(report, inside, between[-1], home, nodes)
    blocks = []
    for number, block in enumerate(between):
        blocks += [block] if block.parts else []
        blocks += [inside[order[number]]] if number < len(order) else []
    sums = [Counter[str](), Counter[str]()]
    for block in blocks:
        for part in block.parts.values():
            sums[0].update(part.before)
            sums[1].update(part.after)
    return Picture(blocks, *sums)


def _regions_by_output(regions: list[RegionReport]) -> dict[str, int]:
    """Value name -> the region whose node gives it; a fused region comes before a refused one."""
    found: dict[str, int] = {}
    for refused in (False, True):
        for number, region in enumerate(regions):
            if (region.status == "refused") is refused:
                for _, _, outputs in region.members:
                    for name in outputs:
                        found.setdefault(name, number)
    return found


def _labels(nodes: list[ir.Node], region_of: dict[str, int], kept: set[str] | None) -> list[int | None]:
    label: list[int | None] = []
    for node in nodes:
        found = {region_of[o.name] for o in node.outputs if o.name and o.name in region_of}
        label.append(min(found) if found else None)
    position = {inner: i for i, node in enumerate(nodes) for inner in (node, *_inner(node))}
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if label[i] is not None or (kept is not None and any(o.name in kept for o in node.outputs)):
            continue
        if kept is None and node.op_type in ("MatMul", "Gemm", "Conv", "Gather"):
            continue
        if any(o.is_graph_output() for o in node.outputs):
            continue
        users = {label[position[u]] if u in position else None for o in node.outputs for u, _ in o.uses()}
        if len(users) == 1:
            label[i] = users.pop()
    return label


def _count_after(
    report: FusionReport, inside: dict[int, Block], tail: Block, home: dict[str, Part], source: list[ir.Node]
) -> None:
    if report.model is None:
        for part in home.values():
            part.after = Counter(part.before)
        for number, block in inside.items():
            if report.regions[number].status != "refused":
                block.parts[""].after = Counter({call_of(report.regions[number]): 1})
        return
    nodes = list(report.model.graph)
    found: dict[ir.Node, Part] = {}
    owner = {inner: node for node in nodes for inner in _inner(node)}

    def take(node: ir.Node, parts: Iterator[Part | None]) -> None:
        if node not in found and (part := next((part for part in parts if part is not None), None)) is not None:
            found[node] = part

    for node in nodes:
        take(node, (home.get(output.name or "") for output in node.outputs))
    regions = {id(block.parts[""]) for block in inside.values()}
    for node, part in _successors(source, nodes, home):
        take(node, iter([part if id(part) in regions else None]))
    # New nodes belong where their first user does: a call's body written out, a Reshape before a call.
    for node in reversed(nodes):
        take(node, (found.get(owner.get(user, user)) for output in node.outputs for user, _ in output.uses()))
    for node in nodes:
        makers = (value.producer() for value in node.inputs if value is not None)
        take(node, (found.get(maker) for maker in makers if maker is not None))
        if node not in found:
            found[node] = tail.parts.setdefault("", Part(""))
        found[node].after.update(_ops(node))


def _successors(source: list[ir.Node], nodes: list[ir.Node], home: dict[str, Part]) -> Iterator[tuple[ir.Node, Part]]:
    """What users of a value that stayed read in its place, and where the value was made."""
    stayed = {node.outputs[0].name: node for node in nodes if node.outputs}
    for node in source:
        now = stayed.get(node.outputs[0].name) if node.outputs else None
        if now is None or len(now.inputs) != len(node.inputs):
            continue
        for old, new in zip(node.inputs, now.inputs, strict=True):
            if old is not None and new is not None and old.name in home and (maker := new.producer()) is not None:
                yield maker, home[old.name]


def call_of(region: RegionReport) -> str:
    """The op that a region becomes: ``deltafuse::KimiDeltaAttention``."""
    from .registry.ops import OPS

    op = OPS.get(region.op)
    return op.qualified_name if op is not None else region.op


def _outputs(model: ir.Model) -> set[str]:
    return {output.name for node in model.graph for output in node.outputs if output.name}


def _inner(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes in the node's subgraphs, at any depth."""
    stack = subgraphs_of(node)
    while stack:
        for inner in stack.pop():
            yield inner
            stack.extend(subgraphs_of(inner))


def _ops(node: ir.Node) -> Iterator[str]:
    """The node's op and those in its subgraphs."""
    for each in (node, *_inner(node)):
        yield f"{each.domain}::{each.op_type}" if each.domain else each.op_type


def _module(node: ir.Node) -> str:
    """The module that a node is of, without its layer's number: "self_attn"; "" where nothing says."""
    scopes = _QUOTED.findall(node.metadata_props.get(_SCOPES, "")[:20_000])
    path = scopes[-2] if len(scopes) > 1 else ""
    if not path and "/" in (node.name or ""):
        path = (node.name or "").rpartition("/")[0].strip("/")
    layers = list(_LAYER.finditer(path))
    if layers:
        return layers[-1][2] or "residual"
    return re.split(r"[./]", path)[-1]


def fold(blocks: list[Block], keys: Sequence[Hashable]) -> list[Fold]:
    """Fold runs of blocks, and of sequences of blocks, with equal keys: the longest run first, then within it."""
    return _fold([Fold(key, [block]) for block, key in zip(blocks, keys, strict=True)])


def _fold(items: list[Fold]) -> list[Fold]:
    start, period, times = _longest_run([item.key for item in items])
    if times < 2:
        return items
    copies = [items[start + n * period : start + (n + 1) * period] for n in range(times)]
    merged = [_merge(list(column)) for column in zip(*copies, strict=True)]
    run = Fold(("run", times, *(item.key for item in merged)), items=_fold(merged), times=times)
    return [*_fold(items[:start]), run, *_fold(items[start + times * period :])]


def _longest_run(keys: list[Hashable]) -> tuple[int, int, int]:
    """Start, period and repeats of the run that folding makes the most shorter; repeats are 1 where there is none."""
    best, saved = (0, 1, 1), 0
    for period in range(1, min(_LONGEST_PERIOD, len(keys) // 2) + 1):
        equal = 0  # how many keys in a row are equal to the one a period later
        for i in range(len(keys) - period, -1, -1):
            same = i + period < len(keys) and keys[i] == keys[i + period]
            equal = equal + 1 if same else 0
            if equal // period * period > saved:
                best, saved = (i, period, equal // period + 1), equal // period * period
    return best


def _merge(copies: list[Fold]) -> Fold:
    """One fold for several blocks with the same key."""
    return Fold(copies[0].key, [block for copy in copies for block in copy.blocks])
