"""Exports of transformers' models: Kimi-Linear, Bailing (Ling 3), GLM-5-next; prompts and steps, many ways.

Usage: ``python -m exports.make_transformers [NAME ...]`` with torch and transformers; no names means all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.export import Dim

from .torch_side import Logits, PrefillWithStates, StepWithStates, bailing, export, flat_cache, glm5, ids, kimi

MAKERS: dict[str, Any] = {}


def maker(function: Any) -> Any:
    MAKERS[function.__name__] = function
    return function


def past_of(model: torch.nn.Module, tokens: int, batch: int = 1, seed: int = 3) -> list[torch.Tensor]:
    """States after a prompt of that many tokens."""
    with torch.no_grad():
        return flat_cache(model(input_ids=ids(tokens, batch, seed), use_cache=True).cache)


def state_names(model: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Readable names for a flat cache: in and out."""
    ins: list[str] = []
    for index, kind in enumerate(model.config.layer_types):
        parts = ("conv", "state") if kind == "linear_attention" else ("keys", "values")
        ins += [f"past.{index}.{part}" for part in parts]
    return ins, [name.replace("past", "present") for name in ins]


def prompt(model: torch.nn.Module, name: str, tokens: int = 12, batch: int = 1, **entry: Any) -> None:
    """A prompt without cache. ``dynamic`` is a spec for the ids: then lengths over 64 get a truth."""
    export(Logits(model), (ids(tokens, batch),), name, names=(["input_ids"], ["logits"]), **entry)


def long_truth(batch: int = 1) -> Any:
    return lambda: {f"T{t}": (ids(t, batch, seed=t),) for t in (7, 64, 65, 130)}


LENGTHS: dict[str, Any] = dict(bindings=[{"S": 3}, {"S": 12}, {"S": 64}], beyond=[{"S": 65}, {"S": 130}])


@maker
def kimi_prefill_static() -> None:
    prompt(kimi(), "kimi_prefill_static", made="KimiLinearForCausalLM, T 12", kda=1, form="chunked", tags=("prefill",))


@maker
def kimi_prefill_dyn() -> None:
    prompt(
        kimi(),
        "kimi_prefill_dyn",
        made="KimiLinearForCausalLM, Dim.DYNAMIC",
        kda=1,
        form="chunked",
        dynamic=({1: Dim.DYNAMIC},),
        truth=long_truth(),
        after=renamed("S"),
        tags=("prefill",),
        **LENGTHS,
    )


def renamed(*names: str) -> Any:
    """Give the free symbols of the inputs these names, in order of appearance, wherever they occur."""

    def rename(model: Any) -> Any:
        found: list[str] = []
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param and dim.dim_param.isidentifier() and dim.dim_param not in found:
                    found.append(dim.dim_param)
        table = dict(zip(found, names, strict=True))
        for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = " ".join(table.get(w, w) for w in dim.dim_param.split(" "))
        return model

    return rename


@maker
def kimi_decode() -> None:
    step(kimi(), "kimi_decode", made="KimiLinearForCausalLM, one token, states in and out")


@maker
def kimi_decode_op23() -> None:
    step(kimi(), "kimi_decode_op23", opset=23, made="KimiLinearForCausalLM, one token, states in and out")


def step(model: torch.nn.Module, name: str, tokens: int = 1, batch: int = 1, made: str = "", **entry: Any) -> None:
    """A step with states in and out; the MLA cache's length is the symbol ``past``."""
    ins, outs = state_names(model)
    past = past_of(model, 9, batch)
    length = Dim("past", min=1, max=512)
    spec = tuple({2: length} if "keys" in n or "values" in n else None for n in ins)
    kwargs: dict[str, Any] = dict(form="recurrent", bindings=[{"past": 9}, {"past": 21}], tags=("decode",), kda=1)
    export(
        StepWithStates(model),
        (ids(tokens, batch), *past),
        name,
        names=(["input_ids", *ins], ["logits", *outs]),
        dynamic=(None, spec),
        made=made,
        **{**kwargs, **entry},
    )


