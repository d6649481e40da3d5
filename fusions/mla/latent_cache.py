"""Caches of keys and values become caches of latents: another signature for the model, an eighteenth of the bytes.

A call that caches expanded keys and values has every new token's latent at hand. Keys and values are functions of the
latents, token by token, so a model that starts with an empty cache computes the same with a cache of latents. That is
checked once for each configuration, by running a prompt and single tokens after it through both forms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.mla import body, call
from ...custom_ops.mla.draw import draw_inputs
from ...custom_ops.mla.spec import ATTRIBUTES, DOMAIN, INPUTS, OP_TYPE, OUTPUTS, MlaConfig
from ..graph import attribute_int, attribute_ints, is_op
from ..op import TOLERANCE
from ..passes import Pass
from ..proof.problem import session
from ..result import PassReport

#: What is run: a prompt, then single tokens.
STEPS = (5, 1, 1, 3)
CAPACITY = 16


@dataclass(frozen=True)
class Changed:
    """One cache of the new model: old and new names and shapes, inputs then outputs."""

    node: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.node}: {', '.join(self.before)} became {', '.join(self.after)}"


class LatentCache(Pass):
    """Rewrite the calls of ``deltafuse::LatentAttention`` whose caches of keys and values are the model's own."""

    name = "latent-cache"
    needs = frozenset({"mla"})

    def __init__(self, *, verify: bool = True) -> None:
        self.verify = verify
        self.changed: list[Changed] = []
        self._errors: dict[MlaConfig, float] = {}

    def run(self, model: ir.Model, report: PassReport) -> None:
        for node in [n for n in model.graph if (n.domain, n.op_type) == (DOMAIN, OP_TYPE)]:
            if node.attributes["cache"].as_string() != "expanded":
                continue
            refused = self._rewrite(model, node)
            if refused is not None:
                report.refused.append(refused)
                continue
            report.matched += 1
        report.changed = report.matched > 0
        report.notes += [str(c) for c in self.changed]
        if not report.matched and not report.refused:
            report.notes.append("no fused latent attention has a cache of keys and values")
        if report.changed:
            common.RemoveUnusedFunctionsPass()(model)
            model.graph.sort()

    def _rewrite(self, model: ir.Model, node: ir.Node) -> Refusal | None:
        given = {n: v for n, v in zip(INPUTS, node.inputs, strict=False) if v is not None}
        made = {n: v for n, v in zip(OUTPUTS, node.outputs, strict=False) if v.name}
        name = node.name or ""
        at = 2 if given["past_key"].is_graph_input() else 1  # the tokens' axis, of the model's own caches
        for role in ("past_key", "past_value"):
            past = given[role] if at == 2 else _before(given[role])
            own = {node} if at == 2 else {given[role].producer()}
            others = [] if past is None else [u for u, _ in past.uses() if u not in own]
            if past is None or not past.is_graph_input() or any(_size_axis(u, at) is None for u in others):
                return Refusal("latent-cache", f"{role} is not an input of the model for this node alone", name)
            given[role] = past
        for role in ("present_key", "present_value"):
            present = made.get(role) if at == 2 or role not in made else _behind(made[role])
            if present is None or not present.is_graph_output() or present.uses():
                return Refusal("latent-cache", f"{role} is not an output of the model and nothing else", name)
            made[role] = present
        config = config_of(node)
        dtype = given["q"].dtype
        if dtype is None or given["past_key"].shape is None:
            return Refusal("latent-cache", "types or shapes that are not known", name)
        if self.verify:
            error = self._error(config)
            if not error <= TOLERANCE:
                return Refusal("latent-cache", f"with latents the results differ by {error:.1e}", name)
        latent = replace(config, cache="latent")
        rope = config.qk_rope_head_dim
        self._exchange(model, node, latent, given, made, dtype, rope, at)
        return None

    def _exchange(
        self,
        model: ir.Model,
        node: ir.Node,
        config: MlaConfig,
        given: dict[str, ir.Value],
        made: dict[str, ir.Value],
        dtype: ir.DataType,
        rope: int,
        at: int,
    ) -> None:
        graph = model.graph
        used = {v.name for v in graph.inputs} | {v.name for n in graph for v in n.outputs}
        olds = [given.pop(role) for role in ("past_key", "past_value")]
        assert olds[0].shape is not None
        batch, length = olds[0].shape[0], olds[0].shape[at]
        widths = {"past_latent": config.kv_lora_rank, **({"past_k_rope": rope} if rope else {})}
        news: list[ir.Value] = []
        for (role, width), old in zip(widths.items(), olds, strict=False):
            value = ir.Value(
                name=_named(old.name or role, role.removeprefix("past_"), used),
                type=ir.TensorType(dtype),
                shape=ir.Shape([batch, length, width]),
            )
            news.append(value)
            given[role] = value
        for old in olds:
            for user in [u for u, _ in old.uses() if is_op(u, "Shape")]:
                axis = _size_axis(user, at)
                assert axis is not None
                user.replace_input_with(0, news[0])
                user.attributes["start"] = ir.AttrInt64("start", axis)
                user.attributes["end"] = ir.AttrInt64("end", axis + 1)
        places = [list(graph.inputs).index(old) for old in olds]
        tokens = None if given["q"].shape is None else given["q"].shape[1]
        known = tokens if isinstance(tokens, int) and tokens > 0 else None
        function = body.build_function(config, graph.opset_imports[""], dtype, seq_len=known)
        new_node = call.make_node(config, given, dtype, seq_len=known, name=node.name)
        new_node.meta.update(node.meta)
        graph.insert_before(node, new_node)
        call.attach(model, function)
        fresh = dict(zip(config.output_names(), [v for v in new_node.outputs if v.name != ""], strict=True))
        made["o"].replace_all_uses_with(fresh["o"], replace_graph_outputs=True)
        fresh["o"].name, made["o"].name = made["o"].name, f"{made['o'].name}_before"
        fresh["o"].shape = made["o"].shape
        outs = [made[role] for role in ("present_key", "present_value")]
        assert outs[0].shape is not None
        total = outs[0].shape[at]
        presents = [fresh[role] for role in ("present_latent", "present_k_rope") if role in fresh]
        for value, old, width in zip(presents, outs, widths.values(), strict=False):
            role = "latent" if value is presents[0] else "k_rope"
            value.name = _named(old.name or role, role, used)
            value.shape = ir.Shape([batch, total, width])
        ends = [list(graph.outputs).index(old) for old in outs]
        before = (*map(_shown, olds), *map(_shown, outs))
        for i, place in sorted(enumerate(ends), key=lambda t: -t[1]):
            del graph.outputs[place]
            if i < len(presents):
                graph.outputs.insert(place, presents[i])
        turns = [] if at == 2 else [*(u for old in olds for u, _ in old.uses()), *(old.producer() for old in outs)]
        graph.remove([n for n in (*turns, node) if n is not None], safe=False)
        for i, place in sorted(enumerate(places), key=lambda t: -t[1]):
            del graph.inputs[place]
            if i < len(news):
                graph.inputs.insert(place, news[i])
        self.changed.append(Changed(new_node.name or "", before, (*map(_shown, news), *map(_shown, presents))))

    def _error(self, config: MlaConfig) -> float:
        small = replace(config, num_heads=min(config.num_heads, 2))
        if small not in self._errors:
            self._errors[small] = sequence_error(small)
        return self._errors[small]


