"""Calls the GroupedQMoE CUDA kernels through their C face, with PyTorch for the device's memory and nothing else."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

try:
    from deltafuse.custom_ops.moe.draw import draw_inputs
    from deltafuse.custom_ops.moe.reference import reference, relative_error, tolerance
    from deltafuse.custom_ops.moe.spec import BIASES, FORMATS, MATRICES, MoeConfig
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from custom_ops.moe.draw import draw_inputs
    from custom_ops.moe.reference import reference, relative_error, tolerance
    from custom_ops.moe.spec import BIASES, FORMATS, MATRICES, MoeConfig

__all__ = [
    "LAYER",
    "Call",
    "Kernels",
    "Layer",
    "MoeConfig",
    "Params",
    "draw_inputs",
    "find_library",
    "float8",
    "plain",
    "reference",
    "relative_error",
    "to_numpy",
    "to_torch",
    "tolerance",
]

#: A layer as models have it, small.
LAYER = MoeConfig(
    num_experts=32,
    top_k=4,
    hidden_size=256,
    intermediate_size=128,
    shared_intermediate_size=128,
    n_group=8,
    topk_group=4,
    norm_eps=1e-20,
    routed_scaling_factor=2.5,
    block_size=128,
    shared_block_size=128,
    weight_format="int4",
    shared_format="int4",
    has_expert_bias=True,
    has_ids=True,
)


def plain(layer: MoeConfig) -> MoeConfig:
    """The layer with weights in the activations' type."""
    return replace(layer, weight_format="float", shared_format="float", block_size=0, shared_block_size=0)


def float8(layer: MoeConfig) -> MoeConfig:
    """The layer with float8 weights in blocks of 128 rows, and of as many columns as before."""
    return replace(layer, weight_format="float8", shared_format="float8", block_rows=128, shared_block_rows=128)


Array = NDArray[Any]
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_I64, _I32, _F32, _PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """``deltafuse::moe::Matrix`` of moe.h, field for field."""

    _fields_ = (
        *((name, _PTR) for name in ("data", "scale", "zero_point")),
        *((name, _I32) for name in ("format", "has_zero_point", "scale_float32", "block_size", "block_rows")),
    )


class Params(ctypes.Structure):
    """``deltafuse::moe::Params`` of moe.h, field for field."""

    _fields_ = (
        ("num_tokens", _I64),
        *((name, _I32) for name in ("num_experts", "top_k", "hidden_size", "intermediate_size")),
        *((name, _I32) for name in ("shared_intermediate_size", "zero_experts", "dtype", "score", "choose_by_logits")),
        *((name, _I32) for name in ("n_group", "topk_group", "group_top")),
        *((name, _I32) for name in ("masked_score_zero", "masked_weights", "norm_topk_prob")),
        *((name, _F32) for name in ("norm_eps", "norm_min", "routed_scaling_factor")),
        *(("activation", _I32), ("activation_alpha", _F32), ("gated", _I32), ("up_offset", _F32), ("clamp", _I32)),
        *((name, _F32) for name in ("gate_limit", "up_limit")),
        *((name, _I32) for name in ("router_weight_float32", "router_logits_float32", "shared_gate_float32")),
        ("has_bias", _I32),
        *((name, _PTR) for name in ("x", "router_weight", "router_logits", "router_bias", "expert_bias")),
        *((name, Matrix) for name in MATRICES),
        *((name, _PTR) for name in ("shared_gate_weight", *BIASES, "y", "expert_ids", "expert_weights")),
    )


def find_library() -> Path | None:
    """The library to test: what DELTAFUSE_MOE_LIBRARY or DELTAFUSE_LIBRARY names, or the plugin's own."""
    named = os.environ.get("DELTAFUSE_MOE_LIBRARY") or os.environ.get("DELTAFUSE_LIBRARY")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("deltafuse")
    folders = [Path(str(f)) for f in (spec.submodule_search_locations or [])] if spec is not None else []
    for folder in [*folders, Path(__file__).resolve().parents[2] / "plugin" / "deltafuse"]:
        library = folder / "libdeltafuse_ep.so"
        if library.is_file():
            return library
    return None


