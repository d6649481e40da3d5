"""`--quantize cache=int8` and `cache=fp8:128`: which caches become 8-bit ones, which stay, what models give then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deltafuse
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from deltafuse.compare import compare
from deltafuse.custom_ops.mla import body, call
from deltafuse.custom_ops.mla.draw import draw_inputs
from deltafuse.custom_ops.mla.quantize import dequantize_float8, dequantize_int8, quantize_int8
from deltafuse.custom_ops.mla.reference import reference
from deltafuse.custom_ops.mla.spec import TOLERANCES, MlaConfig
from deltafuse.errors import OptionError
from deltafuse.fusions.mla.quantized_cache import FEW_TOKENS, HEADROOM, SeenChannels
from deltafuse.fusions.pipeline import fuse_model
from deltafuse.fusions.quantize import QuantizeError, parse_quantize
from deltafuse.fusions.result import FusionReport, QuantizedCache
from deltafuse.model_runs import Steps, open_runner, run_sequence, sequence
from deltafuse.sample_inputs import SampleInputs
from deltafuse.signature import read_signature
from exports import library
from onnx import TensorProto, helper

VOCABULARY = 20
KINDS = {"int8": "cache=int8", "float8": "cache=fp8:128"}
#: Growing, of one size, packed, with a head's axis, of keys and values before, float16, two layers, opset 18.
EXPORTS = [
    *("mla_window_decode", "mla_packed", "mla_scatter", "mla_deepseek_v3_static", "mla_one_product", "mla_latent_f16"),
    *("mla_expanded", "mla_static", "dsv3_wrap_decode_dyn_batched", "bailing_decode_op18"),
]


class AnyChannels(dict[str, SeenChannels]):
    """A calibration that knows every value, all of whose channels are at most ``size``."""

    def __init__(self, rank: int, size: float = 4.0) -> None:
        super().__init__()
        self.seen = SeenChannels(np.full(rank, size, np.float32))

    def get(self, name: str, default: Any = None) -> Any:
        return self.seen


def quantized(model: onnx.ModelProto, kind: str = "float8", **options: Any) -> FusionReport:
    """Fused without proofs (they are tested elsewhere) and with 8-bit caches, whose latents have 16 channels."""
    options = {"latent_cache": True, "verify": False, "fusions": ("mla",), "channels": AnyChannels(16), **options}
    return fuse_model(ir.from_proto(model), quantize=parse_quantize(KINDS[kind]), **options)


def caches(report: FusionReport) -> list[QuantizedCache]:
    assert report.quantization is not None
    return report.quantization.caches


def saved(folder: Path, name: str, model: onnx.ModelProto) -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path


def made_steps(model: Path, count: int = 9, more: int = 4) -> tuple[list[library.Arrays], Steps]:
    """Outputs and inputs of a prompt and steps after it, on function bodies."""
    signature = read_signature(model)
    work = sequence(SampleInputs(signature, vocabulary=VOCABULARY), "steps", count, more)
    with open_runner(model, signature, "cpu", plugin=False) as runner:
        return run_sequence(runner, work), work


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXPORTS)
def test_the_model_stays_the_same_but_for_its_caches(tmp_path: Path, name: str, kind: str) -> None:
    """Calibrated on the export; `verify`'s limits hold, and other codes than the latents' own are seen."""
    from deltafuse.calibration import calibrate

    before, after, data = saved(tmp_path, "before", library.export(name).proto()), tmp_path / "q.onnx", None
    if kind == "int8":
        data = tmp_path / "data.npz"
        calibrate(before, samples=6, tokens=12, vocabulary=VOCABULARY).save(data)
    options: dict[str, Any] = {"fusions": ["mla"], "verify": False, "latent_cache": True}
    report = deltafuse.fuse(before, after, quantize=KINDS[kind], calibration=data, **options)
    assert len(caches(report)) == library.export(name).mla and report.quantization is not None
    assert not report.quantization.notes
    new = onnx.load(after)
    ports = {v.name: v for v in (*new.graph.input, *new.graph.output)}
    code = {"int8": TensorProto.INT8, "float8": TensorProto.FLOAT8E4M3FN}[kind]
    for cache in caches(report):
        assert cache.bytes_after <= 0.7 * cache.bytes_before
        assert all(port.name in ports and library.shape_of(ports[port.name]) == port.shape for port in cache.after)
        codes = [p.name for p in cache.after if ports[p.name].type.tensor_type.elem_type == code]
        scales = [p.name for p in cache.after if p.name.endswith(".scale")]
        assert len(codes) == 2 and len(scales) == (2 if kind == "float8" else 0)
    found = compare(before, after, tokens=(7,), vocabulary=VOCABULARY)
    assert found.same, [(c.reason, [(o.output, o.error, o.limit) for o in c.outputs]) for c in found.cases]
    assert found.error > 1e-4  # it is 8 bits that run

    wrong = onnx.load(after)
    node = next(n for n in wrong.graph.node if n.op_type == "LatentAttention" and set(codes) & set(n.output))
    place = next(i for i, output in enumerate(node.output) if output in codes)
    wide, twice, back = (f"wrong.{part}" for part in ("wide", "twice", "back"))
    wrong.graph.node.extend(
        [
            helper.make_node("Cast", [back], [wide], to=TensorProto.FLOAT),
            helper.make_node("Mul", [wide, "half"], [twice]),
            helper.make_node("Cast", [twice], [node.output[place]], to=code),
        ]
    )
    node.output[place] = back
    wrong.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    onnx.save(wrong, after)
    assert not compare(before, after, tokens=(7,), vocabulary=VOCABULARY).same


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_latents(tmp_path: Path, kind: str) -> None:
    """What the first model caches, the second holds: to half a step of each channel, or of a float8."""
    before, after = saved(tmp_path, "before", library.export("mla_packed").proto()), tmp_path / "q.onnx"
    exact = made_steps(before)[0][-1]["cat_3"]
    seen = {"cat_3": SeenChannels(np.abs(exact).max(axis=(0, 1)))}
    report = quantized(onnx.load(before), kind, channels=seen)
    assert report.model is not None
    onnx.save(ir.to_proto(report.model), after)
    last = made_steps(after)[0][-1]
    latent, rope = exact[..., :16], exact[..., 16:]
    np.testing.assert_allclose(last["cat_3.k_rope"], rope, rtol=1e-5, atol=1e-6)
    if kind == "int8":
        scales = HEADROOM * np.abs(latent).max(axis=(0, 1)) / 127
        held = dequantize_int8(last["cat_3"], scales)
        assert (np.abs(held - latent) <= 0.501 * scales).all()
        assert (np.abs(last["cat_3"]).max(axis=(0, 1)) == 102).all()
    else:
        held = dequantize_float8(last["cat_3"], last["cat_3.scale"])
        assert (np.abs(held - latent) <= np.maximum(np.abs(latent) / 15.9, last["cat_3.scale"] * 2.0**-9)).all()
        assert (np.abs(last["cat_3"].astype(np.float32)).max(axis=2) == 448).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["growing", "static", "paged"])
def test_the_call_gives_what_the_reference_gives(form: str, kind: str) -> None:
    """A model of one call, written by hand; paged caches too. The reference reads and writes the same codes."""
    config = MlaConfig(
        *(2, 8, 4, 8, 136, 0.3),
        rope="half",
        cos_width=4,
        has_kv_norm=True,
        cache="latent",
        has_past=True,
        has_present=True,
        static_cache=form != "growing",
        paged=form == "paged",
    )
    rng = np.random.default_rng(5)
    drawn = draw_inputs(config, 2, 3, 16, rng, block_size=8)
    report = quantized(one_call(config, drawn), kind, channels=AnyChannels(136), fusions=None)
    (cache,) = caches(report)
    assert [p.name for p in cache.before] == ["past_latent", "present_latent", "past_k_rope", "present_k_rope"]
    assert (cache.bytes_before, cache.bytes_after) == (4 * 140, 136 + 16 + (8 if kind == "float8" else 0))
    assert report.model is not None
    model = ir.to_proto(report.model)
    new = MlaConfig(**{**vars(config), "cache_type": kind})
    given = draw_inputs(new, 2, 3, 16, np.random.default_rng(6), block_size=8)
    if kind == "int8":
        given["past_latent_scale"] = np.full(136, HEADROOM * 4.0 / 127, np.float32)
    found = run_any(model, {("past_latent.scale" if n == "past_latent_scale" else n): a for n, a in given.items()})
    found["present_latent_scale"] = found.pop("present_latent.scale", np.zeros(0))
    wanted = reference(new, given, found)
    limit = TOLERANCES["body"]["float32"] * TOLERANCES["body"]["cache_factor"]
    assert library.error(found["o"], wanted["o"]) < limit
    codes = [of["present_latent"].astype(np.float32) for of in (found, wanted)]
    assert np.array_equal(*codes, equal_nan=True)


def one_call(config: MlaConfig, drawn: library.Arrays) -> onnx.ModelProto:
    """A model whose inputs and outputs are those of one call; the weights are constants."""
    kinds = {"i": ir.DataType.INT32, "f": ir.DataType.FLOAT}
    values = {
        name: ir.Value(name=name, type=ir.TensorType(kinds[array.dtype.kind]), shape=ir.Shape(array.shape))
        for name, array in drawn.items()
    }
    node = call.make_node(config, values, name="call")
    made = dict(zip(config.output_names(), [v for v in node.outputs if v.name != ""], strict=True))
    for name, value in made.items():
        value.name = name
        if value.shape is None:
            value.shape = ir.Shape([None, None, None])
        elif config.has_past and not config.static_cache and name.startswith("present"):
            value.shape = ir.Shape([value.shape[0], "total", value.shape[2]])
    opsets = {"": 20, "deltafuse": 1}
    graph = ir.Graph(list(values.values()), list(made.values()), nodes=[node], opset_imports=opsets, name="one")
    model = ir.Model(graph, ir_version=10)
    call.attach(model, body.build_function(config, 20))
    return ir.to_proto(model)


def run_any(model: onnx.ModelProto, feeds: library.Arrays) -> library.Arrays:
    """Outputs of a model whose operands may be float8: ONNX Runtime's plain runs take none."""
    with deltafuse.capture(model, states={}, device="cpu", graphs="never") as runner:
        taken = {name: feeds[name] for name in runner.inputs}
        return dict(runner.run(taken))


