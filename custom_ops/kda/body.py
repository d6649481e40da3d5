"""The op's portable function body: the same computation in standard ONNX ops, for any ONNX runtime.

The body is specialised for one configuration, so the function carries an ``overload`` that names it. It is float32
inside whatever T is, takes any batch and any number of tokens, and uses no op whose meaning changes between opsets 18
and 27.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..common.function_call import attribute_type
from ..common.graph_builder import GraphBuilder
from .body_recurrence import LOWEST_DECAY, Chunks, many_tokens, one_token
from .spec import ATTRIBUTES, DOMAIN, INPUTS, OP_TYPE, OUTPUTS, KdaConfig

FLOAT = ir.DataType.FLOAT
SHORT = {ir.DataType.FLOAT: "f32", ir.DataType.FLOAT16: "f16", ir.DataType.BFLOAT16: "bf16"}
OPSETS = range(18, 28)

#: Tokens a chunk, and up to which heads * head_dim all chunks are prepared at once (both measured on ORT's CPU EP).
CHUNK = 16
HOIST_UP_TO = 512


@dataclass
class _Operands:
    """Float32 operands of one rectangular batch; absent ones are None.

    ``qkv`` holds q, k and v, or the packed q | k | v alone.
    """

    qkv: tuple[ir.Value, ...]
    g: ir.Value
    beta: ir.Value
    gate: ir.Value | None
    conv_state: ir.Value | None
    initial_state: ir.Value | None


class _Body:
    """Builds the body of one configuration."""

    def __init__(self, config: KdaConfig, dtype: ir.DataType, state_dtype: ir.DataType, seq_len: int | None) -> None:
        self.config, self.dtype, self.state_dtype, self.seq_len = config, dtype, state_dtype, seq_len
        self.repeats = config.num_v_heads // config.num_heads
        self.builder = GraphBuilder()
        self.inputs = {name: ir.Value(name=name) for name in INPUTS}
        self.chunk = CHUNK
        self.hoist = config.num_v_heads * config.head_dim <= HOIST_UP_TO

    # Parts before and after the recurrence. x: [B, T, channels].

    def sigmoid_or_silu(self, b: GraphBuilder, x: ir.Value, kind: str) -> ir.Value:
        y = b.op("Sigmoid", x)
        return b.mul(x, y) if kind == "silu" else y

    def convolve(self, b: GraphBuilder, x: ir.Value, past: ir.Value | None) -> tuple[ir.Value, ir.Value | None]:
        """Causal depthwise convolution of [B, T, C], and the state after it [B, C, conv_state_width]."""
        config = self.config
        width, columns, channels = config.conv_width, config.conv_state_width, config.conv_channels
        rows = [] if past is None else [b.transpose(past, [0, 2, 1])]
        kept = max(columns, width - 1)  # tokens of the past, given or zeros
        zeros = kept - (columns if rows else 0)
        if zeros:
            shape = b.concat([b.dim(x, 0), b.const([zeros, channels])], axis=0)
            rows.insert(0, b.op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, np.float32))))
        line = b.concat([*rows, x], axis=1)
        seen = line if kept == width - 1 else b.slice(line, 1, kept - (width - 1), None)
        if config.has_cu_seqlens:  # Conv takes no empty sequence: one more token, dropped afterwards
            seen = b.op("Pad", seen, b.const([0, 1]), None, b.const([1]))
        bias = self.inputs["conv_bias"] if config.has_conv_bias else None
        seen = b.transpose(seen, [0, 2, 1])
        y = b.op("Conv", seen, self.inputs["conv_weight"], bias, group=channels, kernel_shape=[width])
        if config.conv_activation == "silu":
            y = self.sigmoid_or_silu(b, y, "silu")
        y = b.transpose(y, [0, 2, 1])
        if config.has_cu_seqlens:
            y = b.slice(y, 1, 0, -1)
        if not config.has_present_conv_state:
            return y, None
        return y, b.transpose(b.slice(line, 1, -columns, None), [0, 2, 1])

    def l2_normalise(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        config = self.config
        if config.qk_l2norm == "none":
            return x
        total = b.sum_last(b.mul(x, x))
        eps = b.const(float(config.l2norm_eps))
        if config.qk_l2norm == "sum":
            return b.op("Div", x, b.op("Sqrt", b.add(total, eps)))
        return b.op("Div", x, b.op("Max", b.op("Sqrt", total), eps))

    def log_decay(self, b: GraphBuilder, g: ir.Value) -> ir.Value:
        """[B, T, HV*K] pre-activations to log decays [B, T, H, R, K]."""
        config = self.config
        shape = [config.num_heads, self.repeats, config.head_dim]
        x = b.reshape(g, [0, 0, *shape])
        if config.has_dt_bias:
            x = b.add(x, b.reshape(self.inputs["dt_bias"], shape))
        if config.gate_activation != "none":
            rate = b.reshape(b.op("Exp", self.inputs["A_log"]), [*shape[:2], 1])
            if config.gate_activation == "softplus":
                x = b.mul(b.op("Softplus", x), b.op("Neg", rate))
            else:
                x = b.mul(b.op("Sigmoid", b.mul(x, rate)), b.const(float(config.lower_bound)))
        return b.op("Max", x, b.const(LOWEST_DECAY))

    def finish(self, b: GraphBuilder, o: ir.Value, gate: ir.Value | None) -> ir.Value:
        """Norm and output gate: o [B, T, H, R, V] to [B, T, HV*V]."""
        config = self.config
        if config.has_norm:
            mean = b.op("ReduceMean", b.mul(o, o), b.const([-1]), keepdims=1)
            o = b.op("Div", o, b.op("Sqrt", b.add(mean, b.const(float(config.norm_eps)))))
            o = b.mul(o, self.inputs["norm_weight"])
        o = b.reshape(o, [0, 0, config.num_v_heads * config.head_v_dim])
        return o if gate is None else b.mul(o, self.sigmoid_or_silu(b, gate, config.output_gate))

    def run(self, b: GraphBuilder, x: _Operands) -> tuple[ir.Value, ir.Value | None, ir.Value]:
        """The whole op on one rectangular batch: o, present_conv_state, final_state (layout as asked)."""
        config, repeats = self.config, self.repeats
        heads, key_dim, value_dim = config.num_heads, config.head_dim, config.head_v_dim
        qkv, conv_state = x.qkv, None
        if config.conv_width:
            mixed, conv_state = self.convolve(b, b.concat(qkv, axis=2), x.conv_state)
            qkv = (mixed,)
        if len(qkv) == 1:
            qkv = tuple(b.split(qkv[0], [heads * key_dim, heads * key_dim, heads * repeats * value_dim], axis=2))
        q, k, v = qkv
        q = self.l2_normalise(b, b.reshape(q, [0, 0, heads, 1, key_dim]))
        k = self.l2_normalise(b, b.reshape(k, [0, 0, heads, 1, key_dim]))
        q = b.mul(q, b.const(float(config.scale)))
        v = b.reshape(v, [0, 0, heads, repeats, value_dim])
        g = self.log_decay(b, x.g)
        beta = b.reshape(x.beta, [0, 0, heads, repeats, 1])
        if config.beta_activation == "sigmoid":
            beta = b.op("Sigmoid", beta)
        if config.beta_scale != 1.0:
            beta = b.mul(beta, b.const(float(config.beta_scale)))
        state = self.start_state(b, x)

        o, after = self.recurrence(b, q, k, v, g, beta, state)
        after = b.reshape(after, [0, heads * repeats, key_dim, value_dim])
        if config.state_layout == "VK":
            after = b.swap_last(after, 4)
        return self.finish(b, o, x.gate), conv_state, after

    def recurrence(
        self,
        b: GraphBuilder,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        g: ir.Value,
        beta: ir.Value,
        state: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        """The delta rule: outputs [B, T, H, R, V] and the last state [B, H, R, K, V].

        q, k: [B, T, H, 1, K], q scaled.  v: [B, T, H, R, V].  g: [B, T, H, R, K].  beta: [B, T, H, R, 1].
        """
        heads, repeats = self.config.num_heads, self.repeats

        def token(inner: GraphBuilder) -> list[ir.Value]:
            # The slice changes nothing at run time; it keeps this branch well typed where T is known not to be 1.
            first = [inner.transpose(inner.slice(y, 1, 0, 1), [0, 2, 3, 1, 4]) for y in (q, k, v, g, beta)]
            o, after = one_token(inner, first[0], first[1], first[2], first[3], first[4], state)
            return [inner.transpose(o, [0, 3, 1, 2, 4]), after]

        def prompt(inner: GraphBuilder) -> list[ir.Value]:
            chunks = Chunks(self.chunk, self.config.head_dim, self.config.head_v_dim)
            return list(
                many_tokens(
                    inner, q, k, v, g, beta, state, heads=heads, repeats=repeats, chunks=chunks, hoist=self.hoist
                )
            )

        if self.seq_len == 1:
            o, after = token(b)
        elif self.seq_len is not None:
            o, after = prompt(b)
        else:
            single = b.op("Equal", b.squeeze(b.dim(v, 1), 0), b.const(1))
            branches = {"then_branch": b.subgraph("token", [], token), "else_branch": b.subgraph("prompt", [], prompt)}
            o, after = b.ops("If", [single], 2, **branches)
        return o, after

    def start_state(self, b: GraphBuilder, x: _Operands) -> ir.Value:
        """[B, H, R, K, V]."""
        config = self.config
        heads, key_dim, value_dim = config.num_heads, config.head_dim, config.head_v_dim
        if x.initial_state is None:
            shape = b.concat([b.dim(x.qkv[0], 0), b.const([heads, self.repeats, key_dim, value_dim])], axis=0)
            return b.op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, np.float32)))
        if config.state_layout == "KV":
            return b.reshape(x.initial_state, [0, heads, self.repeats, key_dim, value_dim])
        return b.swap_last(b.reshape(x.initial_state, [0, heads, self.repeats, value_dim, key_dim]), 5)

    def run_ragged(self, b: GraphBuilder, x: _Operands) -> tuple[ir.Value, ir.Value | None, ir.Value]:
        """Sequences of their own lengths, one after the other: a Loop over ``cu_seqlens``."""
        config = self.config
        bounds = b.cast(self.inputs["cu_seqlens"], ir.DataType.INT64)
        count = b.sub(b.squeeze(b.dim(bounds, 0), 0), b.const(1))
        number, going = b.value("n", ir.DataType.INT64, []), b.value("going", ir.DataType.BOOL, [])
        width = config.num_v_heads * config.head_v_dim
        done = b.value("done", FLOAT, [1, None, width])

        def one(inner: GraphBuilder) -> list[ir.Value]:
            at = inner.unsqueeze(number, 0)
            after = inner.add(at, inner.const([1]))
            start, stop = inner.slice(bounds, 0, at, after), inner.op("Gather", bounds, after, axis=0)

            def tokens(y: ir.Value | None) -> ir.Value | None:
                return None if y is None else inner.slice(y, 1, start, stop)

            def sequence(y: ir.Value | None) -> ir.Value | None:
                return None if y is None else inner.slice(y, 0, at, after)

            part = _Operands(
                qkv=tuple(inner.slice(y, 1, start, stop) for y in x.qkv),
                g=inner.slice(x.g, 1, start, stop),
                beta=inner.slice(x.beta, 1, start, stop),
                gate=tokens(x.gate),
                conv_state=sequence(x.conv_state),
                initial_state=sequence(x.initial_state),
            )
            o, conv_state, state = self.run(inner, part)
            states = [inner.squeeze(y, 0) for y in (conv_state, state) if y is not None]
            return [inner.op("Identity", going), inner.concat([done, o], axis=1), *states]

        body = b.subgraph("sequence", [number, going, done], one)
        with_conv_state = len(body.outputs) == 4
        nothing = b.const(np.zeros((1, 0, width), np.float32))
        o, *states = b.ops("Loop", [count, None, nothing], len(body.outputs) - 1, body=body)
        return o, states[0] if with_conv_state else None, states[-1]

    def build(self) -> list[ir.Value]:
        """Add all nodes; returns the function's outputs."""
        b, config = self.builder, self.config

        def wide(name: str) -> ir.Value:
            return self.inputs[name] if self.dtype == FLOAT else b.cast(self.inputs[name], FLOAT)

        supplied = config.input_names()
        names = [name for name in ("q", "k", "v") if name in supplied]
        state = None
        if config.has_initial_state:
            state = self.inputs["initial_state"]
            state = state if self.state_dtype == FLOAT else b.cast(state, FLOAT)
        operands = _Operands(
            qkv=tuple(wide(name) for name in names),
            g=wide("g"),
            beta=wide("beta"),
            gate=wide("gate") if "gate" in supplied else None,
            conv_state=wide("conv_state") if config.has_conv_state else None,
            initial_state=state,
        )
        o, conv_state, final_state = (self.run_ragged if config.has_cu_seqlens else self.run)(b, operands)
        nothing = b.const(np.zeros(0, np.float32))
        # Up to the last output that is asked for: a call must name as many outputs as its function has, and trailing
        # omitted ones are lost when a model is written.
        results = [
            (o, self.dtype),
            (nothing if conv_state is None else conv_state, self.dtype),
            (final_state, self.state_dtype),
        ][: len(formal_outputs(config))]
        # a node of its own for each output: a function's output must not be a constant or another output
        outputs = [b.op("Identity", y) if dtype == FLOAT else b.cast(y, dtype) for y, dtype in results]
        for name, output in zip(formal_outputs(config), outputs, strict=True):
            output.name = name
        return outputs


