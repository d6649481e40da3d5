"""A language model of KDA and MLA layers with random weights, already fused: for generate.py, tests and benchmarks.

The layers are those of a Ling 3 model: RMS norm, projections, one deltafuse::KimiDeltaAttention node (convolution, L2
norm, gates, recurrence, gated norm inside) or one deltafuse::LatentAttention node (norm of the latent, rotation, cache,
attention, gate), output projection, then a SwiGLU block. What it says means nothing, but how long it takes is as with
trained weights of this size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from deltafuse.custom_ops.kda.body import build_function
from deltafuse.custom_ops.kda.call import attach, make_node
from deltafuse.custom_ops.kda.spec import KdaConfig
from deltafuse.custom_ops.mla.body import build_function as build_attention
from deltafuse.custom_ops.mla.call import attach as attach_attention
from deltafuse.custom_ops.mla.call import make_node as make_attention
from deltafuse.custom_ops.mla.spec import MlaConfig

OPSET = 20
FLOAT = ir.DataType.FLOAT
States: TypeAlias = list[tuple[ir.Value, ir.Value]]  # as they come in, and as they go out


@dataclass(frozen=True)
class ModelSize:
    """How large the model is. The default speaks bytes and runs in a millisecond on a CPU."""

    layers: int = 2
    hidden: int = 64
    heads: int = 2
    head_dim: int = 64
    rank: int = 16  # of the two gates' projections
    inner: int = 128  # of the SwiGLU block
    vocabulary: int = 256
    dtype: str = "FLOAT"  # or FLOAT16, BFLOAT16; states are float32, convolution states and caches as the model
    attention: dict[int, str] = field(default_factory=dict)  # layers of MLA, and what they cache: latent or expanded
    nope_dim: int = 32  # of their heads' keys, beside the rotated part
    rope_dim: int = 16
    value_dim: int = 32
    latent: int = 32  # numbers that stand for a token's keys and values
    capacity: int = 512  # tokens that a cache has room for

    def attention_config(self, cache: str) -> MlaConfig:
        """The call of a layer of MLA, its cache of one size for good, so that steps can be replayed as CUDA graphs."""
        return MlaConfig(
            num_heads=self.heads,
            qk_nope_head_dim=self.nope_dim,
            qk_rope_head_dim=self.rope_dim,
            v_head_dim=self.value_dim,
            kv_lora_rank=self.latent,
            scale=(self.nope_dim + self.rope_dim) ** -0.5,
            rope="half",
            gate_activation="sigmoid",
            cache=cache,
            has_kv_norm=True,
            has_position_ids=True,
            cos_width=self.rope_dim,
            has_past=True,
            static_cache=True,
            has_present=True,
        )

    def config(self) -> KdaConfig:
        """The call of each layer."""
        return KdaConfig(
            num_heads=self.heads,
            num_v_heads=self.heads,
            head_dim=self.head_dim,
            head_v_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            qk_l2norm="sum",
            gate_activation="sigmoid",
            beta_activation="sigmoid",
            conv_activation="silu",
            output_gate="sigmoid",
            conv_width=4,
            conv_state_width=3,
            has_dt_bias=True,
            has_conv_state=True,
            has_initial_state=True,
            has_norm=True,
            has_present_conv_state=True,
            has_final_state=True,
        )


#: KDA and both kinds of MLA caches; the default of generate.py.
HYBRID = ModelSize(layers=4, attention={1: "latent", 3: "expanded"})
#: Layers of Ling-3.0's width, without its experts.
LING = ModelSize(layers=8, hidden=2560, heads=32, head_dim=128, rank=128, inner=2048, vocabulary=4096, dtype="FLOAT16")


class _Builder:
    def __init__(self, size: ModelSize, seed: int) -> None:
        self.size, self.rng = size, np.random.default_rng(seed)
        self.dtype = ir.DataType[size.dtype]
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.places: dict[str, ir.Value] = {}
        self.count = 0

    def op(self, op_type: str, *inputs: ir.Value, name: str = "", **attributes: object) -> ir.Value:
        self.count += 1
        node = ir.node(op_type, inputs, attributes, num_outputs=1, name=f"{op_type}_{self.count}")  # type: ignore[arg-type]
        node.outputs[0].name = name or f"v{self.count}"
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
        self.count += 1
        kind = dtype or ir.DataType.from_numpy(array.dtype)
        value = ir.Value(name=f"w{self.count}", type=ir.TensorType(kind), shape=ir.Shape(array.shape))
        value.const_value = ir.tensor(array.astype(kind.numpy()), name=value.name)
        self.weights.append(value)
        return value

    def linear(self, x: ir.Value, rows: int, columns: int, gain: float = 1.0) -> ir.Value:
        weight = self.rng.standard_normal((rows, columns), np.float32) * (gain / rows**0.5)
        return self.op("MatMul", x, self.constant(weight, self.dtype))

    def norm(self, x: ir.Value) -> ir.Value:
        wide = x if self.dtype == FLOAT else self.op("Cast", x, to=int(FLOAT))
        square = self.op("Pow", wide, self.constant(np.array(2.0, np.float32)))
        mean = self.op("ReduceMean", square, self.constant(np.array([-1])), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.constant(np.array(1e-6, np.float32))))
        even = self.op("Div", wide, root)
        if self.dtype != FLOAT:
            even = self.op("Cast", even, to=int(self.dtype))
        return self.op("Mul", even, self.constant(np.ones(self.size.hidden, np.float32), self.dtype))

    def state(self, number: int, name: str, kind: ir.DataType, *shape: str | int) -> ir.Value:
        """A layer's state as it comes in."""
        return ir.Value(name=f"past.{number}.{name}", type=ir.TensorType(kind), shape=ir.Shape(shape))

    def delta_attention(self, y: ir.Value, number: int) -> tuple[ir.Value, States]:
        size, config = self.size, self.size.config()
        hidden, width, rank = size.hidden, size.heads * size.head_dim, size.rank
        operands = {name: self.linear(y, hidden, width) for name in ("q", "k", "v")}
        operands["g"] = self.linear(self.linear(y, hidden, rank), rank, width)
        operands["gate"] = self.linear(self.linear(y, hidden, rank), rank, width)
        operands["beta"] = self.linear(y, hidden, size.heads)
        uniform = self.rng.uniform
        operands["A_log"] = self.constant(uniform(-1, 1, size.heads).astype(np.float32))
        operands["dt_bias"] = self.constant(uniform(-1, 1, width).astype(np.float32))
        operands["conv_weight"] = self.constant(uniform(-0.5, 0.5, (3 * width, 1, 4)).astype(np.float32))
        operands["norm_weight"] = self.constant(np.ones(size.head_dim, np.float32))
        conv = self.state(number, "conv", self.dtype, "batch", 3 * width, 3)
        state = self.state(number, "state", FLOAT, "batch", size.heads, size.head_dim, size.head_dim)
        operands["conv_state"], operands["initial_state"] = conv, state
        node = make_node(config, operands, self.dtype, FLOAT, name=f"kda_{number}")
        return self.call(node, number, [conv, state]), list(zip([conv, state], node.outputs[1:], strict=True))

    def latent_attention(self, y: ir.Value, number: int) -> tuple[ir.Value, States]:
        size = self.size
        hidden, heads, rope, kind = size.hidden, size.heads, size.rope_dim, size.attention[number]
        operands = {
            "q": self.linear(y, hidden, heads * (size.nope_dim + rope)),
            "latent": self.linear(y, hidden, size.latent),
            "k_rope": self.linear(y, hidden, rope),
            "gate": self.linear(y, hidden, heads),
            **self.positions(),
        }
        spread = self.rng.standard_normal((size.latent, heads * (size.nope_dim + size.value_dim)), np.float32)
        operands["kv_b_weight"] = self.constant(spread / size.latent**0.5, self.dtype)
        operands["kv_norm_weight"] = self.constant(np.ones(size.latent, np.float32))
        shapes: dict[str, tuple[str | int, ...]] = {
            "latent": ("batch", size.capacity, size.latent),
            "k_rope": ("batch", size.capacity, rope),
        }
        if kind == "expanded":
            shapes = {
                "key": ("batch", heads, size.capacity, size.nope_dim + rope),
                "value": ("batch", heads, size.capacity, size.value_dim),
            }
        past = [self.state(number, name, self.dtype, *shape) for name, shape in shapes.items()]
        operands |= {f"past_{name}": value for name, value in zip(shapes, past, strict=True)}
        node = make_attention(size.attention_config(kind), operands, self.dtype, name=f"mla_{number}")
        made = [output for output in node.outputs[1:] if output.name != ""]
        return self.call(node, number, past), list(zip(past, made, strict=True))

    def positions(self) -> dict[str, ir.Value]:
        """What says where the new tokens stand: inputs and tables of rotations, one for all layers."""
        if not self.places:
            angles = np.outer(np.arange(self.size.capacity), 1e4 ** -np.linspace(0, 1, self.size.rope_dim // 2, False))
            for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                self.places[name] = self.constant(np.tile(table, 2).astype(np.float32))
            for name, shape in (("position_ids", ["batch", "tokens"]), ("cache_lengths", ["batch"])):
                self.places[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(shape))
        return self.places

    def call(self, node: ir.Node, number: int, past: list[ir.Value]) -> ir.Value:
        """Put the call of a fused op in, its outputs named as its states."""
        made = [output for output in node.outputs[1:] if output.name != ""]
        node.outputs[0].name = f"o_{number}"
        for given, output in zip(past, made, strict=True):
            output.name = str(given.name).replace("past", "present")
        self.nodes.append(node)
        return node.outputs[0]

    def layer(self, x: ir.Value, number: int) -> tuple[ir.Value, States]:
        size, hidden = self.size, self.size.hidden
        block: Callable[[ir.Value, int], tuple[ir.Value, States]]
        block = self.latent_attention if number in size.attention else self.delta_attention
        o, states = block(self.norm(x), number)
        width = size.heads * (size.value_dim if number in size.attention else size.head_dim)
        x = self.op("Add", x, self.linear(o, width, hidden, 0.5))
        y = self.norm(x)
        gate = self.linear(y, hidden, size.inner)
        inner = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), self.linear(y, hidden, size.inner))
        return self.op("Add", x, self.linear(inner, size.inner, hidden, 0.5)), states


