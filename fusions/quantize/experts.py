"""Weights of fused ``GroupedQMoE`` nodes, routed and shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import onnx_ir as ir

from ...custom_ops.common.parts_tensor import SpillFile, part_of
from ...custom_ops.common.quantize_matrix import Statistics
from ...custom_ops.common.scheme import Scheme
from ...custom_ops.moe.body import build_function
from ...custom_ops.moe.call import attach, make_node, read_call
from ...custom_ops.moe.quantize import Array, ExpertStatistics, QuantizedStack, effective_blocks, quantize_stack
from ...custom_ops.moe.spec import DOMAIN, INPUTS, MATRICES, OP_TYPE, PLAIN_FORMATS, MoeConfig
from ..result import QuantizedTensor
from .activations import Activations
from .initializers import Names, Sources, add_initializer
from .spec import QuantizeError

Log = Callable[[str], None]


def quantized_config(config: MoeConfig, scheme: Scheme) -> MoeConfig:
    """The configuration with all weights in the scheme's format."""
    plain = scheme.kind in PLAIN_FORMATS
    size, rows = effective_blocks(scheme, config, shared=False)
    changed = replace(
        config,
        weight_format=scheme.kind,
        block_size=size,
        block_rows=rows,
        has_zero_point=scheme.asymmetric and not plain,
    )
    if not config.shared_intermediate_size or config.shared_format not in PLAIN_FORMATS:
        return changed
    size, rows = effective_blocks(scheme, config, shared=True)
    return replace(
        changed,
        shared_format=scheme.kind,
        shared_block_size=size,
        shared_block_rows=rows,
        shared_has_zero_point=scheme.asymmetric and not plain,
    )


#: Experts after which the files that were read are unmapped.
_UNMAP_AFTER = 8


def _stack(
    value: ir.Value,
    scheme: Scheme,
    dtype: ir.DataType,
    spill: SpillFile,
    statistics: Callable[[int], Statistics | None],
    sources: Sources | None,
) -> QuantizedStack:
    assert value.const_value is not None

    def read(done: int) -> None:
        if sources is not None and done % _UNMAP_AFTER == 0:
            sources.unmap()

    found = None
    for scale_dtype in (dtype, ir.DataType.FLOAT):
        try:
            found = quantize_stack(value.const_value, scheme, scale_dtype, spill, statistics, read)
        except ValueError as error:
            raise QuantizeError(f"{value.name}: {error}") from error
        if found is not None:
            break
    if sources is not None:
        sources.unmap()
    assert found is not None
    return found


def is_calibrated(scheme: Scheme, seen: Statistics | None) -> bool:
    """Do statistics have a say in how numbers are rounded?"""
    return seen is not None and seen.algorithm != "nearest" and scheme.kind not in ("float8", "bfloat16")


def _unknown(_: int) -> None:
    """Nothing is known of any expert's inputs."""


OfInputs = Callable[[int], Statistics | None]


def _of_inputs(
    config: MoeConfig, inputs: Mapping[str, ir.Value], seen: Statistics | None, rows: Array | None
) -> dict[str, OfInputs | None]:
    """What is known of each matrix's inputs, by its name and the expert's number. Those of the down projections follow
    from rows of x."""
    found: dict[str, OfInputs | None] = dict.fromkeys(MATRICES)
    if seen is None:
        return found
    way = seen.algorithm
    for prefix in ("", "shared_"):
        found[f"{prefix}gate_up"] = lambda _: seen
        weight = inputs.get(f"{prefix}gate_up_weight")
        shared = prefix != ""
        kind = config.shared_format if shared else config.weight_format
        if rows is None or weight is None or weight.const_value is None or kind not in PLAIN_FORMATS:
            continue
        tensor, held = weight.const_value, inputs.get(f"{prefix}gate_up_bias")
        added = None if held is None or held.const_value is None else held.const_value.numpy()
        if shared:
            bias = None if added is None else added[None]
            of_all = ExpertStatistics(config, rows, None, _whole(tensor), bias, way)
            found["shared_down"] = lambda _, s=of_all: s.down(0)  # type: ignore[misc]
            continue
        router = {name: inputs[name].const_value for name in _ROUTER if name in inputs}
        known = config.has_router_weight and all(t is not None for t in router.values())
        arrays = {name: t.numpy() for name, t in router.items() if t is not None} if known else None
        found["down"] = ExpertStatistics(config, rows, arrays, _part(tensor), added, way).down
    return found