def _before(value: ir.Value) -> ir.Value | None:
    """What heads and tokens of are exchanged for the node alone."""
    turn = value.producer()
    return turn.inputs[0] if turn is not None and _turns(turn) and len(value.uses()) == 1 else None


def _behind(value: ir.Value) -> ir.Value | None:
    """What is made of a node's output by exchanging heads and tokens, if nothing else is."""
    users = [u for u, _ in value.uses()]
    return users[0].outputs[0] if len(users) == 1 and _turns(users[0]) and not value.is_graph_output() else None


def _turns(node: ir.Node) -> bool:
    return is_op(node, "Transpose") and attribute_ints(node, "perm") == [0, 2, 1, 3]


def _size_axis(node: ir.Node, at: int) -> int | None:
    """Where a `Shape` of the batch or the length (axis ``at``) alone finds it in a cache of latents; else None."""
    if not is_op(node, "Shape"):
        return None
    limits = attribute_int(node, "start", 0), attribute_int(node, "end", -1)
    return {(0, 1): 0, (at, at + 1): 1}.get(limits)


def config_of(node: ir.Node) -> MlaConfig:
    """The configuration of a call, from its attributes and operands."""
    given = {n: v for n, v in zip(INPUTS, node.inputs, strict=False) if v is not None}
    made = {n for n, v in zip(OUTPUTS, node.outputs, strict=False) if v.name}
    settings: dict[str, Any] = {n: node.attributes[n].value for n in ATTRIBUTES}
    shape = given["cos"].shape if "cos" in given else None
    width = shape[-1] if shape is not None else None
    return MlaConfig(
        **settings,
        packed_latent="k_rope" not in given and settings["qk_rope_head_dim"] > 0,
        packed_cache="past_latent" in given and "past_k_rope" not in given and settings["qk_rope_head_dim"] > 0,
        has_kv_norm="kv_norm_weight" in given,
        has_position_ids="position_ids" in given,
        cos_width=0 if "cos" not in given else width if isinstance(width, int) else _named_width(node.overload),
        has_q_scale="q_scale" in given,
        has_past="past_key" in given or "past_latent" in given,
        static_cache="cache_lengths" in given,
        paged="block_table" in given,
        has_mask="attn_mask" in given,
        bool_mask="attn_mask" in given and given["attn_mask"].dtype == ir.DataType.BOOL,
        has_present=any(n.startswith("present") for n in made),
    )


