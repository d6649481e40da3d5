"""Latent attention as other code writes it: padded values, norms of queries, MultiHeadAttention, Einsum layers.

Each is made of an export that is fused as it is. What looks like it and is something else stays as it is.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from exports import library
from mutants.editor import Edit, Editor, edited

from . import kit

# --- values as wide as keys -------------------------------------------------------------------------------------------


def bounds(e: Editor, first: int, last: int) -> list[str]:
    return [e.const([n], np.int64) for n in (first, last, 3)]


def padded(front: int = 0, behind: int = 6, first: int = 0, last: int = 6, fill: float = 0.0) -> Edit:
    """Values of 6 channels are padded, and the attention's output is cut; it has 6 channels for what is behind it."""

    def edit(e: Editor) -> None:
        product = e.node("node_matmul_1")
        pads = e.const([0, 0, 0, front, 0, 0, 0, behind], np.int64)
        e.read("node_matmul_1", 1, e.make("Pad", product.input[1], pads, e.const(fill)))
        cut = e.after(product.output[0], "Slice", *bounds(e, first, last))
        if last - first != 6:
            wide = e.after(cut, "Mul", e.const(2.0))
            wide = e.after(wide, "Pad", e.const([0, 0, 0, 0, 0, 0, 0, 6], np.int64))
            e.after(wide, "Slice", *bounds(e, 0, 6))

    return edit


@pytest.mark.parametrize("behind", [1, 6])
def test_padded_values(behind: int) -> None:
    """Kernels that want values as wide as keys are given zeros behind them."""
    model = edited("mla_half", padded(behind=behind))
    report, after = kit.fuse(model)
    assert report.count("mla") == 1, kit.why(report)
    assert not {"Softmax", "Pad"} & kit.ops(after.graph)
    kit.same(model, after, *(library.feeds_for(model, {"S": n}) for n in (4, 11, 70)))


WRONG_PADS = {
    "in front": padded(1, 5),
    "in front, the end kept": padded(6, 6, 12, 18),
    "cut too early": padded(last=5),
    "cut too late": padded(last=8),
    "ones that stay": padded(last=8, fill=1.0),
    "cut behind the first": padded(first=1, last=7),
}


@pytest.mark.parametrize("wrong", WRONG_PADS)
def test_values_padded_otherwise_stay_what_they_are(wrong: str) -> None:
    model = edited("mla_half", WRONG_PADS[wrong])
    report, after = kit.fuse(model)
    assert report.count("mla") == 0
    kit.same(model, after, library.feeds_for(model, {"S": 9}))


# --- norms of each head -----------------------------------------------------------------------------------------------


def normed(value: str, width: int) -> Edit:
    """A root mean square norm, with a weight, between a value and what reads it."""

    def edit(e: Editor) -> None:
        readers = [n for n in e.graph.node if value in n.input]
        mean = e.make("ReduceMean", e.make("Mul", value, value), e.const([-1], np.int64))
        root = e.make("Sqrt", e.make("Add", mean, e.const(1e-5)))
        weighted = e.make("Mul", e.make("Div", value, root), e.const(np.linspace(0.5, 2.0, width)))
        for node in readers:
            node.input[:] = [weighted if v == value else v for v in node.input]

    return edit


QUERY, KEY, VALUE = "transpose", "split_with_sizes_2_split_0", "split_with_sizes_2_split_1"
PART = "split_with_sizes_split_0"  # of queries, not rotated


@pytest.mark.parametrize(("value", "width"), [(QUERY, 12), (PART, 8)])
def test_normalised_queries_are_taken_as_they_are(value: str, width: int) -> None:
    model = edited("mla_half", normed(value, width))
    report, after = kit.fuse(model)
    assert report.count("mla") == 1, kit.why(report)
    kit.same(model, after, *(library.feeds_for(model, {"S": n}) for n in (4, 11, 70)))


@pytest.mark.parametrize(("value", "width", "what"), [(KEY, 8, "keys"), (VALUE, 6, "values")])
def test_normalised_keys_and_values_are_said(value: str, width: int, what: str) -> None:
    model = edited("mla_half", normed(value, width))
    report, after = kit.fuse(model)
    assert [(r.refusal.code, r.refusal.reason.split()[0]) for r in report.regions if r.refusal] == [("norm", what)]
    kit.same(model, after, library.feeds_for(model, {"S": 9}))


def test_an_operation_between_latents_and_attention_is_said() -> None:
    model = edited("mla_half", lambda e: e.after(VALUE, "Tanh") and None)
    report, after = kit.fuse(model)
    assert [(r.refusal.code, r.refusal.reason.split()[0]) for r in report.regions if r.refusal] == [("flow", "Tanh")]
    kit.same(model, after, library.feeds_for(model, {"S": 9}))


