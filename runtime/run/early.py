"""Reductions of gradients start while the last microbatches run, and not after them.

    B0.3: ... part:g2 -> sum:g2, part:g1 -> sum:g1: both are whole now, so all_reduce(cat(g1, g2)) starts; part:g0 -> ...
    after_0: r = all_reduce(cat(g1, g2))        becomes        r = early:all_reduce.wait()

What starts so stands in the stage that runs after the last microbatch, and depends on sums alone. The program does not say it, and means
the same without it: the order of what goes over one group is the same on all ranks either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.fx import Graph, Node

from meshc.ir import spmd
from meshc.program.accumulate import is_added, whole_of
from meshc.program.program import Instruction, Stage

EARLY: Final = "early:"
"""Keys of collectives on their way begin so."""


@dataclass(frozen=True)
class Reduction:
    """`stage` gives one collective's result, under `key`, once the sums that it reads are whole."""

    key: str
    stage: Stage


def without_early(late: Stage, sums: Mapping[str, int]) -> tuple[Stage, list[Reduction]]:
    """What may start before a stage does, and the rest of it. `sums` are the keys that this rank's microbatches make whole."""
    keys = dict(zip(late.graph.find_nodes(op="placeholder"), late.inputs, strict=True))
    whole = {node for node, key in keys.items() if key in sums}
    ready = set(whole)  # what is made of whole sums alone
    found: list[Node] = []
    for node in late.graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes or not ready.issuperset(node.all_input_nodes):
            continue
        if not spmd.is_collective(node.target):
            ready.add(node)
        elif not spmd.joins_stages(node):
            found.append(node)
    if not found:
        return late, []
    return _rest(late, keys, found), [Reduction(EARLY + node.name, _alone(late, keys, node)) for node in found]


def _alone(late: Stage, keys: Mapping[Node, str], wanted: Node) -> Stage:
    """A collective, with what prepares it."""
    needed, work = {wanted}, [wanted]
    while work:
        new = [operand for operand in work.pop().all_input_nodes if operand not in needed]
        needed.update(new)
        work += new
    graph, inputs = Graph(), []
    env: dict[Node, Node] = {}
    for node in late.graph.nodes:
        if node in needed:
            env[node] = graph.node_copy(node, lambda operand: env[operand])
            if node.op == "placeholder":
                inputs.append(keys[node])
    graph.output((env[wanted],))
    return Stage(f"{late.name}, {wanted.name}", graph, tuple(inputs), (EARLY + wanted.name,), late.origin)


def _rest(late: Stage, keys: Mapping[Node, str], found: Sequence[Node]) -> Stage:
    """The stage, to which the collectives found come as inputs. What only prepared them is gone."""
    graph = Graph()
    env: dict[Node, Node] = {}
    given = {**keys, **{node: EARLY + node.name for node in found}}
    for node in given:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in late.graph.nodes:
        if node not in env:
            env[node] = graph.node_copy(node, lambda operand: env[operand])
    for node in reversed([env[node] for node in late.graph.nodes]):
        if not node.users and not _acts(node):
            graph.erase_node(node)
    left = set(graph.nodes)
    return replace(late, graph=graph, inputs=tuple(key for node, key in given.items() if env[node] in left))


def _acts(node: Node) -> bool:
    """Whether a node does more than give a value: it writes, or other ranks take part in it."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "output" or spmd.is_collective(node.target) or (schema is not None and schema.is_mutable)


def made_whole(steps: Sequence[Instruction], stages: Mapping[str, Stage]) -> dict[str, int]:
    """Sums that runs of stages alone make, each with the position of the last run that adds to it."""
    found: dict[str, int] = {}
    others = {key for step in steps if step.op == "recv" for key in step.keys}
    for position, step in enumerate(steps):
        for key in stages[step.stage].outputs if step.op == "run" else ():
            whole = whole_of(key)
            if whole is not None and is_added(key) and whole[1] not in others:
                found[whole[1]] = position
    return found


class Early:
    """The reductions that one rank starts early, in each call.

    whole  sums, with the position of the last run that adds to each
    kept   keys that something else reads later
    start  makes what a stage runs: it returns collectives on their way
    """

    def __init__(
        self,
        found: Sequence[Reduction],
        whole: Mapping[str, int],
        kept: Collection[str],
        start: Callable[[Stage], Callable[..., list[Any]]],
    ) -> None:
        self.found = found
        self.whole = whole
        reads = Counter(key for one in found for key in one.stage.inputs)
        self._kept = {*kept, *(key for key, count in reads.items() if count > 1)}
        self._last = {whole[key] for one in found for key in one.stage.inputs}
        self._runs = [start(one.stage) for one in found]
        self._waiting: list[set[str]] = []

    def begin(self) -> None:
        """Before a call: nothing is whole."""
        self._waiting = [set(one.stage.inputs) for one in self.found]

    def finishing(self, position: int, env: MutableMapping[str, Any]) -> Callable[[str], None] | None:
        """What is to be told of each sum that the run at this position adds to; None if it adds to none for the last time."""
        if position not in self._last:
            return None
        return lambda key: self._added(key, position, env)

    def _added(self, key: str, position: int, env: MutableMapping[str, Any]) -> None:
        if self.whole.get(key) != position:
            return
        for one, run, waiting in zip(self.found, self._runs, self._waiting, strict=True):
            if key in waiting:
                waiting.discard(key)
                if not waiting:
                    sums = [env[name] if name in self._kept else env.pop(name) for name in one.stage.inputs]
                    (env[one.key],) = run(sums)
