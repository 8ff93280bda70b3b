"""`program.explain`: how a parameter is stored and used, or what an operator splits; at which price, and what else it could have been.

    layers.3.mlp.up_proj.weight
      stored     [ffn 14336/tp, hidden 4096/dp], as its gradient; its state [ffn 14336/tp, hidden 4096/dp]
      read by    mm of layers.3.mlp.up_proj, forward       all_gather over dp, 58.7 MB        0.21 ms
                 mm of layers.3.mlp.up_proj, backward      all_gather over dp, 58.7 MB        0.21 ms
      else       [ffn 14336/tp, hidden 4096]               + 3.10 ms
                   + 3.40 ms  all_reduce over dp of mm of layers.3.mlp.up_proj, backward
                   - 0.30 ms  all_gather over dp of layers.3.mlp.up_proj.weight

Seconds and bytes are those of the planner's model (docs/planner.md), for one of the layers that decide alike; what others cost is the
difference of a whole call, with everything beside them as would then be best.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch.fx import Node

from meshc.cost.devices import for_mesh
from meshc.errors import PlanError
from meshc.ir import has_record, op_name, records
from meshc.ir.sharding import Sharding
from meshc.passes.depth.stands_for import captured_name
from meshc.passes.driver import pipeline
from meshc.passes.driver.choose import open_axes
from meshc.passes.driver.run import run
from meshc.passes.phases.lowered import Lowered
from meshc.passes.planner.alternatives import Alternative, Alternatives, collectives, named
from meshc.passes.planner.search import Search
from meshc.passes.planner.space import Decision, Form, Key, Option, Reading, given, wanted
from meshc.plan.plan import Plan
from meshc.program.program import PlainProgram
from meshc.report.summary import bytes_text, placement

SHOWN = 3
"""Operators of a module, and places where a price falls."""


def explain(lowered: Lowered, program: PlainProgram, asked: Plan, name: str) -> str:
    """What was chosen for a parameter, for the operators of a module, or for what made a line of the program; of a plan that was searched
    for, as `asked` says, the best alternatives too. Raises PlanError for a name that nothing has, with those that are closest."""
    return _Explained(lowered, program, asked).text(name)


class _Explained:
    def __init__(self, lowered: Lowered, program: PlainProgram, asked: Plan) -> None:
        self.lowered, self.program, self.placed = lowered, program, lowered.placed
        assignment = self.placed.decided()
        axes = open_axes(asked)
        self.searched = bool(axes)
        as_asked = run(pipeline.PLACE[0], self.placed.again(replace(lowered.request, plan=asked)))  # without the lines of what was found
        self.search = Search(as_asked, for_mesh(lowered.mesh), axes, (assignment,))
        self.model = self.search.model
        self.pick = self.search.pick_of(assignment)
        self.alternatives = Alternatives(self.search, self.pick)
        self.made = {made.decision: made for made in reversed(self.search.space.made)}

    def text(self, name: str) -> str:
        node = self._line(name)
        if node is not None:
            return "\n".join(self._of_line(node)) + "\n"
        captured = captured_name(name, self.lowered.depth)
        if ("parameter", captured) in self.search.space.decisions:
            return "\n".join([name, *self._of_parameter(captured)]) + "\n"
        operators = self._operators(captured)
        if operators:
            return "\n".join([name, *self._of_operators(operators)]) + "\n"
        raise PlanError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        known = {port.name for port in self.program.inputs if port.kind == "parameter"}
        nodes = [node for stage in self.program.stages.values() for node in stage.graph.nodes if has_record(node)]
        known |= {records(node)[0].source.module for node in nodes} - {""}
        close = difflib.get_close_matches(name, sorted(known), n=4, cutoff=0.4)
        told = f"the closest are {', '.join(close)}" if close else "print(program) and program.summary() have the names"
        return f"nothing in this program is called {name!r}\n  what to do: name a parameter, a module, or a line of the program; {told}"

    # ---------------------------------------------------------------------------------------------------------------------- parameters

    def _of_parameter(self, name: str) -> Iterator[str]:
        storage = self.placed.decided().storage
        lies = {kind: storage.get((name, kind)) for kind in ("parameter", "gradient", "state")}
        port = next(port for port in self.placed.joint.inputs if port.kind == "parameter" and port.name == name)
        texts = {kind: placement(one, port.shape) for kind, one in lies.items() if one is not None}
        others = [f"its {kind} {text}" for kind, text in texts.items() if kind != "parameter" and text != texts["parameter"]]
        yield f"  stored     {'; '.join([texts['parameter'], *others])}{self._alike(('parameter', name))}"
        yield from self._readings(("parameter", name))
        for kind in ("parameter", "state"):
            if (kind, name) in self.search.space.decisions:
                yield from self._else((kind, name), "else" if kind == "parameter" else "its state")
        yield from self._not_searched()

    def _readings(self, key: Key) -> Iterator[str]:
        value = self.made.get(key)
        if value is None:
            return
        lies = given(value, self.alternatives.taken(key), self.search.space.axes)
        head = "read by"
        for reading in value.readings:
            wants = wanted(reading, self._option_of(key, reading))
            size = value.elements * value.itemsize
            seconds = self.model.moves.seconds(lies, wants, float(size))
            move = "as it lies"
            if lies != wants:
                held = max(self.model.operators.held(value, form[0]) for form in (lies, wants))
                move = f"{collectives(self.model, lies, wants)}, {bytes_text(held)}, {_ms(seconds)}" if seconds else "its part of it"
            who = named(reading.node) if reading.node is not None else "the program's results"
            yield f"  {head:<10} {who:<44} {move}"
            head = ""

    def _option_of(self, key: Key, reading: Reading) -> Option:
        reader = reading.reader if reading.reader in self.model.folded.of else key
        return self.alternatives.taken(reader)

    # ----------------------------------------------------------------------------------------------------------------------- operators

    def _operators(self, module: str) -> list[Node]:
        """Those of a module that take longest, or, if it has none of its own, of the modules in it."""
        keys = [key for key in self.search.space.decisions if isinstance(key, Node) and key.op == "call_function"]
        where = {key: records(key)[0].source.module for key in keys}
        found = [key for key in keys if where[key] == module] or [key for key in keys if where[key].startswith(f"{module}.")]
        return sorted(found, key=lambda key: -self._own_s(key))

    def _own_s(self, key: Key) -> float:
        number = self.model.folded.of[key]
        return float(self.model.own[number][self.pick[number]]) / self.model.count(number)

    def _of_operators(self, nodes: Sequence[Node]) -> Iterator[str]:
        for node in nodes[:SHOWN]:
            decision = self.search.space.decisions[node]
            said = self._said(decision, self.alternatives.taken(node))
            yield f"  {named(node)}: {said}; {_ms(self._own_s(node))}{self._alike(node)}"
            yield from self._given_to(node)
            yield from (f"  {line}" for line in self._else(node, "else"))
        if len(nodes) > SHOWN:
            yield f"  and {len(nodes) - SHOWN} operators that take less time"
        yield from self._not_searched()

    def _given_to(self, node: Node) -> Iterator[str]:
        """Changes of sharding of what an operator makes, each with those who want it so."""
        for value in (made for made in self.search.space.made if made.decision is node):
            lies = given(value, self.alternatives.taken(node), self.search.space.axes)
            readers: dict[Form, list[str]] = {}
            for reading in value.readings:
                who = "the program's results" if reading.node is None else named(reading.node)
                readers.setdefault(wanted(reading, self._option_of(node, reading)), []).append(who)
            for wants, names in readers.items():
                seconds = self.model.moves.seconds(lies, wants, float(value.elements * value.itemsize))
                if seconds:
                    yield f"    for {' and '.join(dict.fromkeys(names))}: {collectives(self.model, lies, wants)}, {_ms(seconds)}"

    def _line(self, name: str) -> Node | None:
        """The node that a line of the program, or a value's name, means."""
        found = re.match(r"\s*(\w+)\s*(?::\s*\".*|=.*|$)", name)
        if found is None:
            return None
        nodes = (node for stage in self.program.stages.values() for node in stage.graph.nodes)
        return next((node for node in nodes if node.name == found[1] and node.op == "call_function" and has_record(node)), None)

    def _of_line(self, node: Node) -> Iterator[str]:
        record = records(node)[0]
        lies = "" if record.sharding is None else f": {record.sharding}"
        yield f"{node.name}, {op_name(node)}{lies}"
        if str(record.source):
            yield f"  {record.source}{f': {record.source.code}' if record.source.code else ''}"
        if record.reason:
            yield f"  {record.reason}"
        of = next((key for key in self.search.space.decisions if isinstance(key, Node) and key.name == record.of.partition(".")[0]), None)
        if of is not None and of.op == "call_function":
            yield from self._of_operators([of])
        elif record.source.module:
            operators = self._operators(captured_name(record.source.module, self.lowered.depth))
            yield from self._of_operators(operators[:1])

    # -------------------------------------------------------------------------------------------------------------------- alternatives

    def _else(self, key: Key, head: str) -> Iterator[str]:
        if not self.searched:
            return
        found = self.alternatives.of(key)
        if not found:
            yield f"  {head:<10} nothing: this is the one way that is legal here"
        for other in found:
            yield f"  {head:<10} {self._said(self.search.space.decisions[key], other.option):<44} {_more(other)}"
            for text, seconds in other.falls[:SHOWN]:
                yield f"               {_signed(seconds):>12}  {text}"
            head = ""

    def _said(self, decision: Decision, option: Option) -> str:
        if isinstance(decision.key, tuple):
            return placement(self._stored(decision, option), decision.sizes)
        instance, names = self.placed.factors.instances[decision.key], self.placed.names
        said: dict[str, list[str]] = {axis: [] for axis in self.search.space.axes}
        for token, axes in zip(decision.labels, option.axes, strict=True):
            for axis in axes:
                name = names.of[instance.factor[token]]  # type: ignore[index]
                said[axis] += [] if name in said[axis] else [name]
        for axis in option.deferred:
            said[axis].append("a sum that stays pending")
        return ", ".join(f"{axis}: {' and '.join(what) or '-'}" for axis, what in said.items())

    def _stored(self, decision: Decision, option: Option) -> Sharding:
        assert isinstance(decision.key, tuple)
        kind, name = decision.key
        lies = self.placed.decided().storage[name, "parameter"]
        for (dim, position), axes in zip(decision.labels, option.axes, strict=True):
            lies = lies.with_axes(dim, position, axes)  # type: ignore[arg-type]
        return lies

    def _alike(self, key: Key) -> str:
        count = self.model.count(self.model.folded.of[key])
        return f" (and {count - 1} more alike)" if count > 1 else ""

    def _not_searched(self) -> Iterator[str]:
        if not self.searched:
            yield '  its plan was given, not searched for: with plan="auto" the best alternatives stand here'


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'} {_ms(abs(seconds))}"


def _more(other: Alternative) -> str:
    return f"{_signed(other.more_s)}, a rank holds {bytes_text(other.held)}"
