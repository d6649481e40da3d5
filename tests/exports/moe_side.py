"""Mixtures of experts in the coding styles that people export, small, for ``make_moe``. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

D, H, E, K, G, TG = 24, 8, 8, 3, 4, 2


class Router(nn.Module):
    """Scores, groups, choice and weights. ``style`` says how the mask of the groups that stay is made."""

    def __init__(
        self,
        style: str = "scatter",
        *,
        score: str = "sigmoid",
        groups: tuple[int, int] = (G, TG),
        bias: bool = True,
        best: str = "top2",
        fill: float = float("-inf"),
        norm: bool | str = True,
        eps: float = 1e-20,
        least: float = 0.0,
        scale: float = 2.5,
        picked: str = "scores",
        linear_bias: bool = False,
        experts: int = E,
        width: int = D,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, width))
        self.linear_bias = nn.Parameter(torch.zeros(experts)) if linear_bias else None
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts)) if bias else None
        self.style, self.score, self.groups, self.best, self.fill = style, score, groups, best, fill
        self.norm, self.eps, self.scale, self.picked = norm, eps, scale, picked
        self.least = least

    def mask(self, index: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """1 for the groups that stay, [N, G]."""
        if self.style == "onehot":
            return F.one_hot(index, total.shape[-1]).sum(1).to(total.dtype)
        if self.style == "compare":
            return (index.unsqueeze(-1) == torch.arange(total.shape[-1])).any(1).to(total.dtype)
        return torch.zeros_like(total).scatter_(1, index, 1)

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, experts = h.shape[0], self.weight.shape[0]
        logits = F.linear(h.float(), self.weight.float(), self.linear_bias)
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
        choice = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        groups, kept = self.groups
        if groups > 1:
            parts = choice.view(count, groups, -1)
            total = parts.topk(2, dim=-1)[0].sum(-1) if self.best == "top2" else parts.max(-1).values
            mask = self.mask(torch.topk(total, k=kept, dim=-1, sorted=False)[1], total)
            if self.style == "view":  # masked per group, then flattened
                choice = parts.masked_fill(mask.unsqueeze(-1) == 0, self.fill).reshape(count, -1)
            elif self.style == "product":  # zeros by multiplication
                choice = choice * mask.repeat_interleave(experts // groups, dim=1)
            elif self.style == "added":  # a low number for the others
                choice = choice + (mask.repeat_interleave(experts // groups, dim=1) - 1.0) * 1e9
            else:
                wide = mask.unsqueeze(-1).expand(count, groups, experts // groups).reshape(count, -1)
                choice = choice.masked_fill(~wide.bool(), self.fill)
        values, ids = torch.topk(choice, k=K, dim=-1, sorted=False)
        weights = values if self.picked == "values" else scores.gather(1, ids)
        if self.norm == "l1":
            weights = F.normalize(weights, p=1, dim=-1)
        elif self.norm:
            total = weights.sum(-1, keepdim=True) + self.eps
            weights = weights / (total.clamp(min=self.least) if self.least else total)
        return ids, weights * self.scale


ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "relu2_bounded": lambda x: x.clamp(min=0).pow(2),
}


def coarse(module: nn.Module) -> nn.Module:
    """Weights on a coarse grid, small ones too, so that many packed exports stay small."""
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.numel() >= 96:
                tensor.copy_((tensor * 16).round() / 16)
    return module


class Mlp(nn.Module):
    """One expert: gate and up apart or joined, an activation, a clamp before or after it."""

    def __init__(
        self,
        act: str = "silu",
        clamp: tuple[str, float] | None = None,
        inter: int = H,
        form: str = "apart",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.act, self.clamp, self.form = ACTS[act], clamp, form
        if form == "apart":
            self.gate_proj, self.up_proj = nn.Linear(D, inter, bias=bias), nn.Linear(D, inter, bias=bias)
        else:
            self.gate_up = nn.Linear(D, inter if form == "plain" else 2 * inter, bias=False)
        self.down_proj = nn.Linear(inter, D, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "apart":
            gate, up = self.gate_proj(x), self.up_proj(x)
        elif self.form == "plain":
            return self.down_proj(self.act(self.gate_up(x)))
        elif self.form == "interleaved":
            both = self.gate_up(x)
            gate, up = both[..., ::2], both[..., 1::2]
        else:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down_proj(activated(gate, up, self.act, self.clamp))


def activated(gate: torch.Tensor, up: torch.Tensor, act: Callable[..., Any], clamp: Any) -> torch.Tensor:
    """act(gate) * up with the clamp."""
    if clamp and clamp[0] == "before":
        return act(gate.clamp(max=clamp[1])) * up.clamp(-clamp[1], clamp[1])
    if clamp:
        return act(gate).clamp(max=clamp[1]) * up.clamp(-clamp[1], clamp[1])
    return act(gate) * up


class Block(nn.Module):
    """Router, experts written in ``style``, and what is added to them."""

    def __init__(
        self,
        style: str,
        *,
        router: dict[str, Any] | None = None,
        mlp: dict[str, Any] | None = None,
        shared: str = "plain",
        shown: bool = False,
    ) -> None:
        super().__init__()
        self.style, self.shown = style, shown
        self.gate = Router(**(router or {}))
        self.mlp = mlp or {}
        self.experts = nn.ModuleList([Mlp(**self.mlp) for _ in range(E)])
        self.shared_experts = Mlp(**self.mlp) if shared != "none" else None
        self.shared_gate = nn.Linear(D, 1, bias=False) if shared == "gated" else None
        if style in ("by_choice", "added_rows"):
            del self.experts
            self.gates, self.ups = nn.Parameter(torch.zeros(E, H, D)), nn.Parameter(torch.zeros(E, H, D))
            self.downs = nn.Parameter(torch.zeros(E, D, H))

    def stack(self, name: str) -> torch.Tensor:
        return torch.stack([getattr(e, name).weight for e in self.experts])

    def act(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return activated(gate, up, ACTS[self.mlp.get("act", "silu")], self.mlp.get("clamp"))

    def forward(self, x: torch.Tensor) -> Any:
        h = x.reshape(-1, D)
        ids, weights = self.gate(h)
        y = self.result(x, h, ids, weights)
        return (y, ids, weights) if self.shown else y

    def result(self, x: torch.Tensor, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = getattr(self, f"_{self.style}")(h, ids, weights.to(h.dtype)).view(x.shape)
        if self.shared_experts is None:
            return y
        beside = self.shared_experts(x)
        return y + (beside if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * beside)

    # --- every expert on every token -----------------------------------------------------------------------------

    def _dense(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        return sum(self.experts[e](h) * full[:, e : e + 1] for e in range(E))  # type: ignore[return-value]

    def _dense_select(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        out = torch.zeros_like(h)
        for e in range(E):
            out = out + full[:, e].unsqueeze(-1) * self.experts[e](h)
        return out

    def _dense_eq(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(h)
        for e in range(E):
            out = out + self.experts[e](h) * (w * (ids == e)).sum(-1, keepdim=True)
        return out

    def _dense_where(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(h)
        for e in range(E):
            out = out + self.experts[e](h) * torch.where(ids == e, w, 0.0).sum(-1, keepdim=True)
        return out

    def _dense_onehot(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = (F.one_hot(ids, E).to(w.dtype) * w.unsqueeze(-1)).sum(1)
        every = torch.stack([expert(h) for expert in self.experts], dim=1)
        return (every * full.unsqueeze(-1)).sum(1)

    def _picked(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Of all results those of the choices."""
        every = torch.stack([expert(h) for expert in self.experts], dim=1)
        return (every.gather(1, ids.unsqueeze(-1).expand(-1, -1, D)) * w.unsqueeze(-1)).sum(1)

    def _picked_stacked(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The same with stacked weights, by numbers of tokens and experts."""
        gate, up = (torch.einsum("nd,eid->nei", h, self.stack(n)) for n in ("gate_proj", "up_proj"))
        every = torch.einsum("nei,edi->ned", self.act(gate, up), self.stack("down_proj"))
        return torch.einsum("nkd,nk->nd", every[torch.arange(h.shape[0])[:, None], ids], w)

    def _stacked(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        gate = torch.einsum("nd,eid->eni", h, self.stack("gate_proj"))
        up = torch.einsum("nd,eid->eni", h, self.stack("up_proj"))
        return torch.einsum("eni,edi,ne->nd", self.act(gate, up), self.stack("down_proj"), full)

    def _stacked_matmul(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        rows = h.unsqueeze(0).expand(E, -1, -1)
        gate, up = (torch.bmm(rows, self.stack(n).transpose(1, 2)) for n in ("gate_proj", "up_proj"))
        out = torch.bmm(self.act(gate, up), self.stack("down_proj").transpose(1, 2))
        return (out * full.t().unsqueeze(-1)).sum(0)

    # --- weights gathered for each choice ------------------------------------------------------------------------

    def _gather(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate = torch.einsum("nd,nkid->nki", h, self.stack("gate_proj")[ids])
        up = torch.einsum("nd,nkid->nki", h, self.stack("up_proj")[ids])
        out = torch.einsum("nki,nkdi->nkd", self.act(gate, up), self.stack("down_proj")[ids])
        return (out * w[..., None]).sum(1)

    def _gather_matmul(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = torch.index_select(self.stack("gate_up"), 0, ids.reshape(-1)).view(*ids.shape, 2 * H, D)
        both = torch.matmul(wide, h[:, None, :, None]).squeeze(-1)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.mlp["form"] == "interleaved" else both.chunk(2, -1)
        down = torch.index_select(self.stack("down_proj"), 0, ids.reshape(-1)).view(*ids.shape, D, H)
        out = torch.matmul(down, self.act(gate, up).unsqueeze(-1)).squeeze(-1)
        return torch.matmul(w.unsqueeze(1), out).squeeze(1)

    def _gather_turned(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Weights as [E, in, out], and the choice's weight before the down projection."""
        gate, up = (self.stack(n).transpose(1, 2).contiguous()[ids] for n in ("gate_proj", "up_proj"))
        rows = h[:, None, None, :]
        hidden = self.act(rows @ gate, rows @ up) * w[..., None, None]
        return (hidden @ self.stack("down_proj").transpose(1, 2).contiguous()[ids]).squeeze(2).sum(1)

    def _gather_three(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The down projection and the sum over choices in one einsum."""
        gate, up = (torch.einsum("nd,nkid->nki", h, self.stack(n)[ids]) for n in ("gate_proj", "up_proj"))
        return torch.einsum("nki,nkdi,nk->nd", self.act(gate, up), self.stack("down_proj")[ids], w)

    def _gather_row(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """As products of matrices of one row, of which the only one is taken at the end."""
        rows = h[:, None, None, :]
        gate, up = (rows @ self.stack(n).transpose(1, 2)[ids] for n in ("gate_proj", "up_proj"))
        return (w[:, None, :] @ (self.act(gate, up) @ self.stack("down_proj").transpose(1, 2)[ids])[:, :, 0])[:, 0]

    def _by_choice(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """One choice after the other."""
        out, wide = torch.zeros_like(h), h.unsqueeze(-1)
        for place in range(K):
            gate, up, down = (t.index_select(0, ids[:, place]) for t in (self.gates, self.ups, self.downs))
            hidden = self.act(torch.bmm(gate, wide), torch.bmm(up, wide))
            out = out + w[:, place : place + 1] * torch.bmm(down, hidden).squeeze(-1)
        return out

    def _added_rows(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """A row for each choice, added to its token's."""
        flat, token = ids.flatten(), torch.arange(h.shape[0]).repeat_interleave(K)
        rows = h[token].unsqueeze(-1)
        hidden = self.act(torch.bmm(self.gates[flat], rows), torch.bmm(self.ups[flat], rows))
        made = torch.bmm(self.downs[flat], hidden).squeeze(-1) * w.reshape(-1, 1)
        return torch.zeros_like(h).index_add(0, token, made)

    def _einsum_onehot(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.einsum("nke,nk->ne", F.one_hot(ids, E).to(w.dtype), w)
        every = torch.stack([expert(h) for expert in self.experts], dim=1)
        return torch.einsum("ned,ne->nd", every, full)

    def _zero_experts(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The last two experts give back what they are given (LongCat)."""
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        out = sum(self.experts[e](h) * full[:, e : e + 1] for e in range(E - 2))
        return out + h * full[:, E - 2 : E - 1] + h * full[:, E - 1 : E]

    def _zero_loop(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The same as a loop with the tokens that its experts give back added at the end."""
        out = torch.zeros_like(h)
        for e in range(E - 2):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](h[token]) * w[token, slot, None])
        return out + h * (w * (ids >= E - 2)).sum(-1, keepdim=True)

    def _zero_turns(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """LongCat's own loop, unrolled: experts without weights have turns too."""
        out, mask = torch.zeros_like(h), F.one_hot(ids, E).permute(2, 1, 0)
        for e in range(E):
            slot, token = torch.where(mask[e])
            made = self.experts[e](h[token]) if e < E - 2 else h[token]
            out.index_add_(0, token, made * w[token, slot, None])
        return out

    def _zero_pairs(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Rows for the choices that only experts with weights overwrite."""
        flat, out = ids.reshape(-1), h.repeat_interleave(K, dim=0)
        rows = out
        for e in range(E - 2):
            out = torch.where((flat == e).unsqueeze(-1), self.experts[e](rows), out)
        return (out.view(*ids.shape, D) * w.unsqueeze(-1)).sum(1)

    def _zero_stacked(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        gate, up = (torch.einsum("nd,eid->eni", h, self.stack(n)[: E - 2]) for n in ("gate_proj", "up_proj"))
        y = torch.einsum("eni,edi,ne->nd", self.act(gate, up), self.stack("down_proj")[: E - 2], full[:, : E - 2])
        return y + h * full[:, E - 2 :].sum(-1, keepdim=True)

    def _zero_gather(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Gathered weights: ids bounded, weights of the others 0."""
        real = ids < E - 2
        safe, own = torch.where(real, ids, 0), w * real
        return self._gather(h, safe, own) + h * torch.where(real, 0.0, w).sum(-1, keepdim=True)

    def _zero_choices(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Gathered weights: the token in the place of what an expert without weights would give."""
        safe = ids.clamp(max=E - 3)
        gate = torch.einsum("nd,nkid->nki", h, self.stack("gate_proj")[safe])
        up = torch.einsum("nd,nkid->nki", h, self.stack("up_proj")[safe])
        out = torch.einsum("nki,nkdi->nkd", self.act(gate, up), self.stack("down_proj")[: E - 2][safe])
        out = torch.where((ids >= E - 2).unsqueeze(-1), h.unsqueeze(1), out)
        return (out * w[..., None]).sum(1)

    # --- experts' biases -----------------------------------------------------------------------------------------

    def biases(self, name: str) -> torch.Tensor:
        return torch.stack([getattr(e, name).bias for e in self.experts])

    def _gather_biased(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate, up = (
            torch.einsum("nd,nkid->nki", h, self.stack(n)[ids]) + self.biases(n)[ids] for n in ("gate_proj", "up_proj")
        )
        out = torch.einsum("nki,nkdi->nkd", self.act(gate, up), self.stack("down_proj")[ids])
        return ((out + self.biases("down_proj")[ids]) * w[..., None]).sum(1)

    def _stacked_biased(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        rows = h.unsqueeze(0).expand(E, -1, -1)
        gate, up = (
            torch.bmm(rows, self.stack(n).transpose(1, 2)) + self.biases(n).unsqueeze(1)
            for n in ("gate_proj", "up_proj")
        )
        out = torch.bmm(self.act(gate, up), self.stack("down_proj").transpose(1, 2))
        return ((out + self.biases("down_proj").unsqueeze(1)) * full.t().unsqueeze(-1)).sum(0)

    # --- loops over experts --------------------------------------------------------------------------------------

    def _where(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out, mask = torch.zeros_like(h), F.one_hot(ids, E).permute(2, 1, 0)
        for e in range(E):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.experts[e](h[token]) * w[token, slot, None])
        return out

    def _where_rows(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(h)
        for e in range(E):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](h[token]) * w[token, slot, None])
        return out

    def _any_choice(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The tokens that chose an expert at all, and its column of weights over all experts."""
        full, out = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter(1, ids, w), torch.zeros_like(h)
        for e in range(E):
            token = (ids == e).any(-1).nonzero().squeeze(-1)
            out = out.index_add(0, token, self.experts[e](h[token]) * full[token, e, None])
        return out

    def _any_mask(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The same with a mask for an index."""
        full, out = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter(1, ids, w), torch.zeros_like(h)
        for e in range(E):
            mask = (ids == e).any(-1)
            out[mask] += self.experts[e](h[mask]) * full[mask][:, e : e + 1]
        return out

    def _where_put(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Mixtral's older loop, and out[token] += ..."""
        out = torch.zeros_like(h)
        for e in range(E):
            token, slot = torch.where(ids == e)
            out[token] += self.experts[e](h[token]) * w[token, slot].unsqueeze(-1)
        return out

    def _scatter_pairs(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """DeepSeek's training loop: a row for each choice, each expert writes its own."""
        flat, rows = ids.reshape(-1), h.repeat_interleave(K, dim=0)
        out = torch.zeros_like(rows)
        for e in range(E):
            place = torch.where(flat == e)[0]
            out[place] = self.experts[e](rows[place])
        return (out.view(*ids.shape, D) * w.unsqueeze(-1)).sum(1)

    def _dense_pairs(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """As the loop above, with a mask instead of an index: static shapes."""
        flat, rows = ids.reshape(-1), h.repeat_interleave(K, dim=0)
        out = torch.zeros_like(rows)
        for e in range(E):
            out = torch.where((flat == e).unsqueeze(-1), self.experts[e](rows), out)
        return (out.view(*ids.shape, D) * w.unsqueeze(-1)).sum(1)


class Layers(nn.Module):
    """Two blocks, one after the other, with limits of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block("gather", mlp={"clamp": ("before", 0.5)})
        self.second = Block("gather", mlp={"clamp": ("before", 0.3)}, router={"groups": (1, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.first(x)
        return h + self.second(h)


class Hashed(Block):
    """Experts by a table over token ids (DeepSeek-V4's first layers)."""

    def __init__(self) -> None:
        super().__init__("gather")
        self.table = nn.Buffer(torch.arange(60 * K).reshape(60, K) * 5 % E)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> Any:  # type: ignore[override]
        h = x.reshape(-1, D)
        scores = F.linear(h, self.gate.weight).sigmoid()
        ids = self.table[tokens.reshape(-1)]
        weights = scores.gather(1, ids)
        return self.result(x, h, ids, weights / weights.sum(-1, keepdim=True))


class SpreadLogits(Block):
    """The chosen logits among minus infinities, then a softmax over all experts."""

    def __init__(self) -> None:
        super().__init__("dense", router={"groups": (1, 1), "bias": False})

    def forward(self, x: torch.Tensor) -> Any:
        h = x.reshape(-1, D)
        logits = F.linear(h, self.gate.weight)
        values, ids = torch.topk(logits, K, dim=-1)
        full = torch.full_like(logits, float("-inf")).scatter(-1, ids, values).softmax(-1)
        out = torch.zeros_like(h)
        for e in range(E):
            out = out + self.experts[e](h) * full[:, e : e + 1]
        return out.view(x.shape)


class HalfRouter(nn.Module):
    """A float16 block whose router computes logits, or scores too, in float16."""

    def __init__(self, scores: bool) -> None:
        super().__init__()
        self.block, self.scores = Block("gather"), scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = x.reshape(-1, D), self.block.gate
        logits = F.linear(h, gate.weight)
        scores = logits.sigmoid() if self.scores else logits.float().sigmoid()
        values, ids = torch.topk(scores, K, dim=-1)
        return self.block.result(x, h, ids, (values / values.sum(-1, keepdim=True)).to(h.dtype))
