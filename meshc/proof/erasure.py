"""Erasure: every line of a per-rank program is a value of the traced graph, or is inside the lowering of one.

A line is a traced value in the sharding that its type says if
  - it only moves what is that value already, and what is moved is sharded as the type says (`evaluate.py`, `tiles.py`);
  - it adds values, and the traced graph adds the same ones, in any order;
  - it is the last line of what the rule of the value's operator writes for these operands (`replay.py`), padding of operands that would
    count holds what changes nothing, and by the rule the result is sharded as the type says.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Final

import torch
from torch.fx import Node

from meshc import ir
from meshc.ir import Record, is_getitem, operands, record, records, spmd, value_of
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.sharding import Sharding
from meshc.ir.spmd import MICROBATCH
from meshc.ops.optim import WRITTEN
from meshc.program.accumulate import whole_of
from meshc.program.program import PlainProgram, Stage
from meshc.proof.chunks import joined_partial
from meshc.proof.compacted_rows import UsedRows
from meshc.proof.dispatched_rows import DispatchedRows
from meshc.proof.evaluate import WITHOUT_WRITING, Evaluator, repeat_root
from meshc.proof.facts import Fact, Facts, is_value, sharding_before_move, shardings_of_shape, whole_sharding, without_names
from meshc.proof.held import Held, JoinedValues
from meshc.proof.joined_values import each
from meshc.proof.outcome import ProgramProof, UnprovedLine
from meshc.proof.proved_updates import ONE_OF, walk_update, walk_write
from meshc.proof.repeated_lowerings import RepeatedLowerings, ShownLowering
from meshc.proof.replay import MOST, REFUSED, LoweringReplays, Told, padding_fault
from meshc.proof.stages import in_order, schedule_faults
from meshc.proof.tiles import Tiles, Unfit, dims_of_shape, expand_dims, reshape_dims, substitute_root, tiles_of
from meshc.proof.traced import TracedTerms, is_sum
from meshc.proof.uneven import counts_elements
from meshc.rules import rule_of
from meshc.rules.elementwise import is_pointwise
from meshc.rules.result_shardings import runs_of

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
                self.walk_joint_collective({name: (here[name], node) for name, node in met.items()}, len(stages))

    def walk_joint_collective(self, met: Mapping[str, tuple[Stage, Node]], count: int) -> None:
        """A collective of several stages: each of them has its own part."""
        rows = list(met.values())
        _, first = rows[0]
        facts = [self.known.get(node.args[0]) for _, node in rows]  # type: ignore[arg-type]
        alike = all(node.target is first.target and node.args[1:] == first.args[1:] for _, node in rows)
        known = [fact for fact in facts if fact is not None]
        fact: Fact | None = None
        tiles: Tiles | None = None
        why = "stages meet here, and what they make of it is not known"
        if not alike or len(met) != count or len(first.args[1]) != 1:  # type: ignore[arg-type]
            why = "stages have other collectives in its place"
        elif len(known) == len(rows) and first.target is spmd.all_reduce and first.args[2] == "sum":
            if len({without_names(one.sharding) for one in known}) == len({one.value.shape for one in known}) == 1:
                value = self.traced.sum_of([one.value for one in known], record(first).dtype, known[0].value.shape)
                fact = Fact(value, known[0].sharding)
                tiles = tiles_of(value, fact.sharding, self.sizes)
        elif first.target is spmd.broadcast:
            fact, source = facts[first.args[2]], self.held[rows[first.args[2]][1].args[0]]  # type: ignore[index]
            tiles = source if isinstance(source, Tiles) and source.root in self.traced.known else None
        for stage, node in rows:
            if tiles is None:
                self.held[node] = self.evaluator.root(record(node).shape, "met", node.name)
                self.fail(stage, node, why)
                continue
            self.held[node] = tiles
            if fact is not None:
                self.know(node, tiles, fact)
            self.proof.kinds["over stages"] += 1

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
            self.give(key, self.held[node])

    def give(self, key: str, held: Held) -> None:
        """A stage's result under its key; a part of each microbatch as what all of them come to."""
        whole = whole_of(key)
        self.keyed[key] = held
        if whole is None:
            return
        if self.program.microbatches == 1:
            self.keyed[whole[1]] = held
            return
        how = {one.instruction: name for name, one in REDUCTIONS.items()}.get(whole[0])
        if how is not None and isinstance(held, JoinedValues):
            self.keyed[whole[1]] = each(held, lambda piece: self.over_microbatches(piece, how))
        elif how is not None and isinstance(held, Tiles):
            self.keyed[whole[1]] = self.over_microbatches(held, how)
        elif isinstance(held, Tiles):
            self.keyed[whole[1]] = self.evaluator.all_gather(held, (MICROBATCH,), 0)

    def over_microbatches(self, x: Tiles, how: str) -> Tiles:
        """What all microbatches' own come to: what was partial over them, or of a step that is their mean the sum that the traced graph
        says is of all."""
        for value in self.facts.values_of(x.root):
            made = self.traced.sums_of_parts.get(value)
            if made is not None and how == "sum" and all(one == "sum" for _, one in x.partial):
                for fact in self.facts.of(x, value):
                    tiles = replace(tiles_of(made, fact.sharding, self.sizes), padding=_zeros_of(x))
                    self.facts.add(tiles, Fact(made, fact.sharding))
                    return tiles
        return self.evaluator.all_reduce(x, (MICROBATCH,), how)

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
        elif is_sum(node) and self.prove_sum(node, sharding) or self.prove_fill(node, found, sharding):
            return
        elif isinstance(found, Tiles) and self.prove_part(node, found, sharding, values):
            return
        else:
            why = self.unlike_operand(node, sharding) if hint is None else self.prove_lowering(node, found, sharding, *hint)
            if why and hint is not None and isinstance(found, Tiles) and self.prove_moved(node, found, sharding, hint):
                why = ""
            if why and hint is not None and isinstance(found, Tiles) and self.prove_stacked(node, found, sharding, hint):
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
        return values + [made for one in values if one.shape != shape and (made := _in_shape(one, shape)) is not None]

    def unlike_operand(self, node: Node, sharding: Sharding) -> str:
        """Why a line that says of no traced value that it is one is none of its operands either."""
        for x in node.all_input_nodes:
            fact = self.known.get(x)
            if fact is not None and (made := self.traced.makers.get(fact.value.root)) is not None:
                return f"{x} is the traced {made[0]} as {fact.sharding}, of which this line does not make {sharding}"
        return "nothing says what it is"

    def prove_stacked(self, node: Node, found: Tiles, sharding: Sharding, hint: tuple[Node, int]) -> bool:
        """Whether a line is what ranks add to a sum, each as a row of its own: partial over the axes that split the rows."""
        first = sharding.dims[0] if sharding.dims else ()
        axes = [axis for part in first for axis in part.axes]
        if len(first) != 1 or not axes or first[0].size != prod(self.sizes[axis] for axis in axes) or found.dims[0]:
            return False
        apart = Sharding(sharding.dims[1:], (*sharding.partial, *((axis, "sum") for axis in axes)))
        value = _in_shape(self.traced.values[hint], apart.shape)
        if value is None:
            return False
        own, row = sharding_before_move(self.traced.values[hint], value, apart), replace(found, dims=found.dims[1:])
        if is_value(value, apart, row, self.sizes):
            return self.know(node, found, Fact(value, apart), "moved")
        if self.prove_lowering(node, row, own, *hint, moved=Fact(value, apart)):
            return False
        made = self.held[node]
        assert isinstance(made, Tiles)
        self.held[node] = replace(made, dims=((), *made.dims))
        return True

    def prove_moved(self, node: Node, found: Tiles, sharding: Sharding, hint: tuple[Node, int]) -> bool:
        """Whether a line whose traced value only moves another is a lowering of that one, moved likewise."""
        value = self.traced.values[hint]
        made = self.traced.makers.get(value.root, hint)
        if made == hint:
            return False
        own = sharding_before_move(self.traced.values[made], value, sharding)
        return not self.prove_lowering(node, found, own, *made, moved=Fact(value, sharding))

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
            if is_sum(node) and self.prove_sum(node, None) or hint is not None and not self.prove_lowering(node, found, None, *hint):
                return
        self.proof.kinds["inside"] += 1

    def hint(self, node: Node) -> tuple[Node, int] | None:
        """The traced value that a line says it is a form of."""
        name, _, index = record(node).of.partition(".")
        made = self.traced.named.get(name)
        return None if made is None else (made, int(index or 0)) if not is_getitem(made) else value_of(made)

    def prove_sum(self, node: Node, sharding: Sharding | None) -> bool:
        """Whether a line adds values that are sharded alike; then it is their sum. Or one value's parts of several chunks."""
        facts = [self.known.get(one) for one in node.args]  # type: ignore[arg-type]
        if any(fact is None for fact in facts):
            return False
        rows = [fact for fact in facts if fact is not None]
        first = rows[0]
        if len({fact.value for fact in rows}) == 1 and (partial := joined_partial([fact.sharding.partial for fact in rows])) is not None:
            addends = [tiles_of(fact.value, replace(fact.sharding, partial=partial), self.sizes) for fact in rows]
            made = replace(first.sharding, partial=partial) if sharding is None else sharding
            tiles = tiles_of(first.value, made, self.sizes)
            if all(one.like(tiles) for one in addends):
                self.held[node] = tiles
                return self.know(node, tiles, Fact(first.value, made), "chunks")
        sharding = first.sharding if sharding is None else sharding
        shapes = {fact.value.shape for fact in rows}
        whys = {how for _, how in sharding.partial}
        if len(shapes) != 1 or whys - {"sum"} or any(without_names(fact.sharding) != without_names(sharding) for fact in rows):
            return False
        value = self.traced.sum_of([fact.value for fact in rows], record(node).dtype, rows[0].value.shape)
        tiles = tiles_of(value, sharding, self.sizes)
        tiles = self.held[node] = self.without_new_padding(node, tiles)
        return self.know(node, tiles, Fact(value, sharding), "sum")

    def without_new_padding(self, node: Node, tiles: Tiles) -> Tiles:
        """What a pointwise call gives of a value that is repeated has padding where an operand has."""
        there = {row for one in node.all_input_nodes if isinstance(x := self.held[one], Tiles) for row in x.uneven}
        return replace(tiles, uneven=tuple(row for row in tiles.uneven if row in there or not counts_elements(row)))

    def prove_part(self, node: Node, found: Tiles, sharding: Sharding, values: Sequence[Tiles]) -> bool:
        """Whether a line is one microbatch's own of a sum that the traced graph says is of all."""
        own = replace(sharding, partial=tuple(row for row in sharding.partial if row != (MICROBATCH, "sum")))
        if own == sharding:
            return False
        for value in values:
            made = self.traced.sums_of_parts.get(value)
            if made is not None and is_value(value, own, found, self.sizes):
                tiles = self.held[node] = replace(tiles_of(made, sharding, self.sizes), padding=_zeros_of(found))
                return self.know(node, tiles, Fact(made, sharding), "moved")
        return False

    def prove_fill(self, node: Node, found: Tiles | JoinedValues, sharding: Sharding) -> bool:
        """Whether a line is one number in every place: so it is, however it is split; zeros are also what sums are added up from."""
        number = self.evaluator.filled_with(found.root) if isinstance(found, Tiles) else None
        if number is None or isinstance(found, JoinedValues) or any(how != "sum" or number for _, how in sharding.partial):
            return False
        value = repeat_root(found.root, sharding.shape)
        tiles = tiles_of(value, sharding, self.sizes)
        self.held[node] = tiles
        return tiles.dims == found.dims and self.know(node, tiles, Fact(value, sharding), "filled")

    # --------------------------------------------------------------------------------------------------------------- lowerings

    def prove_lowering(
        self, node: Node, found: Tiles | JoinedValues, sharding: Sharding | None, n: Node, index: int, moved: Fact | None = None
    ) -> str:
        """Why a line is not result `index` of the traced call `n`; "" if it is. `moved`: what the line is, if it moves the
        result."""
        tensors = operands(n)
        try:
            rule = rule_of(n, tensors)
        except REFUSED as refused:
            return f"the rule of {ir.op_name(n)}: {refused}"
        if rule is None:
            return f"{ir.op_name(n)} has no rule, and runs on what is split"
        key = self.repeated.key(found, sharding, n, index, rule)
        if moved is None and (shown := self.repeated.find(key)) is not None:
            self.know_as_shown(node, shown, n, index)
            return ""
        guesses = self.types_of_results(n, index, sharding, found)
        roots = [piece.root for piece in found.pieces] if isinstance(found, JoinedValues) else [found.root]
        leaves = [one for root in roots for one in self.traced.terms.tiles_in(root, self.traced.known.__contains__)]
        leaves += [one for one in (self.held[o] for o in node.all_input_nodes) if isinstance(one, Tiles)]
        read = {leaf.root for leaf in leaves}.union(roots)
        direct = self.traced.terms.operands(found.root, n.target) if isinstance(found, Tiles) else []
        why, other = "", ""
        tried = ((row, way, told) for row, way in self.replays.ways(rule, tensors, leaves, direct) for told in guesses)
        for row, way, told in itertools.islice(tried, MOST):
            try:
                made = self.replays.replay(n, rule, row, way, told, sharding is not None)
            except REFUSED as refused:
                other = other or str(refused)
                continue
            result = made.results[index] if index < len(made.results) else None
            if result != found if moved is None else not _is_moved(found, result):
                continue
            by_rule = made.shardings[index]
            why = padding_fault(rule, row, self.sizes, read) or ("" if sharding is None else _difference(by_rule, sharding))
            if not why:
                own, value = by_rule if sharding is None else sharding, self.traced.values[n, index]
                tiles = tiles_of(value, own, self.sizes)
                if moved is not None:
                    try:
                        tiles, value, own = substitute_root(found, result, tiles), moved.value, moved.sharding  # type: ignore[arg-type]
                    except Unfit:
                        continue
                    if not is_value(value, own, tiles, self.sizes):
                        continue
                zero = row[0][0].padding if rule.kind == "layout" and row else ()
                rest = [(at, one) for at, one in enumerate(made.results) if at != index and isinstance(one, Tiles)]
                rest = [row for row in rest if (n, row[0]) in self.traced.values]
                same = tuple((at, made.shardings[at]) for at, one in rest if one == result and moved is None)
                shown = ShownLowering(own, tuple(one for one in zero if one[1] == 0.0), same)
                exchanged = [(at, one) for at, one in rest if self.traced.terms.term(one.root)[0] == "from_zigzag"]
                if moved is None:
                    self.know_as_shown(node, shown, n, index)
                    if not exchanged:
                        self.repeated.keep(key, row, shown)
                else:
                    self.held[node] = replace(tiles, padding=shown.padding)
                    self.know(node, tiles, Fact(value, own), "lowered")
                    self.proof.trusted[ir.op_name(n)] += 1
                if exchanged and not padding_fault(rule, row, self.sizes, {form.root for form, _ in row}):
                    for at, one in exchanged:  # there only if something reads it
                        self.facts.add(one, Fact(self.traced.values[n, at], made.shardings[at]))
                return ""
        return why or f"it is not what the rule of {ir.op_name(n)} writes for it" + (f"; {other}" if other else "")

    def know_as_shown(self, node: Node, shown: ShownLowering, n: Node, index: int) -> None:
        """Notes that a line is result `index` of the traced call `n`; of some calls other results are the same line."""
        tiles = tiles_of(self.traced.values[n, index], shown.sharding, self.sizes)
        if node.target is n.target and is_pointwise(node):
            tiles = self.without_new_padding(node, tiles)
        self.held[node] = replace(tiles, padding=shown.padding)
        self.know(node, tiles, Fact(self.traced.values[n, index], shown.sharding), "lowered")
        for at, sharding in shown.others:
            self.facts.add(tiles, Fact(self.traced.values[n, at], sharding))
        self.proof.trusted[ir.op_name(n)] += 1

    def types_of_results(self, n: Node, index: int, sharding: Sharding | None, line: Tiles | JoinedValues) -> list[Told]:
        """The shardings that types may say the results of a call have; for those of which no line speaks a guess, whose dims matter alone
        where no operand has them."""
        rows = records(n)
        if sharding is None:
            whole = tuple(whole_sharding(one.shape) for one in rows)
            if isinstance(line, JoinedValues) or len(rows[index].shape) != len(line.dims):
                return [whole]
            own = shardings_of_shape(rows[index].shape, line.shape, self.program.axis_sizes)
            return [(*whole[:index], one, *whole[index + 1 :]) for one in own]
        found: list[Sharding | None] = [sharding if one.shape == rows[index].shape else None for one in rows]
        for at in range(len(rows)):
            types = self.types.get((n, at), [])
            if at != index and types:
                found[at] = next((one for one in types if one.split_axes() == sharding.split_axes()), types[0])
        like: list[Sharding | None] = [sharding if one.shape == rows[index].shape else None for one in rows]
        alone = [sharding if at == index else None for at in range(len(rows))]
        return list(dict.fromkeys(map(tuple, (found, like, alone))))


