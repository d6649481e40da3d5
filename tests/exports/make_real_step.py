"""A real-size step of Ling 3's latent attention over a cache, packed without its large weights.

    cd tests && python -m exports.make_real_step

``mla_step.skel.onnx.xz``: transformers' own module (`bailing_hybrid`, Ling-3.0-flash: hidden 2560, 32 heads of 128 and
64, latents of 512), float16, opset 20, one token a sequence on transformers' cache of latents and rotated keys; batch
and past are free. `library.real_layer` fills the weights in.
"""

from __future__ import annotations

import io
import lzma
from typing import Any

import onnx
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridAttention

from .library import DATA

CONFIG: dict[str, Any] = dict(
    hidden_size=2560,
    num_attention_heads=32,
    num_key_value_heads=32,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


class Step(torch.nn.Module):
    """Hidden states of one token, its cosines and sines, latents and rotated keys before it -> result, both caches."""

    def __init__(self) -> None:
        super().__init__()
        config = BailingHybridConfig(**CONFIG)
        config._attn_implementation = "sdpa"
        self.m = BailingHybridAttention(config, 0).half().eval()

    def forward(
        self, x: torch.Tensor, c: torch.Tensor, si: torch.Tensor, latents: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cache = DynamicCache()
        cache.update(latents, rotated, 0)
        result, _ = self.m(x, (c, si), None, cache=cache)
        return result, cache.layers[0].keys, cache.layers[0].values


def main() -> None:
    batch, past = torch.export.Dim("batch"), torch.export.Dim("past")
    inputs = tuple(
        torch.randn(*shape, dtype=torch.float16)
        for shape in ((2, 1, 2560), (2, 1, 64), (2, 1, 64), (2, 1, 9, 512), (2, 1, 9, 64))
    )
    with torch.no_grad():
        program = torch.onnx.export(
            Step(),
            inputs,
            dynamo=True,
            opset_version=20,
            input_names=["x", "c", "si", "past.latents", "past.rotated"],
            output_names=["y", "present.latents", "present.rotated"],
            dynamic_shapes=({0: batch}, {0: batch}, {0: batch}, {0: batch, 2: past}, {0: batch, 2: past}),
        )
    assert program is not None
    buffer = io.BytesIO()
    onnx.save(program.model_proto, buffer)
    model = onnx.load_from_string(buffer.getvalue())
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT16 and len(tensor.raw_data) > 2 * 65536:
            tensor.raw_data = b""
    for node in model.graph.node:
        del node.metadata_props[:]
    (DATA / "mla_step.skel.onnx.xz").write_bytes(lzma.compress(model.SerializeToString(), preset=9))
    print(len(model.graph.node), "nodes")


if __name__ == "__main__":
    main()
