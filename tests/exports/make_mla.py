"""Exports of latent attention: families of transformers, and layers written by hand, in all styles.

Usage: ``python -m exports.make_mla [NAME ...]`` with torch and transformers; no names means all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.export import Dim

from .make_transformers import past_of, renamed
from .torch_mla import SEVERAL, HandMla, LongcatLayer, StaticStep, mla
from .torch_side import Logits, Padded, StepWithStates, export, fill, ids

TOKENS = Dim("S", min=2, max=60)
PAST = Dim("past", min=1, max=60)
#: Families that choose their keys; exported, they do so in another way than in PyTorch.
CHOOSING = ("axk2", "deepseek_v32", "glm_moe_dsa")
BEFORE, CAPACITY, ROOM = 7, 64, 128
#: Rotations for longer prompts: other angles, and a factor of 1.1386 ** 2 on the softmax scale.
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=128,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def prompt(name: str, family: str, opset: int = 20, **changes: Any) -> None:
    """A prompt of any length."""
    model = mla(family, **changes)
    export(
        Logits(model),
        (ids(12),),
        name,
        names=(["input_ids"], ["logits"]),
        dynamic=({1: Dim.DYNAMIC},),
        opset=opset,
        after=renamed("S"),
        # exported, models that choose their keys do so in another way than in PyTorch
        truth=None
        if family in ("axk2", "deepseek_v32", "glm_moe_dsa")
        else lambda: {f"T{t}": (ids(t, seed=t),) for t in (7, 30)},
        bindings=[{"S": 5}, {"S": 40}],
        made=f"{family}, one layer, Dim.DYNAMIC, opset {opset}" + "".join(f", {k} {v}" for k, v in changes.items()),
        kda=0,
        mla=1,
        tags=("mla", "prefill"),
    )


def step(name: str, family: str, opset: int = 20, kind: torch.dtype | None = None, **changes: Any) -> None:
    """One token on a cache of latents."""
    model = mla(family, **changes)
    if kind is not None:
        model = model.to(kind)
    past = past_of(model, 9)
    names = [f"past.{i}" for i in range(len(past))]
    made = f"{family}, one layer, one token, opset {opset}" + "".join(f", {k} {v}" for k, v in changes.items())
    export(
        StepWithStates(model),
        (ids(1), *past),
        name,
        names=(["input_ids", *names], ["logits", *(n.replace("past", "present") for n in names)]),
        dynamic=(None, tuple({2: PAST} for _ in past)),
        opset=opset,
        truth=None if kind is not None else lambda: {f"p{p}": (ids(1), *past_of(model, p)) for p in (9, 21)},
        bindings=[{"past": 9}, {"past": 21}],
        made=made + ("" if kind is None else f", {kind}"),
        tolerance=1e-4 if kind is None else 1e-2,
        kda=0,
        mla=1,
        tags=("mla", "decode") if kind is None else ("mla", "decode", "half", "f16"),
    )


def padded(name: str, family: str, opset: int = 18, legacy: bool = False, past: bool = False, **changes: Any) -> None:
    """A batch of prompts with a padding mask, or (``legacy``) one token of each on a cache."""
    model = mla(family, **changes)

    def inputs(tokens: int, batch: int) -> tuple[torch.Tensor, ...]:
        count = 1 if past else tokens
        mask = torch.ones(batch, tokens, dtype=torch.int64)
        for row in range(batch):
            # on the left, as for generating; PyTorch's own attention and its export differ in rows without a key
            mask[row, slice(row) if legacy else slice(tokens - row, None)] = 0
        cache = [t.expand(batch, -1, -1, -1).contiguous() for t in past_of(model, tokens - 1)] if past else []
        return (ids(count, batch), mask, *cache)

    args = inputs(9, 2)
    pasts = [f"past.{i}" for i in range(len(args) - 2)]
    given, made = ["input_ids", "mask", *pasts], ["logits", *(n.replace("past", "present") for n in pasts)]
    ids_axes = {0: "batch"} if past else {0: "batch", 1: "seq"}
    mask_axes = {0: "batch", 1: "total"} if past else ids_axes
    axes = dict(zip(given, [ids_axes, mask_axes, *({0: "batch", 2: "past"} for _ in pasts)], strict=True))
    # nothing in the model says that the mask has as many rows as the ids: PyTorch gives that number another name
    rows, own = Dim("batch", min=2, max=8), Dim("mask_batch", min=2, max=8)
    sizes = {"batch": 2, "mask_batch": 2, "seq": 9, "total": 9, "past": 8}
    more = {"batch": 3, "mask_batch": 3, "seq": 14, "total": 14, "past": 13}
    export(
        Padded(model),
        args,
        name,
        names=(given, made),
        dynamic=axes if legacy else ({0: rows, 1: Dim("seq", min=2, max=60)}, {0: own, 1: Dim("seq", min=2, max=60)}),
        opset=opset,
        legacy=legacy,
        truth=lambda: {"T9b2": args, "T14b3": inputs(14, 3)},
        bindings=[sizes, more],
        made=f"{family}, one layer, padding mask, opset {opset}" + "".join(f", {k} {v}" for k, v in changes.items()),
        kda=0,
        mla=1,
        tags=("mla", "decode" if past else "prefill"),
    )


def static(name: str, family: str, batch: int = 1, **changes: Any) -> None:
    """Some tokens written into transformers' static cache, from a place on."""
    model = mla(family, **changes)

    def inputs(tokens: int, start: int) -> tuple[torch.Tensor, ...]:
        seed = torch.Generator().manual_seed(tokens + start)
        past = (torch.randn(batch, 1, ROOM, width, generator=seed) for width in (16, 4))
        return (ids(tokens, batch), torch.tensor(start), *past)

    export(
        StaticStep(model),
        inputs(6, 5),
        name,
        names=(["input_ids", "start", "past.0", "past.1"], ["logits", "present.0", "present.1"]),
        dynamic=({1: TOKENS}, None, (None, {})),
        opset=20,
        # whole caches, in and out, take much room: once is enough
        truth=None if batch > 1 else lambda: {f"T{t}s{s}": inputs(t, s) for t, s in ((6, 5), (11, 0), (2, 90))},
        bindings=[{"S": 4}, {"S": 11}],
        made=f"{family}, one layer, static cache, batch {batch}, opset 20"
        + "".join(f", {k} {v}" for k, v in changes.items()),
        kda=0,
        mla=1,
        tags=("mla", "static"),
    )


