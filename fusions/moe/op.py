"""Grouped QMoE as the pipeline sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from ...custom_ops.moe import body, call
from ...custom_ops.moe.reference import reference
from ...custom_ops.moe.spec import BIASES, MoeConfig
from ..candidate import Candidate
from ..graph import GraphView
from ..op import Arrays, Case, FusedOp
from ..proof.extract import Extract
from ..proof.shrink import Shrunk
from .constants import Drawn
from .design import cover, design, tokens

#: Token counts tried on a dynamic graph.
TOKENS = (9, 1, 33, 4)
#: "normal" has twins among the experts, so ties; "low" makes choices negative, where a mask of 0 and one of minus
#: infinity differ; "saturated" makes all scores equal; "one expert" leaves most experts without tokens; "large" reaches
#: every clamp; "zeros" are rows as padding leaves them, with equal scores.
HOSTILE = ("normal", "low", "high", "groups", "saturated", "one expert", "large", "small", "zeros", "many")
#: Case names of the turns that a frozen graph takes to reach every expert.
_TURN = "turn "
_FLOAT32 = frozenset({"router_weight", "router_bias", "expert_bias", "shared_gate_weight", *BIASES})


class MoeOp(FusedOp):
    """``deltafuse::GroupedQMoE``."""

    key = "moe"
    size_ops: frozenset[str] | None = frozenset()

    def kind_of(self, name: str) -> str:
        return "float32" if name in _FLOAT32 else "own" if name == "router_logits" else "T"

    def make_call(
        self,
        candidate: Candidate,
        inputs: Mapping[str, ir.Value],
        opset: int,
        dtype: ir.DataType,
        state_dtype: ir.DataType,
        name: str,
    ) -> tuple[ir.Function, ir.Node, dict[str, ir.Value]]:
        config: MoeConfig = candidate.config
        function = body.build_function(config, opset, dtype)
        node = call.make_node(config, inputs, dtype, name=name)
        return function, node, dict(zip(config.output_names(), node.outputs, strict=False))

    def attach(self, model: ir.Model, function: ir.Function) -> None:
        call.attach(model, function)

    def element_type(self, candidate: Candidate) -> ir.DataType:
        dtype = candidate.operands["x"].pieces[0].value.dtype
        return ir.DataType.FLOAT if dtype is None else dtype

    def plan(self, candidate: Candidate, bounds: Callable[[], list[int]]) -> list[Case]:
        """Each hostile case once, over token counts and batches; "many" has a token for every expert."""
        sizes = self.sizes(candidate)
        length, rows = sizes.get("tokens"), sizes.get("batch", 1)
        config: MoeConfig = candidate.config
        many = self._many(config)
        plan = []
        for i, name in enumerate(HOSTILE):
            count = length if isinstance(length, int) else many if name == "many" else TOKENS[i % len(TOKENS)]
            batch = rows if isinstance(rows, int) else (1, 2)[i % 2]
            plan.append(Case(name, {"batch": batch, "tokens": count}, required=True))
        if isinstance(length, int):
            # a frozen graph reaches few experts at a time: again and again, until all had their turn
            turns = -(-len(cover(config)) // max(1, length * plan[0].sizes["batch"]))
            plan += [Case(f"{_TURN}{i}", plan[0].sizes, required=True) for i in range(turns)]
        return plan

    def unforeseen(self, candidate: Candidate, rng: np.random.Generator) -> list[Case]:
        sizes = self.sizes(candidate)
        drawn = {"batch": rng.permutation(np.arange(3, 8)), "tokens": rng.permutation(np.arange(5, 13))}
        fixed = {"batch": sizes.get("batch", 1), "tokens": sizes.get("tokens")}
        if all(isinstance(number, int) for number in fixed.values()):
            return []
        return [
            Case("normal", {n: number if isinstance(number, int) else int(drawn[n][i]) for n, number in fixed.items()})
            for i in range(2)
        ]

    def draw(self, candidate: Candidate, case: Case, seed: int) -> Arrays:
        config: MoeConfig = candidate.config
        made = design(config)
        rng = np.random.default_rng(seed)
        batch, count = case.sizes["batch"], case.sizes["tokens"]
        x = tokens(config, made, batch * count, rng, case.name)
        if case.name == "many" or case.name.startswith(_TURN):
            first = 0 if case.name == "many" else int(case.name.removeprefix(_TURN)) * len(x)
            every = cover(config)[first : first + len(x)]
            x[: len(every)] = every
        shape = candidate.operands["x"].pieces[0].value.shape
        three = shape is not None and len(shape) == 3
        drawn = {"x": x.reshape(batch, count, -1) if three else x}
        if "router_logits" in candidate.operands:
            logits = made.logits(config, x)
            given = candidate.operands["router_logits"].pieces[0].value.shape
            drawn["router_logits"] = (
                logits.reshape(batch, count, -1) if given is not None and len(given) == 3 else logits
            )
        return {name: array.astype(np.float32) for name, array in drawn.items()}

    def reference(self, candidate: Candidate, inputs: Arrays) -> Arrays:
        return reference(candidate.config, inputs)

    def constants(self, view: GraphView, candidate: Candidate, seed: int) -> Mapping[ir.Value, np.ndarray]:
        return Drawn(candidate, seed)

    def extra_memory(self, candidate: Candidate) -> int:
        """Weights that are gathered for each choice of a number of tokens that the shapes do not tell."""
        if candidate.form != "gathered" or isinstance(self.sizes(candidate).get("tokens"), int):
            return 0
        config: MoeConfig = candidate.config
        return 8 * self._many(config) * config.top_k * config.hidden_size * config.intermediate_size

    @staticmethod
    def _many(config: MoeConfig) -> int:
        return min(512, max(64, 4 * config.num_experts // config.top_k))

    def shrink(
        self, view: GraphView, candidate: Candidate, extract: Extract, arrays: Mapping[ir.Value, np.ndarray]
    ) -> Shrunk:
        from .cut import shrink

        return shrink(view, candidate, extract, arrays)


MOE = MoeOp()
