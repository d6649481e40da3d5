"""GroupedQMoE's kernels, for its tests; other ops' tests have fixtures of their own by these names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .moe_runner import Kernels


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    from .moe_runner import Kernels, find_library

    library = find_library()
    assert library is not None
    return Kernels(library)


@pytest.fixture
def tuned(kernels: Kernels) -> Iterator[Kernels]:
    """The kernels; what a test tunes is put back."""
    yield kernels
    kernels.tune("defaults", 0)
