"""The exports themselves: complete, small, and of the kinds that they are said to be."""

from __future__ import annotations

import onnx
import pytest
from exports import library
from exports.grow import grow
from exports.strip import strip

from . import kit


def test_every_file_has_an_entry_and_every_entry_its_files() -> None:
    entries = library.all_exports().values()
    named = {e.file for e in entries} | {e.truth for e in entries if e.truth}
    real = {f"{name}.skel.onnx.xz" for name in ("kda_512", "kda_2048", "mla_2048", "mla_step", "moe_1", "moe_64")}
    assert {p.name for p in library.DATA.iterdir() if p.is_file()} == named | real | {"expected.json"}
    sizes = [p.stat().st_size for p in library.DATA.iterdir()]
    assert max(sizes) < 2**20
    assert sum(sizes) < 10 * 2**20  # whoever runs the GPU tests elsewhere carries them there


def test_all_kinds_are_there() -> None:
    exports = library.all_exports().values()
    assert {e.form for e in exports if e.kda} == {
        "chunked",
        "recurrent",
        "unrolled",
        "scan",
        "loop",
        "linear-attention",
    }
    assert {e.opset for e in exports if e.kda} >= {18, 20, 21, 22, 23, 24, 27}
    assert sum(e.kda for e in exports) > 80
    assert len(library.names("no-kda")) >= 4


@pytest.mark.parametrize("name", ["bailing_wrap_decode_dyn_batched", "kda_while_dynT", "kimi_prefill_static"])
@pytest.mark.parametrize("shapes", [True, False])
def test_stripping_takes_all_names_and_changes_nothing(name: str, shapes: bool) -> None:
    before = library.export(name).proto()
    after = strip(before, shapes=shapes)
    onnx.checker.check_model(after)
    interface = {v.name for v in [*before.graph.input, *before.graph.output]}
    assert all(not n.name and not n.metadata_props for n in after.graph.node)
    values = {v for n in after.graph.node for v in [*n.input, *n.output] if v}
    assert all(v in interface or v.startswith("v") for v in values)
    assert bool(after.graph.value_info) == shapes
    kit.same(before, after, library.export(name).feeds(), tolerance=0.0)


def test_a_grown_model_of_the_same_layers_computes_the_same() -> None:
    export = library.export("kimi_prefill_static")
    before = export.proto()
    kit.same(before, grow(before, [0, 1]), export.feeds(), tolerance=0.0)
    deep = grow(before, [0, 0, 1])
    onnx.checker.check_model(deep)
    truth, found = library.run(before, export.feeds()), library.run(deep, export.feeds())
    assert library.worst(found, truth)[0] > 1e-2
