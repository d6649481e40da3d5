"""The plugin EP on the CPU device. Tests that need its library are skipped where it is not built, with the reason."""

from __future__ import annotations

import pytest
from deltafuse.discovery import PluginError, get_library_path


@pytest.fixture(scope="session")
def library() -> str:
    try:
        return get_library_path()
    except PluginError as error:
        pytest.skip(str(error))
