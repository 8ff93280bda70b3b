"""Lines that are the last of what a rule writes for a traced call, in a proof."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Node

from meshc import ir
from meshc.ir import operands, records
from meshc.ir.sharding import Sharding
from meshc.proof.added_values import without_new_padding
from meshc.proof.facts import Fact, is_value, whole_sharding
from meshc.proof.held import Held, JoinedValues
from meshc.proof.regrouped import shardings_of_shape, substitute_root
from meshc.proof.repeated_lowerings import ShownLowering
from meshc.proof.replay import MOST, REFUSED, Told, padding_fault
from meshc.proof.tiles import Tiles, Unfit, tiles_of
from meshc.rules import rule_of
from meshc.rules.elementwise import is_pointwise
from meshc.rules.result_shardings import runs_of

if TYPE_CHECKING:
    from meshc.proof.erasure import Erasure


def prove_lowering(
    walk: Erasure, node: Node, found: Tiles | JoinedValues, sharding: Sharding | None, n: Node, index: int, moved: Fact | None = None
) -> str:
    """Why a line is not result `index` of the traced call `n`; "" if it is. `moved`: what the line is, if it moves the
    result."""
    tensors = operands(n)
    try:
        rule = rule_of(n, tensors)
    except REFUSED as refused:
        return f"the rule of {ir.op_name(n)}: {refused}"
    if rule is None:
        return f"{ir.op_name(n)} has no rule, and runs on what is split"
    key = walk.repeated.key(found, sharding, n, index, rule)
    if moved is None and (shown := walk.repeated.find(key)) is not None:
        know_as_shown(walk, node, shown, n, index)
        return ""
    guesses = types_of_results(walk, n, index, sharding, found)
    roots = [piece.root for piece in found.pieces] if isinstance(found, JoinedValues) else [found.root]
    leaves = [one for root in roots for one in walk.traced.terms.tiles_in(root, walk.traced.known.__contains__)]
    leaves += [one for one in (walk.held[o] for o in node.all_input_nodes) if isinstance(one, Tiles)]
    read = {leaf.root for leaf in leaves}.union(roots)
    direct = walk.traced.terms.operands(found.root, n.target) if isinstance(found, Tiles) else []
    why, other = "", ""
    tried = ((row, way, told) for row, way in walk.replays.ways(rule, tensors, leaves, direct) for told in guesses)
    for row, way, told in itertools.islice(tried, MOST):
        try:
            made = walk.replays.replay(n, rule, row, way, told, sharding is not None)
        except REFUSED as refused:
            other = other or str(refused)
            continue
        result = made.results[index] if index < len(made.results) else None
        if result != found if moved is None else not _is_moved(found, result):
            continue
        by_rule = made.shardings[index]
        why = padding_fault(rule, row, walk.sizes, read) or ("" if sharding is None else _difference(by_rule, sharding))
        if not why:
            own, value = by_rule if sharding is None else sharding, walk.traced.values[n, index]
            tiles = tiles_of(value, own, walk.sizes)
            if moved is not None:
                try:
                    tiles, value, own = substitute_root(found, result, tiles), moved.value, moved.sharding  # type: ignore[arg-type]
                except Unfit:
                    continue
                if not is_value(value, own, tiles, walk.sizes):
                    continue
            zero = row[0][0].padding if rule.keeps_zeros and row else ()
            rest = [(at, one) for at, one in enumerate(made.results) if at != index and isinstance(one, Tiles)]
            rest = [row for row in rest if (n, row[0]) in walk.traced.values]
            same = tuple((at, made.shardings[at]) for at, one in rest if one == result and moved is None)
            shown = ShownLowering(own, tuple(one for one in zero if one[1] == 0.0), same)
            exchanged = [(at, one) for at, one in rest if walk.traced.terms.term(one.root)[0] == "from_zigzag"]
            if moved is None:
                know_as_shown(walk, node, shown, n, index)
                if not exchanged:
                    walk.repeated.keep(key, row, shown)
            else:
                walk.held[node] = replace(tiles, padding=shown.padding)
                walk.know(node, tiles, Fact(value, own), "lowered")
                walk.proof.trusted[ir.op_name(n)] += 1
            if exchanged and not padding_fault(rule, row, walk.sizes, {form.root for form, _ in row}):
                for at, one in exchanged:  # there only if something reads it
                    walk.facts.add(one, Fact(walk.traced.values[n, at], made.shardings[at]))
            return ""
    return why or f"it is not what the rule of {ir.op_name(n)} writes for it" + (f"; {other}" if other else "")


def know_as_shown(walk: Erasure, node: Node, shown: ShownLowering, n: Node, index: int) -> None:
    """Notes that a line is result `index` of the traced call `n`; of some calls other results are the same line."""
    tiles = tiles_of(walk.traced.values[n, index], shown.sharding, walk.sizes)
    if node.target is n.target and is_pointwise(node):
        tiles = without_new_padding(walk, node, tiles)
    walk.held[node] = replace(tiles, padding=shown.padding)
    walk.know(node, tiles, Fact(walk.traced.values[n, index], shown.sharding), "lowered")
    for at, sharding in shown.others:
        walk.facts.add(tiles, Fact(walk.traced.values[n, at], sharding))
    walk.proof.trusted[ir.op_name(n)] += 1


def types_of_results(walk: Erasure, n: Node, index: int, sharding: Sharding | None, line: Tiles | JoinedValues) -> list[Told]:
    """The shardings that types may say the results of a call have; for those of which no line speaks a guess, whose dims matter alone
    where no operand has them."""
    rows = records(n)
    if sharding is None:
        whole = tuple(whole_sharding(one.shape) for one in rows)
        if isinstance(line, JoinedValues) or len(rows[index].shape) != len(line.dims):
            return [whole]
        own = shardings_of_shape(rows[index].shape, line.shape, walk.program.axis_sizes)
        return [(*whole[:index], one, *whole[index + 1 :]) for one in own]
    found: list[Sharding | None] = [sharding if one.shape == rows[index].shape else None for one in rows]
    for at in range(len(rows)):
        types = walk.types.get((n, at), [])
        if at != index and types:
            found[at] = next((one for one in types if one.split_axes() == sharding.split_axes()), types[0])
    like: list[Sharding | None] = [sharding if one.shape == rows[index].shape else None for one in rows]
    alone = [sharding if at == index else None for at in range(len(rows))]
    return list(dict.fromkeys(map(tuple, (found, like, alone))))


def _is_moved(found: Tiles | JoinedValues, result: Held | None) -> bool:
    """Whether a line holds the elements of a lowering's result in other places, and ranks have no others than of that."""
    if not isinstance(found, Tiles) or not isinstance(result, Tiles):
        return False
    return (found.root, found.axes, found.partial, found.uneven) == (result.root, result.axes, result.partial, result.uneven)


def _difference(found: Sharding, told: Sharding) -> str:
    """How a type differs from the sharding by the rule; "" if it does not."""
    if dict(found.partial) != dict(told.partial):
        return f"it is partial over {dict(found.partial)}, declared {dict(told.partial)}"
    for dim, (own, declared) in enumerate(zip(found.dims, told.dims, strict=True)):
        if runs_of(own) != runs_of(declared):
            return f"dim {dim} is {' * '.join(map(str, own))}, declared {' * '.join(map(str, declared))}"
    return ""
