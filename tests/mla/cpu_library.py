"""The C++ CPU kernel through ctypes: the built library if there is one, else compiled from the sources here."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from deltafuse.custom_ops.mla.spec import CACHES, ROPES, MlaConfig
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
SOURCES = Path(__file__).resolve().parents[2] / "custom_ops" / "mla"
CODES: dict[Any, int] = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
CACHE_TYPES = ("same", "int8", "float8")

_INT64, _INT32, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
_INPUTS = (
    *("q", "latent", "k_rope", "kv_b_weight", "kv_norm_weight", "cos", "sin", "position_ids", "q_scale"),
    *("past_latent", "past_k_rope", "past_latent_scale", "past_key", "past_value"),
    *("cache_lengths", "block_table", "attn_mask", "gate"),
)
OUTPUTS = ("o", "present_latent", "present_k_rope", "present_latent_scale", "present_key", "present_value")
#: Caches that may be one buffer.
PAIRS = tuple((name.replace("present", "past"), name) for name in OUTPUTS[1:])


class Params(ctypes.Structure):
    """``deltafuse::mla::Params`` of mla.h, field for field."""

    _fields_ = (
        *((name, _INT64) for name in ("batch", "seq_len", "past_len")),
        *((name, _INT32) for name in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
        *((name, _INT32) for name in ("kv_lora_rank", "dtype")),
        ("scale", _FLOAT),
        *((name, _INT32) for name in ("rope", "causal", "window", "gate_sigmoid")),
        ("kv_norm_eps", _FLOAT),
        *((name, _INT32) for name in ("cache", "cache_type", "static_cache", "packed_cache")),
        *((name, _INT64) for name in ("num_blocks", "block_size", "max_blocks")),
        *((name, _INT32) for name in ("cos_width", "cos_float32")),
        *((name, _INT64) for name in ("cos_rows", "cos_batch_stride", "position_batch_stride")),
        ("q_scale_batch_stride", _INT64),
        ("mask_type", _INT32),
        ("mask_strides", _INT64 * 4),
        *((name, _INT64) for name in ("latent_row_stride", "k_rope_row_stride")),
        ("lengths_int64", _INT32),
        *((name, _POINTER) for name in _INPUTS),
        *((name, _POINTER) for name in OUTPUTS),
        ("fault", _POINTER),
    )


def compile_library(folder: Path) -> Path | None:
    """Compile the kernel into ``folder``; None without a C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    library = folder / "libdeltafuse_mla.so"
    sources = [str(SOURCES / name) for name in ("mla_cpu.cc", "mla_cpu_c.cc", "mla_check.cc")]
    command = [compiler, "-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-o", str(library), *sources]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def fill(config: MlaConfig, inputs: Arrays, outputs: Arrays) -> Params:
    """The call, its pointers into ``inputs`` and ``outputs``, which must outlive it."""
    p = Params()
    for name in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"):
        setattr(p, name, getattr(config, name))
    for name in ("scale", "causal", "window", "kv_norm_eps", "cos_width"):
        setattr(p, name, getattr(config, name))
    kind = inputs["q"].dtype
    p.dtype = CODES[kind]
    p.batch, p.seq_len = inputs["q"].shape[:2]
    p.rope, p.gate_sigmoid = ROPES.index(config.rope), config.gate_activation == "sigmoid"
    p.cache, p.cache_type = CACHES.index(config.cache), CACHE_TYPES.index(config.cache_type)
    p.static_cache, p.packed_cache = config.static_cache, config.packed_cache
    if config.has_past and not config.paged:
        p.past_len = inputs["past_key"].shape[2] if config.cache == "expanded" else inputs["past_latent"].shape[1]
    if config.paged:
        p.num_blocks, p.block_size = inputs["past_latent"].shape[:2]
        p.max_blocks = inputs["block_table"].shape[1]
    for name, array in {**inputs, **outputs}.items():
        assert array.flags.c_contiguous
        setattr(p, name, array.ctypes.data)
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    p.latent_row_stride = p.k_rope_row_stride = rank + rope
    if config.packed_latent:
        p.k_rope = inputs["latent"].ctypes.data + rank * kind.itemsize
    else:
        p.latent_row_stride, p.k_rope_row_stride = rank, rope
    if config.rope != "none":
        cos = inputs["cos"]
        p.cos_float32 = cos.dtype == np.float32
        if config.has_position_ids:
            p.cos_rows = cos.shape[0]
        else:
            p.cos_batch_stride = p.seq_len if cos.shape[0] > 1 else 0
    for name in ("position_ids", "q_scale"):
        if name in inputs:
            stride = p.seq_len if inputs[name].shape[0] > 1 else 0
            setattr(p, f"{name.removesuffix('_ids')}_batch_stride", stride)
    if config.has_mask:
        mask = inputs["attn_mask"]
        p.mask_type = 3 if config.bool_mask else 1 if mask.dtype == kind else 2
        steps = [step // mask.itemsize for step in mask.strides]
        p.mask_strides = (_INT64 * 4)(*(s if n > 1 else 0 for s, n in zip(steps, mask.shape, strict=True)))
    if config.static_cache:
        p.lengths_int64 = inputs["cache_lengths"].dtype == np.int64
    return p


def empty_outputs(config: MlaConfig, inputs: Arrays) -> Arrays:
    """All outputs asked for, full of NaN (int8: of 99)."""
    batch, tokens = inputs["q"].shape[:2]
    kind = inputs["q"].dtype
    heads, rope = config.num_heads, config.qk_rope_head_dim
    fresh = {
        "present_latent": (batch, tokens, config.kv_lora_rank + (rope if config.packed_cache else 0)),
        "present_k_rope": (batch, tokens, rope),
        "present_key": (batch, heads, tokens, config.qk_head_dim),
        "present_value": (batch, heads, tokens, config.v_head_dim),
    }
    outputs = {}
    for name in config.output_names():
        past = inputs.get(name.replace("present", "past"))
        if name == "o":
            shape: tuple[int, ...] = (batch, tokens, heads * config.v_head_dim)
        elif past is None:
            shape = fresh[name]
        else:
            axis = 2 if config.cache == "expanded" else 1
            grown = past.shape[axis] + (0 if config.static_cache else tokens)
            shape = (*past.shape[:axis], grown, *past.shape[axis + 1 :])
        own = kind if past is None else past.dtype
        outputs[name] = np.full(shape, 99 if own == np.int8 else np.nan, own)
    return outputs


class CpuKernel:
    """Runs the kernel on NumPy arrays."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("refusal", "forward"):
            getattr(self._library, f"deltafuse_mla_cpu_{name}").restype = ctypes.c_char_p
        self._library.deltafuse_mla_cpu_workspace_bytes.restype = ctypes.c_size_t
        self._library.deltafuse_mla_params_bytes.restype = ctypes.c_size_t
        assert self._library.deltafuse_mla_params_bytes() == ctypes.sizeof(Params), "mla.h has changed"

    def instruction_set(self, limit: int) -> None:
        """0: the best there is, 1: the compiler's default, 2: at most AVX2."""
        self._library.deltafuse_mla_cpu_instruction_set(limit)

    def refusal(self, params: Params) -> str | None:
        reason = self._library.deltafuse_mla_cpu_refusal(ctypes.byref(params))
        return None if reason is None else reason.decode()

    def forward(self, params: Params, threads: int = 2) -> str | None:
        """Run with a workspace full of NaN, and a guard behind it that must stay as it is."""
        size = self._library.deltafuse_mla_cpu_workspace_bytes(ctypes.byref(params))
        workspace = np.full(size // 4 + 17, np.nan, np.float32)
        workspace[-16:] = 12345.0
        offset = 4 if workspace.ctypes.data % 64 == 0 else 0  # ask for no alignment beyond a float's
        reason = self._library.deltafuse_mla_cpu_forward(
            ctypes.byref(params), ctypes.c_void_p(workspace.ctypes.data + offset), ctypes.c_int(threads)
        )
        assert np.all(workspace[-15:] == 12345.0), "written past the workspace"
        return None if reason is None else reason.decode()

    def run(self, config: MlaConfig, inputs: Arrays, *, threads: int = 2, in_place: bool = False) -> Arrays:
        """All outputs asked for. ``in_place``: static caches are updated in copies of the old ones.

        Raises:
            ValueError: the kernel's reason; nothing has been written then.
        """
        inputs = {name: np.ascontiguousarray(x) for name, x in inputs.items()}
        outputs = empty_outputs(config, inputs)
        if in_place and config.static_cache:
            for source, target in PAIRS:
                if source in inputs and target in outputs:
                    inputs[source] = outputs[target] = inputs[source].copy()
        before = {name: x.copy() for name, x in outputs.items()}
        reason = self.forward(fill(config, inputs, outputs), threads)
        if reason is not None:
            for name, x in outputs.items():
                assert x.tobytes() == before[name].tobytes(), f"{name} was written before the error"
            raise ValueError(reason)
        return outputs