def build(size: ModelSize | None = None, seed: int = 0) -> ir.Model:
    """The model.

    Its inputs are ``input_ids`` int64 [batch, tokens]; for each layer of KDA ``past.N.conv`` [batch, 3 H K, 3] and
    ``past.N.state`` float32 [batch, H, K, K]; for each of MLA ``past.N.latent`` [batch, capacity, R] and
    ``past.N.k_rope``, or ``past.N.key`` [batch, H, capacity, D] and ``past.N.value``; and with any of MLA
    ``position_ids`` int64 [batch, tokens] and ``cache_lengths`` int64 [batch]: how many tokens the caches hold. Its
    outputs are ``logits`` float32 [batch, tokens, vocabulary] and the states that continue them, ``present.N.conv`` and
    so on.
    """
    size = size or ModelSize()
    b = _Builder(size, seed)
    ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "tokens"]))
    table = b.constant(b.rng.standard_normal((size.vocabulary, size.hidden), np.float32), b.dtype)
    x = b.op("Gather", table, ids)
    x.type, x.shape = ir.TensorType(b.dtype), ir.Shape(["batch", "tokens", size.hidden])
    states: States = []
    for number in range(size.layers):
        x, more = b.layer(x, number)
        states += more
    logits = b.linear(b.norm(x), size.hidden, size.vocabulary)
    logits = b.op("Cast", logits, to=int(FLOAT), name="logits")
    logits.type, logits.shape = ir.TensorType(FLOAT), ir.Shape(["batch", "tokens", size.vocabulary])
    inputs = [ids, *(value for value in b.places.values() if not value.const_value), *(given for given, _ in states)]
    outputs = [logits, *(made for _, made in states)]
    graph = ir.Graph(
        inputs, outputs, nodes=b.nodes, initializers=b.weights, opset_imports={"": OPSET}, name="small_model"
    )
    model = ir.Model(graph, ir_version=10)
    if len(size.attention) < size.layers:
        attach(model, build_function(size.config(), OPSET, b.dtype, FLOAT))
    for kind in sorted(set(size.attention.values())):
        attach_attention(model, build_attention(size.attention_config(kind), OPSET, b.dtype))
    return model
