"""From a router to candidates: what the fused op would be there. The proof decides; nothing is believed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.moe.spec import MoeConfig
from ..candidate import Operand, Parameter, Piece, Result
from ..graph import GraphView, is_op, static_dims
from ..region import Region, backward
from ..replacement import type_refusal
from .block import (
    HALF,
    MoeCandidate,
    Slabs,
    bias_parameter,
    biases,
    clamp_settings,
    expert_sizes,
    matrices,
    matrix_parameters,
    router_layer,
    shared_settings,
    short,
    vector,
    weight_format,
)
from .forms import Routed, read_routed
from .op import MOE
from .reader import Reader
from .router import Router, low_bias, other_scores
from .sites import Site, cuts
from .slabs import Slab
from .tail import GATE, End, read_ends

#: Ops that compute shapes and nothing else.
_SHAPES = frozenset("Add Cast Concat Gather Identity Mul Reshape Shape Size Slice Squeeze Sub Unsqueeze Div".split())

#: Steps whose results are as long as what they read.
_ELEMENTWISE = ("Add", "Div", "Mul", "Pow", "Reciprocal", "ReduceMean", "Sqrt", "Sub")

#: What ends a slice where its axis does.
_END = 2**31 - 1


def read_site(view: GraphView, site: Site) -> Iterator[MoeCandidate] | Refusal:
    """Candidates at a router, the most complete first, or why there is none."""
    reader, router = site.reader, site.router
    assert reader is not None
    if router is None:
        return _no_router(view, site)
    routed: Routed | None = None
    for value in cuts(view, site.order, router.topk):
        routed = reader.attempt(read_routed, router, value)
        if routed is not None:
            return _candidates(view, site, reader, router, routed, value)
    why = f" ({reader.why[-1]})" if reader.why else ""
    return Refusal(
        "experts", f"{describe(router)}; what follows it is in no form of experts that is known{why}", site.name
    )


def _no_router(view: GraphView, site: Site) -> Refusal:
    """Experts chosen by something else than the best of a router's scores."""
    if site.why:
        return Refusal("routing", site.why, site.name)
    source = site.ids.producer() if site.ids is not None else None
    what = "by indices that no router of this graph makes"
    if is_op(source, "TopK"):
        what = "by a TopK whose scores are neither a sigmoid nor a softmax of logits"
    elif source is not None and is_op(source, "Gather", "GatherND") and view.is_const(source.inputs[0]):  # type: ignore[arg-type]
        what = "by a table (hash or frozen routing), not by scores"
    return Refusal("routing", f"experts are chosen {what}", site.name)


def describe(router: Router) -> str:
    """The router in words."""
    groups = router.groups
    parts = [f"a router with {router.function} scores chooses {router.top_k} of {router.experts} experts"]
    if groups is not None:
        parts.append(f"in {groups.kept} of {groups.count} groups")
    return " ".join(parts)


def _candidates(
    view: GraphView, site: Site, reader: Reader, router: Router, routed: Routed, value: ir.Value
) -> Iterator[MoeCandidate] | Refusal:
    other = other_scores(router)
    if other is not None:
        return Refusal("router-type", f"{other}: the op's are float32, and would choose other experts", site.name)
    low = low_bias(reader, router)
    if low is not None:
        return Refusal("groups", low, site.name)
    found: list[MoeCandidate] = []
    first: Refusal | None = None
    for end in read_ends(reader, value):
        made = _candidate(view, site, reader, router, routed, end)
        if isinstance(made, Refusal):
            first = first or made
            continue
        if first is not None and end.shared is None and first.code == "shared":
            made.not_absorbed.append(first)
        elif end.shared is None and GATE in reader.why:
            made.not_absorbed.append(Refusal("shared", GATE, site.name))
        found.append(made)
    if not found:
        return first or Refusal("experts", "the block has no end", site.name)
    return iter(found)


