"""What .ci/sanitize runs under LeakSanitizer: each way through the plugin EP once or twice, then the end."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import deltafuse
import numpy as np
import onnxruntime as ort
from deltafuse.custom_ops.mla.draw import draw_inputs
from deltafuse.discovery import refusals
from deltafuse.lifetime import unregister
from ep.call import SMALL, Arrays, call_model, draw, quiet, run
from mla import onnx_call as mla_call
from mla.configs import STATIC


def one_round(inputs: Arrays, good: bytes, bad: bytes) -> None:
    made = deltafuse.session(good, device="cpu", sess_options=quiet(), strict=True)
    run(made, SMALL, inputs)
    try:
        run(made, SMALL, inputs | {"beta": inputs["beta"][:, :-1]})
    except Exception as error:
        assert "beta" in str(error)
    refused = deltafuse.session(bad, device="cpu", sess_options=quiet())
    assert deltafuse.assignment(refused).refused and refusals("")
    run(refused, SMALL, inputs)
    try:
        deltafuse.session(good, sess_options=quiet(), provider_options={deltafuse.get_ep_name(): {"turbo": "1"}})
    except Exception as error:
        assert "turbo" in str(error)
    del made, refused
    gc.collect()
    unregister()


def latent_attention() -> None:
    """A good call, and one whose lengths leave no room."""
    feeds = draw_inputs(STATIC, 2, 3, 20, np.random.default_rng(0))
    model = mla_call.call_model(STATIC, feeds).SerializeToString()
    made = deltafuse.session(model, device="cpu", sess_options=quiet(), strict=True)
    mla_call.run(made, STATIC, feeds)
    try:
        mla_call.run(made, STATIC, feeds | {"cache_lengths": feeds["cache_lengths"] + np.int32(20)})
    except Exception as error:
        assert "cache_lengths" in str(error)


inputs = draw(SMALL, 2, 20)
model = call_model(SMALL, inputs)
good = model.SerializeToString()
node = next(node for node in model.graph.node if node.domain == "deltafuse")
next(attribute for attribute in node.attribute if attribute.name == "qk_l2norm").s = b"mean"
for _ in range(3):
    latent_attention()
    one_round(inputs, good, model.SerializeToString())
print(f"onnxruntime {ort.__version__}: three registrations, twelve sessions")
