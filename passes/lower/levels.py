"""Levels of a stage's nodes: the number of waits before each can run; all nodes of a level run together.

A node's level is the number of collectives on the longest path to it. All nodes of a level run, then the collectives that read them start,
and the next level waits for those that it reads. Nodes outside regions (updates in place, nodes that depend on the microbatch's number,
products whose memory is kept) run after the region of their level too.

An update amid backward, and the last reduction that it reads, end a level too: nodes behind it have a later level. So the gradients of a
bucket travel while the next ones are computed, and are freed once they have been read (`early_updates.py`).

A host copy starts behind all nodes before it, and nodes behind it have a later level: its place was chosen for memory's sake.

Values that backward recomputes (`passes/memory/`) could run in forward, as soon as their operands are ready, and would then be kept in
memory: they get the latest level, that of their first reader. So do collectives of forward's values that backward alone reads, such as the
gather of a norm's sequence before a weight's gradient: they start a level sooner, and travel while that level runs.

Gathers of stored parameters would all have level 0, and the whole model would be in memory at once. They are grouped in windows
(`prefetch_windows.py`), one ahead of the readers: the level that first reads a window is later than all before, and the window's gathers
start before the level that reads the previous window.

    level 0:  gathers of windows 0 and 1      level 1:  readers of window 0, gathers of window 2      level 2:  window 1's ...
"""

from __future__ import annotations

from typing import Final

from torch.fx import Graph, Node

from meshc.ir import is_getitem, record, records, runs_on_host, spmd
from meshc.ir.graph import ancestors_of, computable_from
from meshc.ir.keys import is_a
from meshc.ir.regions import is_number, microbatch_integers, why_alone, writes
from meshc.passes.lower.early_updates import updates_amid_backward
from meshc.passes.lower.prefetch_windows import prefetch_windows
from meshc.program.packing import fills_alone, grows_alone, is_view, stays
from meshc.program.program import Stage

TRAVELS: Final = 2
"""Levels by which a collective of backward that waits for no gradient starts before its reader: it travels while one level runs."""


def levels(stage: Stage, window: int | None = None) -> dict[Node, int]:
    """The level of each node. `window`: bytes of a prefetch window; by default `prefetch_windows.py` decides."""
    found = _Levels(stage, window)
    _delay_backward_values(stage.graph, found)
    return found.found


def _delay_backward_values(graph: Graph, levels: _Levels) -> None:
    """Raises the levels of nodes in backward that depend on forward's values alone to those of their first readers."""
    found, waits = levels.found, _delayable_nodes(graph)
    for node in reversed(graph.nodes):
        if node not in found or node in levels.stored or is_number(node) or node not in waits:
            continue
        ahead = (TRAVELS if spmd.is_collective(node.target) else 1) if runs_alone(node, levels.changing) else 0
        latest = min((found[user] - ahead * (not is_getitem(user)) for user in node.users if user in found), default=0)
        found[node] = max(found[node], latest)
    for node in graph.nodes:
        if node in found and is_getitem(node):
            found[node] = found[node.all_input_nodes[0]]


def _delayable_nodes(graph: Graph) -> set[Node]:
    """Recomputed nodes, and views and collectives of backward whose operands are these or values of forward."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or writes(node) or spmd.is_host_copy(node.target):
            continue
        phase, again = records(node)[0].phase, records(node)[0].again
        moves = is_view(node) or spmd.is_collective(node.target) and not spmd.joins_stages(node)
        if again or phase == "backward" and moves and all(operand in found or _is_of_forward(operand) for operand in node.all_input_nodes):
            found.add(node)
    return found


def _is_of_forward(node: Node) -> bool:
    return node.op == "call_function" and records(node)[0].phase == "forward"


def runs_alone(node: Node, changing: set[Node]) -> bool:
    """Whether a call is outside regions: a collective, or a call that must not be traced, or would be traced for one microbatch only.
    Integers of a rank's place are no such calls: they are computed first and cost no level."""
    if node.op != "call_function" or is_number(node):
        return False
    if is_getitem(node):  # of several results, which do not leave a region together
        return runs_alone(node.args[0], changing)  # type: ignore[arg-type]
    return stays(node) or grows_alone(node) or fills_alone(node) or bool(why_alone(node, changing))


