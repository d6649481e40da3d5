"""Exports of transformers' models: Kimi-Linear, Bailing (Ling 3), GLM-5-next; prompts and steps, many ways.

Usage: ``python make_transformers.py [NAME ...]`` with torch and transformers; no names means all.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.export import Dim
from torch_side import Logits, PrefillWithStates, StepWithStates, bailing, export, flat_cache, ids, kimi

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


def step(
    model: torch.nn.Module, name: str, tokens: int = 1, batch: int = 1, made: str = "", **entry: Any
) -> None:
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


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MAKERS:
        MAKERS[wanted]()
