"""The C++ CPU kernel through ctypes: the built library if there is one, else compiled from the sources here."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from deltafuse.custom_ops.moe.draw import DTYPES
from deltafuse.custom_ops.moe.spec import BIASES, FORMATS, MATRICES, MoeConfig
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
SOURCES = Path(__file__).resolve().parents[2] / "custom_ops" / "moe"
CODES = {"float32": 0, "float16": 1, "bfloat16": 2}


class Matrix(ctypes.Structure):
    """``deltafuse::moe::Matrix`` of moe.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scale", "zero_point")),
        *((name, ctypes.c_int32) for name in ("format", "has_zero_point", "scale_float32", "block_size", "block_rows")),
    )


class Params(ctypes.Structure):
    """``deltafuse::moe::Params`` of moe.h, field for field."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("num_experts", "top_k", "hidden_size", "intermediate_size", "shared_intermediate_size"),
                *("zero_experts", "dtype"),
                *(
                    "score",
                    "choose_by_logits",
                    "n_group",
                    "topk_group",
                    "group_top",
                    "masked_score_zero",
                    "masked_weights",
                ),
                "norm_topk_prob",
            )
        ),
        ("norm_eps", ctypes.c_float),
        ("norm_min", ctypes.c_float),
        ("routed_scaling_factor", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("activation_alpha", ctypes.c_float),
        ("gated", ctypes.c_int32),
        ("up_offset", ctypes.c_float),
        ("clamp", ctypes.c_int32),
        ("gate_limit", ctypes.c_float),
        ("up_limit", ctypes.c_float),
        ("router_weight_float32", ctypes.c_int32),
        ("router_logits_float32", ctypes.c_int32),
        ("shared_gate_float32", ctypes.c_int32),
        ("has_bias", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("x", "router_weight", "router_logits", "router_bias", "expert_bias")),
        *((name, Matrix) for name in MATRICES),
        ("shared_gate_weight", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in BIASES),
        *((name, ctypes.c_void_p) for name in ("y", "expert_ids", "expert_weights")),
    )


def set_params(config: MoeConfig, arrays: Arrays, dtype: str) -> Params:
    """The call; pointers into ``arrays`` (inputs and outputs by name), which must outlive it."""
    p = Params()
    for name in (
        *("num_experts", "top_k", "hidden_size", "intermediate_size", "shared_intermediate_size"),
        *("n_group", "topk_group", "group_top", "masked_weights", "norm_topk_prob", "norm_eps"),
        *("routed_scaling_factor", "gated", "gate_limit", "up_limit"),
        *("zero_experts", "choose_by_logits", "norm_min", "activation_alpha", "up_offset"),
    ):
        setattr(p, name, getattr(config, name))
    p.dtype = CODES[dtype]
    p.score = ("sigmoid", "softmax").index(config.score_function)
    p.masked_score_zero = config.masked_score == "0"
    p.activation = ("silu", "gelu", "gelu_tanh", "relu2").index(config.activation)
    p.clamp = ("none", "before", "after").index(config.clamp)
    p.num_tokens = arrays["x"].size // config.hidden_size
    for name, array in arrays.items():
        assert array.flags.c_contiguous
        if hasattr(p, name):
            setattr(p, name, array.ctypes.data)
    for field, name in (
        ("router_weight_float32", "router_weight"),
        ("router_logits_float32", "router_logits"),
        ("shared_gate_float32", "shared_gate_weight"),
    ):
        setattr(p, field, name in arrays and arrays[name].dtype == np.float32)
    p.has_bias = any(name in arrays for name in BIASES)
    for name in MATRICES:
        matrix = getattr(p, name)
        kind, (matrix.block_size, matrix.block_rows), matrix.has_zero_point = config.weights_form(name)
        matrix.format = FORMATS.index(kind)
        for field, part in (("data", "weight"), ("scale", "scale"), ("zero_point", "zero_point")):
            if f"{name}_{part}" in arrays:
                setattr(matrix, field, arrays[f"{name}_{part}"].ctypes.data)
        matrix.scale_float32 = f"{name}_scale" in arrays and arrays[f"{name}_scale"].dtype == np.float32
    return p


def output_arrays(config: MoeConfig, inputs: Arrays, dtype: str) -> Arrays:
    """Outputs full of NaN, and of ids that are none."""
    tokens = inputs["x"].size // config.hidden_size
    outputs = {
        "y": np.full(inputs["x"].shape, np.nan, DTYPES[dtype]),
        "expert_ids": np.full((tokens, config.top_k), -1, np.int64),
        "expert_weights": np.full((tokens, config.top_k), np.nan, np.float32),
    }
    return {name: outputs[name] for name in config.output_names()}


def compile_library(folder: Path) -> Path | None:
    """Compile the kernel into ``folder``; None without a C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    library = folder / "libdeltafuse_moe.so"
    sources = [str(SOURCES / name) for name in ("moe_cpu.cc", "moe_cpu_c.cc")]
    command = [compiler, "-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-o", str(library), *sources]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class CpuKernel:
    """Runs the kernel on NumPy arrays."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("refusal", "forward"):
            getattr(self._library, f"deltafuse_moe_cpu_{name}").restype = ctypes.c_char_p
        self._library.deltafuse_moe_cpu_workspace_bytes.restype = ctypes.c_size_t
        self._library.deltafuse_moe_params_bytes.restype = ctypes.c_size_t
        assert self._library.deltafuse_moe_params_bytes() == ctypes.sizeof(Params), "moe.h has changed"

    def instruction_set(self, limit: int) -> None:
        """0: the best there is, 1: the compiler's default, 2: at most AVX2."""
        self._library.deltafuse_moe_cpu_instruction_set(limit)

    def refusal(self, params: Params) -> str | None:
        reason = self._library.deltafuse_moe_cpu_refusal(ctypes.byref(params))
        return None if reason is None else reason.decode()

    def workspace(self, params: Params) -> NDArray[np.float32]:
        """A workspace full of NaN with a guard behind it."""
        size = self._library.deltafuse_moe_cpu_workspace_bytes(ctypes.byref(params))
        workspace = np.full(size // 4 + 17, np.nan, np.float32)
        workspace[-16:] = 12345.0
        return workspace

    def forward(self, params: Params, threads: int = 2, workspace: NDArray[np.float32] | None = None) -> str | None:
        """Run; the guard must stay as it is."""
        workspace = self.workspace(params) if workspace is None else workspace
        offset = 4 if workspace.ctypes.data % 64 == 0 else 0  # ask for no alignment beyond a float's
        reason = self._library.deltafuse_moe_cpu_forward(
            ctypes.byref(params), ctypes.c_void_p(workspace.ctypes.data + offset), ctypes.c_int(threads)
        )
        assert np.all(workspace[-15:] == 12345.0), "written past the workspace"
        return None if reason is None else reason.decode()

    def run(self, config: MoeConfig, inputs: Arrays, dtype: str = "float32", *, threads: int = 2) -> Arrays:
        """All outputs asked for; they start as NaN and -1."""
        inputs = {name: np.ascontiguousarray(x) for name, x in inputs.items()}
        outputs = output_arrays(config, inputs, dtype)
        reason = self.forward(set_params(config, {**inputs, **outputs}, dtype), threads)
        if reason is not None:
            raise ValueError(reason)
        return outputs
