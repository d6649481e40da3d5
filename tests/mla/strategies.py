"""Any call of the op, small: configurations, sizes and what is drawn, for hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from deltafuse.custom_ops.mla.draw import CASES, DTYPES, draw_inputs
from deltafuse.custom_ops.mla.spec import CACHE_TYPES, ROPES, MlaConfig
from hypothesis import strategies as st
from numpy.typing import NDArray


@dataclass(frozen=True)
class Drawn:
    """A configuration and how its inputs are drawn."""

    config: MlaConfig
    batch: int
    tokens: int
    past: int
    case: str
    dtype: str
    seed: int
    how: dict[str, Any]

    def inputs(self) -> dict[str, NDArray[Any]]:
        rng = np.random.default_rng(self.seed)
        return draw_inputs(self.config, self.batch, self.tokens, self.past, rng, self.case, self.dtype, **self.how)


@st.composite
def configs(draw: st.DrawFn) -> MlaConfig:
    flag = st.booleans()
    rope = draw(st.sampled_from(ROPES))
    width = draw(st.integers(0, 12))
    width = width if rope == "none" else 2 * (width // 2) or 2
    kind = draw(st.sampled_from(["none", "latent", "latent", "paged", "expanded"]))
    cache = "latent" if kind == "paged" else kind
    past = kind == "paged" or (cache != "none" and draw(flag))
    packed_cache = cache == "latent" and width > 0 and draw(flag)
    window = draw(st.sampled_from([0, 0, 1, 5, 64]))
    mask = draw(st.sampled_from(["", "", "number", "bool"]))
    nope = draw(st.integers(1, 40))
    codes = draw(st.sampled_from(CACHE_TYPES)) if past and cache == "latent" and not packed_cache else "same"
    return MlaConfig(
        draw(st.integers(1, 5)),
        nope,
        width,
        draw(st.integers(1, 70)),
        draw(st.integers(1, 140)),
        scale=(nope + width) ** -0.5,
        rope=rope,
        causal=int(window > 0 or draw(flag)),
        window=window,
        gate_activation=draw(st.sampled_from(["none", "sigmoid"])),
        cache=cache,
        cache_type=codes,
        packed_latent=width > 0 and draw(flag),
        packed_cache=packed_cache,
        has_kv_norm=draw(flag),
        has_position_ids=rope != "none" and draw(flag),
        cos_width=0 if rope == "none" else draw(st.sampled_from([width // 2, width])),
        has_q_scale=draw(flag),
        has_past=past,
        static_cache=past and (kind == "paged" or draw(flag)),
        paged=kind == "paged",
        has_mask=bool(mask),
        bool_mask=mask == "bool",
        has_present=cache != "none",
    )


@st.composite
def calls(draw: st.DrawFn, tokens: int = 80, fewest: int = 0) -> Drawn:
    config = draw(configs())
    count, room = draw(st.integers(fewest, tokens)), draw(st.integers(0, 90))
    dtype = draw(st.sampled_from(list(DTYPES)))
    how = {
        "mask_dtype": draw(st.sampled_from(["", "float32"])),
        "cos_dtype": draw(st.sampled_from(["float32", dtype])),
        "lengths_dtype": draw(st.sampled_from(["int32", "int64"])),
        "block_size": draw(st.sampled_from([1, 7, 16, 64])),
        "shared": draw(st.booleans()),
    }
    past = (room + (count if config.static_cache else 0)) if config.has_past else 0
    return Drawn(
        config,
        draw(st.integers(1, 4)),
        count,
        past,
        draw(st.sampled_from(CASES)),
        dtype,
        draw(st.integers(0, 1000)),
        how,
    )
