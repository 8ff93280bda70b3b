"""Predicted seconds of collectives (the fastest algorithm for each), messages and host copies by the alpha-beta model, and the links used.

    seconds = overhead + steps * latency + bytes through a rank's link / bandwidth       S: bytes of the operand, of the result for a gather

    all_reduce       ring    2 (n - 1) steps    2 (n - 1) / n * S     each rank sums one part and hands it round
                     tree    2 log2(n) steps    2 * S                 up and down two trees, each for half, in pieces
                     direct  1 step             (n - 1) * S           all send all they have to all
    all_gather       ring    n - 1 steps        (n - 1) / n * S       reduce_scatter alike
    all_to_all       direct  1 step             (n - 1) / n * S
    ring_shift       direct  1 step             S                     one message out, one in
    to_zigzag        direct  1 step             S / 2                 likewise, as far away as the axis is long; from_zigzag alike
    halo, halo_sum   direct  1 step             bytes that move
    gather_rows, scatter_rows    likewise; rows for other nodes go through a rank's own port, in parallel with rows within its node

Ring and tree are NCCL's (src/graph/tuning.cc counts their steps so), gloo's ring too; direct is what two ranks do. Thakur, Rabenseifner,
Gropp: Optimization of Collective Communication Operations in MPICH (IJHPCA 19(1), 2005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.fx import Node

from meshc import ir
from meshc.cost.devices import Device, Link, RankDevices
from meshc.ir import spmd
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.storage_moves import TIERS, Storage
from meshc.ir.window import received_elements
from meshc.program import in_flight


@dataclass(frozen=True)
class Way:
    """One algorithm of a collective: number of sequential steps, and bytes through each rank's link."""

    name: str
    steps: int
    moved: float

    def seconds(self, link: Link) -> float:
        return self.steps * link.latency_s + self.moved / link.bandwidth_Bps


def ways(kind: str, ranks: int, size: float) -> list[Way]:
    """The algorithms of a collective over `ranks` ranks. `size`: bytes of the operand; for an all_gather of the result; for a halo those
    that move."""
    n = ranks
    if kind == "all_reduce":
        rounds = math.ceil(math.log2(n))
        return [
            Way("ring", 2 * (n - 1), 2 * (n - 1) / n * size),
            Way("tree", 2 * rounds, 2 * size),
            Way("direct", 1, (n - 1) * size),
        ]
    if kind in ("all_gather", "reduce_scatter"):
        return [Way("ring", n - 1, (n - 1) / n * size)]
    if kind == "all_to_all":
        return [Way("direct", 1, (n - 1) / n * size)]
    return [Way("direct", 1, size)]


def fastest(kind: str, ranks: int, size: float, link: Link) -> Way:
    return min(ways(kind, ranks, size), key=lambda way: way.seconds(link))


def send_seconds(size: float, link: Link) -> float:
    """Seconds of one message of `size` bytes between two ranks."""
    return link.latency_s + size / link.bandwidth_Bps


def copy_seconds(size: float, device: Device, storage: Storage = "host") -> float:
    """A copy of `size` bytes between a device and its host, with nothing else on the way; of a device that is the host, in its memory. On
    another `storage` it takes what is slowest of the ways there; of a file, as if nothing of it were in memory."""
    links = map(device.link_to, TIERS[storage].links)
    return max(device.launch_s + 2 * size / device.bytes_per_s if link is None else send_seconds(size, link) for link in links)


def host_copy_seconds(node: Node, device: Device) -> float:
    """The same of a copy of a per-rank graph."""
    size, ends = ir.local_bytes(ir.record(node)), {ir.record(one).storage for one in (node, *node.all_input_nodes)}
    return max((copy_seconds(size, device, one) for one in TIERS if one in ends), default=copy_seconds(size, device))


def link_of(mesh: Mesh, axes: Sequence[str], device: Device) -> Link:
    """The link that bounds a collective over these axes.

    Ranks of one node use the link inside it. A group over several nodes is bounded by the ports of its ranks in a node together: eight
    ranks of a node in one group have eight ports.
    """
    inside, between = device.links
    together = fewest_together(mesh, tuple(axes), device.ranks_per_node)
    if not together:
        return inside
    return Link(between.latency_s, min(inside.bandwidth_Bps, together * between.bandwidth_Bps))


def pair_link(devices: RankDevices, axis: str, one: int, other: int) -> Link:
    """The link between ranks at these two positions along an axis, by the devices of both."""
    return link_of(devices.mesh, [axis], devices.slowest({axis: one}, {axis: other}))