def _is_moved(found: Tiles | JoinedValues, result: Held | None) -> bool:
    """Whether a line holds the elements of a lowering's result in other places, and ranks have no others than of that."""
    if not isinstance(found, Tiles) or not isinstance(result, Tiles):
        return False
    return (found.root, found.axes, found.partial, found.uneven) == (result.root, result.axes, result.partial, result.uneven)


def _zeros_of(x: Tiles) -> tuple[tuple[str, float], ...]:
    """What is known of padding that holds zeros, which stay zeros in a sum."""
    return tuple(row for row in x.padding if row[1] == 0.0)


def _in_shape(value: Tiles, shape: Sequence[int]) -> Tiles | None:
    """The value in another shape; None if it has no such."""
    try:
        if len(shape) > 1 and prod(shape) != prod(value.shape) == prod(shape[1:]):  # the same for each group of the first dim
            own = reshape_dims(value, (1, *shape[1:]))
            return expand_dims(own, shape)
        return reshape_dims(value, shape)
    except Unfit:
        return None


def _difference(found: Sharding, told: Sharding) -> str:
    """How a type differs from the sharding by the rule; "" if it does not."""
    if dict(found.partial) != dict(told.partial):
        return f"it is partial over {dict(found.partial)}, declared {dict(told.partial)}"
    for dim, (own, declared) in enumerate(zip(found.dims, told.dims, strict=True)):
        if runs_of(own) != runs_of(declared):
            return f"dim {dim} is {' * '.join(map(str, own))}, declared {' * '.join(map(str, declared))}"
    return ""


def erase(program: PlainProgram, traced: Stage) -> ProgramProof:
    """The proof of a program against its traced graph, under the same keys, or what of it is not proved."""
    return Erasure(program, TracedTerms(traced, {port.key: port.shape for port in program.inputs})).run()
