"""Pipeline rank that stores each parameter, and the messages between ranks once a call for parameters, gradient sums and buffers.

    parameter:table   stored with the first stage that reads it      another stage that reads it receives it before the first microbatch
    sum:g of it       computed on another rank                        sent to the owner after the last
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch.fx import Node

from meshc.errors import PlanError
from meshc.ir import is_getitem, records
from meshc.ir.keys import is_a, key_of, name_of
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.stages.pipeline_shape import PipelineShape
from meshc.passes.stages.updates import ALL
from meshc.pipelining.pipeline_stages import Move
from meshc.program.program import Stage


class Owners:
    """`of`: owner's rank by key of a parameter, its state and gradient. `ranks`: of each stage. `before`: the stage before microbatches."""

    def __init__(self, lowered: LoweredProgram, stages: Sequence[Stage], ranks: Sequence[int], before: Stage | None) -> None:
        self.lowered, self.stages, self.ranks = lowered, stages, ranks
        self._behind = {} if before is None else _read_for(before)
        # a parameter is stored with the first stage that reads it forward
        forward_first = sorted(stages, key=lambda stage: not stage.name.startswith("forward"))
        readers = {key: ranks[_number_of(stage)] for stage in reversed(forward_first) for key in self._reads(stage)}
        params = [port.key for port in lowered.inputs if port.kind == "parameter"]
        self.of = {key: lowered.request.owners.get(key, readers.get(key, 0)) for key in params}
        for port in (*lowered.inputs, *lowered.outputs):
            of = key_of("parameter", port.of)
            if port.kind in ("state", "gradient") and of in self.of:
                self.of[port.key] = self.of[of]

    def parameter_moves(self) -> list[Move]:
        """Moves of parameters to their other readers before the first microbatch."""
        reads = [(key, self.ranks[_number_of(stage)]) for stage in self.stages for key in self._reads(stage)]
        return list(dict.fromkeys(Move(key, self.of[key], rank) for key, rank in reads if self.of.get(key, rank) != rank))

    def sum_moves(self, after: Stage, made: Mapping[str, int]) -> tuple[dict[str, int], list[Move]]:
        """Rank of each sum when the update begins, and the moves that this needs: to the owner of the sum's parameter, or to all ranks if
        the sum is for parameters of several."""
        settled, moves = dict(made), []
        labels = {node.name: name for node, name in self.lowered.joint.updates.items()}
        leaving: dict[Node, set[str]] = defaultdict(set)
        for key, node in after.results().items():
            if is_a(key, "gradient"):
                leaving[node].add(name_of(key))
        params = {port.key: port.name for port in self.lowered.inputs if port.kind == "parameter"}
        entering = after.keys()
        names = {node: params[key] for node, key in entering.items() if key in params}
        for node, key in entering.items():
            if (here := made.get(key)) is None:
                continue
            wanted = {self.of.get(key_of("parameter", name), here) for name in _parameters_of(node, labels, leaving, names)} or {here}
            if len(wanted) > 1:
                moves += self._moves_to_all(key, here)
                settled[key] = ALL
            elif wanted != {here}:
                (settled[key],) = wanted
                moves.append(Move(key, here, settled[key]))
        return settled, moves

    def _moves_to_all(self, key: str, here: int) -> list[Move]:
        return [Move(key, here, rank) for rank in range(max(self.ranks) + 1) if rank != here]

    def buffer_moves(self, shape: PipelineShape) -> list[Move]:
        """Moves of buffers that microbatches write, from the stage that writes them to all ranks. Raises PlanError if another stage reads
        such a buffer, or its microbatches run out of order."""
        moves: list[Move] = []
        forwards = [item for items in shape.actions for item in items if item.op == "F"]
        for stage, key in [(one, key) for one in self.stages for key in one.outputs if is_a(key, "buffer")]:
            number = _number_of(stage)
            others = [other.name for other in self.stages if other is not stage and key in other.inputs]
            order = [item.microbatch for item in forwards if item.stage == number]
            if others or order != sorted(order):
                why = f"{', '.join(others)} read it too" if others else "the schedule runs that stage's microbatches in another order"
                raise PlanError(
                    f"{name_of(key)} is written by each microbatch for the next one, in {stage.name}, but {why}\n"
                    "  what to do: a mesh without pp, or pp_splits that keep what reads the buffer in one stage"
                )
            moves += self._moves_to_all(key, self.ranks[number])
        return moves

    def _reads(self, stage: Stage) -> list[str]:
        """Keys that a stage reads, including those of values that are gathered for it before the first microbatch."""
        return [key for own in stage.inputs for key in (own, *self._behind.get(own, ()))]


def _number_of(stage: Stage) -> int:
    return int(stage.name.rpartition("_")[2])


def _read_for(stage: Stage) -> dict[str, list[str]]:
    """For each result of a stage, the keys of the inputs that it depends on."""
    keys = stage.keys()
    behind: dict[Node, dict[str, None]] = {}
    for node in stage.graph.nodes:
        behind[node] = {keys[node]: None} if node in keys else {key: None for x in node.all_input_nodes for key in behind[x]}
    return {key: list(behind[node]) for key, node in stage.results().items()}


def _parameters_of(node: Node, labels: Mapping[str, str], leaving: Mapping[Node, set[str]], names: Mapping[Node, str]) -> set[str]:
    """The parameters of which a sum is the gradient: those of the updates that read it, by operand or by label.

    labels   global-view value -> the parameter of the update that it belongs to
    leaving  node that leaves as a gradient -> its parameters
    names    placeholder -> parameter
    """
    found: set[str] = set()
    work, seen = [node], {node}
    while work:
        one = work.pop()
        found |= leaving.get(one, set())
        for user in one.users:
            if user.op != "call_function" or user in seen:
                continue
            seen.add(user)
            label = None if is_getitem(user) else labels.get(records(user)[0].of.partition(".")[0])
            mine = {names[operand] for operand in user.all_input_nodes if operand in names} | ({label} if label is not None else set())
            found |= mine
            if not mine:
                work.append(user)
    return found
