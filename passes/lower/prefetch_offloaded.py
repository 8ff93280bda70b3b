"""Prefetch of offloaded values: copies from the host start as early as they take, copies to the host as soon as they can.

    a = from_host(p)  g = mm(x, a)  h = f(g)  b = from_host(q)  k = mm(h, b)
  becomes, where the copy of b takes as long as f
    a = from_host(p)  g = mm(x, a)  b = from_host(q)  h = f(g)  k = mm(h, b)

Copies in one direction run one after another, so each has to end when the next begins: from the last reader backwards this gives the latest
start of each. Values that have arrived and are not read yet take memory: a window at most (`prefetch_windows.py`), or the operands of one
reader. Values that backward reads are not fetched in forward. Updates of offloaded state are one for each window (`fuse_updates.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf

from torch.fx import Graph, Node

from meshc.cost.devices import Device, devices_of
from meshc.cost.links import host_copy_seconds
from meshc.cost.roofline import start_seconds
from meshc.errors import CompileError
from meshc.ir import PHASES, local_bytes, phase_of, record, runs_on_host, spmd
from meshc.ir.regions import writes
from meshc.ops.optim import MANY
from meshc.passes.lower.exposed_copies import exposed_copies_note
from meshc.passes.lower.order_host_updates import order_host_updates, writers
from meshc.passes.lower.prefetch_windows import runs_within, window_limit
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.packing import below_views


def prefetch_offloaded(lowered: LoweredProgram) -> LoweredProgram:
    """Reorders each stage; values do not change. A note reports the copies that computation on the mesh's device does not hide."""
    device = devices_of(lowered.mesh).slowest()
    for stage in lowered.stages.values():
        place_host_copies(stage.graph, device)
    _refuse_to_send(lowered)
    said = "" if device.host is None else exposed_copies_note(lowered, device)
    return lowered.with_notes(said) if said else lowered


def _refuse_to_send(lowered: LoweredProgram) -> None:
    """Raises CompileError if a value on the host is sent to another pipeline stage."""
    sent = {key for keys in lowered.pipeline.messages.values() for key in keys} if lowered.pipeline is not None else set()
    for stage in lowered.stages.values():
        for key, value in stage.results().items():
            if key in sent and (found := record(value)).storage != "device":
                raise CompileError(
                    f"{value.name} at {found.source} lies on the host by `{found.reason}`, and another pipeline stage reads it\n"
                    "  what to do: name fewer modules in that line, or let a stage begin at another module "
                    "(Options(pipeline=Pipelining(splits=...)))"
                )


def place_host_copies(graph: Graph, device: Device, limit: int | None = None) -> None:
    """Reorders a graph in place. `limit`: bytes of a window; by default an eighth of the bytes fetched in its phase."""
    _place_copies_out(graph)
    order_host_updates(graph)
    # not those that write a parameter back to its place between steps
    fetches = [node for node in graph.find_nodes(op="call_function", target=spmd.from_host) if node.users and len(node.args) == 1]
    if fetches:
        _place_fetches(graph, fetches, device, limit)
        graph.lint()


def update_windows(graph: Graph) -> dict[Node, int]:
    """Window number of each update that has host copies."""
    updates = [node for node in graph.nodes if node.target in MANY and _host_bytes(node)]
    windows = split_into_windows(updates, update_window_bytes(graph))
    return {node: number for number, members in enumerate(windows) for node in members}


def update_window_bytes(graph: Graph) -> int:
    """Bytes of host copies in a window of updates."""
    return window_limit(sum(_host_bytes(node) for node in graph.nodes if node.target in MANY))


def split_into_windows(members: Sequence[Node], window: int) -> Iterator[list[Node]]:
    """Updates in groups whose host copies take no more than `window` bytes, or of one update alone."""
    return runs_within(window, members, _host_bytes)


def _fetches_among(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.target is spmd.from_host]


def _host_bytes(update: Node) -> int:
    """Bytes copied from the host for an update; for an update on the host, bytes of the gradient copied there."""
    if not runs_on_host(update):
        return sum(map(_bytes, _fetches_among(update.all_input_nodes)))
    gradient = update.args[1]
    assert isinstance(gradient, Node)
    return _bytes(gradient)


def _bytes(node: Node) -> int:
    return local_bytes(record(node))


def _place_copies_out(graph: Graph) -> None:
    """Moves each copy to the host right behind the last node that computes or writes its operand, or reads its destination."""
    for node in graph.find_nodes(op="call_function", target=spmd.to_host):
        operand, *place = node.args
        if not place:
            continue
        before = [operand, *(user for user in operand.users if writes(user)), *_fetches_among(place[0].users)]
        last = max(one for one in before if one.op == "call_function")
        if last.next is not node:
            last.append(node)


def _place_fetches(graph: Graph, fetches: Sequence[Node], device: Device, said: int | None) -> None:
    limits = {phase: window_limit(sum(_bytes(node) for node in fetches if record(node).phase == phase)) for phase in PHASES}
    moving = set(fetches)
    nodes = [node for node in graph.nodes if node not in moving]
    place = {node: index for index, node in enumerate(nodes)}
    times = list(start_seconds(nodes, device).values())
    backward = next((index for index, node in enumerate(nodes) if phase_of(node) not in ("forward", "")), len(nodes))
    before, groups = writers(nodes), defaultdict[int, list[Node]](list)
    for node in fetches:
        groups[min(place[user] for user in node.users)].append(node)
    starts, due = dict[int, float](), inf
    for reader in sorted(groups, reverse=True):
        starts[reader] = due = min(times[reader], due) - sum(host_copy_seconds(node, device) for node in groups[reader])
    waiting: list[tuple[int, int]] = []
    for reader, copies in sorted(groups.items()):
        phase = record(copies[0]).phase
        limit = limits[phase] if said is None else said
        first = 0 if phase == "forward" else min(backward, reader)
        sources = (one for node in copies for (source,) in [node.all_input_nodes] for one in (source, *before.get(below_views(source), ())))
        made = (place[one] + 1 for one in sources if place[one] < reader)
        waiting.insert(0, (reader, sum(map(_bytes, copies))))
        filled = zip(waiting, accumulate(size for _, size in waiting), strict=True)
        full = next((earlier for (earlier, _), size in filled if earlier < reader and size > limit), 0)  # it has to run before
        at = min(reader, max([first, *made, full, bisect_right(times, starts[reader]) - 1]))
        while nodes[at].op == "placeholder":
            at += 1
        for node in copies:
            nodes[at].prepend(node)
