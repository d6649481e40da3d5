"""A hand-made model with a paged 8-bit cache: a prompt in two pieces, then tokens, on the plugin EP (CPU device, caches
in one buffer) and in stock ONNX Runtime, whose graph inputs and outputs are the codes themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.mla.body import build_function, formal_outputs, overload_name
from deltafuse.custom_ops.mla.quantize import FLOAT8, int8_scales
from deltafuse.custom_ops.mla.reference import errors, reference, relative_error, tolerance
from deltafuse.custom_ops.mla.spec import INPUTS, MlaConfig
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from .call import quiet

pytestmark = pytest.mark.usefixtures("library")

Arrays = dict[str, NDArray[Any]]
OPSET, HIDDEN, RANK, ROPE, HEADS, WIDTH = 20, 24, 160, 8, 3, 16
BATCH, BLOCKS, BLOCK, PIECES = 2, 9, 4, (7, 5, 1, 1, 1)
CODES = {"int8": TensorProto.INT8, "float8": TensorProto.FLOAT8E4M3FN}


def make_config(cache_type: str) -> MlaConfig:
    return MlaConfig(
        HEADS,
        WIDTH,
        ROPE,
        WIDTH,
        RANK,
        scale=(WIDTH + ROPE) ** -0.5,
        rope="interleaved",
        cache="latent",
        cache_type=cache_type,
        has_position_ids=True,
        cos_width=ROPE // 2,
        has_past=True,
        static_cache=True,
        paged=True,
        has_present=True,
    )


def make_weights() -> Arrays:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    turns = np.outer(np.arange(64), 100.0 ** (-np.arange(ROPE // 2) / (ROPE // 2)))
    return {
        "w_q": normal(HIDDEN, HEADS * (WIDTH + ROPE)),
        "w_latent": normal(HIDDEN, RANK),
        "w_rope": normal(HIDDEN, ROPE),
        "kv_b_weight": normal(RANK, HEADS * 2 * WIDTH),
        "cos": np.cos(turns).astype(np.float32),
        "sin": np.sin(turns).astype(np.float32),
    }


def make_model(config: MlaConfig, weights: Arrays) -> bytes:
    """x to o by three products and a call of the op; nothing but ``onnx.helper``, beside the function itself."""
    floats = TensorProto.FLOAT
    pool: list[int | str] = [BLOCKS, BLOCK]
    scale: list[int | str] = [RANK] if config.cache_type == "int8" else [*pool, -(-RANK // 128)]
    tensors: dict[str, tuple[int, list[int | str]]] = {
        "x": (floats, [BATCH, "S", HIDDEN]),
        "position_ids": (TensorProto.INT64, [BATCH, "S"]),
        "past_latent": (CODES[config.cache_type], [*pool, RANK]),
        "past_k_rope": (floats, [*pool, ROPE]),
        "past_latent_scale": (floats, scale),
        "cache_lengths": (TensorProto.INT64, [BATCH]),
        "block_table": (TensorProto.INT32, [BATCH, "max_blocks"]),
        "o": (floats, [BATCH, "S", HEADS * WIDTH]),
    }
    for name in config.output_names()[1:]:
        tensors[name] = tensors[name.replace("present", "past")]
    values = {name: helper.make_tensor_value_info(name, *kind) for name, kind in tensors.items()}
    products = {"q": "w_q", "latent": "w_latent", "k_rope": "w_rope"}
    nodes = [helper.make_node("MatMul", ["x", weight], [name]) for name, weight in products.items()]
    taken = config.input_names()
    call = helper.make_node(
        "LatentAttention",
        [name if name in taken else "" for name in INPUTS if name not in ("attn_mask", "gate")],
        [name if name in config.output_names() else "" for name in formal_outputs(config)],
        name="mla",
        domain="deltafuse",
        overload=overload_name(config, ir.DataType.FLOAT),
        **config.attributes(),
    )
    graph = helper.make_graph(
        [*nodes, call],
        "hand_made",
        [value for name, value in values.items() if name not in config.output_names()],
        [values[name] for name in config.output_names()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("deltafuse", 1)]
    body = ir.to_proto(build_function(config, OPSET))
    model = helper.make_model(graph, functions=[body], opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def value_of(array: NDArray[Any]) -> ort.OrtValue:
    """An OrtValue of its own memory; float8 as such."""
    if array.dtype == FLOAT8:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8).copy(), TensorProto.FLOAT8E4M3FN)
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def array_of(value: ort.OrtValue) -> NDArray[Any]:
    array = np.array(value.numpy())
    return array.view(FLOAT8) if value.element_type() == TensorProto.FLOAT8E4M3FN else array


@pytest.mark.parametrize("in_place", [True, False], ids=["one-buffer", "two-buffers"])
@pytest.mark.parametrize("where", ["plugin", "stock"])
@pytest.mark.parametrize("cache_type", CODES)
def test_a_prompt_and_tokens(cache_type: str, where: str, in_place: bool) -> None:
    config, weights = make_config(cache_type), make_weights()
    if where == "plugin":
        running = deltafuse.session(make_model(config, weights), device="cpu", sess_options=quiet(), strict=True)
    else:
        running = ort.InferenceSession(make_model(config, weights), quiet(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    x = rng.standard_normal((BATCH, sum(PIECES), HIDDEN)).astype(np.float32)
    latents = x @ weights["w_latent"]
    pool = (BLOCKS, BLOCK)
    caches: Arrays = {"past_k_rope": np.full((*pool, ROPE), np.nan, np.float32)}  # nothing of it is used yet
    if cache_type == "int8":
        caches["past_latent"] = np.full((*pool, RANK), 99, np.int8)
        caches["past_latent_scale"] = int8_scales(np.abs(latents).max(axis=(0, 1)))
    else:
        caches["past_latent"] = np.full((*pool, RANK), 0x7F, np.uint8).view(FLOAT8)  # NaN
        caches["past_latent_scale"] = np.full((*pool, 2), np.nan, np.float32)
    table = np.array([[7, 2, 5, 0], [3, 8, 1, 6]], np.int32)
    held = {name: value_of(array) for name, array in caches.items()}
    outputs, there = [], 0
    for count in PIECES:
        piece = x[:, there : there + count]
        given: Arrays = {
            "position_ids": np.tile(np.arange(there, there + count), (BATCH, 1)),
            "cache_lengths": np.full(BATCH, there, np.int64),
            "block_table": np.where(np.arange(4) * BLOCK < there + count, table, -1).astype(np.int32),
        }
        binding = running.io_binding()
        # Kept until the run is over: up to ONNX Runtime 1.28 a binding does not hold the memory of what is bound.
        fed = {"x": value_of(piece), **{n: value_of(a) for n, a in given.items()}, **held}
        for name, value in fed.items():
            binding.bind_ortvalue_input(name, value)
        for name in config.output_names():
            past = name.replace("present", "past")
            if name != "o" and in_place:
                binding.bind_ortvalue_output(name, held[past])
            else:
                binding.bind_output(name)
        running.run_with_iobinding(binding)
        names = [value.name for value in running.get_outputs()]  # bound in the same order
        got = {name: array_of(value) for name, value in zip(names, binding.get_outputs(), strict=True)}
        operands = {
            **{name: piece @ weights[weight] for name, weight in (("q", "w_q"), ("k_rope", "w_rope"))},
            "latent": piece @ weights["w_latent"],
            **{name: weights[name] for name in ("kv_b_weight", "cos", "sin")},
            **given,
            **caches,
        }
        found = errors(config, operands, got)
        assert max(found.values()) <= tolerance("body", "float32", cache_type=cache_type), (there, found)
        outputs.append(got["o"])
        for name in config.output_names()[1:]:
            past = name.replace("present", "past")
            caches[past] = got[name]
            held[past] = value_of(got[name]) if not in_place else held[past]
        there += count
    # over all: what 8 bits cost, against a cache that is exact
    apart = dict.fromkeys(("has_past", "static_cache", "paged", "has_present"), False)
    exact = replace(config, cache="none", cache_type="same", **apart)
    whole = {
        "q": x @ weights["w_q"],
        "latent": latents,
        "k_rope": x @ weights["w_rope"],
        **{name: weights[name] for name in ("kv_b_weight", "cos", "sin")},
        "position_ids": np.tile(np.arange(there), (BATCH, 1)),
    }
    lost = relative_error(np.concatenate(outputs, axis=1), reference(exact, whole)["o"])
    assert 1e-4 < lost < (0.01 if cache_type == "int8" else 0.04)
