"""Calls LatentAttention's CUDA kernels through their C face, with PyTorch for the device's memory and nothing else."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from .kda_runner import find_library as find_kda_library
from .kda_runner import nans, to_torch

try:
    from deltafuse.custom_ops.mla.draw import draw_inputs
    from deltafuse.custom_ops.mla.reference import errors, reference, relative_error, tolerance
    from deltafuse.custom_ops.mla.spec import MlaConfig
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from custom_ops.mla.draw import draw_inputs
    from custom_ops.mla.reference import errors, reference, relative_error, tolerance
    from custom_ops.mla.spec import MlaConfig

__all__ = [
    "Call",
    "Kernels",
    "MlaConfig",
    "Params",
    "draw_inputs",
    "errors",
    "find_library",
    "reference",
    "relative_error",
    "to_device",
    "tolerance",
]

Array = NDArray[Any]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_I64, _I32, _F32, _PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p

#: Names of what tests and tune_mla.py may choose.
CHOICES = ("grain", "rows", "section_tiles", "chapter_tiles")

#: Which past a present continues.
PASTS = {
    "present_latent": "past_latent",
    "present_k_rope": "past_k_rope",
    "present_latent_scale": "past_latent_scale",
    "present_key": "past_key",
    "present_value": "past_value",
}


class Params(ctypes.Structure):
    """``deltafuse::mla::Params`` of mla.h, field for field."""

    _fields_ = [
        *((name, _I64) for name in ("batch", "seq_len", "past_len")),
        *((name, _I32) for name in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")),
        ("dtype", _I32),
        ("scale", _F32),
        *((name, _I32) for name in ("rope", "causal", "window", "gate_sigmoid")),
        ("kv_norm_eps", _F32),
        *((name, _I32) for name in ("cache", "cache_type", "static_cache", "packed_cache")),
        *((name, _I64) for name in ("num_blocks", "block_size", "max_blocks")),
        *((name, _I32) for name in ("cos_width", "cos_float32")),
        *((name, _I64) for name in ("cos_rows", "cos_batch_stride", "position_batch_stride", "q_scale_batch_stride")),
        ("mask_type", _I32),
        ("mask_strides", _I64 * 4),
        *((name, _I64) for name in ("latent_row_stride", "k_rope_row_stride")),
        ("lengths_int64", _I32),
        *((name, _PTR) for name in ("q", "latent", "k_rope", "kv_b_weight", "kv_norm_weight", "cos", "sin")),
        *((name, _PTR) for name in ("position_ids", "q_scale", "past_latent", "past_k_rope", "past_latent_scale")),
        *((name, _PTR) for name in ("past_key", "past_value", "cache_lengths", "block_table", "attn_mask", "gate")),
        *((name, _PTR) for name in ("o", "present_latent", "present_k_rope", "present_latent_scale")),
        *((name, _PTR) for name in ("present_key", "present_value")),
        ("fault", _PTR),
    ]


def find_library() -> Path | None:
    """The library to test: what DELTAFUSE_MLA_LIBRARY names, or the plugin's own."""
    named = os.environ.get("DELTAFUSE_MLA_LIBRARY")
    return Path(named) if named else find_kda_library()


def to_device(x: Array, device: str = "cuda") -> torch.Tensor:
    """A copy of a NumPy array; float8 as PyTorch's."""
    if x.dtype == ml_dtypes.float8_e4m3fn:
        return to_torch(x.view(np.uint8), device).view(torch.float8_e4m3fn)
    return to_torch(x, device)


def to_array(x: torch.Tensor) -> Array:
    """On the host, as the reference takes it: float64, 8-bit codes as they are."""
    if x.dtype == torch.int8:
        return np.asarray(x.cpu().numpy())
    if x.dtype == torch.float8_e4m3fn:
        return np.asarray(x.view(torch.uint8).cpu().numpy().view(ml_dtypes.float8_e4m3fn))
    return np.asarray(x.detach().to("cpu", torch.float64).numpy())


