"""Mixtures of experts in the coding styles that people export, small, for ``make_moe``. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .moe_dense_styles import DenseStyles
from .moe_gather_styles import GatherStyles
from .moe_loop_styles import LoopStyles
from .moe_parts import D, E, H, K, Mlp, Router


class Block(DenseStyles, GatherStyles, LoopStyles):
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


class TopOne(Block):
    """One expert a token, its number without an axis of choices."""

    def __init__(self) -> None:
        super().__init__("gather")

    def forward(self, x: torch.Tensor) -> Any:
        h = x.reshape(-1, D)
        weights, ids = torch.topk(F.linear(h, self.gate.weight).softmax(-1), 1, dim=-1)
        ids = ids.squeeze(-1)
        gate, up = (torch.einsum("nd,nid->ni", h, self.stack(n)[ids]) for n in ("gate_proj", "up_proj"))
        made = torch.einsum("ni,ndi->nd", self.act(gate, up), self.stack("down_proj")[ids]) * weights
        return made.view(x.shape) + self.shared_experts(x)


class NormedRouter(Block):
    """The router alone reads its input through a norm."""

    def __init__(self) -> None:
        super().__init__("gather")
        self.norm_weight = nn.Parameter(torch.zeros(D))

    def forward(self, x: torch.Tensor) -> Any:
        h = x.reshape(-1, D)
        ids, weights = self.gate(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm_weight)
        return self.result(x, h, ids, weights)


class Behind(nn.Module):
    """A block behind another layer: exporters read sizes of the model's input, not of the block's."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.layer, self.moe = nn.Linear(D, D, bias=False), Block(style)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.layer(x)
        return h + self.moe(h)
