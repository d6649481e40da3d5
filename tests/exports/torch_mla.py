"""Small models of the MLA families of transformers, and a hand-written MLA layer in the styles that people write."""

from __future__ import annotations

from typing import Any

import torch

from .torch_side import fill

#: Families of transformers and what makes their attention special. ``layers`` of dense MLPs keep experts out.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": dict(first_k_dense_replace=9),
    "deepseek_v3": dict(first_k_dense_replace=9),
    "glm4_moe_lite": dict(mlp_layer_types=["dense"], n_routed_experts=4),
    "mistral4": dict(first_k_dense_replace=9, n_routed_experts=4),
    "youtu": dict(),
    "minicpm3": dict(),
    "axk1": dict(first_k_dense_replace=9, n_routed_experts=4),
    "kimi_linear": dict(layer_types=["full_attention"], mlp_layer_types=["dense"]),
    "bailing_hybrid": dict(head_dim=8, layer_group_size=1, first_k_dense_replace=9),
    "axk2": dict(first_k_dense_replace=9, n_routed_experts=4),
    "glm_moe_dsa": dict(mlp_layer_types=["dense"], n_routed_experts=4, index_n_heads=2, index_head_dim=8, index_topk=6),
    "deepseek_v32": dict(first_k_dense_replace=9, index_n_heads=2, index_head_dim=8, index_topk=6),
}

_SMALL: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=3,
    num_key_value_heads=3,
    kv_lora_rank=16,
    q_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def mla(family: str, attention: str = "sdpa", **changes: Any) -> torch.nn.Module:
    """A one-layer causal language model of the family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_SMALL, **FAMILIES[family], **changes})
    config._attn_implementation = attention
    if family == "mistral4":  # not among the automatic classes
        from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

        return fill(Mistral4ForCausalLM(config).eval())
    return fill(AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval())


class StaticStep(torch.nn.Module):
    """Ids, where they begin, and transformers' static cache of latents -> logits and the cache's new contents."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, start: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=past[0].shape[2])
        for layer, (keys, values) in zip(cache.layers, zip(past[::2], past[1::2], strict=True), strict=True):
            layer.keys, layer.values = keys.clone(), values.clone()
            layer.dtype, layer.device = keys.dtype, keys.device
            layer.batch_size, layer.num_heads = keys.shape[:2]
            layer.cumulative_length = start.clone()
            layer.is_initialized = True
        out = self.model(input_ids=input_ids, cache=cache, use_cache=True)
        return (out.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values)))


#: Rotations by three positions of every token: time, height and width.
SEVERAL = ("sections", "strided", "owners")


