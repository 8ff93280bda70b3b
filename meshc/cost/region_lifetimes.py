"""Corrections of live ranges in compiled regions: later readers and kernels than the order of lines says, and memory that is reused.

    with region(3):                               in the backend's generated code
        w1 = reshape(slice(bucket, 1, 0, 8))      is copied before its first reader, or read in place, not at its line:
        w2 = reshape(slice(bucket, 1, 8, 16))     the bucket is live until the last of its pieces has been read
        ...
        a_1 = silu(h); g1 = mm(t(a_1), gy)        a_1, recomputed from h, and gh are computed in one kernel, since both read h: both are
        gh = silu_backward(gy_a, h)               live at once, although a_1 could be dead by then; gh reuses the memory of gy_a, which
                                                  nothing reads later

Observed in Inductor's code (docs/decisions/memory-of-programs.md): copies of pieces are kernels of their own, ordered by their readers,
and pointwise kernels over the same operands are fused if neither depends on the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch.fx import Node

from meshc import ir
from meshc.cost.fused_values import is_fused, is_pointwise
from meshc.ir.regions import region_of
from meshc.program import packing
from meshc.program.bucket import is_copy


def bucket_piece_readers(nodes: Sequence[Node]) -> dict[Node, Node]:
    """The last reader of each copy out of a bucket, within the copy's region. `nodes`: all nodes of a stage, in order."""
    place = {node: turn for turn, node in enumerate(nodes)}
    found = {}
    for node in nodes:
        if region_of(node) is not None and is_copy(node):
            inside = [reader for reader in _readers(node) if region_of(reader) == region_of(node)]
            found[node] = max(inside, key=place.__getitem__, default=node)
    return found


def _readers(node: Node) -> Iterator[Node]:
    """The readers of a value, directly or through views of the same region."""
    for user in node.users:
        if region_of(user) == region_of(node) and packing.is_view(user) and not is_copy(user):
            yield from _readers(user)
        else:
            yield user


def fused_recomputes(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Recomputed pointwise value that is stored in memory -> the last node of its region that is computed in the same kernel."""
    found: dict[Node, Node] = {}
    regions: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        number = region_of(node)
        if number is not None:
            regions[number].append(node)
    for members in regions.values():
        if any(_is_recomputed(node) for node in members):
            found |= _region_fusions(members)
    return found


def reusable_operands(again: Node, other: Node) -> Iterator[Node]:
    """Operands whose memory a kernel that computes both nodes may reuse for the result of `other`: operands of `other` alone, computed in
    the same region, of equal size."""
    for operand in _in_memory(other) - _in_memory(again):
        inside = operand.op == "call_function" and region_of(operand) == region_of(other)
        if inside and ir.is_tensor(operand) and _is_as_large(operand, other):
            yield operand


def _is_recomputed(node: Node) -> bool:
    return is_pointwise(node) and ir.records(node)[0].again and not is_fused(node)


def _region_fusions(members: Sequence[Node]) -> dict[Node, Node]:
    reads = {node: _in_memory(node) for node in members if is_pointwise(node) and not is_fused(node)}
    by_operand: dict[Node, list[Node]] = defaultdict(list)
    for node, operands in reads.items():
        for operand in operands:
            by_operand[operand].append(node)
    place = {node: turn for turn, node in enumerate(members)}
    found = {}
    for node in filter(_is_recomputed, reads):
        behind = _dependents(node, members)
        alike = {other for operand in reads[node] for other in by_operand[operand] if _is_as_large(other, node)}
        later = [other for other in alike if place[other] > place[node] and other not in behind]
        if later:
            found[node] = max(later, key=place.__getitem__)
    return found


def _in_memory(node: Node) -> frozenset[Node]:
    """The values in memory that a kernel reads to compute a node: operands, looked up through views and fused values."""
    found: set[Node] = set()
    work = list(node.all_input_nodes)
    while work:
        operand = work.pop()
        if operand.op == "call_function" and region_of(operand) == region_of(node) and (packing.is_view(operand) or is_fused(operand)):
            work += operand.all_input_nodes
        else:
            found.add(operand)
    return frozenset(found)


def _dependents(node: Node, members: Sequence[Node]) -> set[Node]:
    """Nodes of the region that depend on `node` through an operator that cannot be fused with it, such as a product."""
    with_it, waits = {node}, set[Node]()
    for other in members:
        if any(operand in waits for operand in other.all_input_nodes):
            waits.add(other)
        elif any(operand in with_it for operand in other.all_input_nodes):
            (with_it if is_pointwise(other) or packing.is_view(other) else waits).add(other)
    return waits


def _is_as_large(one: Node, other: Node) -> bool:
    return ir.local_bytes(ir.records(one)[0]) == ir.local_bytes(ir.records(other)[0])
