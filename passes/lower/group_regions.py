"""Compiled regions: operators between two waits stand together as one function, and the all-reduces behind them share a bucket.

    a = relu(x)                             with region(0):
    r = all_reduce(a, ["tp"], "sum")            a = relu(x)
    b = mm(x, w)                  becomes       b = mm(x, w)
    c = add(b, r)                           r = all_reduce(a, ["tp"], "sum")
                                            with region(1):
                                                c = add(b, r)

`levels` computes which nodes run between which waits. The nodes of a level stand together, in parts where they belong to many layers
(`group_regions.py`), followed by the collectives that read them; `meshc/program/bucket.py` joins the all-reduces of a level. Every rank
runs the same order.

A collective that starts as soon as its own sums over microbatches are complete (`start_reductions_early.py`) is left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from torch.fx import Graph, Node

from meshc.ir import has_record, is_getitem, phase_of, record, records, runs_on_host, spmd
from meshc.ir.graph import ancestors_of, computable_from, copy_graph, placeholders, put_in_order
from meshc.ir.keys import is_a
from meshc.ir.regions import is_number, microbatch_integers, set_region, why_alone, writes
from meshc.ir.schemas import written_operands
from meshc.passes.lower.early_updates import updates_amid_backward
from meshc.passes.lower.low_precision_state import is_for_updates_only
from meshc.passes.lower.prefetch_windows import prefetch_windows
from meshc.passes.lower.start_reductions_early import reductions, sums_of_late_stages
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.bucket import bucket
from meshc.program.packing import fills_alone, grows_alone, is_view, stays
from meshc.program.program import Stage


def group_regions(lowered: LoweredProgram) -> LoweredProgram:
    """Marks and reorders each stage; values do not change."""
    sums = sums_of_late_stages(lowered)
    return replace(
        lowered, stages={name: group_stage(stage, lowered.sizes, sums=sums.get(name, ())) for name, stage in lowered.stages.items()}
    )


def group_stage(stage: Stage, sizes: Mapping[str, int], window: int | None = None, sums: Collection[str] = ()) -> Stage:
    """A copy of the stage in regions. `sizes`: of the mesh's axes; `window`: bytes, as in `levels`; `sums`: keys of sums over microbatches
    that are complete before the stage runs."""
    graph = copy_graph(stage.graph)
    stage = replace(stage, graph=graph)
    level = levels(stage, window)
    for one in bucket(stage, sizes, level, targets=[spmd.all_reduce], apart=frozenset(reductions(stage, sums))):
        level[one.sent] = level[one.members[0]]
    for node in graph.nodes:
        if node.op == "call_function" and node not in level:
            level[node] = max(level[operand] + spmd.is_collective(operand.target) for operand in node.all_input_nodes)
    widened = {node for node in graph.nodes if node.op == "call_function" and is_for_updates_only(node)}
    level.update({node: min(level[user] for user in node.users) for node in widened})  # not sooner than it is read
    _place(graph, level, widened)
    return stage


def _place(graph: Graph, level: Mapping[Node, int], widened: Collection[Node]) -> None:
    """Sorts the nodes by level, within a level the region first, and numbers the regions. Nodes in `widened` are in no region."""
    varying = microbatch_integers(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    alone = {node for node in calls if is_number(node) or node in widened or runs_alone(node, varying)}
    order = sorted(calls, key=lambda node: (0, True) if is_number(node) else (1 + level[node], node in alone))
    put_in_order([*placeholders(graph), *order])
    count = 0
    together = [node for node in order if node not in alone]
    for _, members in groupby(together, level.__getitem__):
        nodes = list(members)
        numbers = layer_parts(nodes)
        for node, part in zip(nodes, numbers, strict=True):
            set_region(node, count + part)
        count += 1 + numbers[-1]


# Partition of a compiled region by layer, so that a backend compiles one of several equal layers.
#
#     with region(0):  embedding, layers.0, ..., layers.31, head          one function of 32 layers: compiled for minutes
#     with region(0):  embedding, layers.0
#     with region(1):  layers.1                                           equal to regions 2 to 30: compiled once
#     ...
#
# A layer is an item of a list of modules of which MANY or more are in the region; forward, backward and update are counted separately. An
# operator of an update has no module of its own and takes that of the gradient that it reads (clipping multiplies each). Other operators
# without a module stay with the operator before them; the results of a call stay together. Little fusion is lost between two layers: the
# residual sum of one with the norm of the next.


MANY: Final = 8
"""Layers of one list from which a region is cut. Fewer compile as fast, and run a little faster, as one region."""

BACK: Final = 2
"""Pieces per layer, at most: where layers are interleaved more than that, the region is not cut."""


def layer_parts(nodes: Sequence[Node]) -> list[int]:
    """The part number of each node of a region, in order; 0 for all where the region is not cut."""
    places = [(records(node)[0].phase, tuple(_items(_module(node)))) for node in nodes]
    count = Counter((phase, path) for phase, path, _ in {(phase, *item) for phase, items in places for item in items})
    labels = [
        next(((phase, path, number) for path, number in reversed(items) if count[phase, path] >= MANY), None) for phase, items in places
    ]
    found, part, last = [], 0, None
    for label in labels:
        if label is not None and label != last:
            part, last = part + (last is not None), label
        found.append(part)
    of = dict(zip(nodes, found, strict=True))
    split = any(is_getitem(node) and of.get(node.all_input_nodes[0], of[node]) != of[node] for node in nodes)
    return [0] * len(found) if split or part >= BACK * len(set(labels)) else found


def _module(node: Node) -> str:
    """The module path of a node; for a node of an update, that of its first operand that has one."""
    among = (node, *node.all_input_nodes) if phase_of(node) == "update" else (node,)
    found = (records(one)[0].source.module for one in among if has_record(one) and records(one))
    return next(filter(None, found), "")


def _items(module: str) -> Iterator[tuple[str, str]]:
    """(path of the list, item) for each list of modules in a module's path."""
    names = module.split(".")
    for at, name in enumerate(names):
        if name.isdigit():
            yield ".".join(names[:at]), name