def to_torch(x: Array, device: str) -> torch.Tensor:
    """A copy of a NumPy array, bfloat16 too."""
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(x.copy()).to(device)


def to_numpy(x: torch.Tensor) -> Array:
    x = x.detach().cpu()
    return np.asarray(x.numpy() if x.dtype == torch.int64 else x.to(torch.float64).numpy())


class Call:
    """One call with everything it points to. ``launch`` may be repeated and captured.

    Args:
        config: the call's configuration.
        tensors: operands by the names of ``spec.INPUTS``.
    """

    def __init__(self, config: MoeConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        t = self.tensors = dict(tensors)
        self.config = config
        p = self.params = Params()
        for name in (
            *("num_experts", "top_k", "hidden_size", "intermediate_size", "shared_intermediate_size"),
            *("n_group", "topk_group", "group_top", "masked_weights", "norm_topk_prob", "norm_eps"),
            *("routed_scaling_factor", "gated", "gate_limit", "up_limit"),
            *("zero_experts", "choose_by_logits", "norm_min", "activation_alpha", "up_offset"),
        ):
            setattr(p, name, getattr(config, name))
        p.has_bias = any(name in t for name in BIASES)
        x = t["x"]
        self.device = str(x.device)
        p.dtype = DTYPE_CODES[x.dtype]
        p.score = ("sigmoid", "softmax").index(config.score_function)
        p.masked_score_zero = config.masked_score == "0"
        p.activation = ("silu", "gelu", "gelu_tanh", "relu2").index(config.activation)
        p.clamp = ("none", "before", "after").index(config.clamp)
        p.num_tokens = x.numel() // config.hidden_size
        for field, name in (
            ("router_weight_float32", "router_weight"),
            ("router_logits_float32", "router_logits"),
            ("shared_gate_float32", "shared_gate_weight"),
        ):
            setattr(p, field, name in t and t[name].dtype == torch.float32)
        pointers = ("x", "router_weight", "router_logits", "router_bias", "expert_bias", "shared_gate_weight", *BIASES)
        for name in pointers:
            if name in t:
                setattr(p, name, t[name].data_ptr())
        for name in MATRICES:
            matrix = getattr(p, name)
            kind, (matrix.block_size, matrix.block_rows), matrix.has_zero_point = config.weights_form(name)
            matrix.format = FORMATS.index(kind)
            for field, part in (("data", "weight"), ("scale", "scale"), ("zero_point", "zero_point")):
                if f"{name}_{part}" in t:
                    setattr(matrix, field, t[f"{name}_{part}"].data_ptr())
            matrix.scale_float32 = f"{name}_scale" in t and t[f"{name}_scale"].dtype == torch.float32
        tokens = int(p.num_tokens)
        self.outputs = {"y": torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)}
        if config.has_ids:
            shape = (tokens, config.top_k)
            self.outputs["expert_ids"] = torch.full(shape, -1, dtype=torch.int64, device=x.device)
            self.outputs["expert_weights"] = torch.full(shape, float("nan"), dtype=torch.float32, device=x.device)
        for name, tensor in self.outputs.items():
            setattr(p, name, tensor.data_ptr())
        self.workspace: torch.Tensor | None = None


class Layer:
    """The kernels' packed weights; free it with ``close``."""

    def __init__(self, kernels: Kernels, call: Call, stream: int = 0) -> None:
        self._kernels = kernels
        self.handle = ctypes.c_void_p()
        kernels.check(kernels.face("create")(ctypes.byref(call.params), stream, ctypes.byref(self.handle)))

    def close(self) -> None:
        self._kernels.face("destroy")(self.handle)
        self.handle = ctypes.c_void_p()


