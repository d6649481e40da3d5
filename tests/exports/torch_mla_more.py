"""Latent attention written by hand in further styles: DeepSeek's own axes, one product or two, tables cut twice."""

from __future__ import annotations

import torch

HEADS, NOPE, ROPE, VALUE, RANK, WIDTH, PLACES = 3, 8, 4, 6, 16, 24, 64


class Norm(torch.nn.Module):
    """An RMS norm, written out: the older exporter has none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class OtherMla(torch.nn.Module):
    """One layer; ``style`` says how it is written.

    - "deepseek": axes [batch, tokens, heads, channels] throughout, scores [batch, tokens, heads, keys], given mask
      [tokens, keys]; "deepseek_cached": with caches of keys and values in these axes and a mask of its own;
      "deepseek_absorbed": the same with absorbed weights, caches of latents and a mask of its own.
    - "one": weights absorbed, latent and rotary key in one cache, which is keys and values of one shared head.
    - "two": a product for each of the two parts of the scores, filled where a triangle does not reach.
    - "tril": the causal mask and the rotation cut from tables, by every tensor for itself; ``masked_fill``.
    - "rows": rows of one table of cosines and sines, shaped by every tensor for itself.
    - "inverse": cosines computed from positions, halves doubled, as transformers does.
    - "scatter": `scatter` into caches of one size, one token; "copy": `index_copy` of some tokens from a place on.
    """

    def __init__(self, style: str, sdpa: bool = False) -> None:
        super().__init__()
        self.style, self.sdpa = style, sdpa
        linear = torch.nn.Linear
        self.q_proj = linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj = linear(WIDTH, RANK + ROPE, bias=False)
        self.kv_norm = Norm()
        self.kv_b = linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = linear(HEADS * VALUE, WIDTH, bias=False)
        rates = 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
        angles = torch.arange(PLACES)[:, None] * rates
        self.register_buffer("inv_freq", rates, persistent=False)
        both = torch.cat([angles, angles], -1)
        self.register_buffer("cos_table", both.cos(), persistent=False)
        self.register_buffer("sin_table", both.sin(), persistent=False)
        self.register_buffer("cis", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)
        self.register_buffer("seen", torch.ones(PLACES, PLACES, dtype=torch.int64).tril()[None, None], persistent=False)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, HEADS, NOPE + ROPE)
        latent, k_rope = self.kv_a_proj(x).split([RANK, ROPE], -1)
        if self.style.startswith("deepseek"):
            found = self.deepseek(q, latent, k_rope, rest)
        elif self.style == "one":
            found = self.one(q, latent, k_rope, rest)
        elif self.style in ("scatter", "copy"):
            found = self.scatter(q, latent, k_rope, rest)
        else:
            found = self.plain(q, latent, k_rope, rest)
        out, *presents = found
        return (self.o_proj(out.reshape(b, s, HEADS * VALUE)), *presents)

    @staticmethod
    def pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        cos, sin = cos[None, :, None, :], sin[None, :, None, :]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3)

    @staticmethod
    def halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2  # sliced as transformers does, which torch.onnx knows from opset 23 on
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def row(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, heads, channels]; the axis of a pair stays one of size one."""
        rows = self.cis[places].view(1, x.shape[1], 1, ROPE // 2, 2)
        pairs = x.reshape(*x.shape[:-1], ROPE // 2, 2)
        (a, b), (c, s) = pairs.split(1, -1), rows.split(1, -1)
        return torch.cat([a * c - b * s, a * s + b * c], -1).flatten(3)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        return self.halves(x, self.cos_table[: x.shape[2]], self.sin_table[: x.shape[2]])

    def deepseek(
        self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, rest: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        b, s = q.shape[:2]
        cos, sin = rest[:2]
        q_nope, q_rope = q.split([NOPE, ROPE], -1)
        q_rope, k_rope = self.pairs(q_rope, cos, sin), self.pairs(k_rope.unsqueeze(2), cos, sin)
        latent = self.kv_norm(latent)
        scale = (NOPE + ROPE) ** -0.5
        if self.style in ("deepseek", "deepseek_cached"):
            k_nope, v = self.kv_b(latent).view(b, s, HEADS, NOPE + VALUE).split([NOPE, VALUE], -1)
            k = torch.cat([k_nope, k_rope.expand(-1, -1, HEADS, -1)], -1)
            presents: list[torch.Tensor] = []
            if self.style == "deepseek_cached":
                presents = [torch.cat([past, new], 1) for past, new in zip(rest[2:], (k, v), strict=True)]
                k, v = presents
                mask = torch.full((s, k.shape[1]), float("-inf")).triu(1 + k.shape[1] - s)
            else:
                mask = rest[2]
            scores = torch.einsum("bshd,bthd->bsht", torch.cat([q_nope, q_rope], -1), k) * scale
            scores = (scores + mask.unsqueeze(1)).softmax(-1, dtype=torch.float32)
            return (torch.einsum("bsht,bthd->bshd", scores, v), *presents)
        weight = self.kv_b.weight.view(HEADS, NOPE + VALUE, RANK)
        latents = torch.cat([rest[2], latent], 1)
        keys = torch.cat([rest[3], k_rope.squeeze(2)], 1)
        query = torch.einsum("bshd,hdc->bshc", q_nope, weight[:, :NOPE])
        scores = torch.einsum("bshc,btc->bsht", query, latents) + torch.einsum("bshr,btr->bsht", q_rope, keys)
        past = latents.shape[1] - s
        mask = torch.full((s, past + s), float("-inf")).triu(1 + past)
        scores = (scores * scale + mask.unsqueeze(1)).softmax(-1, dtype=torch.float32)
        mixed = torch.einsum("bsht,btc->bshc", scores, latents)
        return torch.einsum("bshc,hdc->bshd", mixed, weight[:, -VALUE:]), latents, keys

    def one(
        self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, rest: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        cos, sin, cache = rest
        q_nope, q_rope = q.transpose(1, 2).split([NOPE, ROPE], -1)
        weight = self.kv_b.weight.view(HEADS, NOPE + VALUE, RANK)
        new = torch.cat([self.kv_norm(latent).unsqueeze(1), self.halves(k_rope.unsqueeze(1), cos, sin)], -1)
        cache = torch.cat([cache, new], 2)
        query = torch.cat([q_nope @ weight[:, :NOPE], self.halves(q_rope, cos, sin)], -1)
        scale, values = (NOPE + ROPE) ** -0.5, cache[..., :RANK]
        if self.sdpa:
            spread = (t.expand(-1, HEADS, -1, -1) for t in (cache, values))
            mixed = torch.nn.functional.scaled_dot_product_attention(query, *spread, scale=scale)
        else:
            mixed = (query @ cache.transpose(-1, -2) * scale).softmax(-1) @ values
        return (mixed @ weight[:, NOPE:].transpose(1, 2)).transpose(1, 2), cache

    def scatter(
        self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, rest: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        place, latents, keys = rest
        if self.style == "copy":
            place = place + torch.arange(q.shape[1])
        cos, sin = self.cos_table[place], self.sin_table[place]
        q_nope, q_rope = q.transpose(1, 2).split([NOPE, ROPE], -1)
        new = (self.kv_norm(latent), self.halves(k_rope, cos, sin))
        latents, keys = (
            cache.scatter(1, place.view(1, -1, 1).expand_as(t), t)
            for cache, t in zip((latents, keys), new, strict=True)
        )
        mask = (torch.arange(latents.shape[1])[None, :] <= place[:, None])[None, None]
        return self.attend(q_nope, self.halves(q_rope, cos, sin), latents, keys, mask), latents, keys

    def plain(
        self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, rest: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        s = q.shape[1]
        q_nope, q_rope = q.transpose(1, 2).split([NOPE, ROPE], -1)
        k_rope = k_rope.unsqueeze(1)
        if self.style == "inverse":
            angles = (self.inv_freq[None, :, None] @ rest[0][:, None, :].float()).transpose(1, 2)
            both = torch.cat([angles, angles], -1)
            cos, sin = both.cos().unsqueeze(1), both.sin().unsqueeze(1)
            q_rope, k_rope = self.halves(q_rope, cos, sin), self.halves(k_rope, cos, sin)
        elif self.style == "rows":
            places = torch.arange(s)
            q_rope, k_rope = (self.row(t.transpose(1, 2), places).transpose(1, 2) for t in (q_rope, k_rope))
        else:
            q_rope, k_rope = self.cut(q_rope), self.cut(k_rope)
        hidden = self.seen[:, :, :s, :s] == 0
        return (self.attend(q_nope, q_rope, self.kv_norm(latent), k_rope[:, 0], ~hidden),)

    def attend(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latents: torch.Tensor,
        keys: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        b, count, _ = latents.shape
        both = self.kv_b(latents).view(b, count, HEADS, NOPE + VALUE).transpose(1, 2)
        k_nope, v = both.split([NOPE, VALUE], -1)
        keys, scale = keys.unsqueeze(1), (NOPE + ROPE) ** -0.5
        if self.style == "two":
            scores = (q_nope @ k_nope.transpose(-1, -2) + q_rope @ keys.transpose(-1, -2)) * scale
        else:
            k = torch.cat([k_nope, keys.expand(-1, HEADS, -1, -1)], -1)
            scores = torch.cat([q_nope, q_rope], -1) @ k.transpose(-1, -2) * scale
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(1, 2)