class HandMla(torch.nn.Module):
    """Latent attention as people write it by hand; every choice is one that some published code makes.

    Args:
        rope: "half", "hub" (pairs brought apart, then halves), "true" (pairs in place), "none"; halves, by three
            positions of each token: "sections" (runs of pairs), "strided" (every third pair), "owners" (a map, signed
            rates).
        cache: "none", "latent", "expanded", "packed" (latent and rotary key in one tensor), "static" (at given places),
            "start" (static, at places from one start on).
        attention: "eager", "sdpa", "causal" (sdpa's own), "float32" (softmax in float32, scaled queries).
        mask: "none", "given", "bool", "made", "window", "padding" (truths for each key), "both" (truths [B, 1, 1, keys]
            and causal), "sum" (added [B, 1, 1, keys] and causal).
        gate: "none", "float32", "plain", "channels" (one for every channel).
        queries: "one" layer, "two" (one for the rotary part).
        weights: "heads", "parts" (all keys, then all values), "two" (a layer each), "absorbed".
    """

    def __init__(
        self,
        rope: str = "half",
        cache: str = "none",
        attention: str = "eager",
        mask: str = "made",
        gate: str = "none",
        weights: str = "heads",
        norm: bool = True,
        bias: bool = False,
        queries: str = "one",
    ) -> None:
        super().__init__()
        self.h, self.n, self.r, self.v, self.c, width = 3, 8, 6 if rope in SEVERAL else 4, 6, 16, 24
        self.rope, self.cache, self.attention, self.mask, self.gate = rope, cache, attention, mask, gate
        self.weights, self.queries = weights, queries
        linear = torch.nn.Linear
        if queries == "two":
            self.q_nope_proj = linear(width, self.h * self.n, bias=False)
            self.q_rope_proj = linear(width, self.h * self.r, bias=False)
        else:
            self.q_proj = linear(width, self.h * (self.n + self.r), bias=False)
        self.kv_a_proj = linear(width, self.c + self.r, bias=bias)
        self.kv_norm = torch.nn.RMSNorm(self.c, eps=1e-6) if norm else torch.nn.Identity()
        if weights == "two":
            self.k_b = linear(self.c, self.h * self.n, bias=False)
            self.v_b = linear(self.c, self.h * self.v, bias=False)
        else:
            self.kv_b = linear(self.c, self.h * (self.n + self.v), bias=False)
        self.g_proj = linear(width, self.h * (self.v if gate == "channels" else 1), bias=False)
        self.o_proj = linear(self.h * self.v, width, bias=False)
        angles = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, self.r, 2) / self.r)
        full = torch.cat([angles, angles], -1) if rope != "true" else angles
        self.register_buffer("cos_table", full.cos(), persistent=False)
        self.register_buffer("sin_table", full.sin(), persistent=False)

    def several(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines where every pair of channels turns by one of three positions, [3, B, S]."""
        rates = 10000.0 ** (-torch.arange(0, self.r, 2) / self.r)
        if self.rope == "owners":
            signed = rates * torch.tensor([1.0, -1.0, 1.0])
            angles = positions[torch.tensor([2, 0, 1])].permute(1, 2, 0).float() * signed
        else:
            each = positions[..., None].float() * rates
            if self.rope == "sections":
                angles = torch.cat([part[i % 3] for i, part in enumerate(each.split([1, 1, 1], -1))], -1)
            else:
                angles = each[0].clone()
                for axis in (1, 2):
                    angles[..., axis::3] = each[axis, ..., axis::3]
        both = torch.cat([angles, angles], -1)
        return both.cos().unsqueeze(1), both.sin().unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.rope == "none":
            return x
        if self.rope == "true":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        if self.rope == "hub":
            x = x.view(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).reshape(x.shape)
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos + turned * sin

    def forward(self, x: torch.Tensor, positions: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, s, _ = x.shape
        given = list(rest)
        if self.queries == "two":
            q_nope = self.q_nope_proj(x).view(b, s, self.h, self.n).transpose(1, 2)
            q_rope = self.q_rope_proj(x).view(b, s, self.h, self.r).transpose(1, 2)
        else:
            q = self.q_proj(x).view(b, s, self.h, self.n + self.r).transpose(1, 2)
            q_nope, q_rope = q.split([self.n, self.r], -1)
        latent, k_rope = self.kv_a_proj(x).split([self.c, self.r], -1)
        latent = self.kv_norm(latent)
        k_rope = k_rope.view(b, 1, s, self.r)
        if self.rope in SEVERAL:
            cos, sin = self.several(positions)
        else:
            cos, sin = (t[positions].unsqueeze(1) for t in (self.cos_table, self.sin_table))
        q_rope, k_rope = self.rotate(q_rope, cos, sin), self.rotate(k_rope, cos, sin)
        presents: list[torch.Tensor] = []
        past = 0
        if self.cache in ("latent", "packed"):
            if self.cache == "packed":
                joined = torch.cat([given.pop(0), torch.cat([latent, k_rope[:, 0]], -1)], 1)
                presents = [joined]
                latent, k_rope = joined.split([self.c, self.r], -1)
                k_rope = k_rope.unsqueeze(1)
            else:
                latent = torch.cat([given.pop(0), latent], 1)
                k_rope = torch.cat([given.pop(0), k_rope], 2)
                presents = [latent, k_rope]
            past = latent.shape[1] - s
        if self.weights == "absorbed":
            out = self.absorbed(q_nope, q_rope, latent, k_rope, past, s, given)
        else:
            k_nope, value = self.expand(latent)
            key = torch.cat([k_nope, k_rope.expand(-1, self.h, -1, -1)], -1)
            if self.cache == "expanded":
                past = given[0].shape[2]
                key = torch.cat([given.pop(0), key], 2)
                value = torch.cat([given.pop(0), value], 2)
                presents = [key, value]
            elif self.cache in ("static", "start"):
                slots = given.pop(0)
                if self.cache == "start":
                    slots = slots + torch.arange(s)
                key = given.pop(0).index_copy(2, slots, key)
                value = given.pop(0).index_copy(2, slots, value)
                presents = [key, value]
                past = slots
            out = self.attend(torch.cat([q_nope, q_rope], -1), key, value, past, s, given)
        out = out.transpose(1, 2)
        if self.gate == "float32":
            out = out * torch.sigmoid(self.g_proj(x).float()).to(out.dtype).unsqueeze(-1)
        elif self.gate == "channels":
            return (self.o_proj(out.reshape(b, s, self.h * self.v) * self.g_proj(x).sigmoid()), *presents)
        elif self.gate == "plain":
            out = out * self.g_proj(x).sigmoid()[..., None]
        return (self.o_proj(out.reshape(b, s, self.h * self.v)), *presents)

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, keys, _ = latent.shape
        if self.weights == "two":
            k, v = self.k_b(latent), self.v_b(latent)
        elif self.weights == "parts":
            k, v = self.kv_b(latent).split([self.h * self.n, self.h * self.v], -1)
        else:
            both = self.kv_b(latent).view(b, keys, self.h, self.n + self.v).transpose(1, 2)
            k, v = both.split([self.n, self.v], -1)
            return k, v
        return k.view(b, keys, self.h, self.n).transpose(1, 2), v.view(b, keys, self.h, self.v).transpose(1, 2)

    def bias(self, past: int | torch.Tensor, s: int, keys: int, given: list[torch.Tensor]) -> torch.Tensor | None:
        """What is added to the scores, or truths."""
        if self.mask == "none":
            return None
        if self.mask in ("given", "bool"):
            return given.pop(0)
        at = torch.arange(keys)
        new = (past if isinstance(past, torch.Tensor) else past + torch.arange(s))[:, None]
        seen = at[None, :] <= new
        if self.mask == "window":
            seen = seen & (at[None, :] > new - 5)
        seen = seen[None, None]
        if self.mask == "padding":
            seen = seen & given.pop(0)[:, None, None, :].bool()
        if self.mask == "both":
            seen = seen & given.pop(0)
        if self.mask == "sum":
            return torch.where(seen, 0.0, float("-inf")) + given.pop(0)
        if self.attention in ("sdpa", "causal"):
            return seen
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        past: int | torch.Tensor,
        s: int,
        given: list[torch.Tensor],
    ) -> torch.Tensor:
        scale = (self.n + self.r) ** -0.5 * 1.1
        if self.attention == "causal":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        bias = self.bias(past, s, k.shape[2], given)
        if self.attention == "sdpa":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        if self.attention == "float32":
            scores = (q * scale) @ k.transpose(-1, -2)
        else:
            scores = q @ k.transpose(-1, -2) * scale
        if bias is not None:
            scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
        return torch.softmax(scores.float(), -1).to(v.dtype) @ v

    def absorbed(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        past: int,
        s: int,
        given: list[torch.Tensor],
    ) -> torch.Tensor:
        weight = self.kv_b.weight.view(self.h, self.n + self.v, self.c)
        query = torch.einsum("bhsn,hnc->bhsc", q_nope, weight[:, : self.n])
        scores = torch.einsum("bhsc,btc->bhst", query, latent)
        scores = (scores + torch.einsum("bhsr,btr->bhst", q_rope, k_rope[:, 0])) * (self.n + self.r) ** -0.5
        bias = self.bias(past, s, latent.shape[1], given)
        if bias is not None:
            scores = scores + bias
        mixed = torch.einsum("bhst,btc->bhsc", scores.softmax(-1), latent)
        return torch.einsum("bhsc,hvc->bhsv", mixed, weight[:, self.n :])


class LongcatLayer(torch.nn.Module):
    """LongcatFlash's attention alone, causal by itself."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig
        from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMLA

        config = AutoConfig.for_model("longcat_flash", **{**_SMALL, "num_hidden_layers": 2, "num_layers": 1})
        config._attn_implementation = "sdpa"
        self.attention = LongcatFlashMLA(config, 0)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.attention(x, (cos, sin), None)[0]
