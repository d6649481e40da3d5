"""The ladder of a fused node: deltafuse's kernel, else ONNX Runtime's own op, else the function body.

Chosen when a session is created, from what the plugin EP says it refuses, and never in the middle of a run:

1. the plugin EP's kernel for the session's device, CUDA or CPU (one session, one device);
2. ONNX Runtime's own op (``com.microsoft::LinearAttention``, ``QMoE``), on its provider for that device: the node is
   changed in a copy of the model in memory, nothing is written;
3. the ONNX function body, which runs anywhere.

A CPU kernel is not put into a session on a GPU: its operands would cross the bus twice a layer and token, and the
function body on the GPU is faster than that.

:func:`deltafuse.assignment` reports each step with its reason. This module also holds the rule for TF32: it is off for
models with a router, where rounding a score picks other experts.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .custom_ops.kda.spec import ATTRIBUTES, DOMAIN, OP_TYPE, VERSION, KdaConfig

#: Where ORT looks for external data of a model that it gets as bytes.
FOLDER_ENTRY = "session.model_external_initializers_file_folder_path"
#: Operators that choose: models with one of them keep float32 matrix products in float32.
ROUTER_OPS = ("TopK", "MoE", "QMoE", "MoEGroupRouter", "GroupRouter", "GroupedQMoE")

#: The op of mixtures of experts.
EXPERTS = "GroupedQMoE"
NO_CPU_KERNEL = "the CPU kernel is not used in a session on a GPU"

_TYPES = {"f32": 1, "f16": 10, "bf16": 16}
_FLOATS = ("scale", "l2norm_eps", "lower_bound", "beta_scale", "norm_eps")
_OVERLOAD = re.compile(r"-(f32|f16|bf16)-(f32|f16|bf16)(-t1|-tn)?$")


@dataclass(frozen=True)
class Call:
    """What a node that calls the op is: its configuration, the element types T and TS, and its fixed length."""

    config: KdaConfig
    dtype: int
    state_dtype: int
    seq_len: int | None


@dataclass(frozen=True)
class Step:
    """One node that the plugin EP refused.

    Attributes:
        op_type, name: the node; a node without a name by its first output.
        reason: why the plugin EP refused it.
        ort_reason: why ONNX Runtime's op does not run it either, "" where it does.
    """

    op_type: str
    name: str
    reason: str
    ort_reason: str = ""


@dataclass(frozen=True)
class Lowered:
    """A copy of a model with some nodes changed to ONNX Runtime's op.

    Attributes:
        model: the serialised model.
        folder: where its external data are, "" where it was given as bytes.
        steps: all refused nodes, those that were changed (no ``ort_reason``) and those that were not.
    """

    model: bytes
    folder: str
    steps: tuple[Step, ...]

    @property
    def changed(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if not step.ort_reason)


def read_call(node: Any) -> Call:
    """The call that an ``onnx.NodeProto`` makes, from its attributes, its operands and its overload.

    Raises:
        ValueError: the node is not one that this version of deltafuse wrote.
    """
    from onnx import helper

    found = _OVERLOAD.search(node.overload)
    if node.domain != DOMAIN or node.op_type != OP_TYPE or found is None:
        raise ValueError(f"overload {node.overload!r} does not say what the call is")
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    texts: dict[str, Any] = {
        name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()
    }
    missing = [name for name in ATTRIBUTES if name not in texts]
    if missing:
        raise ValueError(f"attribute {missing[0]} is missing")
    texts |= _exact_floats(texts, node.overload)
    have = _present(node)
    width = re.search(r"-conv_width_(\d+)", node.overload)
    config = KdaConfig(
        **{name: texts[name] for name in ATTRIBUTES},
        conv_width=int(width[1]) if width else 0,
        packed_qkv="k" not in have,
        has_dt_bias="dt_bias" in have,
        has_conv_bias="conv_bias" in have,
        has_conv_state="conv_state" in have,
        has_initial_state="initial_state" in have,
        has_norm="norm_weight" in have,
        has_cu_seqlens="cu_seqlens" in have,
        has_present_conv_state="present_conv_state" in have,
        has_final_state="final_state" in have,
    )
    if set(config.input_names()) != have & set(_formal_inputs()):
        raise ValueError(f"its operands {', '.join(sorted(have))} are not those of its attributes")
    seq_len = {None: None, "-t1": 1, "-tn": 2}[found[3]]  # any number above 1 gives the same function
    if config.overload() != node.overload[: found.start()] or texts.get("state_dtype") != _TYPES[found[2]]:
        raise ValueError(f"its attributes are not those of its function {node.overload!r}")
    return Call(config, _TYPES[found[1]], _TYPES[found[2]], seq_len)


def _exact_floats(values: dict[str, Any], overload: str) -> dict[str, float]:
    """The float attributes as they were before ONNX rounded them to float32; the overload has all their digits."""
    defaults = {field.name: field.default for field in fields(KdaConfig)}
    exact = {}
    for name in _FLOATS:
        found = re.search(rf"(?:^|-){name}_(-?[0-9]+(?:p[0-9]+)?(?:e-?[0-9]+)?)", overload)
        value = float(found[1].replace("p", ".")) if found else defaults[name]
        if not isinstance(value, float) or not math.isclose(value, values[name], rel_tol=1e-6):
            raise ValueError(f"its attribute {name} {values[name]} is not that of its function {overload!r}")
        exact[name] = value
    return exact


def _formal_inputs() -> tuple[str, ...]:
    from .custom_ops.kda.spec import INPUTS

    return tuple(INPUTS)


def _present(node: Any) -> set[str]:
    """Formal names of the operands and results that the node has."""
    from .custom_ops.kda.spec import INPUTS, OUTPUTS

    inputs = {name for name, value in zip(INPUTS, node.input, strict=False) if value}
    return inputs | {name for name, value in zip(OUTPUTS, node.output, strict=False) if value}


def lower(
    model: str | os.PathLike[str] | bytes,
    refused: Sequence[Step],
    ort_version: tuple[int, int],
    *,
    on_gpu: bool = False,
) -> Lowered:
    """Change the refused nodes that ONNX Runtime's own op can run, in a copy of the model.

    Args:
        model: the model, as it was given to the session: a path or bytes. Not changed.
        refused: the nodes in question; those of ops that have no stand-in stay.
        ort_version: of the ONNX Runtime that is to run it.
        on_gpu: the session is on a GPU: the reasons then name the CPU kernel too, which is passed over there.

    Returns:
        The new model; where nothing could be changed, ``model`` in it is b"".
    """
    import onnx

    folder = "" if isinstance(model, bytes) else str(Path(model).resolve().parent)
    try:
        if isinstance(model, bytes):
            proto = onnx.load_from_string(model)
        else:
            proto = onnx.load(os.fspath(model), load_external_data=False)
    except Exception as error:  # not an ONNX file: ORT's own format, which cannot be changed
        return Lowered(b"", folder, tuple(_with(step, f"the model cannot be changed: {error}") for step in refused))
    version = next((entry.version for entry in proto.opset_import if entry.domain == DOMAIN), VERSION)
    if version != VERSION:  # what its inputs mean is known to its body alone
        return Lowered(
            b"", folder, tuple(_with(step, f"version {version} of it is not known here") for step in refused)
        )
    wanted = {(step.op_type, step.name): step for step in refused}
    results: dict[tuple[str, str], Step] = {}
    functions: dict[str, Any] = {}
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    for node in nodes_of(proto.graph):
        key = (node.op_type, node.name or next(iter(node.output), ""))
        if node.domain == DOMAIN and key in wanted:
            reason = _lower_node(node, opset, ort_version, functions, on_gpu)
            results[key] = _with(wanted[key], f"{reason}; {NO_CPU_KERNEL}" if reason and on_gpu else reason)
    steps = tuple(
        results.get((step.op_type, step.name), _with(step, "the node is not in the model's graph")) for step in refused
    )
    if not functions:
        return Lowered(b"", folder, steps)
    proto.functions.extend(functions.values())
    for domain in (next(iter(functions.values())).domain, "com.microsoft"):
        _import(proto, domain, 1)
    proto.ir_version = max(proto.ir_version, 10)
    return Lowered(proto.SerializeToString(), folder, steps)


def _with(step: Step, reason: str) -> Step:
    return Step(step.op_type, step.name, step.reason, reason)


def _lower_node(node: Any, opset: int, ort_version: tuple[int, int], functions: dict[str, Any], on_gpu: bool) -> str:
    """Let the node call the function with ORT's op; why not, or ""."""
    import onnx_ir as ir

    from .custom_ops.kda.body_ort import ORT_FORM_DOMAIN
    from .registry.targets import STAND_INS, ort_op_refusal, stand_in_refusal

    none = stand_in_refusal(node.op_type)
    if none is not None:
        return none.reason
    unknown = ort_op_refusal(STAND_INS[node.op_type], ort_version)
    if unknown is not None:
        return unknown.reason
    try:
        build = _experts if node.op_type == EXPERTS else _attention
        function = build(node, opset, ort_version, on_gpu)
        if isinstance(function, str):
            return function
    except (ValueError, TypeError) as error:  # attributes of a wrong type, an opset that the body is not written for
        return str(error)
    if function.overload not in functions:
        functions[function.overload] = ir.serde.serialize_function(function)
    node.domain, node.overload = ORT_FORM_DOMAIN, function.overload
    return ""