def hand(
    name: str,
    decode: bool = False,
    opset: int = 20,
    kind: torch.dtype | None = None,
    fused: int = 1,
    truth: bool = True,
    batch: int = 1,
    **choice: Any,
) -> None:
    """A layer written by hand; see :class:`HandMla`."""
    model = fill(HandMla(**choice))
    cache, mask = choice.get("cache", "none"), choice.get("mask", "made")
    count = 1 if decode else 5

    def inputs(tokens: int, past: int) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
        seed = torch.Generator().manual_seed(tokens + past)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=seed)

        start = past if cache != "none" else 0
        rest: list[torch.Tensor] = []
        spec: list[Any] = []
        keys = tokens
        if cache == "latent":
            rest, spec = [draw(1, past, 16), draw(1, 1, past, model.r)], [{1: PAST}, {2: PAST}]
        elif cache == "packed":
            rest, spec = [draw(1, past, 20)], [{1: PAST}]
        elif cache == "expanded":
            rest, spec = [draw(1, 3, past, 12), draw(1, 3, past, 6)], [{2: PAST}, {2: PAST}]
        elif cache == "static":
            slots = torch.arange(tokens) + past
            rest = [slots, draw(1, 3, CAPACITY, 12), draw(1, 3, CAPACITY, 6)]
            spec, keys = [None if decode else {0: TOKENS}, None, None], CAPACITY
        elif cache == "start":
            rest = [torch.tensor([past]), draw(batch, 3, ROOM, 12), draw(batch, 3, ROOM, 6)]
            spec, keys = [None, *[{0: Dim("B", min=2, max=8)} if batch > 1 else {}] * 2], ROOM
        if cache in ("latent", "packed", "expanded"):
            keys += past
        grown = {3: PAST + 1} if cache not in ("none", "static", "start") else None
        if mask == "given":
            rest.append(draw(1, 1, tokens, keys))
            spec.append(grown if decode else {2: TOKENS, 3: TOKENS})
        elif mask == "bool":
            seen = torch.rand(1, 1, tokens, keys, generator=seed) > 0.3
            rest.append(seen | torch.eye(tokens, keys, dtype=torch.bool))
            spec.append(grown if decode else {2: TOKENS, 3: TOKENS})
        elif mask in ("both", "sum"):
            seen = torch.rand(batch, 1, 1, keys, generator=seed) > 0.3
            seen[..., 0] = True
            rest.append(seen if mask == "both" else torch.where(seen, 0.0, float("-inf")))
            spec.append({**({0: Dim("B", min=2, max=8)} if batch > 1 else {}), **(grown or {3: TOKENS})})
        elif mask == "padding":
            padding = torch.ones(1, keys, dtype=torch.bool)
            padding[:, keys - keys // 3 :] = False
            rest.append(padding)
            spec.append({1: TOKENS})
        positions = torch.arange(tokens)[None] + start
        if choice.get("rope") in SEVERAL:
            positions = torch.randint(-30, 30, (3, batch, tokens), generator=seed)
        plain = [draw(batch, tokens, 24), positions, *rest]
        if kind is not None:
            plain = [t.to(kind) if t.is_floating_point() else t for t in plain]
        dynamic: list[Any] = [None if decode else {1: TOKENS}] * 2
        if batch > 1:
            dynamic[0] = {0: Dim("B", min=2, max=8), **(dynamic[0] or {})}
        if choice.get("rope") in SEVERAL:
            dynamic[1] = {**({1: Dim("B", min=2, max=8)} if batch > 1 else {}), **({} if decode else {2: TOKENS})}
        return tuple(plain), [*dynamic, tuple(spec)] if spec else dynamic

    args, dynamic = inputs(count, BEFORE)
    if kind is not None:
        model = model.to(kind)
    truth_past = BEFORE if cache in ("static", "start") else 12
    pairs = [(count, BEFORE), (1 if decode else 9, truth_past)]
    export(
        model,
        args,
        f"mla_{name}",
        dynamic=tuple(dynamic),
        opset=opset,
        truth=None if kind is not None or not truth else lambda: {f"T{t}p{p}": inputs(t, p)[0] for t, p in pairs},
        bindings=[{"S": 4, "past": 3, "B": 2}, {"S": 11, "past": 17, "B": 3}],
        made="latent attention by hand: " + ", ".join(f"{k} {v}" for k, v in choice.items()) + f"; opset {opset}",
        tolerance=1e-4 if kind is None else 1e-2,
        kda=0,
        mla=fused,
        tags=("mla", "layer") if kind is None else ("mla", "layer", "half", "f16"),
    )


def longcat(name: str) -> None:
    """Scaled queries and latents; the layer alone, because the model's experts do not export."""
    model = fill(LongcatLayer())
    x, cos, sin = torch.randn(1, 6, 48), torch.randn(1, 6, 4), torch.randn(1, 6, 4)
    export(
        model,
        (x, cos, sin),
        name,
        dynamic=({1: TOKENS}, {1: TOKENS}, {1: TOKENS}),
        opset=20,
        truth=lambda: {"T6": (x, cos, sin)},
        bindings=[{"S": 5}, {"S": 40}],
        made="LongcatFlashMLA, causal by itself",
        kda=0,
        mla=1,
        tags=("mla", "layer"),
    )


PROMPTS: dict[str, dict[str, Any]] = {
    "mla_deepseek_v3_prefill": dict(family="deepseek_v3"),
    "mla_deepseek_v3_eager": dict(family="deepseek_v3", attention="eager"),
    "mla_deepseek_v3_op24": dict(family="deepseek_v3", opset=24),
    "mla_deepseek_v3_yarn": dict(family="deepseek_v3", rope_parameters=YARN),
    "mla_deepseek_v32_prefill": dict(family="deepseek_v32"),
    "mla_axk2_prefill": dict(family="axk2"),
    "mla_glm_dsa_prefill": dict(family="glm_moe_dsa"),
    "mla_glm4_lite_prefill": dict(family="glm4_moe_lite", opset=18),
    "mla_mistral4_prefill": dict(family="mistral4"),
    "mla_minicpm3_prefill": dict(family="minicpm3"),
    "mla_youtu_eager_op23": dict(family="youtu", attention="eager", opset=23),
    "mla_bailing_eager": dict(family="bailing_hybrid", attention="eager"),
    "mla_kimi_eager": dict(family="kimi_linear", attention="eager", opset=18),
}
STEPS: dict[str, dict[str, Any]] = {
    "mla_deepseek_v3_decode": dict(family="deepseek_v3"),
    "mla_deepseek_v3_decode_f16": dict(family="deepseek_v3", kind=torch.float16),
    "mla_glm4_lite_decode_eager": dict(family="glm4_moe_lite", attention="eager"),
    "mla_mistral4_decode": dict(family="mistral4", opset=23),
    "mla_youtu_decode_op24": dict(family="youtu", opset=24),
    "mla_axk1_decode": dict(family="axk1", opset=23),
}
STATIC: dict[str, dict[str, Any]] = {
    "mla_deepseek_v3_static": dict(family="deepseek_v3"),
    "mla_glm4_lite_static_batch": dict(family="glm4_moe_lite", attention="eager", batch=2),
}
PADDED: dict[str, dict[str, Any]] = {
    "mla_deepseek_v3_padded": dict(family="deepseek_v3"),
    "mla_legacy_glm4_padded": dict(family="glm4_moe_lite", legacy=True, attention="eager"),
    "mla_legacy_minicpm3_padded": dict(family="minicpm3", legacy=True, attention="eager"),
    "mla_legacy_youtu_decode": dict(family="youtu", opset=20, legacy=True, past=True),
}
HAND: dict[str, dict[str, Any]] = {
    "half": dict(),
    "hub_bias": dict(rope="hub", bias=True),
    "true_rope": dict(rope="true", attention="float32"),
    "mrope_sections": dict(rope="sections", attention="sdpa", batch=2),
    "mrope_strided": dict(rope="strided", gate="plain"),
    "mrope_owners": dict(rope="owners", cache="latent", decode=True),
    "channel_gate": dict(gate="channels", attention="sdpa", opset=23),
    "nope": dict(rope="none", attention="sdpa"),
    "causal_op23": dict(attention="causal", mask="none", opset=23),
    "causal_op20": dict(attention="causal", mask="none"),
    "window": dict(mask="window"),
    "window_decode": dict(mask="window", cache="latent", rope="hub", decode=True),
    "padding": dict(mask="padding", attention="sdpa"),
    "padding_eager": dict(mask="padding"),
    "given": dict(mask="given", gate="plain"),
    "bool": dict(mask="bool", attention="sdpa", gate="float32"),
    "bool_op23": dict(mask="bool", attention="sdpa", gate="float32", opset=23),
    "both": dict(mask="both", attention="sdpa", rope="hub", batch=2),
    "both_op23": dict(mask="both", attention="sdpa", rope="hub", batch=2, opset=23),
    "sum": dict(mask="sum", batch=2),
    "parts": dict(weights="parts"),
    "two": dict(weights="two", rope="true"),
    "queries": dict(queries="two", rope="hub", gate="float32"),
    "queries_nope": dict(queries="two", rope="none", attention="float32", cache="latent", decode=True),
    "queries_absorbed": dict(queries="two", weights="absorbed", cache="latent", decode=True),
    "queries_f16": dict(queries="two", attention="sdpa", kind=torch.float16),
    "nonorm": dict(norm=False, cache="latent", decode=True),
    "absorbed": dict(weights="absorbed", cache="latent", decode=True),
    "absorbed_prefill": dict(weights="absorbed", rope="hub"),
    "packed": dict(cache="packed", decode=True),
    "packed_piece": dict(cache="packed", gate="plain"),
    "expanded": dict(cache="expanded", rope="true", decode=True),
    "expanded_op24": dict(cache="expanded", attention="sdpa", gate="float32", opset=24, decode=True, truth=False),
    "latent_piece": dict(cache="latent", rope="true"),
    "latent_given": dict(cache="latent", mask="given", decode=True),
    "static": dict(cache="static", decode=True),
    "static_op24": dict(cache="static", attention="sdpa", opset=24, decode=True, truth=False),
    "static_piece": dict(cache="static", fused=0, truth=False),
    "start": dict(cache="start", gate="plain"),
    "start_batch": dict(cache="start", rope="hub", batch=2, truth=False),
    "start_window_decode": dict(cache="start", mask="window", decode=True, batch=2, truth=False),
    "latent_f16": dict(cache="latent", gate="float32", kind=torch.float16, decode=True),
    "hub_f16": dict(rope="hub", gate="float32", kind=torch.float16),
}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or [*PROMPTS, *STEPS, *STATIC, *PADDED, *HAND, "mla_longcat"]:
        if wanted in PROMPTS:
            prompt(wanted, **PROMPTS[wanted])
        elif wanted in STEPS:
            step(wanted, **STEPS[wanted])
        elif wanted in STATIC:
            static(wanted, **STATIC[wanted])
        elif wanted in PADDED:
            padded(wanted, **PADDED[wanted])
        elif wanted in HAND:
            hand(wanted, **HAND[wanted])
        else:
            longcat(wanted)
