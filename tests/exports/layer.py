"""A hand-written KDA layer with every choice that authors of such layers make, for the makers.

The recurrence comes in many spellings, each of which exports to different operators; all compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Core = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, g, beta, state) -> (output, state)
Step = Core


@dataclass(frozen=True)
class Choice:
    """One way to write the layer. H query heads and HV value heads of widths K and V, hidden size D."""

    D: int = 24
    H: int = 3
    HV: int = 3
    K: int = 8
    V: int = 8
    core: str = "unrolled"  # unrolled | stacked | scan | while | chunk | neumann
    step: str = "outer"  # outer | einsum | matmul | householder | vfirst
    conv: str = "three"  # three | packed | none
    conv_state: bool = False  # [B, channels, width - 1] in and out
    conv_bias: bool = False
    conv_silu: bool = True
    l2: str = "rsqrt"  # rsqrt | div | normalize | none
    decay: str = "softplus"  # softplus | sigmoid | input
    beta_scale: float = 1.0
    norm: str = "plain"  # plain | native | none
    gate: str = "sigmoid"  # sigmoid | silu | none
    state: str = "io"  # io: in and out | out | none
    chunk: int = 16


# ---- one token: S [B, HV, K, V] (or [B, HV, V, K]), q, k, g [B, HV, K], v [B, HV, V], b [B, HV]


def step_outer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state * torch.exp(g).unsqueeze(-1)
    delta = (v - (state * k.unsqueeze(-1)).sum(-2)) * b.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


def step_einsum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.einsum("bhk,bhkv->bhkv", g.exp(), state)
    seen = torch.einsum("bhk,bhkv->bhv", k, state)
    state = state + torch.einsum("bhk,bhv->bhkv", k, b[..., None] * (v - seen))
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def step_matmul(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = g.exp()[..., None] * state
    delta = b[..., None, None] * (v[..., None, :] - k[..., None, :] @ state)
    state = state + k[..., :, None] @ delta
    return (q[..., None, :] @ state).squeeze(-2), state


def step_householder(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    erase = torch.eye(k.shape[-1]) - b[..., None, None] * (k[..., :, None] * k[..., None, :])
    state = erase @ (g.exp()[..., None] * state) + (b[..., None] * k)[..., :, None] * v[..., None, :]
    return (state.transpose(-1, -2) @ q[..., None])[..., 0], state


def step_vfirst(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state * g.exp()[..., None, :]
    delta = (v - torch.einsum("bhvk,bhk->bhv", state, k)) * b[..., None]
    state = state + delta[..., :, None] * k[..., None, :]
    return torch.einsum("bhvk,bhk->bhv", state, q), state


STEPS: dict[str, Step] = {
    "outer": step_outer,
    "einsum": step_einsum,
    "matmul": step_matmul,
    "householder": step_householder,
    "vfirst": step_vfirst,
}


# ---- whole sequences: q, k, g [B, T, HV, K], v [B, T, HV, V], b [B, T, HV]


def unrolled(step: Step) -> Core:
    def core(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(v)
        for t in range(q.shape[1]):
            out[:, t], state = step(q[:, t], k[:, t], v[:, t], g[:, t], b[:, t], state)
        return out, state

    return core


def stacked(step: Step) -> Core:
    def core(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for parts in zip(*(t.unbind(1) for t in (q, k, v, g, b)), strict=True):
            row, state = step(*parts, state)
            rows.append(row)
        return torch.stack(rows, 1), state

    return core


def scanned(step: Step) -> Core:
    def core(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        from torch._higher_order_ops.scan import scan

        def body(carry: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            row, carry = step(*parts, carry)
            return carry.clone(), row.clone()

        time_first = tuple(t.transpose(0, 1).contiguous() for t in (q, k, v, g, b))
        state, out = scan(body, state, time_first, dim=0)
        return out.transpose(0, 1), state

    return core


def while_looped(step: Step) -> Core:
    def core(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        from torch._higher_order_ops.while_loop import while_loop

        q, k, v, g, b, state = (t.contiguous().clone() for t in (q, k, v, g, b, state))
        total = q.shape[1]

        def more(t: Tensor, state: Tensor, out: Tensor) -> Tensor:
            return t < total

        def body(t: Tensor, state: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            at = t.reshape(1)
            row, state = step(*(x.index_select(1, at).squeeze(1) for x in (q, k, v, g, b)), state)
            return t + 1, state.contiguous(), torch.index_copy(out, 1, at, row.unsqueeze(1)).contiguous()

        _, state, out = while_loop(more, body, (torch.zeros((), dtype=torch.int64), state, torch.zeros_like(v)))
        return out, state

    return core


def _chunks(size: int, *tensors: Tensor) -> list[Tensor]:
    """[B, T, H, *] -> [B, H, T / size, size, *]."""
    return [t.transpose(1, 2).unflatten(2, (-1, size)) for t in tensors]


def chunked(size: int) -> Core:
    """Row by row forward substitution, as the plain PyTorch references write it."""

    def core(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, b = _chunks(size, q, k, v, g, b)
        total = g.cumsum(-2)
        later = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)
        weights = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(later.unsqueeze(-1), float("-inf")).exp()
        lower = -((k * b.unsqueeze(-1)).unsqueeze(-2) * k.unsqueeze(-3) * weights).sum(-1).tril(-1)
        for row in range(1, size):
            old = lower[..., row, :row].clone()
            lower[..., row, :row] = old + (old.unsqueeze(-1) * lower[..., :row, :row].clone()).sum(-2)
        inverse = (lower + torch.eye(size)) * b.unsqueeze(-2)
        return _pass(q, k, v, total, weights, inverse, state)

    return core


def neumann(size: int) -> Core:
    """The inverse of the unit triangle as a product of powers: (I + A)^-1 = (I - A)(I + A^2)(I + A^4)..."""

    def core(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, b = _chunks(size, q, k, v, g, b)
        total = g.cumsum(-2)
        weights = (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp(max=0.0).exp()
        power = -torch.einsum("bhnik,bhnjk,bhnijk->bhnij", b.unsqueeze(-1) * k, k, weights).tril(-1)
        inverse, width = torch.eye(size) + power, 2
        while width < size:
            power = power @ power
            inverse = inverse @ (torch.eye(size) + power)
            width *= 2
        return _pass(q, k, v, total, weights, inverse * b.unsqueeze(-2), state)

    return core


def _pass(
    q: Tensor, k: Tensor, v: Tensor, total: Tensor, weights: Tensor, inverse: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The pass over the chunks once the inverse is there."""
    written, erased = inverse @ v, inverse @ (k * total.exp())
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3) * weights).sum(-1).tril()
    rows = []
    for n in range(q.shape[2]):
        fresh = written[:, :, n] - erased[:, :, n] @ state
        rows.append((q[:, :, n] * total[:, :, n].exp()) @ state + scores[:, :, n] @ fresh)
        last = total[:, :, n, -1:]
        state = (
            state * last.exp().transpose(-1, -2)
            + (k[:, :, n] * (last - total[:, :, n]).exp()).transpose(-1, -2) @ fresh
        )
    return torch.stack(rows, 2).flatten(2, 3).transpose(1, 2), state


