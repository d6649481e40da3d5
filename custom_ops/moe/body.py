"""The op's portable function body: the same computation in standard ONNX ops, for any ONNX runtime.

The router works in float64 where the spec asks for it, the experts in float32 whatever T is. A ``Loop`` goes over the
experts that have tokens: each takes its own weights out of the stack, turns them into float32 and is done with them, so
one expert is in memory at a time. No op's meaning changes between opsets 18 and 27.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..common.function_call import attribute_type
from ..common.graph_builder import GraphBuilder
from .body_experts import FLOAT, expert
from .spec import DOMAIN, INPUTS, OP_TYPE, OUTPUTS, MoeConfig

DOUBLE = ir.DataType.DOUBLE
SHORT = {ir.DataType.FLOAT: "f32", ir.DataType.FLOAT16: "f16", ir.DataType.BFLOAT16: "bf16"}
OPSETS = range(18, 28)


class _Body:
    """Builds the body of one configuration."""

    def __init__(self, config: MoeConfig, dtype: ir.DataType) -> None:
        self.config, self.dtype = config, dtype
        self.builder = GraphBuilder()
        self.inputs = {name: ir.Value(name=name) for name in INPUTS}

    def scores(self, b: GraphBuilder, tokens: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Float32 logits and scores ``[N, E]`` of tokens ``[N, D]`` of type T."""
        config = self.config
        one = b.const(1.0, np.float64)
        if config.has_router_weight:
            weight = b.swap_last(b.cast(self.inputs["router_weight"], DOUBLE), 2)
            logits = b.matmul(b.cast(tokens, DOUBLE), weight)
        else:
            logits = b.reshape(b.cast(self.inputs["router_logits"], DOUBLE), [-1, config.num_experts])
        if config.has_router_bias:
            logits = b.add(logits, b.cast(self.inputs["router_bias"], DOUBLE))
        narrow = b.cast(logits, FLOAT)
        rounded = b.cast(narrow, DOUBLE)
        if config.score_function == "sigmoid":
            # not Sigmoid: ORT's loses all digits of small scores
            score = b.op("Div", one, b.add(b.op("Exp", b.op("Neg", rounded)), one))
        else:
            raised = b.op("Exp", b.sub(rounded, b.op("ReduceMax", rounded, b.const([-1]), keepdims=1)))
            score = b.op("Div", raised, b.sum_last(raised))
        return narrow, b.cast(score, FLOAT)

    def lowest_for_nan(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        return b.op("Where", b.op("IsNaN", x), b.const(-np.inf), x)

    def top(self, b: GraphBuilder, x: ir.Value, count: int) -> tuple[ir.Value, ir.Value]:
        """The largest along the last axis, largest first, and their indices; of equal numbers the lower index."""
        # ORT before 1.31 ends the process on a TopK of no rows: one more, dropped afterwards
        padded = b.op("Pad", x, b.const([0, 1]), None, b.const([0]))
        values, indices = b.ops("TopK", [padded, b.const([count])], 2, axis=-1, largest=1, sorted=1)
        return b.slice(values, 0, 0, -1), b.slice(indices, 0, 0, -1)

    def stays(self, b: GraphBuilder, choice: ir.Value) -> ir.Value:
        """Bool ``[N, E]``: the expert's group is one of the best."""
        config = self.config
        groups, size = config.n_group, config.num_experts // config.n_group
        best, _ = self.top(b, b.reshape(choice, [-1, groups, size]), config.group_top)
        parts = b.split(best, [1] * config.group_top, axis=2) if config.group_top > 1 else [best]
        total = parts[0]
        for part in parts[1:]:  # one after the other: ReduceSum may add in any order
            total = b.add(total, part)
        total = self.lowest_for_nan(b, b.reshape(total, [-1, groups]))
        _, kept = self.top(b, total, config.topk_group)
        same = b.op("Equal", b.unsqueeze(kept, 2), b.const(np.arange(groups)))  # [N, topk_group, n_group]
        kept = b.op("ReduceMax", b.cast(same, ir.DataType.INT32), b.const([1]), keepdims=0)
        return b.op("Gather", b.cast(kept, ir.DataType.BOOL), b.const(np.arange(config.num_experts) // size), axis=1)

    def route(self, b: GraphBuilder, tokens: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Ids int64 and weights float32, ``[N, k]``."""
        config = self.config
        logits, scores = self.scores(b, tokens)
        choice, stays = logits if config.choose_by_logits else scores, None
        if config.has_expert_bias:
            choice = b.add(choice, self.inputs["expert_bias"])
        choice = self.lowest_for_nan(b, choice)
        if config.topk_group < config.n_group:
            stays = self.stays(b, choice)
            choice = b.op("Where", stays, choice, b.const(float(config.masked_score)))
        _, ids = self.top(b, choice, config.top_k)
        if stays is not None and config.masked_weights:
            scores = b.op("Where", stays, scores, b.const(0.0))
        weights = b.op("GatherElements", scores, ids, axis=1)
        if config.norm_topk_prob:
            total = b.sum_last(weights)
            if config.norm_eps:
                total = b.add(total, b.const(float(config.norm_eps)))
            if config.norm_min:
                total = b.op("Max", total, b.const(float(config.norm_min)))
            weights = b.op("Div", weights, total)
        if config.routed_scaling_factor != 1.0:
            weights = b.mul(weights, b.const(float(config.routed_scaling_factor)))
        return ids, weights

    def routed(self, b: GraphBuilder, x: ir.Value, ids: ir.Value, weights: ir.Value) -> ir.Value:
        """The weighted sum ``[N, D]`` of the chosen experts' outputs."""
        config = self.config
        flat_ids, flat_weights = b.reshape(ids, [-1]), b.reshape(weights, [-1, 1])
        present = b.ops("Unique", [flat_ids], 1, sorted=1)[0]
        count = b.squeeze(b.dim(present, 0), 0)
        start = b.mul(x, b.const(0.0))
        if config.zero_experts:  # the last ones: the loop ends before them
            own = b.op("Less", present, b.const(config.own_experts))
            count = b.op("ReduceSum", b.cast(own, ir.DataType.INT64), keepdims=0)
            given = b.op("Where", b.op("Less", ids, b.const(config.own_experts)), b.const(0.0), weights)
            # over two axes, one of them of size 1: ONNX Runtime up to 1.31 leaves out a sum over the last axis here
            start = b.mul(x, b.unsqueeze(b.op("ReduceSum", b.unsqueeze(given, 2), b.const([1, 2]), keepdims=0), 1))
        number, going = b.value("n", ir.DataType.INT64, []), b.value("going", ir.DataType.BOOL, [])
        done = b.value("done", FLOAT, [None, config.hidden_size])

        def one(inner: GraphBuilder) -> list[ir.Value]:
            index = inner.op("Gather", present, number, axis=0)
            places = inner.squeeze(inner.op("NonZero", inner.op("Equal", flat_ids, index)), 0)
            at = inner.op("Div", places, inner.const(config.top_k))

            def operand(name: str) -> ir.Value:
                return inner.op("Gather", self.inputs[name], index, axis=0)

            part = expert(inner, config, inner.op("Gather", x, at, axis=0), "", operand)
            part = inner.mul(part, inner.op("Gather", flat_weights, places, axis=0))
            total = inner.op("ScatterND", done, inner.unsqueeze(at, 1), part, reduction="add")
            return [inner.op("Identity", going), total]

        body = b.subgraph("expert", [number, going, done], one)
        return b.ops("Loop", [count, None, start], 1, body=body)[0]

    def build(self) -> list[ir.Value]:
        """Add all nodes; returns the function's outputs."""
        b, config = self.builder, self.config
        tokens = b.reshape(self.inputs["x"], [-1, config.hidden_size])
        x = tokens if self.dtype == FLOAT else b.cast(tokens, FLOAT)
        ids, weights = self.route(b, tokens)
        y = self.routed(b, x, ids, weights)
        if config.shared_intermediate_size:
            shared = expert(b, config, x, "shared_", lambda name: self.inputs[name])
            if config.has_shared_gate:
                gate = b.op("Gemm", x, b.cast(self.inputs["shared_gate_weight"], FLOAT), transB=1)
                shared = b.mul(shared, b.op("Sigmoid", gate))
            y = b.add(y, shared)
        y = b.op("Reshape", y, b.op("Shape", self.inputs["x"]), allowzero=1)
        results = [b.op("Identity", y) if self.dtype == FLOAT else b.cast(y, self.dtype)]
        if config.has_ids:
            results += [b.op("Identity", ids), b.op("Identity", weights)]
        for name, output in zip(formal_outputs(config), results, strict=True):
            output.name = name
        return results


def overload_name(config: MoeConfig, dtype: ir.DataType) -> str:
    """The overload of the function that :func:`build_function` builds for the same arguments."""
    return f"{config.overload()}-{SHORT[dtype]}"


def formal_outputs(config: MoeConfig) -> tuple[str, ...]:
    """Outputs of the function, and of every call of it."""
    return tuple(OUTPUTS) if config.has_ids else ("y",)


def build_function(config: MoeConfig, opset: int, dtype: ir.DataType = FLOAT) -> ir.Function:
    """The function ``deltafuse::GroupedQMoE`` for one configuration.

    Args:
        config: the call.
        opset: of the model that will hold the function, 18 to 27.
        dtype: element type of T: FLOAT, FLOAT16 or BFLOAT16. Router, scales and plain weights may have any of their
            types.

    Returns:
        A function with all formal inputs of the spec (absent ones are unused).

    Raises:
        ValueError: the configuration, the opset or the dtype is not one the op defines.
    """
    refused = config.check()
    if refused is not None:
        raise ValueError(str(refused))
    if opset not in OPSETS:
        raise ValueError(f"opset {opset}: the body is written for {OPSETS[0]} to {OPSETS[-1]}")
    if dtype not in SHORT:
        raise ValueError(f"dtype {dtype!r}: expected one of FLOAT, FLOAT16, BFLOAT16")
    body = _Body(config, dtype)
    outputs = body.build()
    graph = body.builder.graph(list(body.inputs.values()), outputs, opset)
    declared = [ir.Attr(name, attribute_type(value), None) for name, value in config.attributes().items()]
    return ir.Function(DOMAIN, OP_TYPE, overload_name(config, dtype), graph=graph, attributes=declared)