def _named_width(overload: str) -> int:
    """The width of the cosines as the call's overload has it, where their shape is not known."""
    found = re.search(r"(?:^|-)cos_width_(\d+)", overload)
    return int(found[1]) if found else 0


def sequence_error(config: MlaConfig, seed: int = 20261130) -> float:
    """The worst relative L2 error of the outputs of a prompt and steps, cache of latents against keys and values."""
    latent = replace(config, cache="latent")
    rng = np.random.default_rng(seed)
    rope, heads = config.qk_rope_head_dim, config.num_heads
    slots = CAPACITY if config.static_cache else 0
    wide: dict[str, np.ndarray] = {
        "past_key": np.zeros((1, heads, slots, config.qk_head_dim), np.float32),
        "past_value": np.zeros((1, heads, slots, config.v_head_dim), np.float32),
    }
    narrow: dict[str, np.ndarray] = {"past_latent": np.zeros((1, slots, config.kv_lora_rank), np.float32)}
    if rope:
        narrow["past_k_rope"] = np.zeros((1, slots, rope), np.float32)
    weights: dict[str, np.ndarray] = {}
    worst, there = 0.0, 0
    runs = {form: _runner(form) for form in (config, latent)}
    for tokens in STEPS:
        drawn = draw_inputs(config, 1, tokens, CAPACITY if slots else there, rng)
        weights = weights or {n: drawn[n] for n in ("kv_b_weight", "kv_norm_weight") if n in drawn}
        common_inputs = {n: a for n, a in {**drawn, **weights}.items() if n not in ("past_key", "past_value")}
        if slots:
            common_inputs["cache_lengths"] = np.full(1, there, drawn["cache_lengths"].dtype)
        first = runs[config]({**common_inputs, **wide})
        second = runs[latent]({**common_inputs, **narrow})
        size = float(np.linalg.norm(first["o"])) or 1.0
        error = float(np.linalg.norm(first["o"] - second["o"])) / size
        worst = max(worst, error if np.isfinite(error) else float("inf"))
        wide = {n: first[n.replace("past", "present")] for n in wide}
        narrow = {n: second[n.replace("past", "present")] for n in narrow}
        there += tokens
    return worst


def _runner(config: MlaConfig) -> Any:
    """A function from operands to outputs that runs the portable body of a call."""
    types = {"attn_mask": ir.DataType.BOOL} if config.bool_mask else {}
    types |= {"cache_lengths": ir.DataType.INT32, "position_ids": ir.DataType.INT64}
    values = {n: ir.Value(name=n, type=ir.TensorType(types.get(n, ir.DataType.FLOAT))) for n in config.input_names()}
    node = call.make_node(config, values, name="call")
    outputs = dict(zip(config.output_names(), [v for v in node.outputs if v.name != ""], strict=True))
    for name, value in outputs.items():
        value.name, value.shape = name, None
    graph = ir.Graph(
        list(values.values()), list(outputs.values()), nodes=[node], opset_imports={"": 20, DOMAIN: 1}, name="call"
    )
    model = ir.Model(graph, ir_version=10)
    call.attach(model, body.build_function(config, 20))
    made = session(ir.to_proto(model))

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        feeds = {n: inputs[n] for n in values}
        return dict(zip(outputs, made.run(list(outputs), feeds), strict=True))

    return run


def _named(old: str, role: str, used: set[str | None]) -> str:
    """A name for what takes a value's place: its own with another part, or with one more."""
    for part in ("values", "value", "keys", "key"):
        if part in old:
            name = old.replace(part, role)
            break
    else:
        name = f"{old}.{role}"
    while name in used:
        name += "_"
    used.add(name)
    return name


def _shown(value: ir.Value) -> str:
    dims = [] if value.shape is None else [str(d) if isinstance(d, int) else str(d.value) for d in value.shape]
    return f"{value.name} [{', '.join(dims)}]"
