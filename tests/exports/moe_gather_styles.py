"""Weights gathered for each choice. Needs torch."""

from __future__ import annotations

import torch

from .moe_parts import D, E, H, K, Styles


class GatherStyles(Styles):
    """Ways to write the experts: ``(h, ids, weights) -> y``."""

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

    def _gather_biased(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate, up = (
            torch.einsum("nd,nkid->nki", h, self.stack(n)[ids]) + self.biases(n)[ids] for n in ("gate_proj", "up_proj")
        )
        out = torch.einsum("nki,nkdi->nkd", self.act(gate, up), self.stack("down_proj")[ids])
        return ((out + self.biases("down_proj")[ids]) * w[..., None]).sum(1)
