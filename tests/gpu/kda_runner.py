"""Calls the KDA CUDA kernels through their C face, with PyTorch for the device's memory and nothing else."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

try:
    from deltafuse.custom_ops.kda.draw import draw_inputs
    from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance
    from deltafuse.custom_ops.kda.spec import KdaConfig
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from custom_ops.kda.draw import draw_inputs
    from custom_ops.kda.reference import reference, relative_error, tolerance
    from custom_ops.kda.spec import KdaConfig

__all__ = [
    "Call",
    "KdaConfig",
    "Kernels",
    "Params",
    "draw_inputs",
    "find_library",
    "nans",
    "reference",
    "relative_error",
    "to_numpy",
    "to_torch",
    "tolerance",
]

Array = NDArray[Any]

DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_I64, _I32, _F32, _PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Params(ctypes.Structure):
    """``deltafuse::kda::Params`` of kda.h, field for field."""

    _fields_ = [
        *((name, _I64) for name in ("batch", "seq_len", "num_seqs")),
        *((name, _I32) for name in ("num_heads", "num_v_heads", "head_dim", "head_v_dim")),
        *((name, _I32) for name in ("conv_width", "conv_state_width", "dtype", "state_dtype")),
        ("scale", _F32),
        ("qk_l2norm", _I32),
        ("l2norm_eps", _F32),
        ("gate_activation", _I32),
        ("lower_bound", _F32),
        ("beta_sigmoid", _I32),
        ("beta_scale", _F32),
        ("conv_silu", _I32),
        ("output_gate", _I32),
        ("norm_eps", _F32),
        ("state_v_first", _I32),
        ("cu_seqlens_int64", _I32),
        *((name, _PTR) for name in ("q", "k", "v")),
        *((name, _I64) for name in ("q_row_stride", "k_row_stride", "v_row_stride")),
        *((name, _PTR) for name in ("g", "beta", "A_log", "dt_bias", "conv_weight", "conv_bias", "conv_state")),
        *((name, _PTR) for name in ("initial_state", "norm_weight", "gate", "cu_seqlens")),
        *((name, _PTR) for name in ("o", "present_conv_state", "final_state")),
    ]


def find_library() -> Path | None:
    """The library to test: what DELTAFUSE_KDA_LIBRARY names, or the plugin's own."""
    named = os.environ.get("DELTAFUSE_KDA_LIBRARY")
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


def to_numpy(x: torch.Tensor) -> NDArray[np.float64]:
    return x.detach().to("cpu", torch.float64).numpy()