# --- ONNX Runtime's MultiHeadAttention over what all heads share ------------------------------------------------------


def multi_head(e: Editor) -> None:
    """As onnxscript's fusions for ONNX Runtime write it: heads and channels side by side, on all four sides."""
    node = e.node("node_scaled_dot_product_attention")
    flat = e.const([0, 0, -1], np.int64)
    three = [e.make("Reshape", e.make("Transpose", v, perm=[0, 2, 1, 3]), flat) for v in node.input]
    scale = next(a.f for a in node.attribute if a.name == "scale")
    made = e.make("MultiHeadAttention", *three, num_heads=3, scale=scale, domain="com.microsoft")
    split = e.make("Reshape", made, e.const([0, 0, 3, -1], np.int64))
    e.read("node_matmul_1", 0, e.make("Transpose", split, perm=[0, 2, 1, 3]))
    e.model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    e.declare(e.node("node_matmul_1").input[0], node.output[0])  # onnx has no rule for that operator
    for behind in ("matmul_1", "transpose_2", "view_2"):
        e.declare(behind, behind)


def test_multi_head_attention_over_shared_latents() -> None:
    model = edited("mla_one_product_sdpa", multi_head)
    report, after = kit.fuse(model)
    assert report.count("mla") == 1, kit.why(report)
    assert report.regions[0].config["packed_cache"]
    assert "MultiHeadAttention" not in kit.ops(after.graph)
    export = library.export("mla_one_product_sdpa")
    kit.same(model, after, *map(export.feeds, export.bindings))


def test_multi_head_attention_with_heads_in_another_order() -> None:
    """Heads are split off as channels behind it: another function, left as it is."""

    def wrong(e: Editor) -> None:
        multi_head(e)
        split = next(n for n in e.graph.node if n.output[0] == e.node("node_matmul_1").input[0])
        whole = next(n for n in e.graph.node if n.op_type == "MultiHeadAttention")
        split.input[0] = e.make(
            "Transpose", e.make("Reshape", whole.output[0], e.const([0, 0, -1, 3], np.int64)), perm=[0, 1, 3, 2]
        )

    model = edited("mla_one_product_sdpa", wrong)
    report, after = kit.fuse(model)
    export = library.export("mla_one_product_sdpa")
    kit.same(model, after, *map(export.feeds, export.bindings))
    assert report.count("mla") == 0


# --- layers with weights of three axes --------------------------------------------------------------------------------