def _candidate(
    view: GraphView,
    site: Site,
    reader: Reader,
    router: Router,
    routed: Routed,
    end: End,
    begin: ir.Value | None = None,
) -> MoeCandidate | Refusal:
    from .tail import read_shared

    shared, not_absorbed = end.shared, []
    if routed.beside:
        if shared is not None:
            return Refusal("shared", "two shared experts", site.name)
        shared = reader.attempt(read_shared, routed.beside[0])
        if shared is None or end.scale != 1.0:
            return Refusal("shared", "a term beside the experts is no shared expert", site.name)
    if shared is not None:
        differs = shared_settings(shared, routed)
        if differs is not None:
            return Refusal("shared", differs, site.name)
    sizes = expert_sizes(routed, router)
    if isinstance(sizes, Refusal):
        return sizes
    hidden, inter = sizes
    layer = router_layer(reader, router)
    inputs = list(dict.fromkeys(routed.inputs))
    if shared is not None:
        inputs += [shared.mlp.gate.linear.x, *([shared.mlp.up.linear.x] if shared.mlp.up else [])]
        inputs += [shared.gate.x] if shared.gate is not None else []
    computed = routed.experts[0].down.y.dtype or end.y.dtype
    x = None
    if layer is not None:
        x = _common(reader, [*inputs, layer.x], hidden, end.y, computed, begin)
        if x is not None and _narrows(reader, layer.x, x):
            layer, x = None, None
    if layer is None or x is None:
        layer = None
        x = _common(reader, inputs, hidden, end.y, computed, begin)
    if x is None:
        return Refusal("input", f"experts and shared expert do not read the same {hidden} channels", site.name)
    settings: dict[str, Any] = {
        "num_experts": router.experts,
        "zero_experts": routed.zero,
        "top_k": router.top_k,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "score_function": router.function,
        "norm_topk_prob": int(routed.weighting.norm),
        # of softmax's scores those are largest whose logits are, and no two become equal that count
        "choose_by_logits": int(router.by_logits and (router.function == "sigmoid" or router.bias is not None)),
        "norm_eps": short(routed.weighting.eps),
        "norm_min": short(routed.weighting.least),
        "routed_scaling_factor": short(routed.weighting.scale * end.scale),
        "masked_weights": int(routed.weighting.masked),
        **clamp_settings(routed.experts[0]),
    }
    if len({m.settings() for m in routed.experts}) != 1:
        return Refusal("experts", "experts with different activations or clamps", site.name)
    if router.groups is not None:
        g = router.groups
        settings |= {"n_group": g.count, "topk_group": g.kept, "group_top": g.top, "masked_score": g.fill}
    else:
        settings |= {"group_top": min(2, router.experts)}
    operands = {"x": Operand((Piece(x, axes=("batch", "tokens", None)[-len(x.shape or ()) :]),))}
    parameters: dict[str, Parameter] = {}
    slabs: dict[str, Slabs] = {}
    vectors: dict[str, ir.Value] = {}
    dtype = x.dtype or ir.DataType.FLOAT
    absorbed = [f"router ({describe(router)})", f"experts ({routed.form})"]
    if layer is None and router.logits is None:
        return Refusal("router-layer", "the router's layer and its sigmoid are one node", site.name)
    if layer is None:
        assert router.logits is not None
        rank = len(router.logits.shape or ())
        axes: tuple[str | None, ...] = ("batch", "tokens", None)
        if rank == 2:
            axes = ("batch * tokens" if len(x.shape or ()) == 3 else "tokens", None)
        operands["router_logits"] = Operand((Piece(router.logits, axes=axes),))
        settings["has_router_weight"] = False
        not_absorbed.append(Refusal("router-layer", "the router's linear layer stays in the graph", site.name))
    else:
        slab = Slab.of(layer)
        slabs["router"] = ((slab,),)
        parameters["router_weight"] = Parameter(
            tuple(slab.values()), lambda a: slab.numbers(dict(zip(slab.values(), a, strict=True))), form="router"
        )
        if layer.bias is not None:
            vectors["router_bias"] = layer.bias.given
            settings["has_router_bias"] = True
    if router.bias is not None:
        vectors["expert_bias"] = router.bias
        settings["has_expert_bias"] = True
    for name, source in vectors.items():
        parameters[name] = vector(name, source, router.experts)
    groups = [("", matrices(routed.experts))]
    if shared is not None:
        settings["shared_intermediate_size"] = len(shared.mlp.gate.rows)
        groups.append(("shared_", matrices([shared.mlp])))
        absorbed.append("shared expert")
    for prefix, (gate_up, down) in groups:
        form = weight_format([gate_up, down])
        if isinstance(form, Refusal):
            return form
        kind, block, zero = form
        if kind != "float":
            settings |= {
                f"{prefix or 'weight_'}format": kind,
                f"{prefix}block_size": block,
                f"{prefix}has_zero_point": zero,
            }
        for name, matrix in (("gate_up", gate_up), ("down", down)):
            slabs[f"{prefix}{name}"] = matrix
            parameters |= matrix_parameters(f"{prefix}{name}", matrix, kind, zero, dtype)
        added = biases([shared.mlp] if prefix and shared is not None else routed.experts)
        if isinstance(added, Refusal):
            return added
        for name, pieces in added.items():
            slabs[f"{prefix}{name}_bias"] = pieces
            settings[f"has_{prefix}{name}_bias"] = True
            parameters[f"{prefix}{name}_bias"] = bias_parameter(f"{prefix}{name}_bias", pieces)
    if shared is not None and shared.gate is not None:
        gate_slab = Slab.of(shared.gate)
        slabs["shared_gate"] = ((gate_slab,),)
        settings["has_shared_gate"] = True
        parameters["shared_gate_weight"] = Parameter(
            tuple(gate_slab.values()),
            lambda a: gate_slab.numbers(dict(zip(gate_slab.values(), a, strict=True))),
            form="shared gate",
        )
        absorbed.append("shared expert's gate")
    config = MoeConfig(**settings)
    refused = config.check()
    if refused is not None:
        return refused
    result = _result(x, end.y)
    if result is None:
        return Refusal("shape", f"the result {end.y.name!r} can't be brought to its shape", site.name)
    borders = [p.value for o in operands.values() for p in o.pieces]
    region = backward(view, [end.y], lambda v: v in borders)
    before = [v for v in region.borders if v not in borders and v in reader.trail(x) and v is not x]
    if before and begin is None:
        # something else of the block, a shape at least, is read where x is moved from: x begins there
        return _candidate(view, site, reader, router, routed, end, before[0])
    if any(v not in borders for v in region.borders):
        # sizes may be read of anything, of the model's inputs say
        region = backward(view, [end.y], lambda v: v in borders or is_op(v.producer(), "Shape", "Size"))
    unknown = _unknown(view, reader, region, borders)
    if unknown is not None:
        return Refusal("step", unknown, site.name)
    order = [n for n in config.input_names() if n in parameters]
    candidate = MoeCandidate(
        MOE,
        site.name,
        routed.form,
        config,
        operands,
        {n: parameters[n] for n in order},
        {"y": result},
        region,
        absorbed=absorbed,
        not_absorbed=not_absorbed,
        explained=reader.marks.all(),
        slabs=slabs,
        vectors=vectors,
    )
    return type_refusal(candidate) or candidate


