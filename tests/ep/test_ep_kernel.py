"""The op through the plugin EP on the CPU device, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import deltafuse
import numpy as np
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
from deltafuse.custom_ops.kda.spec import KdaConfig
from kda.configs import CONFIGS

from .call import SMALL, Arrays, call_model, draw, plugin_session, quiet, run
from .models import LAYER, activations, as_layer, executed, layer_model, two_calls

pytestmark = pytest.mark.usefixtures("library")


def assert_close(got: Arrays, want: Arrays, allowed: float, what: object) -> None:
    errors = {name: relative_error(got[name], want[name]) for name in got}
    assert "o" in errors
    assert max(errors.values()) <= allowed, f"{what}: {errors}, allowed {allowed}"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_against_reference(name: str, dtype: str) -> None:
    config = CONFIGS[name]
    running = None
    for tokens, case in ((1, "normal"), (5, "gate-unbounded"), (70, "normal"), (130, "collinear-slow")):
        inputs = draw(config, 3, tokens, tokens, case=case, dtype=dtype)
        running = running or plugin_session(config, inputs, dtype=dtype)
        got = run(running, config, inputs)
        assert_close(got, reference(config, inputs), tolerance("cpu", dtype, case), (name, dtype, tokens, case))


@pytest.mark.parametrize("state_dtype", ["float32", "float16", "bfloat16"])
def test_state_types(state_dtype: str) -> None:
    inputs = draw(SMALL, 2, 9, dtype="bfloat16", state_dtype=state_dtype)
    got = run(plugin_session(SMALL, inputs, dtype="bfloat16", state_dtype=state_dtype), SMALL, inputs)
    assert_close(got, reference(SMALL, inputs), tolerance("cpu", "bfloat16"), state_dtype)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_sequence_lengths_of_both_types(index_dtype: str) -> None:
    config = replace(SMALL, has_cu_seqlens=True)
    inputs = draw(config, 4, 37, case="ragged", index_dtype=index_dtype)
    assert inputs["cu_seqlens"].dtype == index_dtype
    got = run(plugin_session(config, inputs), config, inputs)
    assert_close(got, reference(config, inputs), tolerance("cpu", "float32"), index_dtype)


def test_prompt_then_steps_equals_one_prompt() -> None:
    inputs = draw(SMALL, 2, 12)
    running = plugin_session(SMALL, inputs)
    whole = run(running, SMALL, inputs)
    states = {"conv_state": inputs["conv_state"], "initial_state": inputs["initial_state"]}
    outputs = []
    for first, last in ((0, 8), (8, 9), (9, 10), (10, 12)):
        per_token = ("q", "k", "v", "g", "beta", "gate")
        part = {name: x[:, first:last] if name in per_token else x for name, x in inputs.items()} | states
        got = run(running, SMALL, part)
        outputs.append(got["o"])
        states = {"conv_state": got["present_conv_state"], "initial_state": got["final_state"]}
    assert relative_error(np.concatenate(outputs, axis=1), whole["o"]) < 1e-5
    assert relative_error(states["initial_state"], whole["final_state"]) < 1e-5
    np.testing.assert_array_equal(states["conv_state"], whole["present_conv_state"])


def test_no_tokens_keeps_the_states() -> None:
    inputs = draw(SMALL, 2, 3)
    running = plugin_session(SMALL, inputs)
    empty = {n: x[:, :0] if n in ("q", "k", "v", "g", "beta", "gate") else x for n, x in inputs.items()}
    got = run(running, SMALL, empty)
    assert got["o"].shape == (2, 0, 16)
    np.testing.assert_array_equal(got["final_state"], inputs["initial_state"])
    np.testing.assert_array_equal(got["present_conv_state"], inputs["conv_state"])


def test_no_batch() -> None:
    inputs = draw(SMALL, 2, 3)
    running = plugin_session(SMALL, inputs)
    batched = ("q", "k", "v", "g", "beta", "gate", "conv_state", "initial_state")
    got = run(running, SMALL, {n: x[:0] if n in batched else x for n, x in inputs.items()})
    assert {name: x.shape[0] for name, x in got.items()} == {"o": 0, "present_conv_state": 0, "final_state": 0}


def test_states_bound_in_place() -> None:
    """The same buffer as state in and state out, as a decoder would bind it."""
    inputs = draw(SMALL, 2, 1)
    running = plugin_session(SMALL, inputs)
    want = reference(SMALL, inputs)
    values = {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()}
    binding = running.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("o")
    binding.bind_ortvalue_output("present_conv_state", values["conv_state"])
    binding.bind_ortvalue_output("final_state", values["initial_state"])
    running.run_with_iobinding(binding)
    got = {
        "o": binding.copy_outputs_to_cpu()[0],
        "present_conv_state": values["conv_state"].numpy(),
        "final_state": values["initial_state"].numpy(),
    }
    assert_close(got, want, tolerance("cpu", "float32"), "in place")


def test_equals_the_body_in_stock_onnxruntime() -> None:
    inputs = draw(SMALL, 2, 70)
    model = call_model(SMALL, inputs).SerializeToString()
    stock = ort.InferenceSession(model, quiet(), providers=["CPUExecutionProvider"])
    fused = deltafuse.session(model, device="cpu", strict=True)
    got, want = run(fused, SMALL, inputs), run(stock, SMALL, inputs)
    assert all(relative_error(got[name], want[name]) < 1e-5 for name in want)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("beta", lambda x: x[:, :-1], "beta has shape [2, 2, 4]: expected [2, 3, 4]"),
        ("gate", lambda x: x[:1], "gate has shape"),
        ("initial_state", lambda x: x[:1], "initial_state has shape [1, 4, 8, 4]: expected [2, 4, 8, 4]"),
        ("conv_state", lambda x: np.concatenate([x, x]), "conv_state has shape"),
    ],
)
def test_wrong_shapes_raise_and_name_the_node(name: str, change: object, says: str) -> None:
    inputs = draw(SMALL, 2, 3)
    model = call_model(SMALL, inputs)
    for value in model.graph.input:  # nothing is known when the graph is partitioned: the call itself must check
        for dim in value.type.tensor_type.shape.dim[:2]:
            dim.Clear()
    running = deltafuse.session(model.SerializeToString(), device="cpu", sess_options=quiet(), strict=True)
    assert callable(change)
    with pytest.raises(Exception, match="'kda'") as raised:
        run(running, SMALL, inputs | {name: np.ascontiguousarray(change(inputs[name]))})
    assert says in str(raised.value)
    assert_close(run(running, SMALL, inputs), reference(SMALL, inputs), tolerance("cpu", "float32"), "afterwards")


@pytest.mark.parametrize(
    "lengths", [[0, 2, 1, 5], [1, 2, 3, 5], [0, 2, 3, 6], [0, 2, 3, 4], [0, -1, 3, 5], [0, 1 << 40, 3, 5]]
)
def test_wrong_sequence_lengths_raise(lengths: list[int]) -> None:
    config = replace(SMALL, has_cu_seqlens=True)
    inputs = draw(config, 3, 5)
    running = plugin_session(config, inputs)
    with pytest.raises(Exception, match="cu_seqlens"):
        run(running, config, inputs | {"cu_seqlens": np.array(lengths, np.int64)})


def test_many_threads_share_a_session() -> None:
    from concurrent.futures import ThreadPoolExecutor

    config = KdaConfig(2, 4, 16, 16, 0.25, has_initial_state=True, has_final_state=True)
    cases = [draw(config, 1 + seed % 3, 5 + 7 * seed, seed) for seed in range(8)]
    running = plugin_session(config, cases[0])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: run(running, config, x), cases * 3))
    for inputs, got in zip(cases * 3, results, strict=True):
        assert_close(got, reference(config, inputs), tolerance("cpu", "float32"), "threads")


def test_between_nodes_of_another_ep(tmp_path: Path) -> None:
    inputs = draw(LAYER, 2, 20)
    options = quiet()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    model = layer_model(LAYER, inputs).SerializeToString()
    running = deltafuse.session(model, device="cpu", sess_options=options, strict=True)
    got = run(running, LAYER, activations(inputs))
    want = reference(LAYER, as_layer(inputs))
    assert_close(got, want | {"o": 2 * want["o"]}, tolerance("cpu", "float32"), "layer")
    assert executed(running) == {
        ("Neg", "CPUExecutionProvider"): 1,
        ("KimiDeltaAttention", deltafuse.get_ep_name()): 1,
        ("Mul", "CPUExecutionProvider"): 1,
    }


@pytest.mark.parametrize("keep_first", [False, True])
def test_states_pass_from_call_to_call(keep_first: bool) -> None:
    inputs = draw(SMALL, 2, 6)
    model = two_calls(SMALL, inputs, keep_first=keep_first).SerializeToString()
    running = deltafuse.session(model, device="cpu", sess_options=quiet(), strict=True)
    assert len(deltafuse.assignment(running).fused) == 2
    once = {name: np.asarray(x, np.float32) for name, x in reference(SMALL, inputs).items()}
    states = {"conv_state": once["present_conv_state"], "initial_state": once["final_state"]}
    allowed = tolerance("cpu", "float32")
    for _ in range(3):  # later runs take the memory plan of the first
        assert_close(run(running, SMALL, inputs), reference(SMALL, inputs | states), allowed, "second call")
        if keep_first:
            conv, state = running.run(["first_conv", "first_state"], dict(inputs))
            assert relative_error(-conv, once["present_conv_state"]) <= allowed
            assert relative_error(-state, once["final_state"]) <= allowed
