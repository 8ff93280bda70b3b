"""Axes of an update's operators, by the storage of the state, none for those that need whole matrices; storage of each state.

    m1 = lerp(m, grad, 0.1)        elementwise: on a rank's tile of m
    n = norm(m1); x = m1 / n       on its way to a product of matrices: whole, so m1 is gathered once
    a = mm(x, x^T); ...            whole, on every rank
    w1 = add(w, y, alpha=-lr)      elementwise again: a rank's tile of y

A product between two halves of one matrix (Muon's Newton-Schulz steps, in bfloat16) would need a collective for every product, and round
otherwise than one device does; operators that lead to one compute on the whole instead. An operator without a product keeps the tiles, and
its sums over them (Adafactor's rows and columns) are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch.fx import Node

from meshc.ir import is_getitem, value_of
from meshc.ir.sharding import Sharding
from meshc.passes.phases.factors import Instance, Token


def computed_whole(updates: Iterable[Node], instances: Mapping[Node, Instance]) -> set[Node]:
    """Operators of updates on the way from the first one that is not elementwise to a product, products included."""
    order = [node for node in updates if node in instances]
    mixed: set[Node] = set()
    for node in order:
        if _mixes(instances[node]) or any(value_of(source)[0] in mixed for source in node.all_input_nodes):
            mixed.add(node)
    leading: set[Node] = set()
    for node in reversed(order):
        if _is_product(instances[node]) or any(user in leading for user in _readers(node)):
            leading.add(node)
    return mixed & leading


def _readers(node: Node) -> Iterator[Node]:
    """The operators that read a node's result, or any of its results."""
    for user in node.users:
        yield from user.users if is_getitem(user) else (user,)


def _mixes(instance: Instance) -> bool:
    """Whether an entry of the result depends on more than one entry of an operand."""
    kept = {token for dims in instance.results for row in dims for token in row}
    taken = {token for dims in instance.operands for row in dims for token in row}
    return not instance.known or bool(instance.whole) or not taken <= kept


def _is_product(instance: Instance) -> bool:
    """Whether an operator sums over a letter that two of its operands have."""
    summed = {token for sums in instance.sums for token in sums}
    return any(sum(any(token in row for row in dims) for dims in instance.operands) > 1 for token in summed)


def where_stored(instance: Instance, storage: Sharding, classes: tuple[tuple[int, ...], ...]) -> dict[Token, tuple[str, ...]]:
    """The axes of an update's letters, by the storage of the state of a parameter whose dims have these factor classes.

    An operand of the parameter's rank tells which letter stands for a dim; where it has none of that class (a mean over the dim, a
    transposed matrix), the first letter of the class does.
    """
    chosen: dict[Token, tuple[str, ...]] = {}
    for dim, position, part in storage.parts():
        if not part.axes:
            continue
        wanted = classes[dim][position]
        places = [dims[dim][position] for dims in instance.operands if len(dims) == len(storage.dims) and position < len(dims[dim])]
        tokens = [token for token in (*places, *instance.size) if instance.factor[token] == wanted]
        token = next((token for token in tokens if token not in chosen), None)
        if token is not None and token not in instance.whole and token not in instance.tied:
            chosen[token] = part.axes
    return chosen


def state_storage(whole: Sharding, mine: tuple[tuple[int, ...], ...], storage: Sharding, theirs: tuple[tuple[int, ...], ...]) -> Sharding:
    """The storage of a state whose parameter's states are stored as `storage`: like it in each dim with the same factors.

    whole  the state's unsharded type; `mine`: factor classes of its dims, `theirs`: the parameter's
    """
    if len(mine) != len(theirs):
        return whole
    for dim, position, part in storage.parts():
        if mine[dim] == theirs[dim]:
            whole = whole.with_axes(dim, position, part.axes)
    return whole
