"""Prefetch of offloaded values: copies from the host start as early as they take, copies to the host as soon as they can.

    a = from_host(p)  g = mm(x, a)  h = f(g)  b = from_host(q)  k = mm(h, b)
  becomes, where b takes what f does
    a = from_host(p)  g = mm(x, a)  b = from_host(q)  h = f(g)  k = mm(h, b)

Copies in one direction go one after another, so each has to be done when the next begins: from the last reader backwards that gives the
latest start of each. What has come and is not read yet takes memory: it is a window at most (`windows.py`), or what one reader needs,
beside what that one waits for. What backward reads is not fetched in forward. Updates of offloaded state are one for each window
(`fuse_updates.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from meshc.cost.devices import Device, for_mesh
from meshc.cost.links import host_copy_seconds
from meshc.cost.operators import seconds
from meshc.errors import CompileError
from meshc.ir import PHASES, has_record, local_bytes, record, records, runs_on_host, spmd
from meshc.ir.regions import writes
from meshc.ops.optim import MANY
from meshc.passes.lower.exposed import exposed
from meshc.passes.lower.leave_early import leave_early, root, writers
from meshc.passes.lower.windows import LEAST, WINDOW, WINDOWS
from meshc.passes.phases.lowered import Lowered


def fetch_ahead(lowered: Lowered) -> Lowered:
    """Reorders each stage; values do not change. A note says what of the copies cannot be hidden on the mesh's device."""
    device = for_mesh(lowered.mesh)
    for stage in lowered.stages.values():
        fetched(stage.graph, device)
    _refuse_to_send(lowered)
    said = "" if device.host is None else exposed(lowered, device)
    return lowered.noting(said) if said else lowered


def _refuse_to_send(lowered: Lowered) -> None:
    """What lies on one rank's host is not sent to another's."""
    sent = {key for keys in lowered.pipeline.messages.values() for key in keys} if lowered.pipeline is not None else set()
    for stage in lowered.stages.values():
        for key, value in stage.results().items() if sent else ():
            if key in sent and record(value).host:
                found = record(value)
                raise CompileError(
                    f"{value.name} at {found.source} lies on the host by `{found.reason}`, and another pipeline stage reads it\n"
                    "  what to do: name fewer modules in that line, or let a stage begin at another module (Options(pp_splits=...))"
                )


def fetched(graph: Graph, device: Device, limit: int | None = None) -> None:
    """A graph in place. `limit`: bytes of a window, if not as many as there are in an eighth of what is fetched in its phase."""
    _put_back(graph)
    leave_early(graph)
    fetches = _fetches(graph)
    if fetches:
        _start(graph, fetches, device, limit)
        graph.lint()


def turns(graph: Graph) -> dict[Node, int]:
    """Of each update that runs on the host, the number of its window."""
    found: dict[Node, int] = {}
    updates = [node for node in graph.nodes if node.op == "call_function" and node.target in MANY]
    for number, members in enumerate(in_windows([node for node in updates if _moved(node)], window_of(graph))):
        found |= dict.fromkeys(members, number)
    return found


def window_of(graph: Graph) -> int:
    """Bytes that come for the updates of a window."""
    moved = sum(_moved(node) for node in graph.nodes if node.op == "call_function" and node.target in MANY)
    return min(WINDOW, max(LEAST, moved // WINDOWS))


def in_windows(members: Sequence[Node], window: int) -> Iterator[list[Node]]:
    """Updates in parts for which no more than `window` bytes come from the host, or go there, or for one alone."""
    part: list[Node] = []
    filled = 0
    for member in members:
        size = _moved(member)
        if part and filled and size and filled + size > window:
            yield part
            part, filled = [], 0
        part.append(member)
        filled += size
    if part:
        yield part


@dataclass(frozen=True)
class _Group:
    """Copies that one reader waits for first, and where it stands."""

    nodes: Sequence[Node]
    reader: int
    size: int
    takes_s: float


def _fetches(graph: Graph) -> list[Node]:
    """What comes to be read; not what comes to its place between steps."""
    return [node for node in graph.find_nodes(op="call_function", target=spmd.from_host) if node.users and len(node.args) == 1]


def _of(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.target is spmd.from_host]


def _moved(update: Node) -> int:
    """Bytes that come for it; of one that runs on the host, of the gradient that goes."""
    if not runs_on_host(update):
        return sum(map(_bytes, _of(update.all_input_nodes)))
    gradient = update.args[1]
    assert isinstance(gradient, Node)
    return _bytes(gradient)


def _bytes(node: Node) -> int:
    return local_bytes(record(node))


def _window(fetches: Iterable[Node], phase: str) -> int:
    return min(WINDOW, max(LEAST, sum(_bytes(node) for node in fetches if record(node).phase == phase) // WINDOWS))


def _put_back(graph: Graph) -> None:
    """Each copy to the host behind what makes its operand, or has written it, and behind what reads its place."""
    for node in graph.find_nodes(op="call_function", target=spmd.to_host):
        operand, *place = node.args
        if not place:
            continue
        before = [operand, *(user for user in operand.users if writes(user)), *_of(place[0].users)]
        last = max(one for one in before if one.op == "call_function")
        if last.next is not node:
            last.append(node)


def _start(graph: Graph, fetches: Sequence[Node], device: Device, said: int | None) -> None:
    moving = set(fetches)
    limits = {phase: _window(fetches, phase) if said is None else said for phase in PHASES}
    nodes = [node for node in graph.nodes if node not in moving]
    place = {node: index for index, node in enumerate(nodes)}
    times, now = [], 0.0
    for node in nodes:
        times.append(now)
        now += seconds(node, device) if node.op == "call_function" else 0.0
    late = (place[node] for node in nodes if node.op == "call_function" and has_record(node) and records(node)[0].phase != "forward")
    backward, before = next(late, len(nodes)), writers(nodes)
    groups = _groups(fetches, place, device)
    starts: list[float] = []
    due = now
    for group in reversed(groups):
        due = min(times[group.reader], due) - group.takes_s
        starts.insert(0, due)
    for index, (group, start_s) in enumerate(zip(groups, starts, strict=True)):
        phase = record(group.nodes[0]).phase
        first = 0 if phase == "forward" else min(backward, group.reader)
        made = (place[one] + 1 for node in group.nodes for one in _ahead(node, before) if place[one] < group.reader)
        least = max([first, *made, _read(groups, index, limits[phase])])
        at = min(group.reader, max(least, bisect_right(times, start_s) - 1))
        while nodes[at].op == "placeholder":
            at += 1
        for node in group.nodes:
            nodes[at].prepend(node)


def _ahead(fetch: Node, before: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """What makes or writes what is fetched."""
    (source,) = fetch.all_input_nodes
    return [source, *before.get(root(source), ())]


def _groups(fetches: Sequence[Node], place: dict[Node, int], device: Device) -> list[_Group]:
    found: dict[int, list[Node]] = {}
    for node in fetches:
        found.setdefault(min(place[user] for user in node.users), []).append(node)
    return [
        _Group(found[reader], reader, sum(map(_bytes, found[reader])), sum(host_copy_seconds(node, device) for node in found[reader]))
        for reader in sorted(found)
    ]


def _read(groups: Sequence[_Group], index: int, limit: int) -> int:
    """The reader of the group that has to be read before this one starts, so that no more than a window waits."""
    filled = groups[index].size
    for before in range(index - 1, -1, -1):
        filled += groups[before].size
        if filled > limit:
            return groups[before].reader
    return 0
