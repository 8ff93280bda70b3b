"""`program.explain` of a forward value: kept, recomputed or offloaded for backward, by whose choice, its cost, and plan lines to change it.

Prices are of the graph of all layers before anything is recomputed: operators and collectives one by one, as
`passes/memory/recompute_within_budget.py` has them. A line is named where the minimum cut under it decides otherwise for this value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase

from torch.fx import Node

from meshc.cost import roofline
from meshc.cost.devices import devices_of
from meshc.cost.links import copy_seconds
from meshc.cost.liveness import peak_liveness
from meshc.cost.stage_clock import node_seconds
from meshc.ir import Record, calls_of, has_record, is_getitem, local_bytes, op_name, record, records, spmd, value_of
from meshc.ir.graph import ancestors_of
from meshc.passes import pipeline
from meshc.passes.memory.host_copies import roots_of
from meshc.passes.memory.kept_values import least_kept
from meshc.passes.memory.recomputable import recomputable_of_stage
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.memory_lines import RematLine
from meshc.program.program import PlainProgram
from meshc.report.explanation import PlanAlternative, RetainedValue
from meshc.report.tables import bytes_text, placement

KEPT, AGAIN, OFFLOADED, UNREAD, CHUNKED = "kept", "recomputed", "on the host", "not read by backward", "in chunks"
LINE = r"[\w.-]+\.py:\d+"
WIDER = ("cheap", "selective", "layer")
SHOWN = 3
"""Values of a module, or of a line, the largest first."""


def explain_values(lowered: LoweredProgram, name: str) -> list[RetainedValue]:
    """Of `value:PATH`, a value's name in the program, or `FILE.py:LINE`: the largest values that these mean; none of another name."""
    if not lowered.request.grad:
        return []
    if not _may_mean(lowered, name):
        return []
    named = _ValueMatcher(lowered)
    telling = _Remembering(lowered, named.graph)
    return [telling.of(node) for node in named.nodes(name)]


def names_values(name: str) -> bool:
    """Whether a name can only mean values."""
    return name.startswith("value:") or re.fullmatch(LINE, name.strip()) is not None


def _may_mean(lowered: LoweredProgram, name: str) -> bool:
    return names_values(name) or any(value_name(name) == node.name for node in recorded_calls(lowered))


def value_name(name: str) -> str:
    """A value's name, also of a line of the program; "" if it can be neither."""
    found = re.match(r"\s*(\w+)\s*(?::\s*\".*|=.*|$)", name)
    return "" if found is None else found[1]


def recorded_calls(program: LoweredProgram | PlainProgram) -> list[Node]:
    """The operators of all stages that have records."""
    return [node for stage in program.stages.values() for node in stage.graph.nodes if node.op == "call_function" and has_record(node)]


def before(lowered: LoweredProgram) -> LoweredProgram:
    """The graph of all layers as it was when it was settled what backward recomputes."""
    placed = run_passes(pipeline.PLACE, lowered.placed.restart_for_request(lowered.request))
    return run_passes((pipeline.GROW, pipeline.CHUNKS, pipeline.OFFLOAD_STATE), run_pass(pipeline.PARTITION, placed))


class _ValueMatcher:
    """Which values of forward a name means."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self.lowered, self.graph = lowered, before(lowered)
        (self.stage,) = self.graph.stages.values()

    def nodes(self, name: str) -> list[Node]:
        calls = calls_of(self.stage.graph, "forward")
        home = roots_of(calls)
        means = self._means(name)
        found = {home[node]: None for node in calls if node in home and means(_first(node))}
        return sorted(found, key=lambda node: -local_bytes(record(node)))[:SHOWN]

    def _means(self, name: str) -> Callable[[Record], bool]:
        if re.fullmatch(LINE, name.strip()):
            return lambda one: one.source.place == name.strip()
        if name.startswith("value:"):
            means = {of for path, of in _returned_values(self.lowered) if fnmatchcase(path, name.removeprefix("value:"))}
        else:
            means = {_first(other).of for other in recorded_calls(self.lowered) if other.name == value_name(name)}
        return lambda one: bool(one.of) and one.of in means


def _returned_values(lowered: LoweredProgram) -> Iterator[tuple[str, str]]:
    """Of each value that a module returns, the path, and the value's name in the global view."""
    for node in lowered.joint.graph.nodes:
        for index, one in enumerate(records(node) if has_record(node) else ()):
            made, at = value_of(node) if is_getitem(node) else (node, index)
            yield from ((path, f"{made.name}.{at}") for path in one.returned_by)


def _first(node: Node) -> Record:
    return records(node)[0]


def record_of(node: Node) -> str:
    """The global view's value that a node is a form of."""
    return _first(node).of


def _is_late(node: Node, user: Node) -> bool:
    """Whether a value of forward is left to backward by this use: by a node of its stage, or at its stage's end."""
    return _first(node).phase == "forward" and (user.op == "output" or _first(user).phase == "backward")