def by_einsum(queries: str = "bsd,dhk->bshk", keys: str = "btc,chn->bthn", end: str = "bhqk,bhkv,hvd->bqd") -> Edit:
    """Layers of `mla_half` as `Einsum` with weights [channels, heads, width]; the last one with the values' product."""

    def weight(e: Editor, name: str, equation: str) -> str:
        whole = e.array(name)
        own, right = equation.partition("->")[0].split(",")[-1], equation.partition("->")[2]
        three = whole.reshape(-1, 3, whole.shape[1] // 3)
        return e.const(np.transpose(three, [{own[0]: 0, right[2]: 1, right[3]: 2}[c] for c in own]))

    def edit(e: Editor) -> None:
        for view, equation in (("transpose", queries), ("transpose_1", keys)):
            turn = next(n for n in e.graph.node if n.output[0] == view)
            apart = next(n for n in e.graph.node if n.output[0] == turn.input[0])
            layer = next(n for n in e.graph.node if n.output[0] == apart.input[0])
            made = e.make("Einsum", layer.input[0], weight(e, layer.input[1], equation), equation=equation)
            e.read(turn.name, 0, made)
        product = e.node("node_matmul_1")
        final = next(n for n in e.graph.node if n.output[0] == e.graph.output[0].name)
        out = e.const(e.array(final.input[1]).reshape(3, 6, -1))
        final.op_type = "Einsum"
        final.input[:] = [*product.input, out]
        e.attributes(final.name, equation=end)

    return edit


def test_layers_of_three_axes() -> None:
    model = edited("mla_half", by_einsum())
    assert sum(n.op_type == "Einsum" for n in model.graph.node) == 3
    kit.same(library.export("mla_half").proto(), model, library.export("mla_half").feeds())
    report, after = kit.fuse(model)
    assert report.count("mla") == 1, kit.why(report)
    assert not {"Softmax"} & kit.ops(after.graph)
    kit.same(model, after, *(library.feeds_for(model, {"S": n}) for n in (4, 11, 70)))


def test_layers_of_three_axes_come_back_where_nothing_is_fused() -> None:
    model = edited("mla_half", by_einsum(), lambda e: e.after(VALUE, "Tanh") and None)
    report, after = kit.fuse(model)
    assert report.count("mla") == 0
    count = {n.name: n for n in after.graph.node if n.op_type == "Einsum"}
    before = {n.name: n for n in model.graph.node if n.op_type == "Einsum"}
    assert {k: n.attribute[0].s for k, n in count.items()} == {k: n.attribute[0].s for k, n in before.items()}
    assert [len(n.input) for n in count.values()] == [len(n.input) for n in before.values()]
    assert {t.name for t in after.graph.initializer} <= {t.name for t in model.graph.initializer} | {
        t.name for t in after.graph.initializer if "folded" in t.name
    }
    kit.same(model, after, library.feeds_for(model, {"S": 9}))


@pytest.mark.parametrize("other", [{"queries": "bsd,dkh->bshk"}, {"keys": "btc,cnh->bthn"}])
def test_layers_in_other_orders_are_right_or_left(other: dict[str, str]) -> None:
    model = edited("mla_half", by_einsum(**other))
    _, after = kit.fuse(model)
    kit.same(model, after, library.feeds_for(model, {"S": 9}))


def test_angles_made_twice_are_the_same() -> None:
    """Rotations that compute their own cosines from the positions, as exports that are not optimised leave them."""
    export = library.export("mla_mrope_sections")

    def twice(e: Editor) -> None:
        producers = {o: n for n in e.graph.node for o in n.output}

        def turns(value: str) -> bool:
            node = producers.get(value)
            if node is None or node.op_type not in ("Cos", "Sin", "Unsqueeze", "Cast"):
                return False
            return node.op_type in ("Cos", "Sin") or turns(node.input[0])

        def copy(value: str) -> str:
            node = producers.get(value)
            if node is None or node.op_type not in ("Cos", "Sin", "Unsqueeze", "Cast", "Concat", "Mul", "MatMul"):
                return value
            named = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            return e.make(node.op_type, *(copy(v) for v in node.input), **named)

        users = [
            n for n in e.graph.node if n.op_type == "Mul" and any(turns(v) for v in n.input) and not turns(n.output[0])
        ]
        assert len(users) >= 4
        for node in users[: len(users) // 2]:
            node.input[:] = [copy(v) if turns(v) else v for v in node.input]

    model = edited("mla_mrope_sections", twice)
    assert sum(n.op_type in ("Cos", "Sin") for n in model.graph.node) > 2
    report, after = kit.fuse(model)
    assert report.count("mla") == 1, kit.why(report)
    kit.same(model, after, *map(export.feeds, export.bindings))


def test_absorbed_values_cut_behind_their_weights() -> None:
    """Five of six channels are kept: the weights give six, so that it is left."""

    def cut(e: Editor) -> None:
        whole = e.node("node_matmul_3").output[0]
        kept = e.after(whole, "Slice", *bounds(e, 0, 5))
        wide = e.after(kept, "Mul", e.const(2.0))
        e.after(wide, "Pad", e.const([0, 0, 0, 0, 0, 0, 0, 1], np.int64))

    model = edited("mla_one_product", cut)
    report, after = kit.fuse(model)
    export = library.export("mla_one_product")
    kit.same(model, after, *map(export.feeds, export.bindings))
    assert report.count("mla") == 0


def test_a_further_factor_of_queries_is_named() -> None:
    model = edited("mla_half", lambda e: e.after(QUERY, "Mul", e.const(np.linspace(1, 2, 12))) and None)
    report, after = kit.fuse(model)
    kit.same(model, after, library.feeds_for(model, {"S": 9}))
    refusals = [r.refusal for r in report.regions if r.refusal is not None]
    assert [r.code for r in refusals] == ["rope"] and "'edited_1'" in refusals[0].reason


def test_padded_values_of_an_attention_node() -> None:
    def edit(e: Editor) -> None:
        node = next(n for n in e.graph.node if n.op_type == "Attention")
        pads = e.const([0, 0, 0, 0, 0, 0, 0, 6], np.int64)
        node.input[2] = e.make("Pad", node.input[2], pads)
        e.after(node.output[0], "Slice", *bounds(e, 0, 6))

    model = edited("mla_causal_op23", edit)
    report, after = kit.fuse(model)
    assert report.count("mla") == 1, kit.why(report)
    assert "Attention" not in kit.ops(after.graph)
    kit.same(model, after, *map(library.export("mla_causal_op23").feeds, library.export("mla_causal_op23").bindings))