class ShortConv(nn.Module):
    """Causal depthwise convolution of width 4 over [B, T, C], with or without the last three inputs carried."""

    def __init__(self, channels: int, bias: bool, silu: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 4, groups=channels, padding=3, bias=bias)
        self.silu = silu

    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = x.transpose(1, 2)
        if past is None:
            y, kept = self.conv(x)[..., : x.shape[-1]], None
        else:
            x = torch.cat([past, x], -1)
            y, kept = F.conv1d(x, self.conv.weight, self.conv.bias, groups=x.shape[1]), x[..., -3:]
        return (F.silu(y) if self.silu else y).transpose(1, 2), kept


class Layer(nn.Module):
    """x [B, T, D] (then log decay [B, T, HV*K], state, conv states, as chosen) -> y [B, T, D], state, conv states."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        c = self.choice = choice
        keys, values = c.H * c.K, c.HV * c.V
        self.q, self.k, self.v = (nn.Linear(c.D, n, bias=False) for n in (keys, keys, values))
        if c.conv == "packed":
            self.conv = ShortConv(2 * keys + values, c.conv_bias, c.conv_silu)
        elif c.conv == "three":
            self.convs = nn.ModuleList([ShortConv(n, c.conv_bias, c.conv_silu) for n in (keys, keys, values)])
        if c.decay != "input":
            self.decay_down, self.decay_up = nn.Linear(c.D, c.K, bias=False), nn.Linear(c.K, c.HV * c.K, bias=False)
            self.A_log, self.dt_bias = nn.Parameter(torch.zeros(c.HV)), nn.Parameter(torch.zeros(c.HV * c.K))
        self.b = nn.Linear(c.D, c.HV, bias=False)
        if c.gate != "none":
            self.gate_down, self.gate_up = nn.Linear(c.D, c.V, bias=False), nn.Linear(c.V, values)
        self.norm_weight = nn.Parameter(torch.ones(c.V)) if c.norm != "none" else None
        self.out = nn.Linear(values, c.D, bias=False)

    def extra_names(self) -> list[str]:
        """Names of the arguments after x."""
        c = self.choice
        convs = ["conv"] if c.conv == "packed" else ["conv_q", "conv_k", "conv_v"]
        optional = {"log_decay": c.decay == "input", "past_state": c.state == "io"}
        optional |= {f"past_{n}": c.conv_state for n in convs}
        return [name for name, given in optional.items() if given]

    def output_names(self) -> list[str]:
        """Names of the outputs."""
        c = self.choice
        convs = [n.replace("past", "present") for n in self.extra_names() if n.startswith("past_conv")]
        return ["y"] + ["present_state"] * (c.state != "none") + convs

    def example(self, tokens: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
        """Random arguments."""
        c, rng = self.choice, torch.Generator().manual_seed(seed + 31 * tokens + batch)
        keys, values = c.H * c.K, c.HV * c.V
        channels = {"past_conv_q": keys, "past_conv_k": keys, "past_conv_v": values, "past_conv": 2 * keys + values}
        made = [torch.randn(batch, tokens, c.D, generator=rng)]
        for name in self.extra_names():
            if name == "log_decay":
                made.append(-torch.rand(batch, tokens, c.HV * c.K, generator=rng))
            elif name == "past_state":
                shape = (c.V, c.K) if c.step == "vfirst" else (c.K, c.V)
                made.append(0.5 * torch.randn(batch, c.HV, *shape, generator=rng))
            else:
                made.append(torch.randn(batch, channels[name], 3, generator=rng))
        return tuple(made)

    def normalised(self, x: Tensor) -> Tensor:
        kind = self.choice.l2
        if kind == "normalize":
            return F.normalize(x, dim=-1, eps=1e-6)
        if kind == "div":
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) if kind == "rsqrt" else x

    def log_decay(self, x: Tensor) -> Tensor:
        c = self.choice
        raw = (self.decay_up(self.decay_down(x)) + self.dt_bias).unflatten(-1, (c.HV, c.K))
        rate = self.A_log.exp().unsqueeze(-1)
        return -5.0 * torch.sigmoid(rate * raw) if c.decay == "sigmoid" else -rate * F.softplus(raw)

    def core(self) -> Core:
        c = self.choice
        if c.core in ("chunk", "neumann"):
            return (chunked if c.core == "chunk" else neumann)(c.chunk)
        wrap = {"unrolled": unrolled, "stacked": stacked, "scan": scanned, "while": while_looped}[c.core]
        return wrap(STEPS[c.step])

    def forward(self, x: Tensor, *extra: Tensor) -> tuple[Tensor, ...]:
        c = self.choice
        given = dict(zip(self.extra_names(), extra, strict=True))
        batch, tokens = x.shape[:2]
        parts, kept = [self.q(x), self.k(x), self.v(x)], []
        if c.conv == "packed":
            mixed, past = self.conv(torch.cat(parts, -1), given.get("past_conv"))
            parts, kept = list(mixed.split([c.H * c.K, c.H * c.K, c.HV * c.V], -1)), [past]
        elif c.conv == "three":
            pairs = [m(p, given.get(f"past_conv_{n}")) for m, p, n in zip(self.convs, parts, "qkv", strict=True)]
            parts, kept = [p for p, _ in pairs], [s for _, s in pairs]
        q, k = (p.reshape(batch, tokens, c.H, c.K) for p in parts[:2])
        v = parts[2].reshape(batch, tokens, c.HV, c.V)
        q, k = self.normalised(q) * c.K**-0.5, self.normalised(k)
        if c.HV != c.H:
            q, k = (t.repeat_interleave(c.HV // c.H, dim=2) for t in (q, k))
        g = given["log_decay"].unflatten(-1, (c.HV, c.K)) if c.decay == "input" else self.log_decay(x)
        b = self.b(x).sigmoid() * c.beta_scale if c.beta_scale != 1.0 else self.b(x).sigmoid()
        shape = (c.V, c.K) if c.step == "vfirst" else (c.K, c.V)
        start = given.get("past_state", None)
        state = x.new_zeros(batch, c.HV, *shape) if start is None else start
        o, state = self.core()(q, k, v, g, b, state)
        if self.norm_weight is not None and c.norm == "native":
            o = F.rms_norm(o, (c.V,), self.norm_weight, 1e-5)
        elif self.norm_weight is not None:
            o = self.norm_weight * (o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5))
        if c.gate != "none":
            gate = self.gate_up(self.gate_down(x)).unflatten(-1, (c.HV, c.V))
            o = o * (F.silu(gate) if c.gate == "silu" else gate.sigmoid())
        y = self.out(o.flatten(2))
        states = (state,) if c.state != "none" else ()
        return (y, *states, *(s for s in kept if s is not None))