def _parameter_values(stage: Stage) -> set[Node]:
    """Parameters on the device, and values computed from them alone up to and including their gathers."""
    parameters = [node for node, key in stage.keys().items() if is_a(key, "parameter") and record(node).storage == "device"]
    return computable_from(stage.graph, parameters, through=lambda node: node.target is not spmd.all_gather)


class _Levels:
    """found    node -> level;  highest  the highest of these
    windows    gather -> number of its window
    starts     number of a window -> the level of its first gather
    read       the number of the window that is being read
    floor      lowest level of nodes other than gathers: that of the window that is being read
    after      overwritten value -> first level at which its new value may be read
    borders    updates amid backward, and the last reduction that each reads
    chunk      the chunk of the head to which the current operators belong
    joined     the level of the last collective between pipeline stages, which keep their order: the stages' graphs differ
    """

    def __init__(self, stage: Stage, window: int | None) -> None:
        self.stored = _parameter_values(stage)
        self.changing = microbatch_integers(stage.graph)
        self.borders = updates_amid_backward(stage.graph)
        self.windows = {gather: number for number, gathers in enumerate(prefetch_windows(stage.graph, window)) for gather in gathers}
        self.starts: dict[int, int] = {}
        self.read = -1
        self.floor = self.joined = self.highest = 0
        self.chunk: int | None = None
        self.found: dict[Node, int] = {}
        self.after: dict[Node, int] = {}
        for node in stage.graph.nodes:
            if node.op == "placeholder" or is_number(node):
                self.found[node] = 0
            elif node.op == "call_function":
                self._begin_chunk(records(node)[0].chunk)
                self.found[node] = self._level(node)
                self.highest = max(self.highest, self.found[node])

    def _level(self, node: Node) -> int:
        if is_getitem(node):
            return self.found[node.all_input_nodes[0]]
        behind = max((self._level_after(operand) for operand in node.all_input_nodes), default=0)
        if node in self.stored or node in self.windows:
            return self._gather(node, behind) if node in self.windows else max(self.floor - 1, behind)
        self._begin_window(max((self.windows.get(operand, -1) for operand in node.all_input_nodes), default=-1))
        level = max(self.floor, behind)
        if spmd.is_host_copy(node.target) or runs_on_host(node):
            level = max(level, self.highest)
            self.floor = level + 1
        if writes(node):
            level = max(level, self.highest)
            self.after |= dict.fromkeys(_written_memory(node), level + 1)
        if node in self.borders:
            level = max(level, self.highest)
            self.floor = level + 1
        if spmd.is_collective(node.target) and spmd.joins_stages(node):
            level = self.joined = max(level, self.joined)
        return level

    def _gather(self, node: Node, behind: int) -> int:
        window = self.windows[node]
        self._begin_window(window - 1)  # a window starts where the previous one is read
        return max(self.starts.setdefault(window, max(self.floor - 1, 0)), behind)

    def _begin_chunk(self, chunk: int | None) -> None:
        """Gives a new chunk of the head later levels than all before: values of the previous chunk are freed by then."""
        if chunk is not None and chunk != self.chunk:
            self.chunk, self.floor = chunk, self.highest + 1

    def _begin_window(self, window: int) -> None:
        """Starts a new level if `window` has not been read before."""
        if window > self.read:
            self.read, self.floor = window, self.highest + 1

    def _level_after(self, operand: Node) -> int:
        return max(self.found[operand] + runs_alone(operand, self.changing), self.after.get(operand, 0))


def _written_memory(node: Node) -> dict[Node, None]:
    """The operands that a node writes, and all values that these depend on: a tile may share the memory of the whole."""
    work: list[Node] = []
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            work += [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Node)]
    return ancestors_of(work)
