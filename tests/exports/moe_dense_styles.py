"""Every expert on every token. Needs torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .moe_parts import D, E, Styles


class DenseStyles(Styles):
    """Ways to write the experts: ``(h, ids, weights) -> y``."""

    def _dense(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        return sum(self.experts[e](h) * full[:, e : e + 1] for e in range(E))  # type: ignore[return-value]

    def _dense_select(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        out = torch.zeros_like(h)
        for e in range(E):
            out = out + full[:, e].unsqueeze(-1) * self.experts[e](h)
        return out

    def _dense_inside(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The weight before the down projection."""
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        return sum(self.experts[e](h, full[:, e : e + 1]) for e in range(E))  # type: ignore[return-value]

    def _stacked_inside(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        gate, up = (torch.einsum("nd,eid->eni", h, self.stack(n)) for n in ("gate_proj", "up_proj"))
        hidden = self.act(gate, up) * full.t().unsqueeze(-1)
        return torch.bmm(hidden, self.stack("down_proj").transpose(1, 2)).sum(0)

    def _dense_addcmul(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full, out = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w), torch.zeros_like(h)
        for e in range(E):
            out = torch.addcmul(out, self.experts[e](h), full[:, e, None])
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

    def _einsum_onehot(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.einsum("nke,nk->ne", F.one_hot(ids, E).to(w.dtype), w)
        every = torch.stack([expert(h) for expert in self.experts], dim=1)
        return torch.einsum("ned,ne->nd", every, full)

    def _zero_experts(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The last two experts give back what they are given (LongCat)."""
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        out = sum(self.experts[e](h) * full[:, e : e + 1] for e in range(E - 2))
        return out + h * full[:, E - 2 : E - 1] + h * full[:, E - 1 : E]

    def _zero_stacked(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        gate, up = (torch.einsum("nd,eid->eni", h, self.stack(n)[: E - 2]) for n in ("gate_proj", "up_proj"))
        y = torch.einsum("eni,edi,ne->nd", self.act(gate, up), self.stack("down_proj")[: E - 2], full[:, : E - 2])
        return y + h * full[:, E - 2 :].sum(-1, keepdim=True)

    def _stacked_biased(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter_(1, ids, w)
        rows = h.unsqueeze(0).expand(E, -1, -1)
        gate, up = (
            torch.bmm(rows, self.stack(n).transpose(1, 2)) + self.biases(n).unsqueeze(1)
            for n in ("gate_proj", "up_proj")
        )
        out = torch.bmm(self.act(gate, up), self.stack("down_proj").transpose(1, 2))
        return ((out + self.biases("down_proj").unsqueeze(1)) * full.t().unsqueeze(-1)).sum(0)
