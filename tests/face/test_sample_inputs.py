"""Inputs made for a model: ranges, sizes and roles, and what is said where they cannot be guessed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from deltafuse.errors import OptionError
from deltafuse.sample_inputs import SampleInputs, load_inputs
from deltafuse.signature import read_signature
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def decoder(vocabulary: bool = True, window: str | int = 4) -> onnx.ModelProto:
    """Tokens, positions, a mask, a cache that grows and a state that does not."""
    table = numpy_helper.from_array(np.ones((40, 8), np.float32), "table")
    where = "table" if vocabulary else "made"
    nodes = [
        helper.make_node("Mul", ["table", "table"], ["made"]),
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.INT32),
        helper.make_node("Gather", [where, "ids"], ["logits"]),
        helper.make_node("Identity", ["past.0.key"], ["present.0.key"]),
        helper.make_node("Identity", ["past.0.conv"], ["present.0.conv"]),
    ]
    inputs = [
        ("input_ids", INT, ["b", "s"]),
        ("attention_mask", INT, ["b", "p + s"]),
        ("bias", FLOAT, ["b", 1, "s", "p + s"]),
        ("position_ids", INT, ["b", "s"]),
        ("past.0.key", FLOAT, ["b", 2, "p", 4]),
        ("past.0.conv", FLOAT, ["b", 6, window]),
    ]
    outputs = [("logits", FLOAT, ["b", "s", 8]), ("present.0.key", FLOAT, ["b", 2, "p + s", 4])]
    outputs.append(("present.0.conv", FLOAT, ["b", 6, window]))
    values = [[helper.make_tensor_value_info(*entry) for entry in side] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "decoder", *values, [table])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_decoder() -> None:
    signature = read_signature(decoder())
    roles = {name: port.role for name, port in signature.inputs.items()}
    assert roles == {
        "input_ids": "tokens",
        "attention_mask": "mask",
        "bias": "data",
        "position_ids": "positions",
        "past.0.key": "state",
        "past.0.conv": "state",
    }
    assert signature.states == {"past.0.key": "present.0.key", "past.0.conv": "present.0.conv"}
    assert signature.vocabulary == {"input_ids": 40}
    inputs = SampleInputs(signature, batch=3)
    feeds = inputs.step(5, inputs.past(7))
    assert feeds["input_ids"].shape == (3, 5) and 0 <= feeds["input_ids"].min() <= feeds["input_ids"].max() < 40
    assert feeds["input_ids"].dtype == np.int64
    np.testing.assert_array_equal(feeds["attention_mask"], np.ones((3, 12)))
    np.testing.assert_array_equal(feeds["position_ids"], np.broadcast_to(np.arange(7, 12), (3, 5)))
    states = inputs.states(7)
    assert states["past.0.key"].shape == (3, 2, 7, 4) and states["past.0.conv"].shape == (3, 6, 4)
    assert not states["past.0.key"].any() and inputs.states(7, random=True)["past.0.key"].any()
    assert inputs.step(1, 8, [39])["input_ids"].tolist() == [[39]] * 3


def test_masks_that_are_added_hide_what_comes_later() -> None:
    model = decoder()
    model.graph.input[2].name = "mask_bias"
    feeds = SampleInputs(read_signature(model)).step(3, 2)
    expected = np.array([[0, 0, 0, -1e4, -1e4], [0, 0, 0, 0, -1e4], [0, 0, 0, 0, 0]], np.float32)
    np.testing.assert_array_equal(feeds["mask_bias"][0, 0], expected)


def test_the_same_seed_gives_the_same() -> None:
    signature = read_signature(decoder())
    one, two, other = (SampleInputs(signature, seed=seed).step(9, 0)["input_ids"] for seed in (1, 1, 2))
    assert (one == two).all() and (one != other).any()


def test_given_inputs_set_the_sizes(tmp_path: Path) -> None:
    signature = read_signature(decoder())
    np.savez(tmp_path / "x.npz", input_ids=np.zeros((2, 6), np.int32), **{"past.0.key": np.ones((2, 2, 9, 4))})
    given = load_inputs(tmp_path / "x.npz")
    inputs = SampleInputs(signature, given=given)
    assert (inputs.batch, inputs.tokens(99), inputs.past(0)) == (2, 6, 9)
    feeds = inputs.step(6, 9, first=True)
    assert feeds["input_ids"].dtype == np.int64 and not feeds["input_ids"].any()
    assert feeds["attention_mask"].shape == (2, 15)
    states = inputs.states(9)
    assert states["past.0.key"].dtype == np.float32 and states["past.0.key"].all()
    assert states["past.0.conv"].shape == (2, 6, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dims": {"x": 3}}, "no dimension of that name, it has b, p, p \\+ s, s"),
        ({"given": {"ids": np.zeros(3)}}, "no such input, it has input_ids"),
        ({"given": {"input_ids": np.zeros((1, 3))}}, "is a float64: expected int64"),
        ({"given": {"past.0.key": np.zeros((1, 3, 2, 4))}}, "shape \\[1, 3, 2, 4\\]: expected"),
    ],
)
def test_bad_arguments(options: dict[str, object], expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        SampleInputs(read_signature(decoder()), **options)  # type: ignore[arg-type]


def test_what_cannot_be_guessed() -> None:
    inputs = SampleInputs(read_signature(decoder(vocabulary=False)))
    with pytest.raises(OptionError, match=r"input_ids .* give --vocabulary N"):
        inputs.step(2, 0)
    assert SampleInputs(read_signature(decoder(vocabulary=False)), vocabulary=3).step(99, 0)["input_ids"].max() == 2
    given = SampleInputs(read_signature(decoder(vocabulary=False)), given={"input_ids": np.ones((1, 5), np.int64)})
    given.step(5, 0, first=True)
    with pytest.raises(OptionError, match=r"--vocabulary N for the steps behind the given one, or --steps 0"):
        given.step(1, 5)
    window = read_signature(decoder(window="w"))
    with pytest.raises(OptionError, match="the size 'w' cannot be guessed; give --dim w=N"):
        SampleInputs(window).states(0)
    assert SampleInputs(window, dims={"w": 4}).states(0)["past.0.conv"].shape == (1, 6, 4)
    with pytest.raises(OptionError, match="token 40: input_ids takes 0 to 39"):
        SampleInputs(read_signature(decoder())).step(1, 0, [40])


def test_files_that_are_no_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("no")
    for name, expected in (
        ("one.npy", "holds one array"),
        ("text.npz", "cannot be read as a .npz file of arrays: it is no zip archive"),
        ("absent.npz", "No such"),
    ):
        with pytest.raises(OptionError, match=expected):
            load_inputs(tmp_path / name)