class _Remembering:
    def __init__(self, lowered: LoweredProgram, graph: LoweredProgram) -> None:
        self.lowered, self.graph, self.device = lowered, graph, devices_of(lowered.mesh).slowest()
        self.widest = recomputable_of_stage(graph, WIDER[-1])
        self.there = peak_liveness(lowered.as_program()).values
        self.kept = {record_of(node) for node in recorded_calls(lowered) if any(_is_late(node, user) for user in node.users)}

    def of(self, node: Node) -> RetainedValue:
        widest = self.widest
        inside = {one for one, root in roots_of(widest.forward).items() if root is node}
        fate, why = self._fate(node, inside)
        again = self._recompute_chain(node)
        one = record(node)
        at_peak = sum(each.bytes for each in self.there if one.of and each.made is not None and each.made.record.of == one.of)
        return RetainedValue(
            value=node.name, lies=f"{str(one.dtype).removeprefix('torch.')} {placement(one.sharding, one.shape)}", operator=op_name(node),
            module=one.source.module, source=str(one.source), bytes=local_bytes(one), at_peak_bytes=at_peak, fate=fate, why=why,
            waits_s=self._waiting_seconds(node, inside), recompute_s=sum(map(self._seconds, again)),
            again=[f"{count} {operator}" for operator, count in Counter(map(op_name, again)).most_common()],
            instead=list(self._alternative_lines(node, fate)),
        )  # fmt: skip

    def _fate(self, node: Node, inside: Collection[Node]) -> tuple[str, str]:
        """Fate of a value in the program (kept, recomputed, offloaded, ...), and the reason."""
        forms = [one for one in recorded_calls(self.lowered) if _first(one).of == record(node).of]
        offloaded = next((one for one in forms if one.target is spmd.to_host), None)
        if offloaded is not None:
            return OFFLOADED, record(offloaded).reason
        if record(node).chunk is not None:
            return CHUNKED, "; ".join(map(str, self.lowered.plan.chunks)) or "for the budget"
        if any(_first(one).phase == "backward" and one.target is node.target for one in forms):
            return AGAIN, self._reason(node)
        read = any(user.op == "call_function" and _first(user).phase == "backward" for one in inside for user in one.users)
        return (KEPT, self._reason(node)) if read else (UNREAD, "it is gone after its last reader in forward")

    def _reason(self, node: Node) -> str:
        plan, request, module = self.lowered.plan, self.lowered.request, record(node).source.module
        kept = next((str(line) for line in plan.kept if any(fnmatchcase(path, line.pattern) for path in self._paths(node))), "")
        line = next((str(line) for line in reversed(plan.remats) if line.covers(module)), "")
        if kept or line:
            return f"`{kept or line}` in the plan"
        source = record(node).source
        if source.region:
            return "the policy of its checkpointed region saves it" if source.saved else "the model, which checkpoints a region there"
        if request.options.remat is not None:
            return f"the policy {request.options.remat!r}"
        if request.options.budget is not None:
            return f"Options(memory_budget={request.options.budget}), for which as little as can be is recomputed"
        return "by default, where what is worth its seconds is recomputed"

    def _paths(self, node: Node) -> list[str]:
        return [path for path, of in _returned_values(self.lowered) if of == record(node).of]

    def _recompute_chain(self, node: Node) -> list[Node]:
        """Nodes to recompute a value from the kept values; those that take no time are left out."""
        can = self.widest
        through = {one for one in can.forward if record_of(one) not in self.kept and one not in can.learned} | {node}
        chain = ancestors_of([node], through=through.__contains__)
        return [one for one in can.forward if one in chain and one in through and self._seconds(one) > 0]

    def _seconds(self, node: Node) -> float:
        return node_seconds(node, self.lowered.mesh, self.device)

    def _waiting_seconds(self, node: Node, inside: Collection[Node]) -> float:
        """Seconds of compute between a value's last reader in forward and its first in backward."""
        order = {one: at for at, one in enumerate(node.graph.nodes)}
        users = [user for one in inside for user in one.users if user.op == "call_function"]
        late = [order[user] for user in users if _first(user).phase == "backward"]
        if not late:
            return 0.0
        start = max([order[node], *(order[user] for user in users if _first(user).phase == "forward")])
        return sum(roofline.seconds(one, self.device) for one, at in order.items() if start < at < min(late) and one.op == "call_function")

    def _alternative_lines(self, node: Node, fate: str) -> Iterator[PlanAlternative]:
        """Plan lines under which the value would have another fate."""
        size, module, paths = local_bytes(record(node)), record(node).source.module, self._paths(node)
        copies = 2 * copy_seconds(size, self.device)
        if fate == AGAIN:
            if paths:
                yield PlanAlternative(line=f"keep value:{paths[0]}", what=f"it is kept: {bytes_text(size)} from forward to backward")
            elif module:
                yield PlanAlternative(line=f"remat {module}: none", what=f"it is kept: {bytes_text(size)} from forward to backward")
        if fate == KEPT and module:
            for policy in WIDER:
                lines = [*self.lowered.plan.remats, RematLine(module, policy)]
                can = recomputable_of_stage(self.graph, self.lowered.request.options.remat or "none", lines)
                if node in can.operands and node not in least_kept(can.forward, can.operands, can.bytes_of, can.wanted):
                    yield PlanAlternative(line=f"remat {module}: {policy}", what="it is recomputed, of what is then kept")
                    break
        if fate in (KEPT, AGAIN) and (paths or module):
            line = f"offload value:{paths[0]}" if paths else f"offload {module}"
            yield PlanAlternative(line=line, what=f"it lies on the host in between: {copies * 1e3:.3g} ms of copies, there and back")
        if fate == OFFLOADED:
            yield PlanAlternative(line="the plan without that line", what=f"it is kept: {bytes_text(size)} from forward to backward")
