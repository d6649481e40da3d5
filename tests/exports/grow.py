"""Make a deep model out of a shallow export by repeating its layers, for tests of size and of growth.

Usage as a program: ``python -m exports.grow IN.onnx OUT.onnx 0 0 0 0 0 1`` (what each layer copies).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper

SCOPES = "pkg.torch.onnx.name_scopes"


def grow(model: onnx.ModelProto, layers: Sequence[int]) -> onnx.ModelProto:
    """A model whose layer i is a copy of layer ``layers[i]`` of the export, with weights of its own.

    The export must carry name scopes (``...layers.N``), and its layers must be joined by one hidden state and nothing
    else that differs between them: a prompt with no states. Values that a layer shares with others (masks, positions,
    shapes) stay shared.
    """
    graph = model.graph
    count = max(layers) + 1
    cuts = _cuts(graph, count)
    parts = [_between(graph, cuts[i], cuts[i + 1]) for i in range(count)]
    cloned = {id(node) for part in parts for node in part}
    tail = _after(graph, cuts[count], cloned)
    tail_ids = {id(node) for node in tail}
    weights = {t.name: t for t in graph.initializer}

    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    del result.graph.value_info[:]
    shared_values = set()
    for node in graph.node:
        if id(node) not in cloned and id(node) not in tail_ids:
            result.graph.node.append(node)
            shared_values.update(node.output)
    infos = {v.name: v for v in graph.value_info}
    kept_infos = [infos[n] for n in shared_values if n in infos]
    hidden, first_use = cuts[0], dict[int, int]()
    for position, which in enumerate(layers):
        produced = {o for node in parts[which] for o in node.output if o}
        names = {name: f"{name}.at{position}" for name in produced}
        if which not in first_use:  # what other layers share of this one keeps its name
            first_use[which] = position
            names = {}
        names[cuts[which]] = hidden
        for tensor in _weights_of(parts[which], weights):
            if position != first_use[which] and _is_weight(tensor):
                names[tensor.name] = f"{tensor.name}.at{position}"
                rolled = np.roll(numpy_helper.to_array(tensor), position, axis=0)
                result.graph.initializer.append(numpy_helper.from_array(rolled, names[tensor.name]))
        for node in parts[which]:
            result.graph.node.append(_renamed(node, names, which, position))
        for name in produced:
            if name in infos:
                info = result.graph.value_info.add()
                info.CopyFrom(infos[name])
                info.name = names.get(name, name)
        hidden = names.get(cuts[which + 1], cuts[which + 1])
    for node in tail:
        result.graph.node.append(_renamed(node, {cuts[count]: hidden}, 0, 0))
        kept_infos += [infos[n] for n in node.output if n in infos]
    result.graph.value_info.extend(kept_infos)
    return result


def _scope(node: onnx.NodeProto) -> str:
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            names = ast.literal_eval(entry.value)
            return names[-2] if len(names) > 1 else ""
    return ""


def _cuts(graph: onnx.GraphProto, count: int) -> list[str]:
    """The hidden state before each layer and after the last: the embedding, then each layer's last residual sum."""
    cuts = [next(n.output[0] for n in graph.node if n.op_type == "Gather" and _scope(n).endswith("embed_tokens"))]
    for index in range(count):
        sums = [n for n in graph.node if n.op_type == "Add" and re.search(rf"layers\.{index}$", _scope(n))]
        cuts.append(sums[-1].output[0])
    return cuts


def _between(graph: onnx.GraphProto, start: str, end: str) -> list[onnx.NodeProto]:
    """Nodes that depend on ``start`` and that ``end`` depends on, in order."""
    below, down = {start}, []
    for node in graph.node:
        if any(name in below for name in _reads(node)):
            below.update(node.output)
            down.append(node)
    needed, found = {end}, []
    for node in reversed(down):
        if any(name in needed for name in node.output):
            needed.update(_reads(node))
            found.append(node)
    return found[::-1]


def _after(graph: onnx.GraphProto, start: str, cloned: set[int]) -> list[onnx.NodeProto]:
    below, found = {start}, []
    for node in graph.node:
        if id(node) not in cloned and any(name in below for name in _reads(node)):
            below.update(node.output)
            found.append(node)
    return found


def _reads(node: onnx.NodeProto) -> list[str]:
    inner = [name for a in node.attribute if a.HasField("g") for n in a.g.node for name in _reads(n)]
    return [name for name in [*node.input, *inner] if name]


def _weights_of(nodes: list[onnx.NodeProto], weights: dict[str, onnx.TensorProto]) -> list[onnx.TensorProto]:
    return [weights[name] for name in dict.fromkeys(n for node in nodes for n in _reads(node)) if name in weights]


def _is_weight(tensor: onnx.TensorProto) -> bool:
    """Not a mask, an identity matrix or the like: those hold few distinct numbers."""
    if tensor.data_type != onnx.TensorProto.FLOAT or np.prod(tensor.dims) <= 64:
        return False
    return len(np.unique(numpy_helper.to_array(tensor))) > 4


def _renamed(node: onnx.NodeProto, names: dict[str, str], old: int, new: int) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(n, n) for n in node.input]
    copy.output[:] = [names.get(n, n) for n in node.output]
    if old != new:
        copy.name = f"{node.name}.at{new}"
    for entry in copy.metadata_props:
        entry.value = entry.value.replace(f"layers.{old}", f"layers.{new}")
    return copy


if __name__ == "__main__":
    onnx.save(grow(onnx.load(sys.argv[1]), [int(which) for which in sys.argv[3:]]), sys.argv[2])