# --- what stays ------------------------------------------------------------------------------------------------------


def fused_proto(name: str, **options: Any) -> onnx.ModelProto:
    report = fuse_model(library.export(name).model(), verify=False, fusions=("mla",), **options)
    assert report.model is not None
    return ir.to_proto(report.model)


def adding(model: onnx.ModelProto, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
    model.graph.node.append(helper.make_node(op_type, list(inputs), [output], **attributes))
    model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))


def test_what_is_not_latents_is_refused() -> None:
    with pytest.raises(QuantizeError, match="its cache is of keys and values: --latent-cache makes one of latents"):
        quantized(library.export("mla_expanded").proto(), latent_cache=False)
    with pytest.raises(QuantizeError, match="no fused LatentAttention node keeps a cache"):
        quantized(library.export("mla_two").proto())
    inner = fused_proto("mla_latent_given")
    node = next(n for n in inner.graph.node if n.op_type == "LatentAttention")
    made = [name for name in node.output if name]
    outer = helper.make_node("If", ["yes"], made)
    for branch in ("then_branch", "else_branch"):
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        copied.output[:] = [name and f"{branch}.{name}" for name in node.output]
        results = [helper.make_tensor_value_info(f"{branch}.{name}", TensorProto.FLOAT, None) for name in made]
        outer.attribute.append(helper.make_attribute(branch, helper.make_graph([copied], branch, [], results)))
    place = list(inner.graph.node).index(node)
    del inner.graph.node[place]
    inner.graph.node.insert(place, outer)
    inner.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    with pytest.raises(QuantizeError, match="it stands in a branch or a loop"):
        quantized(inner)
    once = quantized(library.export("mla_packed").proto())
    assert once.model is not None
    with pytest.raises(QuantizeError, match="its cache is float8 already"):
        quantized(ir.to_proto(once.model), "int8")