def _poison(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.full(shape, 0xFF, dtype=torch.uint8, device=device).view(dtype)
    return nans(shape, dtype, device)


class Call:
    """One call with everything it points to. ``launch`` may be repeated and captured.

    Args:
        config: the call's configuration.
        tensors: operands by the names of ``spec.INPUTS``.
        in_place: presents of static caches are their pasts' buffers.
    """

    def __init__(self, config: MlaConfig, tensors: Mapping[str, torch.Tensor], in_place: bool = False) -> None:
        self.config = config
        self.tensors = t = {name: x.contiguous() for name, x in tensors.items()}
        c, p = config, Params()
        q = t["q"]
        self.device = device = str(q.device)
        batch, seq_len = q.shape[:2]
        p.batch, p.seq_len = batch, seq_len
        for name in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "cos_width"):
            setattr(p, name, getattr(c, name))
        p.dtype = DTYPES[q.dtype]
        p.scale, p.kv_norm_eps, p.causal, p.window = c.scale, c.kv_norm_eps, c.causal, c.window
        p.rope = ("none", "half", "interleaved", "deinterleaved").index(c.rope)
        p.gate_sigmoid = c.gate_activation == "sigmoid"
        p.cache = ("none", "latent", "expanded").index(c.cache)
        p.cache_type = ("same", "int8", "float8").index(c.cache_type)
        p.static_cache, p.packed_cache = c.static_cache, c.packed_cache
        if c.paged:
            p.num_blocks, p.block_size = t["past_latent"].shape[:2]
            p.max_blocks = t["block_table"].shape[1]
        elif c.has_past:
            p.past_len = t["past_key"].shape[2] if c.cache == "expanded" else t["past_latent"].shape[1]
        if c.rope != "none":
            cos = t["cos"]
            p.cos_float32 = cos.dtype == torch.float32
            p.cos_rows = cos.shape[0] if c.has_position_ids else 0
            p.cos_batch_stride = seq_len if cos.dim() == 3 and cos.shape[0] > 1 else 0
        for name in ("position_ids", "q_scale"):
            if name in t:
                field = "position_batch_stride" if name == "position_ids" else "q_scale_batch_stride"
                setattr(p, field, seq_len if t[name].shape[0] > 1 else 0)
        if c.has_mask:
            mask = t["attn_mask"]
            kinds = {torch.bool: 3, q.dtype: 1, torch.float32: 2}
            p.mask_type = kinds[mask.dtype]
            for i, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
                p.mask_strides[i] = stride if size > 1 else 0
        p.latent_row_stride, p.k_rope_row_stride = t["latent"].shape[-1], c.qk_rope_head_dim
        for name in c.input_names():
            setattr(p, name, t[name].data_ptr())
        if c.packed_latent:
            p.k_rope_row_stride = t["latent"].shape[-1]
            p.k_rope = p.latent + c.kv_lora_rank * q.element_size()
        if c.static_cache:
            p.lengths_int64 = t["cache_lengths"].dtype == torch.int64
        self.outputs = {"o": _poison((batch, seq_len, c.num_heads * c.v_head_dim), q.dtype, device)}
        for name in c.output_names()[1:]:
            past = t.get(PASTS[name])
            if in_place and c.static_cache and past is not None:
                self.outputs[name] = past
                continue
            if past is not None:
                axis = 2 if c.cache == "expanded" else 1
                shape = list(past.shape)
                shape[axis] += 0 if c.static_cache else seq_len
                kind = past.dtype
            else:
                packed = c.qk_rope_head_dim if c.packed_cache else 0
                shape = {
                    "present_latent": [batch, seq_len, c.kv_lora_rank + packed],
                    "present_k_rope": [batch, seq_len, c.qk_rope_head_dim],
                    "present_key": [batch, c.num_heads, seq_len, c.qk_head_dim],
                    "present_value": [batch, c.num_heads, seq_len, c.v_head_dim],
                }[name]
                kind = q.dtype
            self.outputs[name] = _poison(tuple(shape), kind, device)
        for name, tensor in self.outputs.items():
            setattr(p, name, tensor.data_ptr())
        self.fault = torch.zeros(1, dtype=torch.int32).pin_memory()
        p.fault = self.fault.data_ptr()
        self.params = p
        self.layer: ctypes.c_void_p | None = None
        self.workspace: torch.Tensor | None = None