class Kernels:
    """The kernels of one shared library.

    Args:
        path: ``libdeltafuse_ep.so`` or a library of the kernels alone.
    """

    def __init__(self, path: str | Path) -> None:
        self._library = lib = ctypes.CDLL(str(path))
        lib.deltafuse_moe_params_bytes.restype = ctypes.c_size_t
        if lib.deltafuse_moe_params_bytes() != ctypes.sizeof(Params):
            raise RuntimeError(f"{path}: Params has another size than moe_runner.Params; they must be equal")
        for name, result, args in (
            ("refusal", ctypes.c_char_p, [_PTR, ctypes.c_int]),
            ("create", ctypes.c_char_p, [_PTR, _PTR, _PTR]),
            ("pack", ctypes.c_char_p, [_PTR, _PTR, _PTR]),
            ("destroy", None, [_PTR]),
            ("layer_bytes", ctypes.c_size_t, [_PTR]),
            ("workspace_bytes", ctypes.c_size_t, [_PTR, _PTR]),
            ("forward", ctypes.c_char_p, [_PTR, _PTR, _PTR, _PTR]),
            ("route_workspace_bytes", ctypes.c_size_t, [_PTR]),
            ("route", ctypes.c_char_p, [_PTR, ctypes.c_int, _PTR, _PTR]),
            ("tune", ctypes.c_int, [ctypes.c_char_p, ctypes.c_int]),
        ):
            function = self.face(name)
            function.restype, function.argtypes = result, args

    def face(self, name: str) -> Any:
        return getattr(self._library, f"deltafuse_moe_cuda_{name}")

    @staticmethod
    def check(reason: bytes | None) -> None:
        if reason is not None:
            raise RuntimeError(reason.decode())

    def refusal(self, params: Params, capability: int = 90) -> str | None:
        reason: bytes | None = self.face("refusal")(ctypes.byref(params), capability)
        return None if reason is None else reason.decode()

    def layer(self, call: Call) -> Layer:
        return Layer(self, call)

    def prepare(self, call: Call, layer: Layer, poison: bool = True) -> Call:
        """Give the call its workspace, full of NaN if ``poison``."""
        size = max(int(self.face("workspace_bytes")(layer.handle, ctypes.byref(call.params))), 1)
        call.workspace = torch.full((size,), 0xFF if poison else 0, dtype=torch.uint8, device=call.device)
        return call

    def launch(self, call: Call, layer: Layer, stream: int = 0) -> None:
        """Raises RuntimeError with the kernel's reason."""
        assert call.workspace is not None
        self.check(self.face("forward")(layer.handle, ctypes.byref(call.params), call.workspace.data_ptr(), stream))

    def run(self, config: MoeConfig, inputs: Mapping[str, Array], device: str = "cuda") -> dict[str, Array]:
        """Run one call on NumPy operands; outputs and workspace are full of NaN before it."""
        call = Call(config, {name: to_torch(x, device) for name, x in inputs.items()})
        layer = self.layer(call)
        self.prepare(call, layer)
        self.launch(call, layer, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        layer.close()
        return {name: to_numpy(x) for name, x in call.outputs.items()}

    def route_only(self, call: Call, steps: int, stream: int = 0) -> None:
        """The router alone: steps 1 logits, 2 selection, 4 the first pass of fast logits; makes the workspace."""
        if call.workspace is None:
            size = int(self.face("route_workspace_bytes")(ctypes.byref(call.params)))
            call.workspace = torch.zeros(max(size, 1), dtype=torch.uint8, device=call.device)
        self.check(self.face("route")(ctypes.byref(call.params), steps, call.workspace.data_ptr(), stream))

    def tune(self, name: str, value: int) -> None:
        """Change how the process's calls are driven, for benchmarks and tests: prompts (``PromptTuning`` of
        moe_launch.h) and, with ``decode_`` before the name, few tokens (``DecodeTuning`` of moe_decode.h). ``defaults``
        undoes all changes.

        Raises:
            ValueError: there is no such thing to tune.
        """
        if self.face("tune")(name.encode(), value):
            raise ValueError(f"{name}: the kernels have no such setting")