def hop_of(mesh: Mesh, axes: Sequence[str], device: Device) -> Link:
    """The link that bounds a shift along a ring over these axes: one rank's port if the ring spans several nodes."""
    inside, between = device.links
    return between if fewest_together(mesh, tuple(axes), device.ranks_per_node) else inside


def across_and_inside(mesh: Mesh, axes: Sequence[str], device: Device) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(axes between nodes, axes inside a node); None unless the axes divide so, those between nodes first."""
    names = tuple(axis for axis in axes if mesh.size(axis) > 1)
    for cut in range(1, len(names)):
        first, second = (fewest_together(mesh, part, device.ranks_per_node) for part in (names[:cut], names[cut:]))
        if first and not second:
            return names[:cut], names[cut:]
    return None


@lru_cache(maxsize=1024)
def fewest_together(mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int) -> int:
    """The smallest number of ranks in a node of any group over `axes` that spans several nodes; 0 if none does."""
    fewest = 0
    for group in mesh.groups(axes):
        nodes = [rank // ranks_per_node for rank in group]
        if len(set(nodes)) > 1:
            least = min(map(nodes.count, set(nodes)))
            fewest = min(fewest, least) if fewest else least
    return fewest


def payload(node: Node, sizes: Mapping[str, int]) -> int:
    """Bytes of a collective on each rank: of the operand; for an all_gather of the result, the larger side; for halo and halo_sum those
    that the rank with most receives, or sends; for a change of order the half that moves; for chosen rows those that move if all experts
    are equally likely."""
    if node.target in spmd.OF_ROWS:
        whole = node if node.target is spmd.gather_rows else node.args[0]
        ranks = math.prod(sizes[axis] for axis in node.args[1])  # type: ignore[union-attr, misc, index]
        share = node.args[4]
        assert isinstance(whole, Node) and isinstance(share, float)
        return int(ir.local_bytes(ir.record(whole)) * share * (ranks - 1) / ranks)
    if node.target in spmd.OF_ORDER:
        return in_flight.half_bytes(node)
    moved = node if node.target is spmd.all_gather else node.args[0]
    if node.target not in (spmd.halo, spmd.halo_sum):
        return sum(map(ir.local_bytes, ir.records(moved)))  # type: ignore[arg-type]
    operand, axes, dim, size, window = node.args[:5]
    found = ir.record(operand)  # type: ignore[arg-type]
    along = received_elements(size, [sizes[axis] for axis in axes], window)  # type: ignore[union-attr, arg-type, index]
    return ir.local_bytes(found) // max(1, found.shape[dim]) * along  # type: ignore[index]


def rows_by_link(node: Node, mesh: Mesh, device: Device) -> tuple[float, float]:
    """Bytes (within its node, between nodes) of chosen rows that a rank receives, or of their sums that it sends, under even routing."""
    axes = tuple(node.args[1])  # type: ignore[arg-type]
    ranks = math.prod(map(mesh.size, axes))
    size = payload(node, axis_sizes(mesh))
    near = (fewest_together(mesh, axes, device.ranks_per_node) or ranks) - 1
    return size * near / (ranks - 1), size * (ranks - 1 - near) / (ranks - 1)


def _rows_seconds(times: float, node: Node, mesh: Mesh, device: Device) -> float:
    """Seconds of an exchange of rows: all messages at once, those to other nodes through the rank's own port."""
    near, far = rows_by_link(node, mesh, device)
    inside, between = device.links
    takes = send_seconds(times * near, inside)
    return max(takes, send_seconds(times * far, between)) if far else takes


def collective_seconds(node: Node, mesh: Mesh, device: Device, times: float = 1.0) -> float:
    """Predicted seconds of a collective of a per-rank graph, without other traffic on the link; its bytes are multiplied by `times`."""
    axes = tuple(node.args[1])  # type: ignore[arg-type]
    if axes == (spmd.MICROBATCH,):
        return 0.0
    ranks = math.prod(map(mesh.size, axes))
    if ranks == 1:
        return 0.0
    size = times * payload(node, axis_sizes(mesh))
    if node.target in spmd.OF_ROWS:
        return device.collective_s + _rows_seconds(times, node, mesh, device)
    link = (hop_of if node.target is spmd.ring_shift else link_of)(mesh, axes, device)
    return device.collective_s + fastest(node.target.__name__, ranks, size, link).seconds(link)  # type: ignore[union-attr]
