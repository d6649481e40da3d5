"""What .ci/sanitize runs under LeakSanitizer: each way through the plugin EP once or twice, then the end."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import deltafuse
import onnxruntime as ort
from deltafuse.discovery import refusals
from deltafuse.lifetime import unregister
from ep.call import SMALL, Arrays, call_model, draw, quiet, run


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


inputs = draw(SMALL, 2, 20)
model = call_model(SMALL, inputs)
good = model.SerializeToString()
node = next(node for node in model.graph.node if node.domain == "deltafuse")
next(attribute for attribute in node.attribute if attribute.name == "qk_l2norm").s = b"mean"
for _ in range(3):
    one_round(inputs, good, model.SerializeToString())
print(f"onnxruntime {ort.__version__}: three registrations, nine sessions")