def _attention(node: Any, opset: int, ort_version: tuple[int, int], on_gpu: bool) -> Any:
    """The function for a ``KimiDeltaAttention`` node, or why there is none."""
    import onnx_ir as ir

    from .custom_ops.kda.body_ort import build_ort_function, ort_refusal

    call = read_call(node)
    refused = ort_refusal(call.config, on_gpu=on_gpu)
    if refused is not None:
        return refused.reason
    types = ir.DataType(call.dtype), ir.DataType(call.state_dtype)
    return build_ort_function(call.config, opset, *types, seq_len=call.seq_len)


def _experts(node: Any, opset: int, ort_version: tuple[int, int], on_gpu: bool) -> Any:
    """The function for a ``GroupedQMoE`` node, or why there is none."""

    from .custom_ops.moe import body_ort, call
    from .custom_ops.moe.spec import ATTRIBUTES as KNOWN
    from .custom_ops.moe.spec import INPUTS

    if ort_version < body_ort.MIN_ORT:
        needs, has = (".".join(map(str, version)) for version in (body_ort.MIN_ORT, ort_version))
        return f"com.microsoft::{body_ort.ORT_OP} with weights of a router needs ONNX Runtime {needs}, this is {has}"
    strange = [attribute.name for attribute in node.attribute if attribute.name not in KNOWN]
    if strange:
        raise ValueError(f"what its attribute {strange[0]} means is not known here")
    config, dtype = call.read_call(_ir_node(node))
    have = {name for name, value in zip(INPUTS, node.input, strict=False) if value}
    if set(config.input_names()) != have:
        raise ValueError(f"its operands {', '.join(sorted(have))} are not those of its attributes")
    refused = body_ort.ort_refusal(config, dtype, on_gpu=on_gpu)
    return body_ort.build_ort_function(config, opset, dtype, on_gpu=on_gpu) if refused is None else refused.reason