@maker
def bailing_softplus_prefill() -> None:
    model = bailing(kda_safe_gate=False)
    prompt(
        model,
        "bailing_softplus_prefill",
        made="Bailing, kda_safe_gate off, T 12",
        kda=1,
        form="chunked",
        tags=("prefill",),
    )


@maker
def bailing_bound3_decode() -> None:
    step(bailing(kda_lower_bound=-3.0), "bailing_bound3_decode", made="Bailing, lower bound -3, one token")


@maker
def bailing_batch3_prefill() -> None:
    prompt(
        bailing(),
        "bailing_batch3_prefill",
        9,
        3,
        made="Bailing, batch 3, T 9",
        kda=1,
        form="chunked",
        tags=("prefill",),
    )


@maker
def bailing_dynbatch_prefill() -> None:
    """Batch and length both symbolic."""
    prompt(
        bailing(),
        "bailing_dynbatch_prefill",
        12,
        2,
        made="Bailing, batch and length Dim.DYNAMIC",
        kda=1,
        form="chunked",
        dynamic=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},),
        truth=lambda: {f"B{b}T{t}": (ids(t, b, seed=t),) for b, t in ((1, 5), (3, 64), (2, 70))},
        after=renamed("B", "S"),
        bindings=[{"B": 1, "S": 5}, {"B": 3, "S": 20}],
        beyond=[{"B": 2, "S": 70}],
        tags=("prefill", "batch"),
    )


@maker
def bailing_batch2_decode() -> None:
    step(bailing(), "bailing_batch2_decode", batch=2, made="Bailing, one token, batch 2", tags=("decode", "batch"))


@maker
def bailing_dynbatch_decode() -> None:
    """One token; the batch is symbolic in ids and every state."""
    model = bailing()
    ins, outs = state_names(model)
    batch, length = Dim("B", min=1, max=64), Dim("past", min=1, max=512)
    spec = tuple({0: batch, 2: length} if "keys" in n or "values" in n else {0: batch} for n in ins)
    export(
        StepWithStates(model),
        (ids(1, 2), *past_of(model, 9, 2)),
        "bailing_dynbatch_decode",
        names=(["input_ids", *ins], ["logits", *outs]),
        dynamic=({0: batch}, spec),
        made="Bailing, one token, symbolic batch",
        kda=1,
        form="recurrent",
        bindings=[{"B": 2, "past": 9}, {"B": 5, "past": 3}, {"B": 1, "past": 3}],
        tags=("decode", "batch"),
    )


@maker
def bailing_prefill_states() -> None:
    """A prompt that returns its states, frozen at 12 tokens."""
    prompt_with_states("bailing_prefill_states", None, made="Bailing, T 12, returns states")


@maker
def bailing_prefill_states_dyn() -> None:
    prompt_with_states(
        "bailing_prefill_states_dyn",
        ({1: Dim.DYNAMIC},),
        made="Bailing, Dim.DYNAMIC, returns states",
        truth=long_truth(),
        after=renamed("S"),
        bindings=[{"S": 5}, {"S": 12}, {"S": 64}],
        beyond=LENGTHS["beyond"],
    )


def prompt_with_states(name: str, dynamic: Any, **entry: Any) -> None:
    model = bailing()
    _, outs = state_names(model)
    export(
        PrefillWithStates(model),
        (ids(12),),
        name,
        names=(["input_ids"], ["logits", *outs]),
        dynamic=dynamic,
        kda=1,
        form="chunked",
        tags=("prefill", "states"),
        **entry,
    )


@maker
def bailing_prompt_piece() -> None:
    """The second piece of a prompt: 12 tokens on top of earlier states."""
    step(
        bailing(),
        "bailing_prompt_piece",
        12,
        made="Bailing, 12 more tokens on states of an earlier piece",
        form="chunked",
        tags=("prefill", "states"),
    )


