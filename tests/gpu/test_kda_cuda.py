"""KDA's CUDA kernels against the float64 reference, over the op's grid. Needs a GPU, PyTorch and the built library."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("KDA's CUDA kernels: PyTorch is not installed", allow_module_level=True)
import torch

#: "cuda", or "cpu" for a library that emulates the kernels on the host.
DEVICE = os.environ.get("DELTAFUSE_KDA_DEVICE", "cuda")
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("KDA's CUDA kernels: no GPU here", allow_module_level=True)

from .kda_runner import Call, KdaConfig, Kernels, find_library, to_torch  # noqa: E402

if find_library() is None:
    pytest.skip(
        "KDA's CUDA kernels: no library; set DELTAFUSE_KDA_LIBRARY or build the plugin", allow_module_level=True
    )

from .kda_runner import draw_inputs, reference, relative_error, tolerance  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")

#: A layer as models have it: everything around the recurrence is there.
LAYER = KdaConfig(
    num_heads=2,
    num_v_heads=2,
    head_dim=64,
    head_v_dim=64,
    scale=0.125,
    qk_l2norm="sum",
    gate_activation="sigmoid",
    beta_activation="sigmoid",
    conv_activation="silu",
    output_gate="sigmoid",
    conv_width=4,
    conv_state_width=3,
    has_dt_bias=True,
    has_conv_bias=True,
    has_conv_state=True,
    has_initial_state=True,
    has_norm=True,
    has_present_conv_state=True,
    has_final_state=True,
)
#: The recurrence alone.
BARE = KdaConfig(2, 2, 64, 64, 0.125, has_initial_state=True, has_final_state=True)

OPTIONS: dict[str, KdaConfig] = {
    "layer": LAYER,
    "bare": BARE,
    "no states": replace(BARE, has_initial_state=False, has_final_state=False),
    "final state only": replace(BARE, has_initial_state=False),
    "initial state only": replace(BARE, has_final_state=False),
    "states by value": replace(LAYER, state_layout="VK"),
    "shared query heads": replace(LAYER, num_v_heads=6),
    "shared query heads, bare": replace(BARE, num_v_heads=4, qk_l2norm="max", l2norm_eps=1e-12),
    "wide conv state, packed": replace(LAYER, conv_state_width=4, packed_qkv=True, output_gate="silu"),
    "packed, no convolution": replace(BARE, packed_qkv=True, qk_l2norm="sum"),
    "conv of width 1": replace(LAYER, conv_width=1, conv_state_width=1, has_conv_bias=False),
    "conv of width 8": replace(LAYER, conv_width=8, conv_state_width=7, conv_activation="none"),
    "conv without states": replace(
        LAYER, conv_width=3, conv_state_width=0, has_conv_state=False, has_present_conv_state=False
    ),
    "conv with a state out only": replace(LAYER, conv_width=2, conv_state_width=2, has_conv_state=False),
    "softplus gate, max norm": replace(LAYER, gate_activation="softplus", qk_l2norm="max", beta_scale=2.0),
    "log decays given, with a bias": replace(BARE, has_dt_bias=True, has_norm=True),
    "norm without gate": replace(LAYER, output_gate="none"),
    "gate without norm": replace(LAYER, has_norm=False, output_gate="silu"),
    "deep bound": replace(LAYER, lower_bound=-20.0, has_dt_bias=False),
}

WIDTHS = [(64, 128), (128, 64), (128, 128), (192, 192), (256, 256), (64, 256), (256, 64), (192, 128)]
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 200, 1000)
CASES = (
    "gate-near-zero",
    "gate-near-bound",
    "gate-unbounded",
    "collinear-slow",
    "tiny-keys",
    "zero-state",
    "full-state",
)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    library = find_library()
    assert library is not None
    yield Kernels(library)


def check(
    kernels: Kernels,
    config: KdaConfig,
    batch: int,
    seq_len: int,
    dtype: str,
    case: str = "normal",
    state_dtype: str = "float32",
    index_dtype: str = "int64",
    in_place: bool = False,
    row_padding: int = 0,
) -> None:
    rng = np.random.default_rng([batch, seq_len, len(case)])
    inputs = draw_inputs(config, batch, seq_len, rng, case, dtype, state_dtype, index_dtype)
    want = reference(config, inputs)
    got = kernels.run(config, inputs, DEVICE, state_dtype, in_place, row_padding)
    assert set(got) == set(config.output_names())
    for name, result in got.items():
        allowed = tolerance("cuda", dtype, case)
        if name == "final_state":
            allowed = max(allowed, tolerance("cuda", state_dtype, case))
        error = relative_error(result, want[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}, tolerance {allowed:.0e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_lengths(kernels: Kernels, seq_len: int, dtype: str) -> None:
    check(kernels, LAYER, 2 if seq_len < 1000 else 1, seq_len, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("seq_len", [1, 150])
def test_head_widths(kernels: Kernels, seq_len: int, widths: tuple[int, int], dtype: str) -> None:
    layout = "VK" if sum(widths) % 128 else "KV"
    config = replace(LAYER, head_dim=widths[0], head_v_dim=widths[1], scale=widths[0] ** -0.5, state_layout=layout)
    check(kernels, config, 1, seq_len, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seq_len", [1, 100])
def test_options(kernels: Kernels, seq_len: int, name: str, dtype: str) -> None:
    check(kernels, OPTIONS[name], 2, seq_len, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gate", ["none", "softplus", "sigmoid"])
@pytest.mark.parametrize("seq_len", [1, 200])
def test_hostile_inputs(kernels: Kernels, seq_len: int, gate: str, case: str, dtype: str) -> None:
    config = replace(BARE, gate_activation=gate, qk_l2norm="sum", beta_activation="sigmoid", head_dim=128)
    check(kernels, config, 1, seq_len, dtype, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 70), (3, 3), (6, 333), (40, 500)])
def test_ragged(kernels: Kernels, sequences: int, tokens: int, index_dtype: str, dtype: str) -> None:
    config = replace(LAYER, has_cu_seqlens=True)
    check(kernels, config, sequences, tokens, dtype, "ragged", index_dtype=index_dtype, in_place=tokens == 333)


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("seq_len", [1, 65])
def test_state_types(kernels: Kernels, seq_len: int, layout: str, state_dtype: str) -> None:
    config = replace(LAYER, state_layout=layout, head_dim=128, head_v_dim=192)
    check(kernels, config, 2, seq_len, "bfloat16", state_dtype=state_dtype)


@pytest.mark.parametrize("name", ["layer", "states by value", "shared query heads", "wide conv state, packed"])
@pytest.mark.parametrize("seq_len", [1, 2, 70])
@pytest.mark.parametrize("head_v_dim", [64, 128, 192, 256])
def test_states_in_place(kernels: Kernels, seq_len: int, name: str, head_v_dim: int) -> None:
    config = replace(OPTIONS[name], head_v_dim=head_v_dim)
    check(kernels, config, 3, seq_len, "bfloat16", in_place=True)


@pytest.mark.parametrize("padding", [8, 3])
@pytest.mark.parametrize("seq_len", [1, 90])
@pytest.mark.parametrize("name", ["bare", "layer"])
def test_strided_rows(kernels: Kernels, seq_len: int, padding: int, name: str) -> None:
    check(kernels, OPTIONS[name], 2, seq_len, "float16", row_padding=padding)


def _call(kernels: Kernels, config: KdaConfig, seq_len: int, dtype: str = "bfloat16") -> Call:
    inputs = draw_inputs(config, 1, seq_len, np.random.default_rng(5), "normal", dtype)
    return kernels.prepare(Call(config, {name: to_torch(x, DEVICE) for name, x in inputs.items()}))


@pytest.mark.parametrize("seq_len", [1, 700])
def test_two_runs_agree_bit_for_bit(kernels: Kernels, seq_len: int) -> None:
    config = replace(LAYER, num_heads=8, num_v_heads=8, head_dim=128, head_v_dim=128)
    results = []
    for _ in range(3):
        call = _call(kernels, config, seq_len)
        kernels.launch(call)
        results.append({name: x.clone() for name, x in call.outputs.items()})
    for later in results[1:]:
        for name, x in results[0].items():
            assert torch.equal(x, later[name]), name


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("seq_len", [1, 300])
def test_replayed_from_a_graph(kernels: Kernels, seq_len: int) -> None:
    call = _call(kernels, LAYER, seq_len)
    kernels.launch(call)
    torch.cuda.synchronize()
    direct = {name: x.clone() for name, x in call.outputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.launch(call, torch.cuda.current_stream().cuda_stream)
    for x in call.outputs.values():
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for name, x in direct.items():
        assert torch.equal(x, call.outputs[name]), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 96}, "head_dim 96: kernels take 64, 128, 192, 256"),
        ({"head_v_dim": 32}, "head_v_dim 32: kernels take 64, 128, 192, 256"),
        ({"num_v_heads": 3}, "num_v_heads 3 is not a multiple of num_heads 2"),
        ({"conv_width": 9}, "conv_width 9: expected 1 to 8"),
        ({"conv_state_width": 1}, "conv_state has 1 columns: expected 3 or 4"),
        ({"state_dtype": 7}, "state type 7"),
    ],
    ids=str,
)
def test_refused_with_a_reason(kernels: Kernels, change: dict[str, int], words: str) -> None:
    call = _call(kernels, LAYER, 5)
    assert kernels.refusal(call.params) is None
    for name, value in change.items():
        setattr(call.params, name, value)
    reason = kernels.refusal(call.params)
    assert reason is not None and words in reason
    with pytest.raises(RuntimeError, match=words.split(":")[0]):
        kernels.launch(call)
    assert torch.isnan(call.outputs["o"]).all(), "a refused call must not write"


def test_old_gpus_and_missing_operands_are_refused(kernels: Kernels) -> None:
    call = _call(kernels, LAYER, 5)
    assert "compute capability 7.5" in str(kernels.refusal(call.params, 75))
    call.params.A_log = None
    with pytest.raises(RuntimeError, match="A_log is required"):
        kernels.launch(call)


def test_workspace_is_small(kernels: Kernels) -> None:
    """A real layer's prompt of 2048 tokens needs well under a gigabyte, one token needs none."""
    config = replace(LAYER, num_heads=32, num_v_heads=32, head_dim=128, head_v_dim=128)
    call = _call(kernels, replace(config, num_heads=2, num_v_heads=2), 1)
    assert kernels.workspace_bytes(call.params) == 0
    call.params.num_heads = call.params.num_v_heads = 32
    call.params.seq_len = 2048
    assert kernels.workspace_bytes(call.params) < 2**28
