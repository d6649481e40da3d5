"""Models that use ONNX's own ``LinearAttention`` and ``CausalConvWithState`` (opset 27), written as ONNX text.

Usage: ``python -m exports.make_onnx``. Needs no torch.
``update_rule`` and the decay's shape say which of them is KDA.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from .pack import pack

D, H, K, V = 24, 3, 8, 8
KEYS, VALUES = H * K, H * V

GATE = """
    down = MatMul(x, w_down)
    up = MatMul(down, w_up)
    biased = Add(up, dt_bias)
    by_head = Reshape(biased, heads_k)
    scaled = Mul(by_head, rate)
    sig = Sigmoid(scaled)
    decay4 = Mul(sig, bound)
    decay = Reshape(decay4, flat)
    b_raw = MatMul(x, w_b)
    beta = Sigmoid(b_raw)
"""
SOFTPLUS_GATE = GATE.replace(
    "scaled = Mul(by_head, rate)\n    sig = Sigmoid(scaled)\n    decay4 = Mul(sig, bound)",
    "soft = Softplus(by_head)\n    grown = Mul(soft, rate)\n    decay4 = Neg(grown)",
)
NORM = """
    o4 = Reshape(o, heads_v)
    normed = RMSNormalization <axis = -1, epsilon = 1e-5> (o4, w_norm)
    gate_raw = MatMul(x, w_gate)
    gate4 = Reshape(gate_raw, heads_v)
    opened = Sigmoid(gate4)
    gated = Mul(normed, opened)
    merged = Reshape(gated, flat)
    y = MatMul(merged, w_out)
"""


def three_convs(which: str = "qkv") -> str:
    return "".join(
        f"""
    {n}_raw = MatMul(x, w_{n})
    {n}_t = Transpose <perm = [0, 2, 1]> ({n}_raw)
    {n}_c, present_{n} = CausalConvWithState <activation = "silu"> ({n}_t, c_{n}, , past_{n})
    {n}_v = Transpose <perm = [0, 2, 1]> ({n}_c)"""
        for n in which
    )


def l2(name: str, source: str) -> str:
    return f"""
    {name}4 = Reshape({source}, heads_k)
    {name}sq = Mul({name}4, {name}4)
    {name}sum = ReduceSum <keepdims = 1> ({name}sq, last)
    {name}eps = Add({name}sum, tiny)
    {name}len = Sqrt({name}eps)
    {name}unit = Div({name}4, {name}len)
    {name} = Reshape({name}unit, flat)
