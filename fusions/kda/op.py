"""Kimi Delta Attention as the pipeline sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ...custom_ops.kda import body, call
from ...custom_ops.kda.reference import reference
from ..candidate import Candidate
from ..graph import GraphView
from ..op import LONGEST_PROBE, TOLERANCE, Arrays, Case, FusedOp, Sizes
from ..proof.extract import Extract
from ..proof.shrink import Shrunk
from .cases import HOSTILE, draw
from .decays import bounds_log_decays
from .heads import shrink
from .sizes import environment, rows_and_tokens

#: How much more than TOLERANCE the nearly collinear case may have.
HARD_FACTOR = 5.0
#: Token counts tried on a dynamic graph. A chunked export is right up to 64 tokens only: longer ones are probed.
TOKENS = (5, 1, 17, 64)
PROBES = (65, 130)
MOST_ROWS = 64
#: Cases whose decays a chunked original may overflow with, in float64 too: exponents of the other sign, masked later.
OVERFLOWING = frozenset({"gate-unbounded", "gate-near-bound", "wide", "extreme-last"})
_PARAMETERS = frozenset({"A_log", "dt_bias", "conv_weight", "conv_bias", "norm_weight"})


class KdaOp(FusedOp):
    """``deltafuse::KimiDeltaAttention``."""

    key = "kda"
    size_ops: frozenset[str] | None = frozenset({"Mod"})  # chunks are filled up
    scaled_output = "o"

    def kind_of(self, name: str) -> str:
        if name in ("initial_state", "final_state"):
            return "TS"
        return "float32" if name in _PARAMETERS else "own" if name == "cu_seqlens" else "T"

    def make_call(
        self,
        candidate: Candidate,
        inputs: Mapping[str, ir.Value],
        opset: int,
        dtype: ir.DataType,
        state_dtype: ir.DataType,
        name: str,
    ) -> tuple[ir.Function, ir.Node, dict[str, ir.Value]]:
        config, seq_len = candidate.config, 1 if candidate.one_token else None
        function = body.build_function(config, opset, dtype, state_dtype, seq_len=seq_len)
        node = call.make_node(config, inputs, dtype, state_dtype, seq_len=seq_len, name=name)
        asked = [v for v in node.outputs if v.name != ""]
        return function, node, dict(zip(config.output_names(), asked, strict=True))

    def attach(self, model: ir.Model, function: ir.Function) -> None:
        call.attach(model, function)

    def plan(self, candidate: Candidate, bounds: Callable[[], list[int]]) -> list[Case]:
        """Each hostile case once, over the token counts; then probes beyond 64."""
        rows, length = rows_and_tokens(candidate)
        batches = [rows] if isinstance(rows, int) else [1, 2]
        tokens = [length] if isinstance(length, int) else list(TOKENS)
        cases = [(case, batches[i % len(batches)], tokens[i % len(tokens)]) for i, case in enumerate(HOSTILE)]
        required = isinstance(length, int)
        plan = [
            Case(case, {"batch": b, "tokens": t}, required)
            for case, b, t in cases
            if candidate.config.has_initial_state or case not in ("zero-state", "full-state")
        ]
        if isinstance(length, int) and isinstance(rows, int):
            return plan
        named = bounds()
        probes: list[tuple[int, int]] = []
        if not isinstance(length, int):
            # past the largest bound, and past all of them one behind the other
            past = {t + 3 for t in (named[-1:] and (named[-1], sum(named))) if max(PROBES) < t + 3 <= LONGEST_PROBE + 3}
            probes += [(batches[0], t) for t in (*PROBES, *sorted(past))]
        if not isinstance(rows, int):
            past_rows = {3, *(b + 3 for b in named if b <= MOST_ROWS)}
            probes += [(b, tokens[0]) for b in sorted(past_rows)[-2:]]
        return plan + [Case("normal", {"batch": b, "tokens": t}) for b, t in probes]

    def unforeseen(self, candidate: Candidate, rng: np.random.Generator) -> list[Case]:
        rows, length = rows_and_tokens(candidate)
        if isinstance(rows, int) and isinstance(length, int):
            return []
        batches = [rows] * 2 if isinstance(rows, int) else rng.choice(np.arange(3, 9), 2, replace=False)
        tokens = [length] * 2 if isinstance(length, int) else rng.choice(np.arange(6, 64), 2, replace=False)
        return [Case("normal", {"batch": int(b), "tokens": int(t)}) for b, t in zip(batches, tokens, strict=True)]

    def screening_case(self, candidate: Candidate) -> Case:
        rows, length = rows_and_tokens(candidate)
        sizes = {
            "batch": rows if isinstance(rows, int) else 1,
            "tokens": length if isinstance(length, int) else TOKENS[0],
        }
        return Case("normal", sizes)

    def draw(self, candidate: Candidate, case: Case, seed: int) -> Arrays:
        return draw(candidate.config, case.sizes["batch"], case.sizes["tokens"], seed, case.name)

    def reference(self, candidate: Candidate, inputs: Arrays) -> Arrays:
        return reference(candidate.config, inputs)

    def limit(self, candidate: Candidate, case: Case) -> float:
        return TOLERANCE * (HARD_FACTOR if case.name == "collinear-slow" else 1.0)

    def overflows(self, case: Case) -> bool:
        return case.name in OVERFLOWING

    def allows(self, view: GraphView, candidate: Candidate, node: ir.Node) -> bool:
        return bounds_log_decays(view, candidate, node)

    def shrink(
        self, view: GraphView, candidate: Candidate, extract: Extract, arrays: Mapping[ir.Value, np.ndarray]
    ) -> Shrunk:
        return shrink(view, candidate, extract, arrays)

    def sizes(self, candidate: Candidate) -> dict[str, int | str | None]:
        rows, length = rows_and_tokens(candidate)
        return {"batch": rows, "tokens": length}

    def environment(self, candidate: Candidate, sizes: Sizes) -> dict[str, int]:
        return environment(candidate, sizes["batch"], sizes["tokens"])

    def describe(self, candidate: Candidate) -> dict[str, Any]:
        return {**super().describe(candidate), "one_token": candidate.one_token}


KDA = KdaOp()
