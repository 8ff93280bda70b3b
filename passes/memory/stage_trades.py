"""Recompute for each rank of a pipeline: the most and the fewest bytes that it can keep, and the step recomputed to given bytes.

    rank 0   4 microbatches in flight   a kept value counts 4 times   9.1 MB held of 8: keeps 1.1 MB less, at the fewest seconds
    rank 1   1 in flight                once                          5.2 MB held: keeps everything

Stages and schedule are settled. A value is in memory once for each microbatch that waits in its stage between forward and backward; so many
times its bytes are traded for the seconds of recomputing it (`trade.py`), for each rank separately. A value from another rank is kept if
backward reads it. Callers cut the result and predict its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from meshc.cost.devices import devices_of
from meshc.passes.memory.policies import BY_BUDGET
from meshc.passes.memory.recomputable import recomputable_of_stage
from meshc.passes.memory.recompute_within_budget import recompute_note, recompute_seconds, with_copies
from meshc.passes.memory.trade import KeptValues, Trade
from meshc.passes.phases.lowered_program import LoweredProgram


@dataclass(frozen=True)
class StageMap:
    """
    stage    of each value that one stage computes, by name
    ranks    of each stage
    waiting  of each stage, the most microbatches between its forward and its backward
    """

    stage: Mapping[str, int]
    ranks: Sequence[int]
    waiting: Sequence[int]


class StageTrades:
    """Trades of the ranks of a step, as `recompute` left it, before microbatches. `fixed`: values that are not recomputed."""

    def __init__(self, lowered: LoweredProgram, places: StageMap, fixed: Collection[Node] = ()) -> None:
        self.lowered, self.places = lowered, places
        (stage,) = lowered.stages.values()
        self._at = at = {node: places.stage[node.name] for node in stage.graph.nodes if node.name in places.stage}
        ranks = places.ranks
        # handed on between two stages of one rank
        between = {node for node, own in at.items() for user in node.users if at.get(user, own) != own and ranks[at[user]] == ranks[own]}
        self._can = recomputable_of_stage(lowered, BY_BUDGET, fixed={*fixed, *between})
        self._readers = {rank: [node for node in self._can.backward if self._is_on_rank(rank, node)] for rank in sorted(set(places.ranks))}
        takes = recompute_seconds(self._can, lowered, devices_of(lowered.mesh).slowest())
        self._trades = {rank: self._trade(rank, takes) for rank in self._readers}

    def _is_on_rank(self, rank: int, node: Node) -> bool:
        """Whether a stage of `rank` computes `node`. Values without a stage are computed by each."""
        return node not in self._at or self.places.ranks[self._at[node]] == rank


    def _trade(self, rank: int, takes: Mapping[Node, float]) -> Trade:
        """The trade of the values that the rank computes; values from other ranks are kept where they are read."""
        can, places, readers = self._can, self.places, set(self._readers[rank])
        own = {node for node in can.forward if self._is_on_rank(rank, node)}
        handed = {operand for node in (*own, *readers) for operand in node.all_input_nodes} - own
        most = max(count for count, at in zip(places.waiting, places.ranks, strict=True) if at == rank)
        times = dict.fromkeys(handed, most) | {node: places.waiting[self._at[node]] for node in own if node in self._at}
        forward = [node for node in can.forward if node in own or node in handed]
        wanted = {node for node in can.wanted if not readers.isdisjoint(node.users)}
        operands = {node: can.operands[node] for node in own if node in can.operands}
        return Trade(replace(can, forward=forward, wanted=wanted, operands=operands), takes, times)

    @property
    def most(self) -> dict[int, int]:
        """Bytes that each rank keeps if it recomputes nothing."""
        return {rank: trade.keep_all.bytes for rank, trade in self._trades.items()}

    @property
    def least(self) -> dict[int, int]:
        """The fewest bytes that each rank can keep."""
        return {rank: trade.keep_least.bytes for rank, trade in self._trades.items()}

    def with_kept_bytes(self, most: Mapping[int, int]) -> tuple[LoweredProgram, int]:
        """A copy of the step in which each rank of `most` keeps at most so many bytes and recomputes the other values; and their number."""
        found = {rank: self._trades[rank].within(bytes_kept) for rank, bytes_kept in most.items()}
        left = with_copies(self.lowered, [(self._readers[rank], kept.again) for rank, (kept, _) in found.items()])
        several = [kept for kept, _ in found.values()]
        again = tuple(dict.fromkeys(node for kept in several for node in kept.again))
        whole = KeptValues(frozenset(), frozenset(), sum(kept.bytes for kept in several), 0.0, again, sum(kept.seconds for kept in several))
        return left.with_notes(recompute_note(whole, sum(bound for _, bound in found.values()), self._can, " a microbatch")), len(again)
