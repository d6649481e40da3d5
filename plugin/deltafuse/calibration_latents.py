"""What fused latent attention is about to cache, made anew beside it so that its statistics can be taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .custom_ops.mla.spec import DOMAIN, INPUTS, OP_TYPE
from .fusions.mla.quantized_cache import LATENT_OF


def add_latents(proto: onnx.ModelProto) -> dict[str, list[dict[str, Any]]]:
    """Add the normed latent of the new tokens of each call that keeps a cache to the main graph, in float32.

    Returns:
        The value's name (``quantized_cache.LATENT_OF``) -> the node that caches it, as a calibration's ``users``.
    """
    graph = proto.graph
    made = {}
    for node in [n for n in graph.node if (n.domain, n.op_type) == (DOMAIN, OP_TYPE)]:
        settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if settings.get("cache", b"none") == b"none" or settings.get("cache_type", b"same") != b"same":
            continue
        name = LATENT_OF.format(node.output[0])
        if any(name in (*other.output, *other.input) for other in graph.node):
            continue  # a value of the model's own
        given = dict(zip(INPUTS, node.input, strict=False))
        _add(graph, name, given, int(settings["kv_lora_rank"]), float(settings.get("kv_norm_eps", 1e-6)))
        place = list(INPUTS).index("latent")
        made[name] = [{"op_type": node.op_type, "name": node.name, "input": place}]
    return made


def _add(graph: onnx.GraphProto, name: str, given: dict[str, str], rank: int, epsilon: float) -> None:
    def constant(part: str, array: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(array, f"{name}.{part}"))
        return f"{name}.{part}"

    def node(part: str, op_type: str, *inputs: str, **attributes: Any) -> str:
        output = f"{name}.{part}" if part else name
        graph.node.append(helper.make_node(op_type, list(inputs), [output], name=output, **attributes))
        return output

    limits = [constant(part, np.array([at], np.int64)) for part, at in (("from", 0), ("to", rank), ("axis", 2))]
    wide = node("wide", "Cast", given["latent"], to=TensorProto.FLOAT)
    weight = given.get("kv_norm_weight", "")
    latent = node("rows" if weight else "", "Slice", wide, *limits)  # packed ones have the rotary key behind
    if not weight:
        return
    # a product: what reductions take their axes from differs between opsets
    mean = constant("mean", np.full((rank, 1), 1.0 / rank, np.float32))
    square = node("square", "MatMul", node("squares", "Mul", latent, latent), mean)
    root = node("root", "Sqrt", node("shifted", "Add", square, constant("epsilon", np.array(epsilon, np.float32))))
    node("", "Mul", node("normed", "Div", latent, root), weight)