def _ir_node(node: Any) -> Any:
    """An ``onnx.NodeProto`` as an ``onnx_ir.Node``; its inputs are declared, or onnx_ir warns of an invalid model."""
    import onnx
    import onnx_ir as ir

    declared = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
    return ir.serde.deserialize_graph(onnx.GraphProto(node=[node], input=declared)).node(0)


def _import(proto: Any, domain: str, version: int) -> None:
    if all(entry.domain != domain for entry in proto.opset_import):
        proto.opset_import.add(domain=domain, version=version)


def nodes_of(graph: Any) -> Iterator[Any]:
    """All nodes of an ``onnx.GraphProto`` and of the graphs inside it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)
            for inner in attribute.graphs:
                yield from nodes_of(inner)


def router_op(model: str | os.PathLike[str] | bytes) -> str:
    """The first operator of :data:`ROUTER_OPS` in the model, "" where there is none."""
    return first_op(model, ROUTER_OPS)


def first_op(model: str | os.PathLike[str] | bytes, wanted: Sequence[str]) -> str:
    """The first of these operators that the model has, "" where it has none.

    The file is searched for the operator's name as protobuf writes it in a node, so that models of many gigabytes need
    not be parsed. A sampler's TopK counts as well: it chooses by comparing too.
    """
    names = {name: bytes([0x22, len(name)]) + name.encode() for name in wanted}  # field 4 (op_type), length, text
    if isinstance(model, bytes):
        return next((name for name, written in names.items() if written in model), "")
    try:
        with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return next((name for name, written in names.items() if data.find(written) >= 0), "")
    except (OSError, ValueError):  # no such file, or an empty one: ORT says so
        return ""


def tf32_choice(model: str | os.PathLike[str] | bytes, options: dict[str, str]) -> tuple[dict[str, str], str]:
    """The CUDA EP's options with TF32 off for a model with a router, and a remark.

    A caller's own ``use_tf32`` is left as it is.
    """
    found = router_op(model)
    if not found:
        return options, ""
    if "use_tf32" in options:
        return (
            options,
            f"TF32 is as the caller set it (use_tf32 {options['use_tf32']}); the model has a router ({found})",
        )
    return {**options, "use_tf32": "0"}, f"TF32 is off: the model has a router ({found}), where rounding picks others"
