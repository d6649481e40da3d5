"""The C++ CPU kernel through ctypes: the built library if there is one, else compiled from the sources here."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from deltafuse.custom_ops.kda.draw import DTYPES
from deltafuse.custom_ops.kda.spec import KdaConfig
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
SOURCES = Path(__file__).resolve().parents[2] / "custom_ops" / "kda"
CODES = {"float32": 0, "float16": 1, "bfloat16": 2}

_INT64 = ("batch", "seq_len", "num_seqs")
_INT32 = (
    "num_heads",
    "num_v_heads",
    "head_dim",
    "head_v_dim",
    "conv_width",
    "conv_state_width",
    "dtype",
    "state_dtype",
)


class Params(ctypes.Structure):
    """``deltafuse::kda::Params`` of kda.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INT64),
        *((name, ctypes.c_int32) for name in _INT32),
        ("scale", ctypes.c_float),
        ("qk_l2norm", ctypes.c_int32),
        ("l2norm_eps", ctypes.c_float),
        ("gate_activation", ctypes.c_int32),
        ("lower_bound", ctypes.c_float),
        ("beta_sigmoid", ctypes.c_int32),
        ("beta_scale", ctypes.c_float),
        ("conv_silu", ctypes.c_int32),
        ("output_gate", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
        ("state_v_first", ctypes.c_int32),
        ("cu_seqlens_int64", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((f"{name}_row_stride", ctypes.c_int64) for name in ("q", "k", "v")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("g", "beta", "A_log", "dt_bias", "conv_weight", "conv_bias", "conv_state", "initial_state"),
                *("norm_weight", "gate", "cu_seqlens", "o", "present_conv_state", "final_state"),
            )
        ),
    )


def compile_library(folder: Path) -> Path | None:
    """Compile the kernel into ``folder``; None without a C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    library = folder / "libdeltafuse_kda.so"
    sources = [str(SOURCES / name) for name in ("kda_cpu.cc", "kda_cpu_c.cc")]
    command = [compiler, "-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-o", str(library), *sources]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class CpuKernel:
    """Runs the kernel on NumPy arrays."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("refusal", "forward"):
            getattr(self._library, f"deltafuse_kda_cpu_{name}").restype = ctypes.c_char_p
        self._library.deltafuse_kda_cpu_workspace_bytes.restype = ctypes.c_size_t
        self._library.deltafuse_kda_params_bytes.restype = ctypes.c_size_t
        assert self._library.deltafuse_kda_params_bytes() == ctypes.sizeof(Params), "kda.h has changed"

    def instruction_set(self, limit: int) -> None:
        """0: the best there is, 1: the compiler's default, 2: at most AVX2."""
        self._library.deltafuse_kda_cpu_instruction_set(limit)

    def params(self, config: KdaConfig, inputs: Arrays, outputs: Arrays, dtype: str, state_dtype: str) -> Params:
        """The call, its pointers into ``inputs`` and ``outputs``, which must outlive it."""
        p = Params()
        for name in ("num_heads", "num_v_heads", "head_dim", "head_v_dim", "conv_width", "conv_state_width"):
            setattr(p, name, getattr(config, name))
        for name in ("scale", "l2norm_eps", "lower_bound", "beta_scale", "norm_eps"):
            setattr(p, name, getattr(config, name))
        p.dtype, p.state_dtype = CODES[dtype], CODES[state_dtype]
        p.batch, p.seq_len = inputs["q"].shape[:2]
        p.num_seqs = len(inputs["cu_seqlens"]) - 1 if config.has_cu_seqlens else p.batch
        p.qk_l2norm = ("none", "sum", "max").index(config.qk_l2norm)
        p.gate_activation = ("none", "softplus", "sigmoid").index(config.gate_activation)
        p.output_gate = ("none", "sigmoid", "silu").index(config.output_gate)
        p.beta_sigmoid = config.beta_activation == "sigmoid"
        p.conv_silu = config.conv_activation == "silu"
        p.state_v_first = config.state_layout == "VK"
        for name, array in {**inputs, **outputs}.items():
            assert array.flags.c_contiguous
            setattr(p, name, array.ctypes.data)
        if config.packed_qkv:
            keys = config.num_heads * config.head_dim
            item = inputs["q"].itemsize
            p.k, p.v = inputs["q"].ctypes.data + keys * item, inputs["q"].ctypes.data + 2 * keys * item
            p.q_row_stride = p.k_row_stride = p.v_row_stride = config.conv_channels
        else:
            p.q_row_stride, p.k_row_stride, p.v_row_stride = (inputs[name].shape[-1] for name in ("q", "k", "v"))
        if config.has_cu_seqlens:
            p.cu_seqlens_int64 = inputs["cu_seqlens"].dtype == np.int64
        return p

    def refusal(self, params: Params) -> str | None:
        reason = self._library.deltafuse_kda_cpu_refusal(ctypes.byref(params))
        return None if reason is None else reason.decode()

    def forward(self, params: Params, threads: int = 2) -> str | None:
        """Run with a workspace full of NaN, and a guard behind it that must stay as it is."""
        size = self._library.deltafuse_kda_cpu_workspace_bytes(ctypes.byref(params))
        workspace = np.full(size // 4 + 17, np.nan, np.float32)
        workspace[-16:] = 12345.0
        offset = 4 if workspace.ctypes.data % 64 == 0 else 0  # ask for no alignment beyond a float's
        reason = self._library.deltafuse_kda_cpu_forward(
            ctypes.byref(params), ctypes.c_void_p(workspace.ctypes.data + offset), ctypes.c_int(threads)
        )
        assert np.all(workspace[-15:] == 12345.0), "written past the workspace"
        return None if reason is None else reason.decode()

    def run(
        self,
        config: KdaConfig,
        inputs: Arrays,
        dtype: str = "float32",
        state_dtype: str = "float32",
        *,
        threads: int = 2,
        in_place: bool = False,
    ) -> Arrays:
        """All outputs asked for; they start as NaN. ``in_place``: new states overwrite copies of the old."""
        inputs = {name: np.ascontiguousarray(x) for name, x in inputs.items()}
        rows, tokens = inputs["q"].shape[:2]
        count = len(inputs["cu_seqlens"]) - 1 if config.has_cu_seqlens else rows
        layout = (config.head_dim, config.head_v_dim)
        shapes: dict[str, tuple[int, ...]] = {
            "o": (rows, tokens, config.num_v_heads * config.head_v_dim),
            "present_conv_state": (count, config.conv_channels, config.conv_state_width),
            "final_state": (count, config.num_v_heads, *(layout if config.state_layout == "KV" else layout[::-1])),
        }
        outputs = {
            name: np.full(shapes[name], np.nan, DTYPES[state_dtype if name == "final_state" else dtype])
            for name in config.output_names()
        }
        if in_place:
            for source, target in (("conv_state", "present_conv_state"), ("initial_state", "final_state")):
                if source in inputs and target in outputs:
                    inputs[source] = outputs[target] = inputs[source].copy()
        reason = self.forward(self.params(config, inputs, outputs, dtype, state_dtype), threads)
        if reason is not None:
            raise ValueError(reason)
        return outputs
