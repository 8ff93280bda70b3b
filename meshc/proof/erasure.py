"""Erasure: every line of a per-rank program is a value of the traced graph, or is inside the lowering of one.

A line is a traced value in the sharding that its type says if
  - it only moves what is that value already, and what is moved is sharded as the type says (`evaluate.py`, `tiles.py`);
  - it adds values, and the traced graph adds the same ones, in any order;
  - it is the last line of what the rule of the value's operator writes for these operands (`replay.py`), padding of operands that would
    count holds what changes nothing, and by the rule the result is sharded as the type says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Final

import torch
from torch.fx import Node

from meshc import ir
from meshc.ir import Record, is_getitem, operands, record, records, spmd, value_of
from meshc.ir.sharding import Sharding
from meshc.ops.optim import WRITTEN
from meshc.program.program import PlainProgram, Stage
from meshc.proof.added_values import prove_fill, prove_part, prove_sum
from meshc.proof.dispatched_rows import DispatchedRows
from meshc.proof.evaluate import WITHOUT_WRITING, Evaluator
from meshc.proof.facts import Fact, Facts, is_value, whole_sharding
from meshc.proof.held import Held, JoinedValues
from meshc.proof.lowered_lines import prove_lowering
from meshc.proof.moved_lowerings import prove_moved, prove_stacked
from meshc.proof.outcome import ProgramProof, UnprovedLine
from meshc.proof.over_stages import give, walk_joint_collective
from meshc.proof.proved_updates import ONE_OF, walk_update, walk_write
from meshc.proof.regrouped import in_shape
from meshc.proof.repeated_lowerings import RepeatedLowerings
from meshc.proof.replay import REFUSED, LoweringReplays
from meshc.proof.rows_in_use import UsedRows
from meshc.proof.stages import in_order, schedule_faults
from meshc.proof.tiles import Tiles, Unfit, dims_of_shape, tiles_of
from meshc.proof.traced import TracedTerms, is_sum

aten = torch.ops.aten
CHECK: Final = torch.ops.meshc.check_index.default


class Erasure:
    def __init__(self, program: PlainProgram, traced: TracedTerms) -> None:
        self.program, self.traced = program, traced
        self.evaluator = Evaluator(traced.terms, program.axis_sizes, traced.known, traced.numel)
        self.sizes = self.evaluator.sizes
        self.proof = ProgramProof(str(program.mesh), len(traced.known))
        self.held: dict[Node, Held] = {}
        self.known: dict[Node, Fact] = {}
        self.facts = Facts(self.sizes)
        self.replays = LoweringReplays(traced, self.evaluator, self.facts, program.dynamic)
        self.repeated = RepeatedLowerings(traced, self.evaluator)
        self.used_rows = UsedRows()
        self.dispatched = DispatchedRows(traced, self.sizes, self.used_rows)
        self.entering = {port.key: port for port in program.inputs}
        self.keyed: dict[str, Held] = {}
        self.types: dict[tuple[Node, int], list[Sharding]] = defaultdict(list)
        """Traced value -> the types of its lines."""
        for node in (node for stage in program.stages.values() for node in stage.graph.nodes):
            if node.op == "call_function" and isinstance(node.meta[ir.KEY], Record) and (hint := self.hint(node)) is not None:
                self.types[hint] += [own] if (own := record(node).sharding) is not None else []
        self.updates: dict[object, list[Node]] = defaultdict(list)
        """(operator, what it is given first) -> the traced updates."""
        for node in traced.named.values():
            if node.target in WRITTEN:
                self.updates[node.target, traced.values[value_of(operands(node)[0])]].append(node)

    def run(self) -> ProgramProof:
        for stages in in_order(self.program):
            self.walk_stages(stages)
        ports = {port.key: port for port in self.program.outputs}
        given = {key: (stage, node) for stage in self.program.stages.values() for key, node in stage.results().items()}
        last = next(reversed(self.program.stages.values()))
        for key, want in self.traced.results.items():
            stage, node = given.get(key, (last, next(iter(last.graph.nodes))))
            found, own = self.keyed.get(key), ports[key].sharding if key in ports else None
            sharding = whole_sharding(want.shape) if own is None else own
            if not isinstance(found, Tiles) or not is_value(want, sharding, found, self.sizes):
                self.fail(stage, node, f"{key} is not what the traced graph gives" if key in given else f"nothing gives {key}")
        for key in self.traced.of_one_microbatch:
            self.fail(last, next(iter(last.graph.nodes)), f"{key} is of one microbatch, and nothing says what it is of all")
        for key in ports.keys() - self.traced.results.keys():
            stage, node = given.get(key, (last, next(iter(last.graph.nodes))))
            self.fail(stage, node, f"the traced graph gives no {key}")
        for why in schedule_faults(self.program):
            self.fail(last, next(iter(last.graph.nodes)), why)
        return self.proof

    def walk_stages(self, stages: Sequence[Stage]) -> None:
        """Walks stages; where they have collectives with each other, in lock step."""
        walks = {stage.name: self.walk_stage(stage) for stage in stages}
        here = {stage.name: stage for stage in stages}
        while walks:
            met: dict[str, Node] = {}
            for name, walk in list(walks.items()):
                if (node := next(walk, None)) is None:
                    del walks[name]
                else:
                    met[name] = node
            if met:
                walk_joint_collective(self, {name: (here[name], node) for name, node in met.items()}, len(stages))

    def walk_stage(self, stage: Stage) -> Iterator[Node]:
        """Walks a stage; yields the collectives with others."""
        for node, key in stage.keys().items():
            if key in self.entering and key in self.traced.ports:
                try:
                    self.enter(stage, node, key)
                except Unfit as unfit:
                    self.held[node] = self.evaluator.root(record(node).shape, "not taken", key)
                    self.fail(stage, node, f"the proof cannot take it: {unfit}")
            elif key in self.keyed:
                self.held[node] = self.keyed[key]
                self.know_by_type(node)
            else:
                self.held[node] = self.evaluator.root(record(node).shape, "key", key)
        for node in stage.graph.nodes:
            if node.op == "call_function":
                self.proof.lines += 1
                if spmd.joins_stages(node):
                    yield node
                    continue
                try:
                    self.walk_line(stage, node)
                except REFUSED as error:
                    self.held[node] = self.evaluator.root(records(node)[0].shape if records(node) else (), "not taken", node.name)
                    self.fail(stage, node, f"the proof cannot take it: {type(error).__name__} {error}")
        for key, node in stage.results().items():
            before = self.keyed.get(key)
            if before not in (None, self.held[node]) and not ir.is_integer(node):
                self.fail(stage, node, f"another stage gives something else as {key}")
            give(self, key, self.held[node])

    def know_by_type(self, node: Node) -> None:
        """What enters a stage from another is known as its type says, if it is."""
        held, sharding = self.held[node], record(node).sharding
        if isinstance(held, Tiles) and sharding is not None:
            value = next((one for one in self.facts.values_of(held.root) if is_value(one, sharding, held, self.sizes)), None)
            if value is not None:
                self.know(node, held, Fact(value, sharding))

    def enter(self, stage: Stage, node: Node, key: str) -> None:
        """What enters the program, as it does before any stage has run."""
        value = self.traced.ports[key]
        port = self.entering[key]
        if port.shape != value.shape:  # the rows of all microbatches
            if prod(port.shape) != prod(value.shape) * self.program.microbatches:
                count = self.program.microbatches
                self.fail(stage, node, f"{key} is {list(port.shape)}, of which {count} microbatches are not {list(value.shape)} each")
            self.facts.add(value, Fact(value, whole_sharding(value.shape)))
            value = Tiles(value.root, dims_of_shape(port.shape))
        sharding = port.sharding or whole_sharding(value.shape)
        tiles = tiles_of(value, sharding, self.sizes)
        zero = {axis: 0.0 for d, p, part in sharding.parts() if (d, p) in sharding.zero for axis in part.axes}
        self.held[node] = replace(tiles, padding=tuple(sorted(zero.items())))
        self.know(node, tiles, Fact(value, sharding))
        before = self.keyed.get(key)
        if before is not None and not (isinstance(before, Tiles) and before.like(tiles)):
            self.fail(stage, node, f"{key} has been written by then")

    def know(self, node: Node, tiles: Tiles, fact: Fact, kind: str = "") -> bool:
        """Notes what a line is. `kind`: how it is proved."""
        self.known[node] = fact
        self.facts.add(tiles, fact)
        self.proof.kinds.update([kind] if kind else [])
        return True

    def fail(self, stage: Stage, node: Node, why: str, should_be: Node | None = None) -> None:
        self.proof.failures.append(UnprovedLine(stage.name, node, why, should_be))

    # ------------------------------------------------------------------------------------------------------------------- a line

    def walk_line(self, stage: Stage, node: Node) -> None:
        if node.target in ONE_OF:
            return walk_update(self, stage, node)
        if node.target in WITHOUT_WRITING:
            return walk_write(self, stage, node)
        found = self.held[node] = self.evaluator.call(node, self.held.__getitem__)
        if why := self.used_rows.fault(node, self.held.__getitem__) or self.dispatched.fault(node, self.held.__getitem__):
            return self.fail(stage, node, why)
        if node.target is CHECK and not self.is_guard(node):
            return self.fail(stage, node, "it checks an index against bounds that no reader of it has")
        if not isinstance(found, Tiles | JoinedValues) or isinstance(found, JoinedValues) and self.hint(node) is None:
            self.proof.kinds["inside"] += 1
            return
        sharding, hint = record(node).sharding, self.hint(node)
        if sharding is None:
            return self.walk_untyped(stage, node, found, hint)
        values = self.candidates(found, hint, sharding.shape) if isinstance(found, Tiles) else []
        value = next((one for one in values if isinstance(found, Tiles) and is_value(one, sharding, found, self.sizes)), None)
        if value is not None:
            assert isinstance(found, Tiles)
            before = {one.root for x in node.all_input_nodes if isinstance(one := self.held.get(x), Tiles)}
            self.know(node, found, Fact(value, sharding), "moved" if found.root in before else "computed whole")
        elif is_sum(node) and prove_sum(self, node, sharding) or prove_fill(self, node, found, sharding):
            return
        elif isinstance(found, Tiles) and prove_part(self, node, found, sharding, values):
            return
        else:
            why = self.unlike_operand(node, sharding) if hint is None else prove_lowering(self, node, found, sharding, *hint)
            if why and hint is not None and isinstance(found, Tiles) and prove_moved(self, node, found, sharding, hint):
                why = ""
            if why and hint is not None and isinstance(found, Tiles) and prove_stacked(self, node, found, sharding, hint):
                why = ""
            if why:
                self.fail(stage, node, why, None if hint is None else hint[0])

    def candidates(self, found: Tiles, hint: tuple[Node, int] | None, shape: tuple[int, ...]) -> list[Tiles]:
        """The values of which a line may have tiles: those whose elements it has."""
        values = [self.traced.values[hint]] if hint is not None and hint in self.traced.values else []
        values = [*values, *self.facts.values_of(found.root)]
        if found.root in self.traced.makers:
            values.append(self.traced.values[self.traced.makers[found.root]])
        values = [one for one in values if one.root == found.root or 0 in one.shape]
        return values + [made for one in values if one.shape != shape and (made := in_shape(one, shape)) is not None]

    def unlike_operand(self, node: Node, sharding: Sharding) -> str:
        """Why a line that says of no traced value that it is one is none of its operands either."""
        for x in node.all_input_nodes:
            fact = self.known.get(x)
            if fact is not None and (made := self.traced.makers.get(fact.value.root)) is not None:
                return f"{x} is the traced {made[0]} as {fact.sharding}, of which this line does not make {sharding}"
        return "nothing says what it is"

    def is_guard(self, node: Node) -> bool:
        """Whether a check of an index has the bounds of a traced reader of it."""
        found, (low, high, ignore) = self.held[node], node.args[1:4]
        values = self.facts.values_of(found.root) if isinstance(found, Tiles) else []
        bounds = (bound for value in values for bound in self.traced.bounds.get(value, ()))
        return any((bound.low, bound.high, bound.ignore) == (low, high, ignore) for bound in bounds)

    def walk_untyped(self, stage: Stage, node: Node, found: Tiles | JoinedValues, hint: tuple[Node, int] | None) -> None:
        """A line without a type: inside of a lowering, a part of a move, or the value of a chunk."""
        is_known = isinstance(found, Tiles) and found.root in self.traced.known
        if record(node).chunk is not None and not is_known:
            if is_sum(node) and prove_sum(self, node, None) or hint is not None and not prove_lowering(self, node, found, None, *hint):
                return
        self.proof.kinds["inside"] += 1

    def hint(self, node: Node) -> tuple[Node, int] | None:
        """The traced value that a line says it is a form of."""
        name, _, index = record(node).of.partition(".")
        made = self.traced.named.get(name)
        return None if made is None else (made, int(index or 0)) if not is_getitem(made) else value_of(made)


def erase(program: PlainProgram, traced: Stage) -> ProgramProof:
    """The proof of a program against its traced graph, under the same keys, or what of it is not proved."""
    return Erasure(program, TracedTerms(traced, {port.key: port.shape for port in program.inputs})).run()
