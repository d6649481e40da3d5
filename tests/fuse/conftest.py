"""Makes ``exports`` importable and keeps one fused copy of each export for all tests of a run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
