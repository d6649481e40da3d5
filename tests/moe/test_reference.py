"""The float64 reference against a token-by-token loop that shares no code with it, and what selection must keep."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from deltafuse.custom_ops.moe.draw import CASES, draw_inputs
from deltafuse.custom_ops.moe.packing import RANGES, STORED, decode_table, pack, unpack
from deltafuse.custom_ops.moe.reference import dequantize, reference, relative_error, route
from deltafuse.custom_ops.moe.spec import FORMATS, MoeConfig, cuda_refusal
from numpy.typing import NDArray

from .configs import CONFIGS, FULL

Arrays = dict[str, NDArray[Any]]


def plain(inputs: Arrays, config: MoeConfig, name: str) -> list[list[list[float]]]:
    """Weights as nested lists of numbers, one matrix an expert."""
    shared = name.startswith("shared_")
    kind = config.shared_format if shared else config.weight_format
    size = config.shared_block_size if shared else config.block_size
    rows = config.shared_block_rows if shared else config.block_rows
    numbers = inputs[f"{name}_weight"]
    numbers = numbers if kind in ("float", "bfloat16") else unpack(numbers, kind)
    numbers = numbers.astype(np.float64)
    scale, zero = inputs.get(f"{name}_scale"), inputs.get(f"{name}_zero_point")
    if shared:
        numbers = numbers[None]
        scale = None if scale is None else scale[None]
        zero = None if zero is None else zero[None]
    result = []
    for e in range(numbers.shape[0]):
        matrix = []
        for r in range(numbers.shape[1]):
            line = []
            for c in range(numbers.shape[2]):
                value = float(numbers[e, r, c])
                at = (e, r // rows, c // size if size else 0)
                if zero is not None:
                    value -= float(zero[at])
                line.append(value if scale is None else value * float(scale[at]))
            matrix.append(line)
        result.append(matrix)
    return result


def act(kind: str, v: float, alpha: float = 1.0) -> float:
    if kind == "silu":
        return v / (1 + math.exp(-alpha * v)) if alpha * v > -700 else 0.0
    if kind == "relu2":
        return max(v, 0.0) ** 2
    if kind == "gelu":
        return 0.5 * v * (1 + math.erf(v / math.sqrt(2)))
    return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


Matrix = list[list[float]]


def product(matrix: Matrix, x: list[float], bias: list[float]) -> list[float]:
    return [math.fsum([b, *(w * v for w, v in zip(row, x, strict=True))]) for row, b in zip(matrix, bias, strict=True)]


def one_expert(
    config: MoeConfig, x: list[float], gate_up: Matrix, down: Matrix, biases: tuple[list[float], list[float]]
) -> list[float]:
    mixed = product(gate_up, x, biases[0])
    if config.gated:
        half, inner = len(mixed) // 2, []
        for gate, up in zip(mixed[:half], mixed[half:], strict=True):
            if config.clamp == "before":
                gate = min(gate, config.gate_limit)
            gate = act(config.activation, gate, config.activation_alpha)
            if config.clamp == "after":
                gate = min(gate, config.gate_limit)
            if config.clamp != "none":
                up = max(-config.up_limit, min(config.up_limit, up))
            inner.append(gate * (up + config.up_offset))
    else:
        inner = [act(config.activation, v, config.activation_alpha) for v in mixed]
    return product(down, inner, biases[1])


def biases_of(inputs: Arrays, prefix: str, index: Any, rows: tuple[int, int]) -> tuple[list[float], list[float]]:
    """Zeros where there are none."""
    found = []
    for name, count in zip(("gate_up", "down"), rows, strict=True):
        bias = inputs.get(f"{prefix}{name}_bias")
        found.append([0.0] * count if bias is None else bias[index].astype(float).tolist())
    return found[0], found[1]


def one_token(config: MoeConfig, x: list[float], inputs: Arrays, row: int) -> tuple[list[int], list[float]]:
    """Ids and weights, by repeated search for the best."""
    f32 = np.float32
    if config.has_router_weight:
        weight = inputs["router_weight"].astype(float).tolist()
        logits = [math.fsum(w * v for w, v in zip(line, x, strict=True)) for line in weight]
    else:
        logits = inputs["router_logits"].reshape(-1, config.num_experts)[row].astype(float).tolist()
    if config.has_router_bias:
        logits = [v + float(b) for v, b in zip(logits, inputs["router_bias"], strict=True)]
    logits = [float(f32(v)) for v in logits]
    if config.score_function == "sigmoid":
        scores = [f32(1 / (1 + math.exp(-v)) if v > -700 else 0.0) for v in logits]
    else:
        top = max(logits)
        total = math.fsum(math.exp(v - top) for v in logits)
        scores = [f32(math.exp(v - top) / total) for v in logits]
    choice = [f32(v) for v in logits] if config.choose_by_logits else list(scores)
    if config.has_expert_bias:
        choice = [v + b for v, b in zip(choice, inputs["expert_bias"], strict=True)]
    choice = [f32(-np.inf) if np.isnan(v) else v for v in choice]
    size = config.num_experts // config.n_group
    groups = []
    for g in range(config.n_group):
        best = sorted(choice[g * size : (g + 1) * size], reverse=True)[: config.group_top]
        total32 = best[0]
        for v in best[1:]:
            total32 = f32(total32 + v)
        groups.append(f32(-np.inf) if np.isnan(total32) else total32)

    def best_of(values: list[Any], count: int) -> list[int]:
        left = list(range(len(values)))
        found = []
        for _ in range(count):
            at = left[0]
            for i in left[1:]:
                if values[i] > values[at]:
                    at = i
            left.remove(at)
            found.append(at)
        return found

    kept = best_of(groups, config.topk_group)
    masked = -math.inf if config.masked_score == "-inf" else 0.0
    ids = best_of([v if i // size in kept else f32(masked) for i, v in enumerate(choice)], config.top_k)
    weights = [float(scores[i]) if i // size in kept or not config.masked_weights else 0.0 for i in ids]
    if config.norm_topk_prob:
        total = max(math.fsum(weights) + config.norm_eps, config.norm_min)
        weights = [w / total if total else math.nan for w in weights]
    return ids, [w * config.routed_scaling_factor for w in weights]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "int4-128"])
@pytest.mark.parametrize("case", ["normal", "ties", "bias-inf", "large-activations"])
def test_it_agrees_with_a_plain_loop(name: str, case: str) -> None:
    config = CONFIGS[name]
    inputs = draw_inputs(config, 3, np.random.default_rng(5), case, "float16", router_dtype="float16")
    result = reference(config, inputs)
    gate_up, down = plain(inputs, config, "gate_up"), plain(inputs, config, "down")
    for row, x in enumerate(inputs["x"].astype(float).tolist()):
        with np.errstate(all="ignore"):
            ids, weights = one_token(config, x, inputs, row)
        assert ids == result["expert_ids"][row].tolist()
        assert np.allclose(weights, result["expert_weights"][row], rtol=1e-12, equal_nan=True)
        y = np.zeros(config.hidden_size)
        rows = len(gate_up[0]), len(down[0])
        for index, weight in zip(ids, weights, strict=True):
            if index >= config.num_experts - config.zero_experts:
                y += weight * np.array(x)
                continue
            biases = biases_of(inputs, "", index, rows)
            y += weight * np.array(one_expert(config, x, gate_up[index], down[index], biases))
        if config.shared_intermediate_size:
            args = [plain(inputs, config, f"shared_{part}")[0] for part in ("gate_up", "down")]
            biases = biases_of(inputs, "shared_", ..., (len(args[0]), len(args[1])))
            shared = np.array(one_expert(config, x, *args, biases))
            if config.has_shared_gate:
                v = math.fsum(
                    w * t for w, t in zip(inputs["shared_gate_weight"][0].astype(float).tolist(), x, strict=True)
                )
                shared = shared / (1 + math.exp(-v))
            y += shared
        assert relative_error(result["y"][row], y) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_ids_are_valid_and_distinct(case: str) -> None:
    for config in CONFIGS.values():
        ids = reference(config, draw_inputs(config, 7, np.random.default_rng(1), case))["expert_ids"]
        assert ids.min() >= 0 and ids.max() < config.num_experts
        assert all(len(set(row)) == config.top_k for row in ids.tolist())


def test_cases_are_what_they_say() -> None:
    rng = np.random.default_rng(2)
    config = CONFIGS["int4-128"]
    scores = {case: route(config, x["x"], x).scores for case in CASES if (x := draw_inputs(config, 9, rng, case))}
    assert len(np.unique(scores["equal-scores"])) == 1
    assert all(len(np.unique(row)) <= config.num_experts // 4 for row in scores["ties"])
    assert {0.0, 1.0} <= set(np.unique(scores["huge-logits"]).tolist())
    assert scores["low-logits"].max() < 1e-3
    near = scores["near-ties"]
    assert np.all(near.max(axis=1) - near.min(axis=1) < 1e-5) and len(np.unique(near)) > len(near)
    one, two = (
        reference(config, draw_inputs(config, 9, rng, case))["expert_ids"] for case in ("one-expert", "two-experts")
    )
    assert len(np.unique(one)) == config.top_k and len(np.unique(two)) <= config.top_k + 1


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
def test_logits_that_are_not_finite(logit: float, function: str) -> None:
    config = MoeConfig(6, 2, 4, 2, score_function=function, has_router_weight=False, has_ids=True)
    inputs = draw_inputs(config, 2, np.random.default_rng(3))
    inputs["router_logits"][0, 3] = logit
    result = reference(config, inputs)
    assert sorted(set(result["expert_ids"][0].tolist())) == sorted(result["expert_ids"][0].tolist())
    bad = function == "softmax" and logit != -np.inf
    assert np.all(np.isnan(result["expert_weights"][0])) == bad
    if logit == np.inf and function == "sigmoid":
        assert result["expert_ids"][0, 0] == 3
    if bad:
        assert result["expert_ids"][0].tolist() == [0, 1]


@pytest.mark.parametrize("kind", STORED)
def test_packed_bytes_are_those_of_an_onnx_tensor(kind: str) -> None:
    rng = np.random.default_rng(4)
    low, high = RANGES[kind]
    numbers = rng.uniform(low, high + 0.99, (3, 5, 8))
    numbers = numbers if kind == "float8" else np.floor(numbers)
    stored = numbers.astype(STORED[kind])
    packed = pack(numbers, kind)
    assert packed.tobytes() == ir.tensor(stored).tobytes()
    assert np.array_equal(unpack(packed, kind).astype(np.float64), stored.astype(np.float64))
    if kind != "int8":
        table = decode_table(kind)[packed].reshape(numbers.shape)
        assert np.array_equal(table, stored.astype(np.float32))


def test_an_odd_row_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="must be even"):
        pack(np.zeros((2, 3)), "int4")


def test_blocks_are_those_of_dequantize_linear() -> None:
    """Along a row, the last block short; and rows that share a scale."""
    weight = np.arange(24, dtype=np.int8).reshape(4, 6)
    scale = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    zero = np.arange(8).reshape(4, 2)
    expected = (weight - np.repeat(zero, 4, axis=1)[:, :6]) * np.repeat(scale, 4, axis=1)[:, :6]
    assert np.array_equal(dequantize(weight, scale, zero, 4), expected)
    shared = np.repeat(scale[:2], 3, axis=0)[:4]
    expected = weight * np.repeat(shared, 4, axis=1)[:, :6]
    assert np.array_equal(dequantize(weight, scale[:2], None, 4, 3), expected)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no-experts": ({"num_experts": 0}, "must be 1 or more"),
    "top-k": ({"top_k": 17}, "top_k 17 of num_experts 16"),
    "groups-divide": ({"n_group": 5}, "n_group 5"),
    "too-many-groups": ({"topk_group": 5}, "topk_group 5"),
    "group-top": ({"group_top": 5}, "group_top 5 of 4 experts"),
    "score": ({"score_function": "relu"}, "expected one of sigmoid, softmax"),
    "activation": ({"activation": "swish"}, "expected one of silu"),
    "format": ({"weight_format": "int3"}, "expected one of float, int4"),
    "masked": ({"masked_score": "-1"}, "expected one of -inf, 0"),
    "clamp-limit": ({"gate_limit": -1.0}, "gate_limit -1.0"),
    "clamp-nan": ({"up_limit": math.nan}, "up_limit nan"),
    "scale": ({"routed_scaling_factor": math.inf}, "routed_scaling_factor inf"),
    "blocks-of-floats": ({"weight_format": "float"}, "not quantized"),
    "negative-block": ({"block_size": -1}, "block_size -1"),
    "rows-of-int4": ({"block_rows": 2}, "scales of its own for each row"),
    "float8-zero": ({"weight_format": "float8", "has_zero_point": True}, "float8 has none"),
    "odd-width": ({"intermediate_size": 9}, "down_weight has rows of 9: int4 needs an even number"),
    "odd-block": ({"block_size": 5}, "gate_up_weight has blocks of 5: int4 needs an even number"),
    "zero-experts": ({"zero_experts": 16}, "zero_experts 16 of num_experts 16"),
    "least-sum": ({"norm_min": -1.0}, "norm_min -1.0"),
    "slope": ({"activation": "gelu", "activation_alpha": 2.0}, "gelu has none"),
    "offset": ({"gated": 0, "clamp": "none", "up_offset": 1.0}, "no up projection"),
    "no-shared": ({"shared_intermediate_size": -1}, "shared_intermediate_size -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_defined_is_refused(name: str) -> None:
    changes, reason = BAD[name]
    values = {field: getattr(FULL, field) for field in FULL.__dataclass_fields__}
    refused = MoeConfig(**{**values, **changes}).check()
    assert refused is not None and reason in refused.reason


def test_logits_are_chosen_from_where_scores_are_all_one() -> None:
    config = MoeConfig(4, 2, 3, 2, has_router_weight=False, choose_by_logits=1, has_ids=True)
    inputs = draw_inputs(config, 1, np.random.default_rng(4))
    inputs["router_logits"][0] = [20.0, 40.0, 30.0, 50.0]
    assert reference(config, inputs)["expert_ids"].tolist() == [[3, 1]]
    by_scores = MoeConfig(4, 2, 3, 2, has_router_weight=False, has_ids=True)
    assert reference(by_scores, inputs)["expert_ids"].tolist() == [[0, 1]]


def test_what_the_cuda_kernels_do_not_take_is_named() -> None:
    found = {name: refused.reason for name, config in CONFIGS.items() if (refused := cuda_refusal(config))}
    assert set(found) == {
        *("zero-experts", "zero-experts-shared", "clamped-norm", "by-logits"),
        *("biases", "biases-int4", "biases-not-gated"),
    }
    assert found["zero-experts"] == "zero_experts 4: the kernels have none"
    assert found["biases-not-gated"] == "activation_alpha 2.0, gate_up_bias, shared_down_bias: the kernels have none"


def test_configurations_cover_every_choice() -> None:
    for field, values in (
        ("weight_format", FORMATS),
        ("shared_format", ("float", "int4", "int8", "uint8", "float8")),
        ("activation", ("silu", "gelu", "gelu_tanh", "relu2")),
        ("clamp", ("none", "before", "after")),
        ("score_function", ("sigmoid", "softmax")),
        ("masked_score", ("-inf", "0")),
    ):
        assert {getattr(config, field) for config in CONFIGS.values()} == set(values), field
    assert all(config.check() is None for config in CONFIGS.values())
    assert len({config.overload() for config in CONFIGS.values()}) == len(CONFIGS)
