"""Updates and other writes in place, in a proof: behind them the names of what they write stand for the new values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch.fx import Node

from meshc.ir import operands, record, value_of
from meshc.ops.optim import MANY, WRITTEN
from meshc.program.program import Stage
from meshc.proof.facts import Fact, whole_sharding
from meshc.proof.lowered_lines import prove_lowering
from meshc.proof.tiles import Tiles, tiles_of

if TYPE_CHECKING:
    from meshc.proof.erasure import Erasure

ONE_OF: Final = {many: one for one, many in MANY.items()}


def walk_update(walk: Erasure, stage: Stage, node: Node) -> None:
    """One update of many is one of each; behind it the names of what it writes stand for the new values."""
    one = ONE_OF[node.target]  # type: ignore[index]
    count = 1 + len(WRITTEN[one])
    columns, rest = node.args[:count], node.args[count:]
    new: dict[Node, tuple[Tiles, Fact]] = {}
    for row in zip(*columns, strict=True):
        if why := _fault_of_update(walk, one, row, rest, new):
            return walk.fail(stage, node, f"{row[0]}: {why}")
    for x, (tiles, fact) in new.items():
        walk.held[x] = tiles
        walk.know(x, tiles, fact)
    walk.proof.kinds["update"] += 1


def walk_write(walk: Erasure, stage: Stage, node: Node) -> None:
    """A call that writes its result over its first operand, whose name stands for the new value behind it."""
    x, hint = node.args[0], walk.hint(node)
    assert isinstance(x, Node)
    found, own = walk.evaluator.opaque(node, walk.held.__getitem__), record(x).sharding
    sharding = whole_sharding(record(x).shape) if own is None else own
    assert isinstance(found, Tiles)
    why = "nothing says what it is" if hint is None else prove_lowering(walk, node, found, sharding, *hint)
    if why:
        return walk.fail(stage, node, why, None if hint is None else hint[0])
    walk.held[x], walk.known[x] = walk.held[node], walk.known[node]


def _fault_of_update(walk: Erasure, one: object, row: Sequence[Node], rest: Sequence[Any], new: dict[Node, tuple[Tiles, Fact]]) -> str:
    """Why no traced update is that of one parameter; "" if one is, whose results are added to `new`."""
    given = [walk.known.get(x) for x in (*row, *(x for x in rest if isinstance(x, Node)))]
    facts = [fact for fact in given if fact is not None]
    if len(facts) < len(given):
        return "an operand is no value"
    if row[0] in new:
        return "it is written twice"
    flags = [argument for argument in rest if not isinstance(argument, Node)]
    for n in walk.updates.get((one, facts[0].value), ()):
        wanted = [walk.traced.values[value_of(operand)] for operand in operands(n)]
        if wanted != [fact.value for fact in facts] or flags != [x for x in n.args[len(row) :] if not isinstance(x, Node)]:
            continue
        written = WRITTEN[one]  # type: ignore[index]
        for place in (*written, 1):
            own = facts[place].sharding
            if own.partial or own.dims and own.shape == facts[0].value.shape and own.dims != facts[0].sharding.dims:
                return f"{row[place]} is {own}, and {row[0]} {facts[0].sharding}"
        for i, place in enumerate(written):
            fact = Fact(walk.traced.values[n, i], facts[place].sharding)
            new[row[place]] = tiles_of(fact.value, fact.sharding, walk.sizes), fact
        return ""
    return f"no traced update takes {', '.join(map(str, row[1:]))}"