def _common(
    reader: Reader,
    inputs: list[ir.Value],
    hidden: int,
    y: ir.Value,
    dtype: ir.DataType | None,
    source: ir.Value | None = None,
) -> ir.Value | None:
    """The earliest value that all inputs are moved from; one of the type that experts compute in and of the result's
    rank is best."""
    trails = [reader.trail(v) for v in dict.fromkeys(inputs)]
    shared = [v for v in trails[0] if all(v in t for t in trails)]
    shared = [v for v in shared if (d := static_dims(v)) is not None and len(d) in (2, 3) and d[-1] == hidden]
    if not shared:
        return None

    def fitness(value: ir.Value) -> tuple[bool, bool, bool]:
        kept = not any(_narrowed(trail[: trail.index(value)], value) for trail in trails)
        return kept, value.dtype == dtype, len(value.shape or ()) == len(y.shape or ())

    best = source if source in shared else max(reversed(shared), key=fitness)
    for trail in trails:
        for value in trail[: trail.index(best)]:
            producer = value.producer()
            assert producer is not None
            reader.marks.add(producer)
    return best


def _narrows(reader: Reader, value: ir.Value, x: ir.Value) -> bool:
    """Is a value cast to fewer bits on its way from x?"""
    trail = reader.trail(value)
    return _narrowed(trail[: trail.index(x)], x)


