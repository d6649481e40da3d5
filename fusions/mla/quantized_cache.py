"""Caches of latents become 8-bit caches: codes in the model's inputs and outputs, the rotary keys as they are.

int8 has one scale a channel, a constant of the model, from the largest magnitudes that a calibration saw. float8
(e4m3fn) has one a token and 128 channels, which the fused node makes: they are a further state of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...custom_ops.common.refusal import Refusal
from ...custom_ops.mla import body, call
from ...custom_ops.mla.quantize import (
    dequantize_float8,
    dequantize_int8,
    float8_groups,
    int8_scales,
    quantize_float8,
    quantize_int8,
)
from ...custom_ops.mla.spec import DOMAIN, INPUTS, OP_TYPE, OUTPUTS, MlaConfig
from ..result import CachePort, QuantizedCache
from .cache_ports import Port, dims_of, past_port, present_port, redirect
from .latent_cache import config_of
from .op import HELD

Names = Callable[[str], str]
#: What a calibration calls the normed latent of a fused node: the name of the node's first output, and this.
LATENT_OF = "{}.latent"
#: int8 covers this times the largest magnitude that was seen: later tokens have larger ones, and cutting a few of them
#: off costs more than a coarser step does. Normal latents, 544 tokens seen: an error of 1.0e-2 in place of 1.9e-2.
HEADROOM = 1.25
#: Of fewer tokens the largest magnitudes tell little of those to come.
FEW_TOKENS = 64
#: The least magnitude that makes a scale: below, float32's reciprocal is not finite.
_LEAST = 1e-30
CODES = {"int8": ir.DataType.INT8, "float8": ir.DataType.FLOAT8E4M3FN}


@dataclass(frozen=True)
class SeenChannels:
    """What a calibration knows of a value's channels.

    Attributes:
        amax: ``[channels]``, the largest magnitude of each.
        mean_square: ``[channels]``, where it is known.
        rows: ``[n, channels]``, some rows, or None.
        count: how many rows there were, where it is known.
    """

    amax: NDArray[np.float32]
    mean_square: NDArray[np.float32] | None = None
    rows: NDArray[np.float32] | None = None
    count: int | None = None


class CalibrationError(ValueError):
    """Statistics that no scales can be made of."""


def quantize_caches(
    model: ir.Model, kind: str, scheme: str, seen: Mapping[str, SeenChannels], names: Names
) -> Iterator[QuantizedCache | Refusal]:
    """Change every cache of ``deltafuse::LatentAttention`` that can be held in 8 bits.

    Args:
        model: changed in place.
        kind: "int8" or "float8".
        scheme: what it is called in the report.
        seen: a calibration, by names of values.
        names: makes names that the model does not have.

    Yields:
        For each call that keeps a cache, what was done, or why it stays.

    Raises:
        CalibrationError: a calibration that holds numbers that are not finite.
    """
    for node in [n for n in model.graph.all_nodes() if (n.domain, n.op_type) == (DOMAIN, OP_TYPE)]:
        if node.graph is not model.graph:
            yield Refusal("cache", "it stands in a branch or a loop", node.name or "")
        elif node.attributes["cache"].as_string() != "none":
            found = _quantize(model, node, kind, scheme, seen, names)
            yield replace(found, node=node.name or "") if isinstance(found, Refusal) else found


def _quantize(
    model: ir.Model, node: ir.Node, kind: str, scheme: str, seen: Mapping[str, SeenChannels], names: Names
) -> QuantizedCache | Refusal:
    given = {n: v for n, v in zip(INPUTS, node.inputs, strict=False) if v is not None}
    made = {n: v for n, v in zip(OUTPUTS, node.outputs, strict=False) if v.name}
    config = config_of(node)
    refused = _form_refusal(config, made)
    if refused is not None:
        return refused
    past = past_port(given["past_latent"], node, "the past cache of latents")
    if isinstance(past, Refusal):
        return past
    present = present_port(made["present_latent"], "the present cache of latents")
    if isinstance(present, Refusal):
        return present
    dtype, new = given["q"].dtype, replace(config, packed_cache=False, cache_type=kind)
    if dtype is None:
        return Refusal("cache", "its types are not known")
    if (invalid := new.check()) is not None:
        return invalid
    latent, found = LATENT_OF.format(node.outputs[0].name), _seen(node, config, present.name, seen)
    scales, unseen = None, 0
    if kind == "int8":
        if found is None:
            known_as = ", ".join(_known_as(node, present.name))
            return Refusal("cache", f"the calibration has nothing of its latents ({known_as})")
        scales, unseen = _scales(*found)
        if scales is None:
            return Refusal("cache", f"the calibration saw nothing but zeros in its latents ({found[0]})")
    rope = _rope_ports(given, made, node, config)
    before = [_described(p.value, i) for p, i in ((past, "input"), (present, "output"))]
    before += [_described(v, i) for v, i in rope]
    after = _exchange(model, node, new, config, given, made, (past, present), dtype, scales, names)
    return QuantizedCache(
        node=node.name or "",
        scheme=scheme,
        before=before,
        after=[*(_described(v, i) for v, i in after), *([] if config.packed_cache else before[2:])],
        bytes_before=(config.kv_lora_rank + config.qk_rope_head_dim) * int(dtype.itemsize),
        bytes_after=_row_bytes(new, dtype),
        calibrated="" if found is None or kind != "int8" else found[0],
        error=None if found is None else _error(found[1], kind, scales, found[0] == latent or not config.static_cache),
        unseen=unseen,
    )


def _form_refusal(config: MlaConfig, made: Mapping[str, ir.Value]) -> Refusal | None:
    """Why a call's cache is none that can change, by its form."""
    if config.cache == "expanded":
        return Refusal("cache", "its cache is of keys and values: --latent-cache makes one of latents, if it can")
    if config.cache_type != "same":
        return Refusal("cache", f"its cache is {config.cache_type} already")
    if not config.has_past:
        return Refusal("cache", "it begins a cache and takes none: the 8-bit form goes on with one")
    if "present_latent" not in made:
        return Refusal("cache", "it reads a cache and gives none: what fills it is elsewhere")
    return None


