"""Sums over the whole batch that a microbatch reads: means that enter a product, as the load-balancing loss of routed experts has them.

    chosen = mean(one_hot(choice)), likely = mean(p), loss = .. + sum(chosen * likely)
    d p of a row = chosen / rows: of all rows, those of later microbatches too

    first:  forward of microbatch k as far as part:chosen needs it         all microbatches, before the first `each`
    each:   forward and backward of microbatch k, which reads sum:chosen

What `first` makes it hands to nobody, so that a step holds no more than without it; forward runs once more as far as the sums need it.
Under a pipeline there is no `first`: forward halves make the parts, and the schedule has to run them for all microbatches before a backward
half reads the sum (`passes/stages/whole_sums.py`).

Sums that are made of other such sums would need forward once more for each of them (batch norm in a second layer), and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Graph, Node

from meshc.errors import CompileError
from meshc.ir import record, spmd
from meshc.ir.graph import made_of, read_by
from meshc.ir.spmd import MICROBATCH
from meshc.passes.phases.lowered import Lowered


def refuse_gathered(graph: Graph, sums: Collection[Node]) -> None:
    """Raises CompileError for what has rows of all microbatches otherwise than as one of the sums."""
    for node in graph.nodes:
        if spmd.is_collective(node.target) and node not in sums and MICROBATCH in node.args[1]:
            raise _mixes(node)


def ahead_of(graph: Graph, varies: Collection[Node], done: Collection[Node], sums: Sequence[Node], lowered: Lowered) -> list[Node]:
    """Those of the sums that microbatches read. CompileError: they cannot be made before.

    varies  nodes that differ between microbatches, up to sums
    done    nodes that read a sum
    """
    clashing = [node for node in graph.nodes if node in varies and node in done]
    if not clashing:
        return []
    needed = made_of(clashing)
    read = [total for total in sums if total in needed]
    made = made_of(operand for total in read for operand in total.all_input_nodes)
    again = next((total for total in read if total in made), None)
    if again is not None or lowered.parts is not None:
        raise _mixes(again or clashing[0], read)
    return read


def _mixes(node: Node, sums: Sequence[Node] = ()) -> CompileError:
    cause = next((total for total in sums if node in read_by([total])), node)
    found = record(cause)
    return CompileError(
        f"{found.reason.split(' ')[0].rstrip(',') or cause.name} at {found.source} mixes the whole batch, so the batch cannot be cut into "
        "microbatches without changing the result.\n"
        '  what to do: TrainStep(..., batch_mix="mean_of_parts") if the step may be the mean of what each microbatch gives alone, '
        "microbatches=1, or a norm that does not mix the batch, such as group norm"
    )
