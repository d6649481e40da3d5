"""Fusions from other packages: entry points of the group ``deltafuse.fusions``.

An entry point names a class, one of:

- a :class:`~.fuse.FusePass`: a recogniser. Its ``op`` is a new one, whose entry for the registry the class has as
  ``registration`` (:class:`registry.ops.Op`), or an instance that deltafuse has (``deltafuse.fusions.kda.op.KDA``), in
  which case it finds that op in exports of another style. It runs after deltafuse's own recognisers;
- another :class:`~.passes.Pass`: a clean-up, which runs after deltafuse's own clean-ups and before all recognisers.

What these propose is proved like everything else. A package whose entry point cannot be loaded keeps nobody from
working: what it says stands in the report's warnings. ``DELTAFUSE_PLUGINS=0`` switches them all off.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..registry.ops import OPS, Op
from ..registry.ops import register as register_op

if TYPE_CHECKING:
    from .fuse import FusePass
    from .passes import Pass

GROUP = "deltafuse.fusions"
SWITCH = "DELTAFUSE_PLUGINS"


@dataclass
class Plugins:
    """What other packages bring: clean-ups, recognisers, and why some of them were not taken."""

    passes: list[type[Pass]] = field(default_factory=list)
    fusers: list[type[FusePass]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def domains(self) -> set[str]:
        """The domains of the functions that their recognisers' calls are of."""
        return {OPS[fuser.op.key].domain for fuser in self.fusers}


_loaded: tuple[object, Plugins] | None = None


def load() -> Plugins:
    """The fusions of all installed packages, each loaded once a process; their ops are then in the registry."""
    global _loaded
    points = tuple(_entry_points())
    if _loaded is None or _loaded[0] != points:
        _loaded = (points, _load(points))
    return _loaded[1]


def _entry_points() -> Iterator[importlib.metadata.EntryPoint]:
    if os.environ.get(SWITCH) == "0":
        return
    found = importlib.metadata.entry_points(group=GROUP)
    yield from sorted(found, key=lambda point: (point.name, point.value))


def _load(points: tuple[importlib.metadata.EntryPoint, ...]) -> Plugins:
    made = Plugins()
    for point in points:
        package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
        try:
            _add(made, point.load())
        except Exception as error:  # whatever another package's code raises
            text = " ".join(str(error).split())
            made.problems.append(f"the fusion {point.name!r}{package} is not used: {type(error).__name__}: {text}")
    return made


def _add(made: Plugins, found: Any) -> None:
    """Take a class in, its op into the registry.

    Raises:
        TypeError, ValueError: it is not what an entry point of this group may name.
    """
    from .fuse import FusePass
    from .op import FusedOp
    from .passes import Pass

    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise TypeError(f"expected a class derived from deltafuse.fusions.passes.Pass, got {found!r}")
    if not found.name:
        raise ValueError(f"{found.__name__} has no name")
    if not issubclass(found, FusePass):
        made.passes.append(found)
        return
    op = getattr(found, "op", None)
    if not isinstance(op, FusedOp):
        raise TypeError(f"{found.__name__}.op: expected an instance of a FusedOp, got {op!r}")
    registration: Op | None = getattr(found, "registration", None)
    if registration is not None:
        if registration.key != op.key:
            raise ValueError(f"{found.__name__}: its op has the key {op.key!r}, its registration {registration.key!r}")
        register_op(registration)
    elif op.key not in OPS:
        raise ValueError(f"{found.__name__} has no registration, and {op.key!r} is no op of deltafuse's")
    made.fusers.append(found)
