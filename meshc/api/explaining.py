"""`program.explain` of a parameter or operator: its storage or sharding, the price, and the alternatives.

Seconds and bytes are those of the planner's model (docs/planner.md), for one of the layers that decide alike; what others cost is the
difference of a whole call, with everything beside them as would then be best.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch.fx import Node

from meshc.api.explain_values import explain_values, names_values, recorded_calls, value_name
from meshc.cost.devices import devices_of
from meshc.errors import PlanError
from meshc.ir import has_record, op_name, records
from meshc.ir.sharding import Sharding
from meshc.passes import pipeline
from meshc.passes.depth.captured_names import captured_name
from meshc.passes.pass_runner import run_pass
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.planner.alternatives import Alternatives, collectives, decision_text
from meshc.passes.planner.plan_search import PlanSearch
from meshc.passes.planner.search_space import Decision, Form, Key, Option, Reading, given_form, wanted_form
from meshc.plan.plan import Plan, open_axes
from meshc.program.program import PlainProgram
from meshc.report.explanation import (
    SHOWN,
    Alternative,
    Change,
    Explanation,
    Fall,
    OperatorChoice,
    ParameterReader,
    ParameterStorage,
    ProgramLine,
)
from meshc.report.tables import dtensor_placements, placement


def explain_choice(lowered: LoweredProgram, program: PlainProgram, asked: Plan, name: str) -> Explanation:
    """What was chosen for a parameter, for the operators of a module, or for what made a line of the program; of a plan that was searched
    for, as `asked` says, the best alternatives too. Raises PlanError for a name that nothing has, with those that are closest."""
    values = explain_values(lowered, name)
    if values and names_values(name):
        return Explanation(name=name, searched=bool(open_axes(asked)), stored=None, line=None, operators=[], further=0, remembered=values)
    return {**_Explaining(lowered, program, asked).of(name), "remembered": values}


class _Explaining:
    def __init__(self, lowered: LoweredProgram, program: PlainProgram, asked: Plan) -> None:
        self.lowered, self.program, self.placed = lowered, program, lowered.placed
        assignment = self.placed.require_assignment()
        axes = open_axes(asked)
        self.searched = bool(axes)
        as_asked = run_pass(
            pipeline.PLACE[0], self.placed.restart_for_request(replace(lowered.request, plan=asked))
        )  # without the lines of what was found
        self.search = PlanSearch(as_asked, devices_of(lowered.mesh).slowest(), axes, (assignment,))
        self.model = self.search.model
        self.pick = self.search.pick_of(assignment)
        self.alternatives = Alternatives(self.search, self.pick)
        self.made = {made.decision: made for made in reversed(self.search.space.made)}

    def of(self, name: str) -> Explanation:
        node = self._line(name)
        if node is not None:
            return self._explanation(node.name, line=self._line_origin(node), operators=self._source_operators(node))
        captured = captured_name(name, self.lowered.depth)
        if ("parameter", captured) in self.search.space.decisions:
            return self._explanation(name, stored=self._stored_as(captured))
        operators = self._operators(captured)
        if operators:
            return self._explanation(name, operators=operators)
        raise PlanError(self._unknown(name))

    def _explanation(
        self, name: str, *, stored: ParameterStorage | None = None, line: ProgramLine | None = None, operators: Sequence[Node] = ()
    ) -> Explanation:
        return Explanation(
            name=name, searched=self.searched, stored=stored, line=line,
            operators=[self._operator_choice(node) for node in operators[:SHOWN]],
            further=len(operators[SHOWN:]), remembered=[],
        )  # fmt: skip

    def _unknown(self, name: str) -> str:
        known = {port.name for port in self.program.inputs if port.kind == "parameter"}
        nodes = [node for stage in self.program.stages.values() for node in stage.graph.nodes if has_record(node)]
        known |= {records(node)[0].source.module for node in nodes} - {""}
        close = difflib.get_close_matches(name, sorted(known), n=4, cutoff=0.4)
        told = f"the closest are {', '.join(close)}" if close else "print(program) and program.summary() have the names"
        return f"nothing in this program is called {name!r}\n  what to do: name a parameter, a module, or a line of the program; {told}"

    # ---------------------------------------------------------------------------------------------------------------------- parameters

    def _stored_as(self, name: str) -> ParameterStorage:
        storage = self.placed.require_assignment().storage
        stored = {kind: one for kind in ("parameter", "gradient", "state") if (one := storage.get((name, kind))) is not None}
        mesh = self.program.mesh
        axes = [axis.name for axis in mesh.axes if axis != mesh.pipeline_axis]
        port = next(port for port in self.placed.joint.inputs if port.kind == "parameter" and port.name == name)
        decided = [kind for kind in ("parameter", "state") if (kind, name) in self.search.space.decisions]
        return ParameterStorage(
            sharding={kind: placement(one, port.shape) for kind, one in stored.items()},
            placements={kind: f"({dtensor_placements(one, mesh, axes)}) over ({', '.join(axes)})" for kind, one in stored.items()},
            alike=self._count_alike(("parameter", name)),
            readers=list(self._readers(("parameter", name))),
            others={kind: self._others((kind, name)) for kind in decided} if self.searched else None,
        )

    def _readers(self, key: Key) -> Iterator[ParameterReader]:
        value = self.made.get(key)
        if value is None:
            return
        lies = given_form(value, self.alternatives.taken_option(key), self.search.space.axes)
        for reading in value.readings:
            wants = wanted_form(reading, self._option_of(key, reading))
            size = value.elements * value.itemsize
            seconds = self.model.moves.seconds(lies, wants, float(size)) if lies != wants else 0.0
            held = max(self.model.operators.held_bytes(value, form[0]) for form in (lies, wants))
            move = "as it lies" if lies == wants else collectives(self.model, lies, wants) if seconds else "its part of it"
            yield ParameterReader(reader=_reader(reading), move=move, bytes=int(held), seconds=float(seconds))

    def _option_of(self, key: Key, reading: Reading) -> Option:
        reader = reading.reader if reading.reader in self.model.folded.of else key
        return self.alternatives.taken_option(reader)

    # ----------------------------------------------------------------------------------------------------------------------- operators

    def _operators(self, module: str) -> list[Node]:
        """A module's operators, slowest first; if it has none of its own, those of its submodules."""
        keys = [key for key in self.search.space.decisions if isinstance(key, Node) and key.op == "call_function"]
        where = {key: records(key)[0].source.module for key in keys}
        found = [key for key in keys if where[key] == module] or [key for key in keys if where[key].startswith(f"{module}.")]
        return sorted(found, key=lambda key: -self._own_s(key))

    def _own_s(self, key: Key) -> float:
        number = self.model.folded.of[key]
        return float(self.model.own[number][self.pick[number]]) / self.model.count(number)

    def _operator_choice(self, node: Node) -> OperatorChoice:
        decision = self.search.space.decisions[node]
        return OperatorChoice(
            operator=decision_text(node),
            splits=self._option_text(decision, self.alternatives.taken_option(node)),
            seconds=self._own_s(node),
            alike=self._count_alike(node),
            changes=list(self._changes(node)),
            others=self._others(node) if self.searched else None,
        )

    def _changes(self, node: Node) -> Iterator[Change]:
        """Reshards of an operator's results, each with the readers that need it."""
        for value in (made for made in self.search.space.made if made.decision is node):
            lies = given_form(value, self.alternatives.taken_option(node), self.search.space.axes)
            readers: dict[Form, dict[str, None]] = {}
            for reading in value.readings:
                readers.setdefault(wanted_form(reading, self._option_of(node, reading)), {})[_reader(reading)] = None
            for wants, names in readers.items():
                seconds = self.model.moves.seconds(lies, wants, float(value.elements * value.itemsize))
                if seconds:
                    yield Change(readers=[*names], move=collectives(self.model, lies, wants), seconds=float(seconds))

    def _line(self, name: str) -> Node | None:
        """The node that a line of the program, or a value's name, means."""
        return next((node for node in recorded_calls(self.program) if node.name == value_name(name)), None)

    def _line_origin(self, node: Node) -> ProgramLine:
        record = records(node)[0]
        return ProgramLine(
            operator=op_name(node), lies="" if record.sharding is None else str(record.sharding), source=str(record.source),
            code=record.source.code, reason=record.reason,
        )  # fmt: skip

    def _source_operators(self, node: Node) -> list[Node]:
        """The operator of the model that a line is a form of; of a collective, the one that takes longest in its module."""
        record = records(node)[0]
        of = next((key for key in self.search.space.decisions if isinstance(key, Node) and key.name == record.of.partition(".")[0]), None)
        if of is not None and of.op == "call_function":
            return [of]
        module = record.source.module
        return self._operators(captured_name(module, self.lowered.depth))[:1] if module else []

    # -------------------------------------------------------------------------------------------------------------------- alternatives

    def _others(self, key: Key) -> list[Alternative]:
        decision = self.search.space.decisions[key]
        return [
            Alternative(
                option=self._option_text(decision, other.option), more_s=other.more_s, holds_bytes=int(other.held),
                falls=[Fall(what=what, more_s=more) for what, more in other.falls],
            )
            for other in self.alternatives.of(key)
        ]  # fmt: skip

    def _option_text(self, decision: Decision, option: Option) -> str:
        if isinstance(decision.key, tuple):
            return placement(self._storage_sharding(decision, option), decision.sizes)
        instance, names = self.placed.factors.instances[decision.key], self.placed.names
        said: dict[str, list[str]] = {axis: [] for axis in self.search.space.axes}
        for token, axes in zip(decision.labels, option.axes, strict=True):
            for axis in axes:
                name = names.of[instance.factor[token]]  # type: ignore[index]
                said[axis] += [] if name in said[axis] else [name]
        for axis in option.deferred:
            said[axis].append("a sum that stays partial")
        return ", ".join(f"{axis}: {' and '.join(what) or '-'}" for axis, what in said.items())

    def _storage_sharding(self, decision: Decision, option: Option) -> Sharding:
        assert isinstance(decision.key, tuple)
        kind, name = decision.key
        lies = self.placed.require_assignment().storage[name, "parameter"]
        for (dim, position), axes in zip(decision.labels, option.axes, strict=True):
            lies = lies.with_axes(dim, position, axes)  # type: ignore[arg-type]
        return lies

    def _count_alike(self, key: Key) -> int:
        """Number of other decisions that are folded with this one."""
        return int(self.model.count(self.model.folded.of[key])) - 1


def _reader(reading: Reading) -> str:
    return "the program's results" if reading.node is None else decision_text(reading.node)
