"""Raise written-out attention: torch calls of an attention that a model writes out, as one call.

    scores = matmul(q, transpose(k, 2, 3)) * scale + bias                     out = weighed(q, transpose(transpose(k, 2, 3), -2, -1), v,
    scores = masked_fill(scores, hidden, -inf)                                              [bias], [(hidden, -inf)], scale, ...)
    weights = dropout(softmax(scores, -1, dtype=float32).to(q.dtype), 0.1)
    out = matmul(weights, v)

    combined = cat([scores, sinks], -1)                                       the same with sinks, as gpt-oss has them
    weights = softmax(combined - combined.max(-1, True)[0], -1)[..., :-1]

Part of `raise_ops`, after the numbering of random calls. Unchanged where something else reads the values between (a model that also
returns its attention weights), where weights have fewer bits than queries, where scores are filled with a number that does not hide
(adding it would not be the same as replacing a score), and where weights beside sinks are dropped.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from meshc.ops.attention_masked_blocks import NEVER
from meshc.ops.random_calls import RAISED
from meshc.ops.sdpa import written_out_attention
from meshc.passes.trace.chains import (
    ADDS,
    DIVIDES,
    FILLS,
    IDLE,
    MATMULS,
    MULTIPLIES,
    SOFTMAXES,
    SUBTRACTS,
    PatternMismatch,
    argument,
    drops_nothing,
    forget,
    need,
    node_of,
    only,
    plain_number,
    reader,
)
from meshc.passes.trace.stand_ins import StandIns, own_result

functional = torch.nn.functional
DROPOUT: Final = RAISED[functional.dropout]


def raise_written_out(module: GraphModule, stand_ins: StandIns) -> None:
    """Replaces the calls in place."""
    graph = module.graph
    for softmax in list(graph.nodes):
        if softmax.op not in ("call_function", "call_method") or softmax.target not in SOFTMAXES or softmax in stand_ins.transformed_nodes:
            continue
        try:
            dim = argument(softmax, 1, "dim")
            need(dim == -1 or dim == 3 and _dims(softmax) == 4)
            found = _WrittenAttention()
            out = found.match_values(softmax)
            found.match_scores(found.without_sinks(node_of(softmax.args[0])))
            found.check(softmax)
        except PatternMismatch:
            continue
        with graph.inserting_before(out):
            turned = graph.call_method("transpose", (found.turned, -2, -1))
            operands = found.q, turned, found.values, found.biases, found.hidden, found.scale, _dtype(softmax), found.sinks
            made = graph.call_function(written_out_attention, operands if found.sinks is not None else operands[:-1], found.drops)
        turned.meta.update(found.turned.meta)
        turned.meta.pop("example_value", None)
        made.meta.update(out.meta)
        stand_ins.compare(made)
        out.replace_all_uses_with(made)
        forget(out)
        own_result(made)


def _example(x: Node) -> torch.Tensor:
    found = x.meta.get("example_value")
    if not isinstance(found, torch.Tensor):
        raise PatternMismatch
    return found


def _dims(x: Node) -> int:
    return _example(x).dim()


def _dtype(x: Node) -> torch.dtype:
    return _example(x).dtype


@dataclass
class _WrittenAttention:
    """The operands of a written-out attention.

    biases  summands of the scores           hidden  (mask, number that hides)       drops  keywords of the dropout of the weights
    sinks   a further column of the scores, if the weights are read without it (`all_but_last`)
    """

    biases: list[Node] = field(default_factory=list)
    hidden: list[tuple[Node, float]] = field(default_factory=list)
    scale: float = 1.0
    drops: dict[str, Any] = field(default_factory=dict)
    sinks: Node | None = None
    all_but_last: bool = False

    def match_values(self, softmax: Node) -> Node:
        """The product of the weights and the values; records `values` and `drops`."""
        weights, following = softmax, reader(softmax)
        if following.target is operator.getitem:
            need(following.args[1] == (Ellipsis, slice(None, -1, None)))
            self.all_but_last, weights, following = True, following, reader(following)
        while following.target not in MATMULS:
            need(following.args and following.args[0] is weights)
            if following.target is DROPOUT:
                need(not self.drops and not argument(following, 3, "inplace", False))
                named = ("seed_step", "call")
                self.drops = {"p": argument(following, 1, "p", 0.5), **{name: following.kwargs[name] for name in named}}
            else:
                need(following.target in IDLE or drops_nothing(following))
            weights, following = following, reader(following)
        need(len(following.args) == 2 and following.args[0] is weights)
        self.values = node_of(following.args[1])
        need(self.values is not weights)
        return following

    def without_sinks(self, x: Node) -> Node:
        """The scores among the operands of a softmax; records them, and `sinks`."""
        self.scores = x
        if self.all_but_last:
            x = _without_shift(x)
            need(x.target is torch.cat and argument(x, 1, "dim") in (-1, 3) and isinstance(x.args[0], list | tuple) and len(x.args[0]) == 2)
            self.scores, self.sinks = map(node_of, x.args[0])  # type: ignore[arg-type]
            need(not self.drops)
        return self.scores

    def match_scores(self, x: Node) -> None:
        """Reads the scores from the last call to the first."""
        only(x)
        if x.target in IDLE:
            self.match_scores(node_of(x.args[0]))
        elif x.target in ADDS:
            need(len(x.args) == 2 and not x.kwargs)
            first, second = map(node_of, x.args)
            scores, bias = (first, second) if _scores(first) else (second, first)
            self.biases.append(bias)
            self.match_scores(scores)
        elif x.target in FILLS:
            where, number = argument(x, 1, "mask"), plain_number(argument(x, 2, "value"))
            need(number <= NEVER)
            self.hidden.append((node_of(where), float(number)))
            self.match_scores(node_of(x.args[0]))
        else:
            self._products(x)

    def _products(self, x: Node) -> None:
        """Reads the product of queries and keys, and its scale."""
        if x.target in (*MULTIPLIES, *DIVIDES) and not x.kwargs:
            number = plain_number(x.args[1])
            need(number != 0)
            self.scale = 1.0 / number if x.target in DIVIDES else float(number)
            x = only(node_of(x.args[0]))
        need(x.target in MATMULS and len(x.args) == 2)
        self.q, self.turned = map(node_of, x.args)

    def check(self, softmax: Node) -> None:
        """Queries, keys and values are [batch, heads, positions, head]; no value between has fewer bits. Raises PatternMismatch."""
        kind = _dtype(self.q)
        need(all(_dtype(one) == kind and _dims(one) == 4 for one in (self.q, self.turned, self.values)))
        need(kind.is_floating_point and torch.promote_types(kind, _dtype(softmax)) == _dtype(softmax))
        scores = self.scores
        while scores.target not in MATMULS:
            need(torch.promote_types(kind, _dtype(scores)) == _dtype(scores))
            scores = node_of(scores.args[0 if scores.target not in ADDS or _scores(node_of(scores.args[0])) else 1])
        need(all(_dims(bias) <= 4 and torch.promote_types(kind, _dtype(bias)) == kind for bias in self.biases))
        need(all(_dims(where) <= 4 and _dtype(where) == torch.bool for where, _ in self.hidden))


def _scores(x: Node) -> bool:
    """Whether `x` is the product of queries and keys, or a single-reader chain of scalings, fills and additions on it."""
    between = (*IDLE, *ADDS, *FILLS, *MULTIPLIES, *DIVIDES)
    while x.target in between and isinstance(x.args[0], Node) and len(x.users) == 1:
        x = x.args[0]
    return x.target in MATMULS and len(x.users) == 1


def _without_shift(x: Node) -> Node:
    """The operand of a softmax, without the subtraction of its maximum, which changes nothing."""
    if x.target not in SUBTRACTS or len(x.args) != 2:
        return x
    combined, greatest = map(node_of, x.args)
    if greatest.target is operator.getitem:
        need(greatest.args[1] == 0)
        greatest = only(node_of(greatest.args[0]))
    need(greatest.target in ("max", "amax", torch.max, torch.amax) and greatest.args[0] is combined)
    need(argument(greatest, 1, "dim") in (-1, 3) and argument(greatest, 2, "keepdim") is True)
    need(set(combined.users) == {x, greatest} and len(greatest.users) == 1 and len(x.users) == 1)
    return combined
