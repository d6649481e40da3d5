"""Loops over experts. Needs torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .moe_parts import D, E, K, Styles


class LoopStyles(Styles):
    """Ways to write the experts: ``(h, ids, weights) -> y``."""

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

    def _where_none(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Mixtral's loop in transformers 4: rows taken behind an axis of one entry."""
        out, mask = torch.zeros_like(h), F.one_hot(ids, E).permute(2, 1, 0)
        for e in range(E):
            slot, token = torch.where(mask[e])
            rows = h[None, token].reshape(-1, D)
            out.index_add_(0, token, self.experts[e](rows) * w[token, slot, None])
        return out

    def _where_inside(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The weight before the down projection (DeepSeek-V4's inference)."""
        out = torch.zeros_like(h)
        for e in range(E):
            token, slot = torch.where(ids == e)
            out[token] += self.experts[e](h[token], w[token, slot, None])
        return out

    def _scatter_add(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Each result added at its token's channels."""
        out = torch.zeros_like(h)
        for e in range(E):
            token, slot = torch.nonzero(ids == e, as_tuple=True)
            made = self.experts[e](h.index_select(0, token)) * w[token, slot].unsqueeze(-1)
            out = out.scatter_add(0, token.unsqueeze(-1).expand(-1, D), made)
        return out

    def _any_choice(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The tokens that chose an expert at all, and its column of weights over all experts."""
        full, out = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter(1, ids, w), torch.zeros_like(h)
        for e in range(E):
            token = (ids == e).any(-1).nonzero().squeeze(-1)
            out = out.index_add(0, token, self.experts[e](h[token]) * full[token, e, None])
        return out

    def _where_column(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The tokens whose weight for the expert is more than 0."""
        full, out = torch.zeros(h.shape[0], E, dtype=w.dtype).scatter(1, ids, w), torch.zeros_like(h)
        for e in range(E):
            (token,) = torch.where(full[:, e] > 0)
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

    def _mask_pairs(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The same as DeepSeek writes it, with a mask for an index."""
        flat, rows = ids.reshape(-1), h.repeat_interleave(K, dim=0)
        out = torch.empty_like(rows)
        for e in range(E):
            out[flat == e] = self.experts[e](rows[flat == e])
        return (out.view(*ids.shape, D) * w.unsqueeze(-1)).sum(1)

    def _dense_pairs(self, h: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """As the loop above, with a mask instead of an index: static shapes."""
        flat, rows = ids.reshape(-1), h.repeat_interleave(K, dim=0)
        out = torch.zeros_like(rows)
        for e in range(E):
            out = torch.where((flat == e).unsqueeze(-1), self.experts[e](rows), out)
        return (out.view(*ids.shape, D) * w.unsqueeze(-1)).sum(1)

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
