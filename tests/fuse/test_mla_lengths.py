"""Lengths of caches are asked of what comes in, not of what a block gives: a mask as long as the keys stays outside."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.fusions.cleanup import cleanup_passes
from deltafuse.fusions.mla.lengths import spell_lengths
from deltafuse.fusions.passes import PassManager

from . import kit


def model(asked: str, place: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[B, P, 16] past, float[B, S, 16] x) => (float[B, L, 16] present, float[B, H, D, N] turned,
            int64 length) <int64[4] apart = {{0, 0, 4, 4}}, int64 place = {{{place}}}> {{
            new = Neg (x)
            present = Concat <axis = 1> (past, new)
            heads = Reshape (present, apart)
            keys = Transpose <perm = [0, 2, 1, 3]> (heads)
            turned = Transpose <perm = [0, 1, 3, 2]> (keys)
            one = Constant <value_int = 1> ()
            later = Slice (keys, begin, end, axis)
            sizes = Shape ({asked})
            size = Gather (sizes, place)
            length = Add (size, one)
        }}""".replace("<int64[4]", "<int64[1] begin = {1}, int64[1] end = {1000}, int64[1] axis = {2}, int64[4]")
    )


@pytest.mark.parametrize(
    ("asked", "place", "cache"), [("keys", "2", False), ("keys", "-2", False), ("later", "2", True)]
)
def test_a_size_of_keys_is_that_of_the_cache(asked: str, place: str, cache: bool) -> None:
    """Keys cut by one are another size: those are asked as before."""
    before = model(asked, place)
    made = ir.from_proto(before)
    PassManager(cleanup_passes())(made)
    spell_lengths(made.graph)
    stack, seen = [made.graph.outputs[2]], set()
    while stack:
        node = stack.pop().producer()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [v for v in node.inputs if v is not None]
    assert ("Concat" in {n.op_type for n in seen}) == cache
    rng = np.random.default_rng(0)
    for past, tokens in ((3, 2), (7, 1)):
        feeds = {"past": rng.standard_normal((2, past, 16)), "x": rng.standard_normal((2, tokens, 16))}
        kit.same(before, ir.to_proto(made), {n: a.astype(np.float32) for n, a in feeds.items()})