@maker
def kimi_prompt_piece_batch2() -> None:
    step(
        kimi(),
        "kimi_prompt_piece_batch2",
        12,
        2,
        made="Kimi, batch 2, 12 more tokens on states of an earlier piece",
        form="chunked",
        tags=("prefill", "states", "batch"),
    )


@maker
def hybrid4_prefill() -> None:
    """Three KDA layers and one MLA layer."""
    prompt(
        bailing(num_hidden_layers=4, layer_group_size=4),
        "hybrid4_prefill",
        20,
        made="Bailing, 4 layers of which 3 KDA, T 20",
        kda=3,
        form="chunked",
        tags=("prefill", "hybrid"),
    )


@maker
def hybrid4_decode() -> None:
    step(
        bailing(num_hidden_layers=4, layer_group_size=4),
        "hybrid4_decode",
        made="Bailing, 4 layers of which 3 KDA, one token",
        kda=3,
        tags=("decode", "hybrid"),
    )


@maker
def bailing_noopt_decode() -> None:
    step(bailing(), "bailing_noopt_decode", optimize=False, made="Bailing, one token, optimize=False")


@maker
def bailing_noopt_prefill() -> None:
    prompt(
        bailing(),
        "bailing_noopt_prefill",
        optimize=False,
        made="Bailing, T 12, optimize=False",
        kda=1,
        form="chunked",
        tags=("prefill",),
    )


@maker
def opsets() -> None:
    for version in (18, 21, 22, 24):
        step(bailing(), f"bailing_decode_op{version}", opset=version, made=f"Bailing, one token, opset {version}")
    for version in (18, 24):
        name = f"kimi_prefill_op{version}"
        prompt(
            kimi(), name, opset=version, made=f"Kimi, T 12, opset {version}", kda=1, form="chunked", tags=("prefill",)
        )


@maker
def halves() -> None:
    """float16 and bfloat16. At opset 23 their RMSNormalization has a float32 scale, which no checker takes."""
    for kind, suffix in ((torch.float16, "f16"), (torch.bfloat16, "bf16")):
        for version in (20, 23):
            model, twin = bailing().to(kind), bailing().to(kind).float()
            step(
                model,
                f"bailing_decode_{suffix}_op{version}",
                opset=version,
                made=f"Bailing, one token, {suffix}, opset {version}",
                loads=suffix == "f16" and version == 20,
                truth=widened_past(model),
                truth_module=StepWithStates(twin),
                **half(suffix, "decode"),
            )
    for name, model, twin, version in (
        ("kimi_prefill_f16", kimi().half(), kimi().half().float(), 20),
        ("bailing_prefill_bf16_op23", bailing().bfloat16(), bailing().bfloat16().float(), 23),
    ):
        prompt(
            model,
            name,
            made=f"{name.split('_')[0]}, T 12, half precision, opset {version}",
            opset=version,
            kda=1,
            form="chunked",
            loads=version == 20,
            truth=lambda: {"T12": (ids(12),)},
            truth_module=Logits(twin),
            **half("f16" if version == 20 else "bf16", "prefill"),
        )


def half(suffix: str, kind: str) -> dict[str, Any]:
    return dict(tolerance=1e-2 if suffix == "f16" else 3e-2, tags=(kind, "half", suffix))


def widened_past(model: torch.nn.Module) -> Any:
    """Truth cases with states as the half-precision model leaves them, held in float32."""
    return lambda: {f"p{p}": (ids(1), *(t.float() for t in past_of(model, p))) for p in (9, 21)}


@maker
def glm5_prefill() -> None:
    prompt(
        glm5(), "glm5_prefill", made="Glm5NextTextModel, 2 KDA layers, T 12", kda=2, form="chunked", tags=("prefill",)
    )


@maker
def glm5_decode() -> None:
    step(glm5(), "glm5_decode", made="Glm5NextTextModel, 2 KDA layers, one token", kda=2, bindings=[{}])


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MAKERS:
        MAKERS[wanted]()
