"""Sums over the whole batch that a microbatch reads, such as the means in the load-balancing loss of routed experts.

    chosen = mean(one_hot(choice)), likely = mean(p), loss = .. + sum(chosen * likely)
    d p of a row = chosen / rows, where `chosen` counts the rows of later microbatches too

    first:  forward of microbatch k as far as part:chosen needs it         all microbatches, before the first `each`
    each:   forward and backward of microbatch k, which reads sum:chosen

Nothing but the sums leaves `first`, so that a step needs no more memory than without it; forward runs once more as far as the sums need it.
Under a pipeline there is no `first`: forward halves compute the parts, and the schedule has to run these for all microbatches before a
backward half reads the sum (`passes/stages/whole_sums.py`).

Sums that depend on other such sums would need forward once more for each of them (batch norm in a second layer), and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from torch.fx import Graph, Node

from meshc.errors import CompileError
from meshc.ir import record, spmd
from meshc.ir.graph import ancestors_of, descendants_of
from meshc.ir.spmd import MICROBATCH
from meshc.passes.phases.lowered_program import LoweredProgram


def refuse_gathered_rows(graph: Graph, sums: Collection[Node], sizes: Mapping[str, int]) -> None:
    """Raises CompileError for a collective over microbatches that is none of the `sums`. `sizes`: of the axes."""
    for node in graph.nodes:
        if spmd.is_collective(node.target) and node not in sums and MICROBATCH in node.args[1]:
            _refuse_few_rows(node, sizes)
            raise _mixes(node)


def _refuse_few_rows(node: Node, sizes: Mapping[str, int]) -> None:
    """Raises CompileError if partial rows of all microbatches are reduce-scattered and a microbatch has fewer rows than ranks."""
    (operand,) = node.all_input_nodes
    sharding = record(operand).sharding
    if sharding is None:
        return
    ranks = prod(sizes[axis] for axis, _ in sharding.partial)
    for part in (part for dim in sharding.dims for part in dim if MICROBATCH in part.axes):
        if part.size < sizes[MICROBATCH] * ranks:
            count, axes = sizes[MICROBATCH], " and ".join(axis for axis, _ in sharding.partial)
            raise CompileError(
                f"microbatches={count}: the {part.factor} has {part.size} rows, and each of {ranks} ranks along {axes} takes a row of "
                f"every microbatch, at {record(node).source}\n"
                f"  what to do: microbatches=1, or {count * ranks} rows"
            )


def sums_before_microbatches(
    graph: Graph, varies: Collection[Node], done: Collection[Node], sums: Sequence[Node], lowered: LoweredProgram
) -> list[Node]:
    """Those of the sums that microbatches read. Raises CompileError if these cannot be computed before.

    varies  nodes that differ between microbatches, up to sums
    done    nodes that read a sum
    """
    clashing = [node for node in graph.nodes if node in varies and node in done]
    if not clashing:
        return []
    needed = ancestors_of(clashing)
    read = [total for total in sums if total in needed]
    made = ancestors_of(operand for total in read for operand in total.all_input_nodes)
    again = next((total for total in read if total in made), None)
    if again is not None or lowered.parts is not None:
        raise _mixes(again or clashing[0], read)
    return read


def _mixes(node: Node, sums: Sequence[Node] = ()) -> CompileError:
    cause = next((total for total in sums if node in descendants_of([total])), node)
    found = record(cause)
    return CompileError(
        f"{found.reason.split(' ')[0].rstrip(',') or cause.name} at {found.source} mixes the whole batch, so the batch cannot be cut into "
        "microbatches without changing the result.\n"
        '  what to do: TrainStep(..., batch_mix="mean_of_parts") if the step may be the mean of what each microbatch gives alone, '
        "microbatches=1, or a norm that does not mix the batch, such as group norm"
    )
