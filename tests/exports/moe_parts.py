"""Routers and experts that mixtures of experts are put together of, small, for ``moe_side``. Needs torch."""

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
        if self.picked == "indexed":
            weights = scores[torch.arange(count)[:, None], ids]
        if self.norm == "l1":
            weights = F.normalize(weights, p=1, dim=-1)
        elif self.norm == "scaled":  # the factor first
            return ids, self.scale * weights / (weights.sum(-1, keepdim=True) + self.eps)
        elif self.norm == "share":  # the factor divided by the sum
            return ids, weights * (self.scale / (weights.sum(-1, keepdim=True) + self.eps))
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

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        if self.form == "apart":
            gate, up = self.gate_proj(x), self.up_proj(x)
        elif self.form == "plain":
            return self.down_proj(self.act(self.gate_up(x)))
        elif self.form == "interleaved":
            both = self.gate_up(x)
            gate, up = both[..., ::2], both[..., 1::2]
        else:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
        made = activated(gate, up, self.act, self.clamp)
        return self.down_proj(made if weight is None else weight * made)


def activated(gate: torch.Tensor, up: torch.Tensor, act: Callable[..., Any], clamp: Any) -> torch.Tensor:
    """act(gate) * up with the clamp."""
    if clamp and clamp[0] == "before":
        return act(gate.clamp(max=clamp[1])) * up.clamp(-clamp[1], clamp[1])
    if clamp:
        return act(gate).clamp(max=clamp[1]) * up.clamp(-clamp[1], clamp[1])
    return act(gate) * up


class Styles(nn.Module):
    """What ways to write the experts share: the experts, and their weights as stacks."""

    experts: nn.ModuleList
    mlp: dict[str, Any]

    def stack(self, name: str) -> torch.Tensor:
        return torch.stack([getattr(e, name).weight for e in self.experts])

    def act(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return activated(gate, up, ACTS[self.mlp.get("act", "silu")], self.mlp.get("clamp"))

    def biases(self, name: str) -> torch.Tensor:
        return torch.stack([getattr(e, name).bias for e in self.experts])