def _row_bytes(config: MlaConfig, dtype: ir.DataType) -> int:
    """Bytes of one token in one layer."""
    scales = 4 * float8_groups(config.kv_lora_rank) if config.cache_type == "float8" else 0
    return config.kv_lora_rank + scales + int(config.qk_rope_head_dim * dtype.itemsize)


def _rope_ports(
    given: Mapping[str, ir.Value], made: Mapping[str, ir.Value], node: ir.Node, config: MlaConfig
) -> list[tuple[ir.Value, str]]:
    """The model's input and output for the rotary keys, where they are apart and can be told."""
    if config.packed_cache or "past_k_rope" not in given or "present_k_rope" not in made:
        return []
    ports = (past_port(given["past_k_rope"], node, "keys"), present_port(made["present_k_rope"], "keys"))
    kinds = ("input", "output")
    return [(p.value, kind) for p, kind in zip(ports, kinds, strict=True) if not isinstance(p, Refusal)]


# --- scales ----------------------------------------------------------------------------------------------------------


def _known_as(node: ir.Node, present: str) -> list[str]:
    """Names under which a calibration may have the latents, the best first."""
    return list(dict.fromkeys((LATENT_OF.format(node.outputs[0].name), *node.meta.get(HELD, ()), present)))


def _seen(
    node: ir.Node, config: MlaConfig, present: str, seen: Mapping[str, SeenChannels]
) -> tuple[str, SeenChannels] | None:
    rank = config.kv_lora_rank
    for name in _known_as(node, present):
        found = seen.get(name)
        if found is None:
            continue
        if len(found.amax) == rank:
            return name, found
        if name == present and config.packed_cache and len(found.amax) == rank + config.qk_rope_head_dim:
            squares = None if found.mean_square is None else found.mean_square[:rank]
            return name, SeenChannels(found.amax[:rank], squares, None if found.rows is None else found.rows[:, :rank])
    return None


def _scales(name: str, seen: SeenChannels) -> tuple[NDArray[np.float32] | None, int]:
    """int8's scales, and how many channels were never seen: those take the largest of the others."""
    amax = np.asarray(seen.amax, np.float64)
    if not np.isfinite(amax).all() or (amax < 0).any():
        bad = int(np.sum(~np.isfinite(amax) | (amax < 0)))
        raise CalibrationError(
            f"calibration: {name}: the largest magnitudes of {bad} of {len(amax)} channels are negative or not finite"
        )
    empty = amax < _LEAST
    if empty.all():
        return None, len(amax)
    return int8_scales(HEADROOM * np.where(empty, amax.max(), amax)), int(empty.sum())


