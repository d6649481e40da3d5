"""Without Olive these tests are skipped, by name: ``pip install 'deltafuse[olive]'`` brings it.

This folder is no package: it would stand in front of Olive's own, whose name it has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OLIVE_DISABLE_TELEMETRY"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("olive")
    if found is not None and found.origin is not None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="Olive is not installed: pip install 'deltafuse[olive]'"))
