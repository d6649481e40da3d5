"""deltafuse: find Kimi Delta Attention in an ONNX model, prove it, and run it as one fused node in ONNX Runtime.

``import deltafuse`` loads neither onnx nor onnxruntime; each name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any


def _version() -> str:
    try:
        return str(importlib.import_module("._version", __name__).version)  # written by the build
    except ModuleNotFoundError:
        return "0.1.0.dev0+checkout"


__version__ = _version()

if TYPE_CHECKING:
    from .api import fuse, inspect
    from .capture import capture
    from .discovery import build_info, get_ep_name, get_ep_names, get_library_path
    from .errors import DeltaFuseError, RequirementError
    from .fusions.proof import ProofBudget
    from .fusions.result import FusionReport
    from .lifetime import unregister
    from .session import assignment, register, session

#: Public name -> the module that defines it.
_WHERE = {
    "fuse": ".api",
    "inspect": ".api",
    "capture": ".capture",
    "DeltaFuseError": ".errors",
    "RequirementError": ".errors",
    "FusionReport": ".fusions.result",
    "ProofBudget": ".fusions.proof",
    "get_library_path": ".discovery",
    "get_ep_name": ".discovery",
    "get_ep_names": ".discovery",
    "build_info": ".discovery",
    "register": ".session",
    "session": ".session",
    "assignment": ".session",
    "unregister": ".lifetime",
}

__all__ = [
    "DeltaFuseError",
    "FusionReport",
    "ProofBudget",
    "RequirementError",
    "__version__",
    "assignment",
    "build_info",
    "capture",
    "fuse",
    "get_ep_name",
    "get_ep_names",
    "get_library_path",
    "inspect",
    "register",
    "session",
    "unregister",
]


#: Modules that are there without an import of their own.
_MODULES = ("calibration", "compare", "report_html", "show")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _WHERE:
        raise AttributeError(f"module 'deltafuse' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """``deltafuse.session`` is a function, and also the name of the module that defines it.

    Importing a submodule binds it on its package; that binding must not hide the public function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WHERE and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