def overload_name(
    config: KdaConfig, dtype: ir.DataType, state_dtype: ir.DataType, *, seq_len: int | None = None
) -> str:
    """The overload of the function that :func:`build_function` builds for the same arguments."""
    suffix = "" if seq_len is None or config.has_cu_seqlens else "-t1" if seq_len == 1 else "-tn"
    return f"{config.overload()}-{SHORT[dtype]}-{SHORT[state_dtype]}{suffix}"


def formal_outputs(config: KdaConfig) -> tuple[str, ...]:
    """Outputs of the function, and of every call of it: those of the spec up to the last one asked for."""
    names = tuple(OUTPUTS)
    return names[: 1 + names.index(config.output_names()[-1])]


def build_function(
    config: KdaConfig,
    opset: int,
    dtype: ir.DataType = FLOAT,
    state_dtype: ir.DataType = FLOAT,
    *,
    seq_len: int | None = None,
) -> ir.Function:
    """The function ``deltafuse::KimiDeltaAttention`` for one configuration.

    Args:
        config: the call.
        opset: of the model that will hold the function, 18 to 27.
        dtype: element type of T: FLOAT, FLOAT16 or BFLOAT16.
        state_dtype: of TS.
        seq_len: tokens of every call where that is known: 1 gives the one-token form alone, more the chunked form
            alone; None decides at run time. Sequences of a ``cu_seqlens`` call always decide at run time.

    Returns:
        A function with all formal inputs of the spec (absent ones are unused) and its outputs up to the last one that
        the configuration asks for (an earlier one that is not asked for is an empty tensor).

    Raises:
        ValueError: the configuration, the opset or a dtype is not one the op defines.
    """
    refused = config.check()
    if refused is not None:
        raise ValueError(str(refused))
    if opset not in OPSETS:
        raise ValueError(f"opset {opset}: the body is written for {OPSETS[0]} to {OPSETS[-1]}")
    for name, value in (("dtype", dtype), ("state_dtype", state_dtype)):
        if value not in SHORT:
            raise ValueError(f"{name} {value!r}: expected one of FLOAT, FLOAT16, BFLOAT16")
    body = _Body(config, dtype, state_dtype, None if config.has_cu_seqlens else seq_len)
    outputs = body.build()
    graph = body.builder.graph(list(body.inputs.values()), outputs, opset)
    declared = [ir.Attr(name, attribute_type(getattr(config, name)), None) for name in ATTRIBUTES]
    declared.append(ir.Attr("state_dtype", ir.AttributeType.INT, None))
    overload = overload_name(config, dtype, state_dtype, seq_len=seq_len)
    return ir.Function(DOMAIN, OP_TYPE, overload, graph=graph, attributes=declared)