"""


def la(extra: str = "", state: str = "past_state", out: str = "present_state", decay: str = "decay") -> str:
    heads = f"q_num_heads = {H}, kv_num_heads = {H}" if "num_heads" not in extra else ""
    attributes = ", ".join(part for part in (heads, extra) if part)
    return f"\n    o, {out} = LinearAttention <{attributes}> (q, k, v, {state}, {decay}, beta)\n"


STATES = f"float[B,{H},{K},{V}] past_state"
CONVS = ", ".join(f"float[B,{KEYS if n != 'v' else VALUES},3] past_{n}" for n in "qkv")
QKV = f"float[B,T,{KEYS}] q, float[B,T,{KEYS}] k, float[B,T,{VALUES}] v"
CONVS_OUT = CONVS.replace("past", "present")
MODELS: dict[str, dict[str, Any]] = {
    "la27_prompt": dict(
        inputs=f"float[B,T,{D}] x, {STATES}, {CONVS}",
        outputs=f"float[B,T,{D}] y, {STATES.replace('past', 'present')}, {CONVS_OUT}",
        body=three_convs()
        + l2("q", "q_v")
        + l2("k", "k_v")
        + "    v = Identity(v_v)\n"
        + GATE
        + la('update_rule = "gated_delta"')
        + NORM,
        made="three CausalConvWithState, LinearAttention with states, gated norm",
        kda=1,
    ),
    "la27_step": dict(
        inputs=f"float[B,1,{D}] x, {STATES}",
        outputs=f"float[B,1,{D}] y, {STATES.replace('past', 'present')}",
        body="""
    q_raw = MatMul(x, w_q)
    k_raw = MatMul(x, w_k)
    v = MatMul(x, w_v)"""
        + l2("qn", "q_raw")
        + l2("k", "k_raw")
        + "    q = Mul(qn, half)\n"
        + SOFTPLUS_GATE
        + la("scale = 1.0")
        + NORM,
        made="one token, no convolution, softplus gate, explicit scale",
        kda=1,
    ),
    "la27_bare": dict(
        inputs=f"{QKV}, float[B,T,{KEYS}] decay, float[B,T,{H}] beta",
        outputs=f"float[B,T,{VALUES}] o",
        body=la("scale = 0.25", state="", out="unused"),
        made="LinearAttention alone, everything a graph input, no state",
        kda=1,
    ),
    "la27_gated": dict(
        inputs=f"float[B,T,{KEYS}] q, float[B,T,{KEYS}] k, float[B,T,{VALUES}] v, float[B,T,{KEYS}] decay",
        outputs=f"float[B,T,{VALUES}] o",
        body=la('update_rule = "gated"', state="", out="unused").replace(", beta)", ")"),
        made="LinearAttention with rule 'gated': not KDA",
        kda=0,
    ),
    "la27_delta": dict(
        inputs=f"float[B,T,{KEYS}] q, float[B,T,{KEYS}] k, float[B,T,{VALUES}] v, float[B,T,{H}] beta",
        outputs=f"float[B,T,{VALUES}] o",
        body=la('update_rule = "delta"', state="", out="unused", decay=""),
        made="LinearAttention with rule 'delta': no decay, not KDA",
        kda=0,
    ),
}


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(27)

    def draw(*shape: int) -> np.ndarray:
        return (np.round(16 * 0.35 * rng.standard_normal(shape)) / 16).astype(np.float32)

    return {
        "w_q": draw(D, KEYS), "w_k": draw(D, KEYS), "w_v": draw(D, VALUES), "w_down": draw(D, K), "w_up": draw(K, KEYS),
        "w_b": draw(D, H), "w_gate": draw(D, VALUES), "w_out": draw(VALUES, D), "dt_bias": draw(KEYS),
        "c_q": draw(KEYS, 1, 4), "c_k": draw(KEYS, 1, 4), "c_v": draw(VALUES, 1, 4),
        "w_norm": 1 + 0.2 * draw(V),
        "rate": np.exp(rng.random((H, 1)) * 0.8).astype(np.float32),
        "bound": np.array(-5.0, np.float32), "tiny": np.array(1e-6, np.float32), "half": np.array(K**-0.5, np.float32),
        "last": np.array([-1], np.int64), "flat": np.array([0, 0, -1], np.int64),
        "heads_k": np.array([0, 0, H, K], np.int64), "heads_v": np.array([0, 0, H, V], np.int64),
    }  # fmt: skip


def main() -> None:
    """Write them all."""
    store = weights()
    for name, entry in MODELS.items():
        header = f'<ir_version: 13, opset_import: ["" : 27]>\n{name} ({entry["inputs"]}) => ({entry["outputs"]}) {{\n'
        model = parser.parse_model(header + entry["body"] + "}")
        used = {i for node in model.graph.node for i in node.input}
        model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in store.items() if n in used)
        onnx.checker.check_model(model, full_check=True)
        along = (
            [{"B": 1, "T": 1}, {"B": 2, "T": 5}, {"B": 1, "T": 70}]
            if ",T," in entry["inputs"]
            else [{"B": 1}, {"B": 3}]
        )
        form = "linear-attention" if entry["kda"] else ""
        pack(model, name, made=entry["made"], kda=entry["kda"], form=form, bindings=along, tags=("onnx27",))


if __name__ == "__main__":
    main()