def test_a_cache_that_others_read_stays() -> None:
    read = fused_proto("mla_latent_given")
    adding(read, "ReduceSum", ["rest_0"], "total", keepdims=0)
    with pytest.raises(QuantizeError, match=r"ReduceSum reads the past cache of latents too \(node 'mla.0'\)"):
        quantized(read)
    read = fused_proto("mla_latent_given")
    adding(read, "ReduceSum", ["cat_2"], "total", keepdims=0)
    with pytest.raises(QuantizeError, match="ReduceSum reads the present cache of latents too"):
        quantized(read)
    made = fused_proto("mla_latent_given")
    node = next(n for n in made.graph.node if n.op_type == "LatentAttention")
    place = list(node.input).index("rest_0")
    made.graph.node.insert(0, helper.make_node("Mul", ["rest_0", "two"], ["doubled"]))
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two"))
    node.input[place] = "doubled"
    with pytest.raises(QuantizeError, match="made in the graph, by a node Mul, and not an input of the model"):
        quantized(made)
    lost = fused_proto("mla_latent_given")
    del lost.graph.output[[o.name for o in lost.graph.output].index("cat_2")]
    with pytest.raises(QuantizeError, match="the present cache of latents is not an output of the model: nothing"):
        quantized(lost)


def test_one_of_two_is_left_with_its_reason() -> None:
    model = fused_proto("dsv3_wrap_decode_dyn_batched")
    adding(model, "ReduceSum", ["flat_2"], "total", keepdims=0)
    report = quantized(model, channels=AnyChannels(32))
    assert [cache.node for cache in caches(report)] == ["mla.0"]
    assert report.quantization is not None
    reason = "cache: ReduceSum reads the past cache of latents too (node 'mla.1')"
    assert report.quantization.notes == [reason]
    assert [r.code for p in report.passes if p.name == "quantize" for r in p.refused] == ["cache"]


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_are_read_of_a_cache_stay(kind: str) -> None:
    """All of them at once, some, and one: those of the cache before, with its head's axis and packed channels."""
    model = fused_proto("mla_one_product")
    limits = {"all": {}, "last": {"start": -2}, "tokens": {"start": 2, "end": 3}, "batch": {"end": 1}}
    for name, attributes in limits.items():
        model.graph.node.append(helper.make_node("Shape", ["rest_2"], [f"{name}_sizes"], **attributes))
        model.graph.output.append(helper.make_tensor_value_info(f"{name}_sizes", TensorProto.INT64, [None]))
    report = quantized(model, kind)
    assert report.model is not None
    new = ir.to_proto(report.model)
    feeds = library.feeds_for(library.export("mla_one_product").proto(), {"B": 2, "past": 5, "seq": 1, "S": 1, "T": 1})
    ports = {i.name: i.type.tensor_type.elem_type for i in new.graph.input}
    for name, width in (("rest_2", 16), ("rest_2.k_rope", 4), ("rest_2.scale", 1)):
        if name in ports:
            feeds[name] = np.zeros((2, 5, width), helper.tensor_dtype_to_np_dtype(ports[name]))
    found = run_any(new, feeds)
    assert found["all_sizes"].tolist() == [2, 1, 5, 20]
    assert found["last_sizes"].tolist() == [5, 20]
    assert (found["tokens_sizes"].tolist(), found["batch_sizes"].tolist()) == ([5], [2])