def nans(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


class Call:
    """One call with everything it points to. ``launch`` may be repeated and captured.

    Args:
        config: the call's configuration.
        tensors: operands by the names of ``spec.INPUTS``.
        state_dtype: element type of the states when there is no initial state to tell it.
        in_place: final_state is initial_state and present_conv_state is conv_state, where both are there.
        row_padding: extra elements between the token rows of q, k and v.
    """

    def __init__(
        self,
        config: KdaConfig,
        tensors: Mapping[str, torch.Tensor],
        state_dtype: str = "float32",
        in_place: bool = False,
        row_padding: int = 0,
    ) -> None:
        self.tensors = dict(tensors)
        t = self.tensors
        c = config
        device = str(t["q"].device)
        dtype = t["q"].dtype
        name_of = {v: k for k, v in TORCH_DTYPES.items()}
        if "initial_state" in t:
            state_dtype = name_of[t["initial_state"].dtype]
        batch, seq_len = t["q"].shape[:2]
        sequences = t["cu_seqlens"].numel() - 1 if c.has_cu_seqlens else batch
        p = Params()
        p.batch, p.seq_len, p.num_seqs = batch, seq_len, sequences
        p.num_heads, p.num_v_heads, p.head_dim, p.head_v_dim = c.num_heads, c.num_v_heads, c.head_dim, c.head_v_dim
        p.conv_width, p.conv_state_width = c.conv_width, c.conv_state_width
        p.dtype, p.state_dtype = DTYPE_CODES[name_of[dtype]], DTYPE_CODES[state_dtype]
        p.scale, p.l2norm_eps, p.lower_bound = c.scale, c.l2norm_eps, c.lower_bound
        p.beta_scale, p.norm_eps = c.beta_scale, c.norm_eps
        p.qk_l2norm = ("none", "sum", "max").index(c.qk_l2norm)
        p.gate_activation = ("none", "softplus", "sigmoid").index(c.gate_activation)
        p.output_gate = ("none", "sigmoid", "silu").index(c.output_gate)
        p.beta_sigmoid = c.beta_activation == "sigmoid"
        p.conv_silu = c.conv_activation == "silu"
        p.state_v_first = c.state_layout == "VK"
        for name in ("q", "k", "v"):
            if row_padding and name in t:
                wide = nans((batch, seq_len, t[name].shape[-1] + row_padding), dtype, device)
                wide[..., : t[name].shape[-1]] = t[name]
                t[name] = wide
        if c.packed_qkv:
            size, keys = t["q"].element_size(), c.num_heads * c.head_dim
            p.q = t["q"].data_ptr()
            p.k, p.v = p.q + keys * size, p.q + 2 * keys * size
            p.q_row_stride = p.k_row_stride = p.v_row_stride = t["q"].shape[-1]
        else:
            for name in ("q", "k", "v"):
                setattr(p, name, t[name].data_ptr())
                setattr(p, f"{name}_row_stride", t[name].shape[-1])
        for name in c.input_names():
            if name not in ("q", "k", "v"):
                setattr(p, name, t[name].data_ptr())
        if c.has_cu_seqlens:
            p.cu_seqlens_int64 = t["cu_seqlens"].dtype == torch.int64

        self.outputs = {"o": nans((batch, seq_len, c.num_v_heads * c.head_v_dim), dtype, device)}
        if c.has_present_conv_state:
            shape = (sequences, c.conv_channels, c.conv_state_width)
            reuse = in_place and c.has_conv_state
            self.outputs["present_conv_state"] = t["conv_state"] if reuse else nans(shape, dtype, device)
        if c.has_final_state:
            inner = (c.head_dim, c.head_v_dim) if c.state_layout == "KV" else (c.head_v_dim, c.head_dim)
            reuse = in_place and c.has_initial_state
            fresh = nans((sequences, c.num_v_heads, *inner), TORCH_DTYPES[state_dtype], device)
            self.outputs["final_state"] = t["initial_state"] if reuse else fresh
        for name, tensor in self.outputs.items():
            setattr(p, name, tensor.data_ptr())
        self.params = p
        self.device = device
        self.workspace: torch.Tensor | None = None


class Kernels:
    """The kernels of one shared library.

    Args:
        path: ``libdeltafuse_ep.so`` or a library of the kernels alone.
    """

    def __init__(self, path: str | Path) -> None:
        lib = ctypes.CDLL(str(path))
        lib.deltafuse_kda_params_bytes.restype = ctypes.c_size_t
        if lib.deltafuse_kda_params_bytes() != ctypes.sizeof(Params):
            raise RuntimeError(f"{path}: Params has another size than kda_runner.Params; they must be equal")
        self._refusal = lib.deltafuse_kda_cuda_refusal
        self._refusal.restype, self._refusal.argtypes = ctypes.c_char_p, [_PTR, ctypes.c_int]
        self._workspace = lib.deltafuse_kda_cuda_workspace_bytes
        self._workspace.restype, self._workspace.argtypes = ctypes.c_size_t, [_PTR]
        self._forward = lib.deltafuse_kda_cuda_forward
        self._forward.restype, self._forward.argtypes = ctypes.c_char_p, [_PTR, _PTR, _PTR]

    def refusal(self, params: Params, capability: int = 90) -> str | None:
        reason: bytes | None = self._refusal(ctypes.byref(params), capability)
        return None if reason is None else reason.decode()

    def workspace_bytes(self, params: Params) -> int:
        return int(self._workspace(ctypes.byref(params)))

    def prepare(self, call: Call, poison: bool = True) -> Call:
        """Give the call its workspace, full of NaN if ``poison``."""
        size = self.workspace_bytes(call.params)
        fill = torch.full if poison else torch.zeros
        args = ((max(size, 1),), 0xFF) if poison else ((max(size, 1),),)
        call.workspace = fill(*args, dtype=torch.uint8, device=call.device)
        return call

    def launch(self, call: Call, stream: int = 0) -> None:
        """Raises RuntimeError with the kernel's reason."""
        assert call.workspace is not None
        reason = self._forward(ctypes.byref(call.params), call.workspace.data_ptr(), stream)
        if reason is not None:
            raise RuntimeError(reason.decode())

    def run(
        self,
        config: KdaConfig,
        inputs: Mapping[str, Array],
        device: str = "cuda",
        state_dtype: str = "float32",
        in_place: bool = False,
        row_padding: int = 0,
    ) -> dict[str, NDArray[np.float64]]:
        """Run one call on NumPy operands; outputs and workspace are full of NaN before it."""
        tensors = {name: to_torch(x, device) for name, x in inputs.items()}
        call = self.prepare(Call(config, tensors, state_dtype, in_place, row_padding))
        stream = torch.cuda.current_stream().cuda_stream if device != "cpu" else 0
        self.launch(call, stream)
        if device != "cpu":
            torch.cuda.synchronize()
        return {name: to_numpy(x) for name, x in call.outputs.items()}