_ROUTER = ("router_weight", "router_bias", "expert_bias")


def _whole(tensor: ir.TensorProtocol) -> Callable[[int], Array]:
    return lambda _: tensor.numpy()


def _part(tensor: ir.TensorProtocol) -> Callable[[int], Array]:
    return lambda index: part_of(tensor, index)


def quantize_experts(
    model: ir.Model,
    scheme: Scheme,
    statistics: Mapping[str, Statistics],
    spill: SpillFile,
    names: Names,
    log: Log,
    progress: Callable[[int, int], None],
    sources: Sources | None = None,
) -> list[QuantizedTensor]:
    """Quantize the experts of every fused node whose weights are floats and constants.

    Args:
        model: changed in place.
        statistics: of activations, by their value's name.
        spill: where the new weights wait until the model is saved.
        names: makes unique names.
        log: takes what was left alone, and why.
        progress: called with (nodes done, nodes).
        sources: the files that the weights are read from.
    """
    nodes = [n for n in model.graph.all_nodes() if (n.domain, n.op_type) == (DOMAIN, OP_TYPE)]
    done: list[QuantizedTensor] = []
    shared: dict[ir.Value, QuantizedStack] = {}
    for number, node in enumerate(nodes):
        progress(number, len(nodes))
        config, dtype = read_call(node)
        inputs = {name: value for name, value in zip(INPUTS, node.inputs, strict=False) if value is not None}
        if config.weight_format not in PLAIN_FORMATS:
            log(f"{node.name}: its experts are quantized already ({config.weight_format})")
            continue
        wanted = quantized_config(config, scheme)
        refused = wanted.check()
        if refused is not None:
            log(f"{node.name}: {refused.reason}")
            continue
        changes = [
            name
            for name in MATRICES
            if f"{name}_weight" in inputs and wanted.weights_form(name) != config.weights_form(name)
        ]
        variable = [name for name in changes if inputs[f"{name}_weight"].const_value is None]
        if variable:
            log(f"{node.name}: {variable[0]}_weight is not a constant")
            continue
        seen = statistics.get(inputs["x"].name or "")
        if seen is not None and len(seen.mean_square) != config.hidden_size:
            seen = None  # of another model, in which the name means something else
        if statistics and seen is None and getattr(statistics, "algorithm", "") != "nearest":
            hint = "rounded to nearest (a calibration of the fused model has it)"
            log(f"{node.name}: the calibration has nothing of {inputs['x'].name!r}: {hint}")
        rows = statistics.rows(inputs["x"].name or "") if isinstance(statistics, Activations) and seen else None
        of_inputs = _of_inputs(config, inputs, seen, rows)
        for name in changes:
            before = inputs[f"{name}_weight"]
            use = of_inputs[name]
            stack = shared.get(before)
            if stack is None:
                stack = shared[before] = _stack(before, scheme, dtype, spill, use or _unknown, sources)
            parts = {"weight": stack.weight, "scale": stack.scale, "zero_point": stack.zero_point}
            for part, tensor in parts.items():
                if tensor is not None:
                    inputs[f"{name}_{part}"] = add_initializer(model, names, f"{node.name}.{name}_{part}", tensor)
            assert before.const_value is not None
            done.append(
                QuantizedTensor(
                    name=f"{node.name}.{name}",
                    group="experts",
                    scheme=str(scheme),
                    error=stack.error,
                    bytes_before=before.const_value.nbytes,
                    bytes_after=sum(t.nbytes for t in parts.values() if t is not None),
                    calibrated=use is not None and is_calibrated(scheme, seen),
                    product_error=stack.product_error,
                )
            )
        _replace(model, node, wanted, inputs, dtype)
    if nodes:
        progress(len(nodes), len(nodes))
    return done


def _replace(
    model: ir.Model, node: ir.Node, config: MoeConfig, inputs: Mapping[str, ir.Value], dtype: ir.DataType
) -> None:
    """Another call in the place of ``node``."""
    function = build_function(config, model.opset_imports[""], dtype)
    made = make_node(config, inputs, dtype, name=node.name)
    made.metadata_props.update(node.metadata_props)
    for old, new in zip(node.outputs, made.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
    graph = node.graph
    assert graph is not None
    ir.convenience.replace_nodes_and_values(graph, node, [node], [made], list(node.outputs), list(made.outputs))
    attach(model, function)
