"""The pass manager: named passes with what they need and give, run in order, each with its own report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import onnx_ir as ir

from .result import PassReport

Progress = Callable[[str, int, int], None]  # (what, done, total)


class Pass(ir.passes.InPlacePass):
    """A pass over a model that reports on itself.

    Attributes:
        name: what reports call it.
        needs: facts that earlier passes must have established; checked by the manager.
        gives: facts that hold after it.
    """

    name: str = ""
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()

    def run(self, model: ir.Model, report: PassReport) -> None:
        """Change the model in place; write ``changed``, ``matched``, ``refused`` and ``notes`` to the report."""
        raise TypeError(f"{type(self).__name__} does not define run")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """onnx-ir's own entry, so that a pass can stand in any of its pipelines."""
        report = PassReport(self.name)
        self.run(model, report)
        return ir.passes.PassResult(model, report.changed)


class OrderError(ValueError):
    """A pass stands before the one that it needs."""


class PassManager:
    """Runs passes in order, checks what they need, times them and keeps their reports.

    A pass that raises stops the pipeline: the model it worked on is a copy, so nothing of the user's is lost.
    """

    def __init__(self, passes: Sequence[Pass], progress: Progress | None = None) -> None:
        have: set[str] = set()
        for item in passes:
            missing = item.needs - have
            if missing:
                raise OrderError(f"pass {item.name!r} needs {', '.join(sorted(missing))}, which no earlier pass gives")
            have |= item.gives
        self.passes = list(passes)
        self.progress = progress

    def __call__(self, model: ir.Model) -> list[PassReport]:
        reports: list[PassReport] = []
        for i, item in enumerate(self.passes):
            if self.progress is not None:
                self.progress(item.name, i, len(self.passes))
            report = PassReport(item.name)
            start = time.perf_counter()
            item.run(model, report)
            report.seconds = time.perf_counter() - start
            reports.append(report)
        if self.progress is not None:
            self.progress("done", len(self.passes), len(self.passes))
        return reports