def _error(seen: SeenChannels, kind: str, scales: NDArray[np.float32] | None, full: bool) -> float | None:
    """Relative L2 error of the latents: of rows, else what rounding to nearest makes of mean squares on average.

    ``full``: mean squares are of tokens alone, and not of slots of a static cache that hold nothing yet.
    """
    rows = seen.rows
    if rows is not None and len(rows) and np.isfinite(rows).all() and (size := float(np.linalg.norm(rows))) > 0:
        if scales is not None:
            held = dequantize_int8(quantize_int8(rows, scales), scales)
        else:
            held = dequantize_float8(*quantize_float8(rows))
        return float(np.linalg.norm(held - rows)) / size
    if kind == "int8" and scales is not None and seen.mean_square is not None and full:
        total = float(np.sum(seen.mean_square, dtype=np.float64))
        step = float(np.sum(np.square(scales.astype(np.float64)))) / 12.0
        return (step / total) ** 0.5 if 0.0 < total < np.inf else None
    return None


# --- the graph -------------------------------------------------------------------------------------------------------


def _exchange(
    model: ir.Model,
    node: ir.Node,
    new: MlaConfig,
    old: MlaConfig,
    given: dict[str, ir.Value],
    made: dict[str, ir.Value],
    ports: tuple[Port, Port],
    dtype: ir.DataType,
    scales: NDArray[np.float32] | None,
    names: Names,
) -> list[tuple[ir.Value, str]]:
    """Put the new call into the old one's place. Returns the new inputs and outputs of the model."""
    graph, (past, present) = model.graph, ports
    rank, rope = new.kv_lora_rank, new.qk_rope_head_dim
    stem = past.name

    def state(name: str, kind: ir.DataType, width: int) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([past.batch, past.length, width]))

    inputs = {"past_latent": state(stem, CODES[new.cache_type], rank)}
    if old.packed_cache:
        inputs["past_k_rope"] = state(names(f"{stem}.k_rope"), dtype, rope)
    if scales is None:
        inputs["past_latent_scale"] = state(names(f"{stem}.scale"), ir.DataType.FLOAT, float8_groups(rank))
    else:
        constant = ir.Value(
            name=names(f"{stem}.scale"), const_value=ir.tensor(scales), type=ir.TensorType(ir.DataType.FLOAT)
        )
        constant.shape = ir.Shape([rank])
        graph.register_initializer(constant)
        given["past_latent_scale"] = constant
    # ORT's older Shape takes no float8
    sized = inputs["past_latent" if scales is not None else "past_latent_scale"]
    width = rank + (rope if old.packed_cache else 0)
    past.value.name = names(f"{stem}.before")
    redirect(model, past, sized, width)
    place = list(graph.inputs).index(past.value)
    tokens = None if given["q"].shape is None else given["q"].shape[1]
    known = tokens if isinstance(tokens, int) and tokens > 0 else None
    operands = {**given, **inputs}
    function = body.build_function(new, graph.opset_imports[""], dtype, seq_len=known)
    fresh_node = call.make_node(new, operands, dtype, seq_len=known, name=node.name)
    fresh_node.meta.update(node.meta)
    graph.insert_before(node, fresh_node)
    call.attach(model, function)
    fresh = dict(zip(new.output_names(), [v for v in fresh_node.outputs if v.name != ""], strict=True))

    stem = present.name
    at = list(graph.outputs).index(present.value)
    present.value.name = names(f"{stem}.before")
    fresh["present_latent"].name = stem
    outputs = {"present_latent": rank}
    if old.packed_cache:
        fresh["present_k_rope"].name = names(f"{stem}.k_rope")
        outputs["present_k_rope"] = rope
    if scales is None:
        fresh["present_latent_scale"].name = names(f"{stem}.scale")
        outputs["present_latent_scale"] = float8_groups(rank)
    for role, width_of in outputs.items():
        fresh[role].shape = ir.Shape([present.batch, present.length, width_of])
    redirect(model, present, fresh["present_latent" if scales is not None else "present_latent_scale"], width)
    del graph.outputs[at]
    for number, role in enumerate(outputs):
        graph.outputs.insert(at + number, fresh[role])
    for role in ("o", "present_k_rope"):
        if role in made and role not in outputs:
            value, before = fresh[role], made[role]
            before.replace_all_uses_with(value, replace_graph_outputs=True)
            value.name, before.name = before.name, names(f"{before.name}.before")
            value.shape = before.shape
    for user in reversed(present.moves):
        graph.remove(user, safe=True)
    graph.remove(node, safe=True)
    for user in past.moves:
        graph.remove(user, safe=True)
    del graph.inputs[place]
    for number, value in enumerate(inputs.values()):
        graph.inputs.insert(place + number, value)
    return [
        *((v, "input") for v in inputs.values()),
        *((fresh[role], "output") for role in outputs),
    ]


def _described(value: ir.Value, kind: str) -> CachePort:
    dtype = "?" if value.dtype is None else {ir.DataType.FLOAT: "float32"}.get(value.dtype, str(value.dtype).lower())
    return CachePort(value.name or "", kind, dtype, dims_of(value))
