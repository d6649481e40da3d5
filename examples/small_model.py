"""A language model of KDA layers with random weights, already fused: for generate.py, for tests and for benchmarks.

The layers are those of a Ling 3 model: RMS norm, projections, one deltafuse::KimiDeltaAttention node (convolution, L2
norm, gates, recurrence, gated norm inside), output projection, then a SwiGLU block. What it says means nothing, but how
long it takes is as with trained weights of this size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from deltafuse.custom_ops.kda.body import build_function
from deltafuse.custom_ops.kda.call import attach, make_node
from deltafuse.custom_ops.kda.spec import KdaConfig

OPSET = 20
FLOAT = ir.DataType.FLOAT


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
    dtype: str = "FLOAT"  # or FLOAT16, BFLOAT16; states are float32, convolution states as the model

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


#: Layers of Ling-3.0's width, without its experts.
LING = ModelSize(layers=8, hidden=2560, heads=32, head_dim=128, rank=128, inner=2048, vocabulary=4096, dtype="FLOAT16")


class _Builder:
    def __init__(self, size: ModelSize, seed: int) -> None:
        self.size, self.rng = size, np.random.default_rng(seed)
        self.dtype = ir.DataType[size.dtype]
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
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

    def layer(self, x: ir.Value, past: tuple[ir.Value, ir.Value], number: int) -> tuple[ir.Value, list[ir.Value]]:
        size, config = self.size, self.size.config()
        hidden, width, rank = size.hidden, size.heads * size.head_dim, size.rank
        y = self.norm(x)
        operands = {name: self.linear(y, hidden, width) for name in ("q", "k", "v")}
        operands["g"] = self.linear(self.linear(y, hidden, rank), rank, width)
        operands["gate"] = self.linear(self.linear(y, hidden, rank), rank, width)
        operands["beta"] = self.linear(y, hidden, size.heads)
        uniform = self.rng.uniform
        operands["A_log"] = self.constant(uniform(-1, 1, size.heads).astype(np.float32))
        operands["dt_bias"] = self.constant(uniform(-1, 1, width).astype(np.float32))
        operands["conv_weight"] = self.constant(uniform(-0.5, 0.5, (3 * width, 1, 4)).astype(np.float32))
        operands["norm_weight"] = self.constant(np.ones(size.head_dim, np.float32))
        operands["conv_state"], operands["initial_state"] = past
        node = make_node(config, operands, self.dtype, FLOAT, name=f"kda_{number}")
        o, conv, state = node.outputs
        o.name, conv.name, state.name = f"o_{number}", f"present.{number}.conv", f"present.{number}.state"
        self.nodes.append(node)
        x = self.op("Add", x, self.linear(o, width, hidden, 0.5))
        y = self.norm(x)
        gate = self.linear(y, hidden, size.inner)
        inner = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), self.linear(y, hidden, size.inner))
        return self.op("Add", x, self.linear(inner, size.inner, hidden, 0.5)), [conv, state]


def build(size: ModelSize | None = None, seed: int = 0) -> ir.Model:
    """The model.

    Its inputs are ``input_ids`` int64 [batch, tokens] and, for each layer, ``past.N.conv`` [batch, 3 H K, 3] and
    ``past.N.state`` float32 [batch, H, K, K]; its outputs ``logits`` float32 [batch, tokens, vocabulary] and the states
    that continue them, ``present.N.conv`` and ``present.N.state``.
    """
    size = size or ModelSize()
    b = _Builder(size, seed)
    ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "tokens"]))
    table = b.constant(b.rng.standard_normal((size.vocabulary, size.hidden), np.float32), b.dtype)
    x = b.op("Gather", table, ids)
    x.type, x.shape = ir.TensorType(b.dtype), ir.Shape(["batch", "tokens", size.hidden])
    inputs, states = [ids], []
    for number in range(size.layers):
        heads, dim = size.heads, size.head_dim
        kinds = ((b.dtype, ["batch", 3 * heads * dim, 3]), (FLOAT, ["batch", heads, dim, dim]))
        past = [
            ir.Value(name=f"past.{number}.{name}", type=ir.TensorType(kind), shape=ir.Shape(shape))
            for name, (kind, shape) in zip(("conv", "state"), kinds, strict=True)
        ]
        inputs += past
        x, present = b.layer(x, (past[0], past[1]), number)
        states += present
    logits = b.linear(b.norm(x), size.hidden, size.vocabulary)
    logits = b.op("Cast", logits, to=int(FLOAT), name="logits")
    logits.type, logits.shape = ir.TensorType(FLOAT), ir.Shape(["batch", "tokens", size.vocabulary])
    graph = ir.Graph(
        inputs, [logits, *states], nodes=b.nodes, initializers=b.weights, opset_imports={"": OPSET}, name="small_model"
    )
    model = ir.Model(graph, ir_version=10)
    attach(model, build_function(size.config(), OPSET, b.dtype, FLOAT))
    return model
