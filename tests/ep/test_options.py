"""The EP's options: what is refused, and in which words."""

from __future__ import annotations

import deltafuse
import pytest
from deltafuse.discovery import EP_NAME
from deltafuse.errors import OptionError

from .call import SMALL, call_model, draw, quiet

pytestmark = pytest.mark.usefixtures("library")
MODEL = call_model(SMALL, draw(SMALL, 1, 2)).SerializeToString()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"stream": "1"},
            r"there is no option 'stream': there are memory_limit_mib, nvtx_ranges, session_tag, share_weights, "
            r"user_compute_stream",
        ),
        ({"memory_limit_mib": "100"}, "memory_limit_mib '100': it is for CUDA devices, the session is on cpu"),
        ({"memory_limit_mib": "much"}, "memory_limit_mib 'much': expected a number of MiB, 0 for no limit"),
        ({"memory_limit_mib": "-1"}, "memory_limit_mib '-1': expected a number of MiB"),
        ({"memory_limit_mib": "3 "}, "memory_limit_mib '3 ': expected a number of MiB"),
        ({"user_compute_stream": 0}, "user_compute_stream '0': it is for CUDA devices, the session is on cpu"),
        (
            {"user_compute_stream": "0xzz"},
            "user_compute_stream '0xzz': expected the stream's address as a number, 0 for",
        ),
        ({"user_compute_stream": "9" * 30}, "user_compute_stream '9+': expected the stream's address as a number"),
        ({"share_weights": "maybe"}, "share_weights 'maybe': expected 0 or 1"),
        ({"nvtx_ranges": "yes"}, "nvtx_ranges 'yes': expected 0 or 1"),
    ],
)
def test_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=f"^{EP_NAME}: {says}"):
        deltafuse.session(MODEL, "cpu", sess_options=quiet(), provider_options={EP_NAME: options}, strict=True)


def test_taken() -> None:
    made = deltafuse.session(
        MODEL, "cpu", sess_options=quiet(), provider_options={EP_NAME: {"nvtx_ranges": 0}}, strict=True
    )
    assert deltafuse.assignment(made).fused