# --- calibrations ----------------------------------------------------------------------------------------------------


def scale_of(report: FusionReport) -> np.ndarray:
    assert report.model is not None
    node = next(n for n in report.model.graph if n.op_type == "LatentAttention")
    constants = [v.const_value for v in node.inputs if v is not None and (v.name or "").endswith(".scale")]
    (scale,) = [c.numpy() for c in constants if c is not None]
    return np.asarray(scale)


def test_a_channel_that_was_never_seen_gets_the_largest_scale() -> None:
    amax = np.linspace(1, 2, 16, dtype=np.float32)
    amax[3], amax[5] = 0.0, 1e-38
    report = quantized(library.export("mla_latent_given").proto(), "int8", channels={"cat_2": SeenChannels(amax)})
    (cache,) = caches(report)
    assert (cache.unseen, cache.calibrated) == (2, "cat_2")
    wanted = np.where(np.isin(np.arange(16), (3, 5)), 2.0, amax) * HEADROOM / 127
    np.testing.assert_allclose(scale_of(report), wanted, rtol=1e-6)


def test_tokens_that_come_later_are_not_cut_off() -> None:
    """Scales of the largest magnitudes alone give 1.9e-2 on tokens that were not calibrated on."""
    rng = np.random.default_rng(8)
    seen, later = np.abs(rng.standard_normal((544, 16))).max(axis=0), rng.standard_normal((20000, 16))
    channels = {"cat_2": SeenChannels(seen.astype(np.float32))}
    scales = scale_of(quantized(library.export("mla_latent_given").proto(), "int8", channels=channels))
    held = dequantize_int8(quantize_int8(later, scales), scales)
    assert library.error(held, later) < 1.2e-2


