"""Latent attention as the pipeline sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from ...custom_ops.mla import body, call
from ...custom_ops.mla.reference import reference
from ..candidate import Candidate
from ..graph import GraphView
from ..op import LONGEST_PROBE, TOLERANCE, Arrays, Case, FusedOp
from ..proof.extract import Extract
from ..proof.shrink import Shrunk
from .cases import HOSTILE, draw
from .heads import shrink

TOKENS = (5, 1, 17, 33)
PASTS = (7, 19, 3, 40)
#: Lengths beyond: (tokens, past).
PROBES = ((130, 3), (2, 300))
#: Numbers of tokens that nothing else of a size divides.
PRIMES = (11, 13, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
#: Scores of a magnitude at which float32 itself loses digits of the weights.
HARD_FACTOR = 5.0
#: A fused node's ``meta``: names of values of the graph that it came from which are what its cache holds.
HELD = "deltafuse.held"
HARD = frozenset({"large-scores", "extreme-last", "wide"})


class MlaOp(FusedOp):
    """``deltafuse::LatentAttention``."""

    key = "mla"
    explains_positions = True
    size_ops: frozenset[str] | None = frozenset()

    def kind_of(self, name: str) -> str:
        if name in ("kv_norm_weight", "q_scale", "past_latent_scale"):
            return "float32"
        return "own" if name in ("cos", "sin", "position_ids", "attn_mask", "cache_lengths", "block_table") else "T"

    def make_call(
        self,
        candidate: Candidate,
        inputs: Mapping[str, ir.Value],
        opset: int,
        dtype: ir.DataType,
        state_dtype: ir.DataType,
        name: str,
    ) -> tuple[ir.Function, ir.Node, dict[str, ir.Value]]:
        config, tokens = candidate.config, self.sizes(candidate).get("tokens")
        # known: the form of the body is chosen here, not when it runs
        seq_len = 1 if candidate.one_token else tokens if isinstance(tokens, int) and tokens > 1 else None
        function = body.build_function(config, opset, dtype, seq_len=seq_len)
        node = call.make_node(config, inputs, dtype, seq_len=seq_len, name=name)
        node.meta[HELD] = candidate.held
        asked = [v for v in node.outputs if v.name != ""]
        return function, node, dict(zip(config.output_names(), asked, strict=True))

    def attach(self, model: ir.Model, function: ir.Function) -> None:
        call.attach(model, function)

    def plan(self, candidate: Candidate, bounds: Callable[[], list[int]]) -> list[Case]:
        """Each hostile case once, over batches, tokens and caches; then longer ones, past every bound."""
        fixed = self.sizes(candidate)
        choices = {"batch": (1, 2), "tokens": TOKENS, "past": PASTS}

        if candidate.config.static_cache:
            room = fixed.get("past")
            choices["past"] = (40, 64, 33, 50)
            if isinstance(room, int):  # no more tokens than the cache holds
                choices["tokens"] = tuple(min(t, room) for t in TOKENS)

        def size(name: str, i: int) -> int:
            number = fixed.get(name, 1)
            return number if isinstance(number, int) else choices[name][i % len(choices[name])]

        names = [n for n in ("batch", "tokens", "past") if n in fixed or n != "past"]
        frozen = all(isinstance(fixed.get(n, 1), int) for n in names)
        plan = [
            Case(case, {n: size(n, i) for n in names}, frozen)
            for i, case in enumerate(HOSTILE)
            if (candidate.config.gate_activation != "none" or case != "gate-extreme")
            and (candidate.config.has_mask or case != "masked-rows")
        ]
        if frozen:
            return plan
        base = {n: size(n, 0) for n in names}
        named = bounds()
        far = sorted({b + 3 for b in (*named[-1:], sum(named)) if 130 < b + 3 <= LONGEST_PROBE + 3})
        probes: list[dict[str, int]] = []
        for tokens, past in (*PROBES, *((f, 3) for f in far), *((2, f) for f in far)):
            wanted = {"tokens": tokens, "past": past + (tokens if candidate.config.static_cache else 0)}
            changed = {n: wanted[n] for n in names if n in wanted and not isinstance(fixed.get(n, 1), int)}
            if candidate.config.static_cache and "tokens" in changed:  # no more than the cache holds
                changed["tokens"] = min(changed["tokens"], changed.get("past", base["past"]))
            if changed and {**base, **changed} not in probes:
                probes.append({**base, **changed})
        if not isinstance(fixed.get("batch", 1), int):
            probes.append({**base, "batch": 3})
        return plan + [Case("normal", sizes) for sizes in probes]

    def unforeseen(self, candidate: Candidate, rng: np.random.Generator) -> list[Case]:
        fixed = self.sizes(candidate)
        runs = []
        for batch in (4, 5, 6, 7):
            tokens, past = map(int, rng.choice(PRIMES, 2, replace=False))
            past += tokens if candidate.config.static_cache else 0
            drawn = {"batch": batch, "tokens": tokens, "past": past}
            sizes = {n: drawn[n] for n in drawn if n != "past" or n in fixed}
            for name in sizes:
                number = fixed.get(name, 1)
                sizes[name] = number if isinstance(number, int) else drawn[name]
            if candidate.config.static_cache:  # no more tokens than the cache holds
                sizes["tokens"] = min(sizes["tokens"], sizes["past"])
            runs.append(Case("normal", sizes))
        return [] if all(isinstance(fixed.get(n, 1), int) for n in runs[0].sizes) else runs

    def draw(self, candidate: Candidate, case: Case, seed: int) -> Arrays:
        sizes = case.sizes
        return draw(candidate, sizes["batch"], sizes["tokens"], sizes.get("past", 0), seed, case.name)

    def reference(self, candidate: Candidate, inputs: Arrays) -> Arrays:
        return reference(candidate.config, inputs)

    def limit(self, candidate: Candidate, case: Case) -> float:
        return TOLERANCE * (HARD_FACTOR if case.name in HARD else 1.0)

    def overflows(self, case: Case) -> bool:
        return case.name == "masked-rows"  # a softmax over nothing is no number

    def allows(self, view: GraphView, candidate: Candidate, node: ir.Node) -> bool:
        return node.op_type in ("Softmax", "Sigmoid") and node.domain in ("", "ai.onnx")

    def shrink(
        self, view: GraphView, candidate: Candidate, extract: Extract, arrays: Mapping[ir.Value, np.ndarray]
    ) -> Shrunk:
        return shrink(view, candidate, extract, arrays)


MLA = MlaOp()