# Levels of a stage's nodes: the number of waits before each can run; all nodes of a level run together.
#
# A node's level is the number of collectives on the longest path to it. All nodes of a level run, then the collectives that read them
# start, and the next level waits for those that it reads. Nodes outside regions (updates in place, nodes that depend on the microbatch's
# number, products whose memory is kept) run after the region of their level too.
#
# An update amid backward, and the last reduction that it reads, end a level too: nodes behind it have a later level. So the gradients of a
# bucket travel while the next ones are computed, and are freed once they have been read (`early_updates.py`).
#
# A host copy starts behind all nodes before it, and nodes behind it have a later level: its place was chosen for memory's sake.
#
# Values that backward recomputes (`passes/memory/`) could run in forward, as soon as their operands are ready, and would then be kept in
# memory: they get the latest level, that of their first reader. So do collectives of forward's values that backward alone reads, such as
# the gather of a norm's sequence before a weight's gradient: they start a level sooner, and travel while that level runs.
#
# Gathers of stored parameters would all have level 0, and the whole model would be in memory at once. They are grouped in windows
# (`prefetch_windows.py`), one ahead of the readers: the level that first reads a window is later than all before, and the window's gathers
# start before the level that reads the previous window.
#
#     level 0:  gathers of windows 0 and 1      level 1:  readers of window 0, gathers of window 2      level 2:  window 1's ...


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
        moves = phase_of(node) == "backward" and (is_view(node) or spmd.is_collective(node.target) and not spmd.joins_stages(node))
        waits = any(operand not in found and phase_of(operand) != "forward" for operand in node.all_input_nodes)
        if records(node)[0].again or moves and not waits:
            found.add(node)
    return found


def runs_alone(node: Node, changing: set[Node]) -> bool:
    """Whether a call is outside regions: a collective, or a call that must not be traced, or would be traced for one microbatch only.
    Integers of a rank's place are no such calls: they are computed first and cost no level."""
    if node.op != "call_function" or is_number(node):
        return False
    if is_getitem(node):  # of several results, which do not leave a region together
        return runs_alone(node.args[0], changing)  # type: ignore[arg-type]
    return stays(node) or grows_alone(node) or fills_alone(node) or bool(why_alone(node, changing))


class _Levels:
    """found    node -> level;  highest  the highest of these
    stored     parameters on the device, and values computed from them alone up to and including their gathers
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
        parameters = [node for node, key in stage.keys().items() if is_a(key, "parameter") and record(node).storage == "device"]
        self.stored = computable_from(stage.graph, parameters, through=lambda node: node.target is not spmd.all_gather)
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
        ends = spmd.is_host_copy(node.target) or runs_on_host(node) or node in self.borders
        if ends or writes(node):
            level = max(level, self.highest)
        if ends:
            self.floor = level + 1
        if writes(node):
            self.after |= dict.fromkeys(_written_memory(node), level + 1)
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
    return ancestors_of([one for one in written_operands(node.target, node.args, {}) if isinstance(one, Node)])  # type: ignore[arg-type]