class Kernels:
    """The kernels of one shared library.

    Args:
        path: ``libdeltafuse_ep.so`` or a library of the kernels alone.
    """

    def __init__(self, path: str | Path) -> None:
        lib = ctypes.CDLL(str(path))
        lib.deltafuse_mla_params_bytes.restype = ctypes.c_size_t
        if lib.deltafuse_mla_params_bytes() != ctypes.sizeof(Params):
            raise RuntimeError(f"{path}: Params has another size than mla_runner.Params; they must be equal")
        self._refusal = lib.deltafuse_mla_cuda_refusal
        self._refusal.restype, self._refusal.argtypes = ctypes.c_char_p, [_PTR, ctypes.c_int]
        self._create = lib.deltafuse_mla_cuda_create
        self._create.restype, self._create.argtypes = ctypes.c_char_p, [_PTR, _PTR, _PTR]
        self._destroy = lib.deltafuse_mla_cuda_destroy
        self._destroy.restype, self._destroy.argtypes = None, [_PTR]
        self._workspace = lib.deltafuse_mla_cuda_workspace_bytes
        self._workspace.restype, self._workspace.argtypes = ctypes.c_size_t, [_PTR, _PTR]
        self._forward = lib.deltafuse_mla_cuda_forward
        self._forward.restype, self._forward.argtypes = ctypes.c_char_p, [_PTR, _PTR, _PTR, _PTR]
        switch = lib.deltafuse_mla_cuda_masked_prompts
        switch.restype, switch.argtypes = None, [ctypes.c_int]
        switch(os.environ.get("DELTAFUSE_MLA_MASKED_PROMPTS") != "0")  # what it is for: mla_plan_cuda.h
        self._choose = lib.deltafuse_mla_cuda_choose
        self._choose.restype, self._choose.argtypes = ctypes.c_int, [ctypes.c_char_p, ctypes.c_int]
        self._core = lib.deltafuse_mla_cuda_core
        self._core.restype, self._core.argtypes = ctypes.c_char_p, [_PTR, _PTR, _PTR, _PTR]

    def choose(self, **choices: int) -> None:
        """What decode does from now on instead of what it would choose: ``DecodeChoice`` of mla_launch.h. What is not
        named is left to it again. Before a call is prepared, not between that and its launch."""
        for name in {**dict.fromkeys(CHOICES, -1), **choices}:
            if not self._choose(name.encode(), choices.get(name, -1)):
                raise KeyError(name)

    def refusal(self, params: Params, capability: int = 90) -> str | None:
        reason: bytes | None = self._refusal(ctypes.byref(params), capability)
        return None if reason is None else reason.decode()

    def prepare(self, call: Call, poison: bool = True, keep_weights: bool = True) -> Call:
        """Create the call's layer and workspace, full of NaN if ``poison``.

        Args:
            keep_weights: the layer copies the weights and the calls name none.
        """
        stream = torch.cuda.current_stream().cuda_stream
        weights = call.params.kv_b_weight
        if not keep_weights:
            call.params.kv_b_weight = None
        layer = ctypes.c_void_p()
        reason = self._create(ctypes.byref(call.params), stream, ctypes.byref(layer))
        if reason is not None:
            raise RuntimeError(reason.decode())
        call.params.kv_b_weight = None if keep_weights else weights
        call.layer = layer
        size = int(self._workspace(layer, ctypes.byref(call.params)))
        call.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=call.device)
        if poison:
            call.workspace.fill_(0xFF)
        return call

    def release(self, call: Call) -> None:
        """Give the layer back."""
        torch.cuda.synchronize()
        self._destroy(call.layer)
        call.layer = None

    def launch(self, call: Call, core: bool = False) -> None:
        """Launch on PyTorch's current stream. ``core``: the attention alone, after a whole call. Raises RuntimeError
        with the kernel's reason."""
        assert call.workspace is not None
        handle = torch.cuda.current_stream().cuda_stream
        function = self._core if core else self._forward
        reason = function(call.layer, ctypes.byref(call.params), call.workspace.data_ptr(), handle)
        if reason is not None:
            raise RuntimeError(reason.decode())

    def run(
        self, config: MlaConfig, inputs: Mapping[str, Array], in_place: bool = False, keep_weights: bool = True
    ) -> dict[str, Array]:
        """Run one call on NumPy operands; outputs and workspace are full of NaN before it. Faults raise ValueError."""
        call = Call(config, {name: to_device(np.asarray(x)) for name, x in inputs.items()}, in_place)
        self.prepare(call, keep_weights=keep_weights)
        try:
            self.launch(call)
        finally:
            self.release(call)
        if int(call.fault[0]):
            raise ValueError(f"fault {int(call.fault[0])}")
        return {name: to_array(x) for name, x in call.outputs.items()}