def test_calibrations_that_are_of_no_use_are_errors() -> None:
    model = library.export("mla_latent_given").proto()

    def with_channels(amax: Sequence[float]) -> None:
        quantized(model, "int8", channels={"cat_2": SeenChannels(np.asarray(amax, np.float32))})

    for bad in (np.nan, np.inf, -1.0):
        with pytest.raises(QuantizeError, match="calibration: cat_2: the largest magnitudes of 1 of 16 channels are"):
            with_channels([bad, *[1.0] * 15])
    with pytest.raises(QuantizeError, match="the calibration saw nothing but zeros in its latents"):
        with_channels([0.0] * 16)
    with pytest.raises(QuantizeError, match=r"the calibration has nothing of its latents \(mla\.0\.o\.latent"):
        with_channels([1.0] * 15)
    with pytest.raises(QuantizeError, match="the calibration has nothing of its latents"):
        quantized(model, "int8", channels={})


@pytest.mark.parametrize("count", [None, 1, FEW_TOKENS - 1, FEW_TOKENS])
def test_a_calibration_of_few_tokens_is_told(count: int | None) -> None:
    """One token's magnitudes gave outputs that were 80% off, and a report that said 0.3%."""
    channels = {"cat_2": SeenChannels(np.ones(16, np.float32), count=count)}
    report = quantized(library.export("mla_latent_given").proto(), "int8", channels=channels).quantization
    assert report is not None
    said = [f"few tokens of mla.0 ({count})" in note for note in report.notes]
    assert said == ([True] if count is not None and count < FEW_TOKENS else [])


def test_the_error_is_that_of_the_rows() -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((400, 16)).astype(np.float32)
    amax, squares = np.abs(rows).max(axis=0), np.square(rows).mean(axis=0)
    model = library.export("mla_latent_given").proto()
    errors = {}
    for kind in KINDS:
        for name, seen in (("rows", SeenChannels(amax, squares, rows)), ("squares", SeenChannels(amax, squares))):
            errors[kind, name] = caches(quantized(model, kind, channels={"cat_2": seen}))[0].error
    step = HEADROOM * amax / 127
    measured = dequantize_int8(np.rint(rows / step), step) - rows
    assert errors["int8", "rows"] == pytest.approx(np.linalg.norm(measured) / np.linalg.norm(rows), rel=1e-3)
    assert errors["int8", "squares"] == pytest.approx(errors["int8", "rows"], rel=0.1)
    assert errors["float8", "squares"] is None and 0.015 < errors["float8", "rows"] < 0.035


def test_an_option_error_says_what_is_missing(tmp_path: Path) -> None:
    path = saved(tmp_path, "model", library.export("mla_packed").proto())
    with pytest.raises(OptionError, match="quantize: cache=int8 takes its scales from a calibration"):
        deltafuse.fuse(path, quantize="cache=int8")
    for text in ("cache=int4:128", "cache=int8:128", "cache=fp8:128x128", "cache=bf16"):
        with pytest.raises(OptionError, match="a cache is held as int8 or as fp8:128"):
            deltafuse.fuse(path, quantize=text)
    with pytest.raises(OptionError, match="quantize: cache: no fused LatentAttention node keeps a cache"):
        deltafuse.fuse(path, quantize="cache=fp8:128", fusions=["moe"])