def _narrowed(values: list[ir.Value], x: ir.Value) -> bool:
    return x.dtype not in HALF and any(v.dtype in HALF for v in values)


def _result(x: ir.Value, y: ir.Value) -> Result | None:
    """The op's result, in the shape of x, brought to the shape of y."""
    dims, have = static_dims(y), static_dims(x)
    if dims is None or have is None:
        return None
    unknown = [i for i, d in enumerate(dims) if d is None]
    if len(dims) == len(have):
        pairs = list(zip(dims, have, strict=True))
        alike = all(a == b or a is None or b is None for a, b in pairs)
        # [tokens, 1, D] and [1, tokens, D] are not
        turned = any(a != b and 1 in (a, b) for a, b in pairs) and len(unknown) <= 1
        if alike and not turned:
            return Result((y,))
        if not turned:
            return None
    if len(unknown) > 1:
        return None
    return Result((y,), reshape=tuple(-1 if d is None else d for d in dims))


def _unknown(view: GraphView, reader: Reader, region: Region, borders: list[ir.Value]) -> str | None:
    """A node of the region that no reading passed, in words; None when all are known or compute shapes."""
    shapes: set[ir.Node] = set()
    for node in region.nodes:
        if is_op(node, "Shape", "Size"):
            shapes.add(node)
        elif is_op(node, *_SHAPES) and all(view.is_integer(v) for v in node.outputs):
            sources = [v.producer() for v in node.inputs if v is not None and not view.is_const(v)]
            if sources and all(p in shapes or is_op(p, "Shape", "Size") for p in sources):
                shapes.add(node)
    for value in region.borders:
        if value not in borders:
            return f"it reads {value.name!r}, which is no operand of the op"
    needed = _needed(view, region)
    for node in region.nodes:
        if node in reader.marks or node in shapes or all(view.is_const(v) for v in node.outputs):
            continue
        if node not in needed and (reader.is_move(node) or _before_shape(view, node)):
            continue
        return f"{node.op_type} {node.name!r} is no step of experts that is known"
    return None


def _before_shape(view: GraphView, node: ir.Node) -> bool:
    """Is it a step that exporters put before `Shape`: the larger one of indices, whose shapes are broadcast; a first
    row, for how long it is; a step of a norm in front of the router alone?"""
    if is_op(node, *_ELEMENTWISE):
        return True
    if is_op(node, "Max"):
        return all(view.is_integer(v) for v in node.outputs)
    if not is_op(node, "Slice") or not all(v is None or view.is_const(v) for v in node.inputs[1:]):
        return False
    starts, ends, _, steps = [None if v is None else view.ints(v) for v in [*node.inputs[1:], None, None][:4]]
    first = starts is not None and ends is not None and not any(starts) and all(e == 1 or e >= _END for e in ends)
    return first and set(steps or [1]) == {1}


def _needed(view: GraphView, region: Region) -> set[ir.Node]:
    """The nodes of whose results more than the shape is read."""
    found: set[ir.Node] = set()
    stack = list(region.outputs)
    while stack:
        producer = stack.pop().producer()
        if producer is None or producer in found or producer not in region:
            continue
        found.add(producer)
        if not is_op(producer, "Shape", "Size"):
            stack.extend(view.inputs_of(producer))
    return found
