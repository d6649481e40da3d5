"""What the torch-based makers share: weights that compress, wrappers with flat caches, exporting with truth.

Needs torch and transformers; CI never imports it.
"""

from __future__ import annotations

import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import onnx
import onnx_ir as ir
import torch

from .pack import pack, truth_file

warnings.filterwarnings("ignore")
logging.getLogger("torch.onnx").setLevel(logging.ERROR)
logging.getLogger("transformers").setLevel(logging.ERROR)
torch.set_num_threads(2)


def fill(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Random weights for every parameter, large ones on a coarse grid so that a packed export stays small.

    Norm weights lie near 1, ``A_log`` in 0 to 0.8, biases are not zero: no mistake hides behind a neutral value.
    """
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name:
                continue
            draw = torch.randn(tensor.shape, generator=rng)
            if name.endswith("A_log"):
                value = 0.8 * torch.rand(tensor.shape, generator=rng)
            elif tensor.dim() == 1 and "norm" in name and name.endswith("weight"):
                value = 1 + 0.15 * draw
            elif name.endswith(("bias", "e_score_correction_bias")):
                value = 0.25 * draw
            elif "conv" in name:
                value = 0.5 * draw
            else:
                value = draw * min(0.35, 1.3 / tensor.shape[-1] ** 0.5)
            if tensor.numel() > 512:
                value = (value * 16).round() / 16
            tensor.copy_(value)
    return module.eval()


def bailing(**changes: Any) -> torch.nn.Module:
    """A small BailingHybridForCausalLM: by default one KDA and one MLA layer with experts."""
    from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridForCausalLM

    settings = dict(head_dim=8, layer_group_size=2, first_k_dense_replace=1, kda_safe_gate=True, kda_lower_bound=-5.0)
    return _causal(BailingHybridForCausalLM, BailingHybridConfig, {**_SMALL, **settings, **changes})


def kimi(**changes: Any) -> torch.nn.Module:
    """A small KimiLinearForCausalLM: one KDA layer, one MLA layer."""
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

    settings = dict(
        linear_head_dim=8,
        linear_num_heads=3,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
    )
    return _causal(KimiLinearForCausalLM, KimiLinearConfig, {**_SMALL, **settings, **changes})


def glm5(**changes: Any) -> torch.nn.Module:
    """A small Glm5NextTextModel of linear-attention layers only: hyper-connections, padding mask, low-rank gates."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    common = {k: v for k, v in _SMALL.items() if k != "num_local_experts"}
    settings = dict(
        n_routed_experts=4,
        q_lora_rank=12,
        qk_rope_head_dim=0,
        linear_head_dim=8,
        linear_num_heads=3,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        layer_types=["linear_attention"] * 2,
        mlp_layer_types=["dense", "sparse"],
    )
    return LinearOnly(_causal(Glm5NextTextModel, Glm5NextTextConfig, {**common, **settings, **changes}))


class LinearOnly(torch.nn.Module):
    """Supplies positions and masks, which such a model cannot get from a cache with no attention layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        mask = {"linear_attention": torch.ones_like(input_ids, dtype=torch.bool)}
        return self.model(input_ids=input_ids, position_ids=positions, attention_mask=mask, **kwargs)


_SMALL: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=40,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    num_local_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def _causal(model_class: Any, config_class: Any, settings: dict[str, Any]) -> torch.nn.Module:
    experts, attention = settings.pop("experts", "batched_mm"), settings.pop("attention", "sdpa")
    config = config_class(**settings)
    config._attn_implementation = attention
    model = model_class(config).eval()
    model.set_experts_implementation(experts)
    return fill(model)


class Logits(torch.nn.Module):
    """ids -> logits with no cache: the plainest wrapper that people export."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return first_output(self.model(input_ids=input_ids, use_cache=False))


class Padded(torch.nn.Module):
    """ids, padding mask and every layer's state, if there are any -> logits and new states."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = cache_from(self.model.config, past) if past else None
        out = self.model(input_ids=input_ids, attention_mask=mask, cache=cache, use_cache=bool(past))
        return (first_output(out), *(flat_cache(out.cache) if past else ()))


class PrefillWithStates(torch.nn.Module):
    """ids -> logits and every layer's state after the prompt."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.model(input_ids=input_ids, use_cache=True)
        return (first_output(out), *flat_cache(out.cache))


class StepWithStates(torch.nn.Module):
    """ids and every layer's state -> logits and new states: one token, or the next piece of a prompt."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.model(input_ids=input_ids, cache=cache_from(self.model.config, past), use_cache=True)
        return (first_output(out), *flat_cache(out.cache))


def first_output(out: Any) -> torch.Tensor:
    """Logits, or the hidden states of a model without a head."""
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def flat_cache(cache: Any) -> list[torch.Tensor]:
    """(conv state, recurrent state) of a KDA layer, (keys, values) of others, in layer order."""
    flat: list[torch.Tensor] = []
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            flat += [layer.conv_states[0].clone(), layer.recurrent_states[0].clone()]
        else:
            flat += [layer.keys.clone(), layer.values.clone()]
    return flat


def cache_from(config: Any, flat: Sequence[torch.Tensor]) -> Any:
    """The inverse of :func:`flat_cache`."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    for layer, (first, second) in zip(cache.layers, zip(flat[::2], flat[1::2], strict=True), strict=True):
        layer.dtype, layer.device = first.dtype, first.device
        if hasattr(layer, "conv_states"):
            layer.conv_states[0], layer.recurrent_states[0] = first.clone(), second.clone()
            layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = True
            layer.has_previous_state[0] = True
            layer.conv_kernel_size[0] = first.shape[-1]
        else:
            layer.keys, layer.values, layer.is_initialized = first, second, True
    return cache


def ids(tokens: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Random token ids below 60."""
    return torch.randint(3, 60, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def array(tensor: torch.Tensor) -> np.ndarray:
    """NumPy copy; bfloat16 becomes float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy().copy()


def _legacy_export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    names: tuple[Sequence[str], Sequence[str]],
    opset: int | None,
    axes: dict[str, dict[int, str]] | None,
) -> onnx.ModelProto:
    file = io.BytesIO()
    given, made = map(list, names)
    torch.onnx.export(
        module,
        args,
        file,
        dynamo=False,
        opset_version=opset,
        input_names=given,
        output_names=made,
        dynamic_axes=axes,
    )
    return onnx.load_from_string(file.getvalue())


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    name: str,
    *,
    dynamic: Any = None,
    names: tuple[Sequence[str], Sequence[str]] = ((), ()),
    truth: Callable[[], dict[str, tuple[Any, ...]]] | None = None,
    truth_module: torch.nn.Module | None = None,
    opset: int | None = None,
    optimize: bool = True,
    legacy: bool = False,
    after: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
    **entry: Any,
) -> onnx.ModelProto | None:
    """Export with torch.onnx, post-process with ``after``, pack; say so on one line, or say why it failed.

    ``truth`` gives the arguments of each case whose outputs PyTorch computes now, with ``truth_module`` (a float32 twin
    of a half-precision module) where one is given. ``legacy`` takes torch's TorchScript-based exporter: other names, no
    shapes, no metadata; ``dynamic`` has the names of its axes.
    """
    started = time.time()
    try:
        with torch.no_grad():
            program = (
                _legacy_export(module, args, names, opset, dynamic)
                if legacy
                else torch.onnx.export(
                    module,
                    args,
                    dynamo=True,
                    dynamic_shapes=dynamic,
                    input_names=list(names[0]) or None,
                    output_names=list(names[1]) or None,
                    opset_version=opset,
                    optimize=optimize,
                    verbose=False,
                )
            )
        model = program if legacy else ir.to_proto(program.model)
        if after:
            model = after(model)
    except Exception as reason:
        print(
            f"{name}: FAILED after {time.time() - started:.0f} s: {type(reason).__name__}: {str(reason)[:1500]}",
            flush=True,
        )
        return None
    file = ""
    if truth:
        inputs, outputs = [i.name for i in model.graph.input], [o.name for o in model.graph.output]
        cases = {}
        for case, call in truth().items():
            with torch.no_grad():
                result = (truth_module or module)(*call)
            result = result if isinstance(result, tuple) else (result,)
            cases[case] = (
                dict(zip(inputs, map(array, call), strict=True)),
                dict(zip(outputs, map(array, result), strict=True)),
            )
        file = truth_file(name, cases)
    pack(model, name, truth=file, **entry)
    print(f"{name}: {len(model.graph.node)} nodes, {time.time() - started:.0f} s", flush=True)
    return model
