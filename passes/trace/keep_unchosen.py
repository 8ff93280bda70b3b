"""Keep unchosen: parameters and state of experts that no row of a batch has chosen, unchanged by an update, as in torch.optim.

    w, m, v, t = adam(w1, ..)        becomes        w = where(routed[3] > 0, w, w1), and so m, v, t

Where a model's code does not call an expert, or a cluster of an adaptive softmax, its parameters have no gradient on one device, and an
optimizer skips them: no decay, no step counted. A program has zero gradients there. How often each expert is chosen, over the whole batch
and all microbatches, is in the graph already (`count_experts.py`); the rows of a cluster are counted here, by the mask that its product
reads (`meshc/frontend/traced_adaptive.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Final

import torch
from torch import nn
from torch.fx import Node

from meshc.errors import CompileError, join_names
from meshc.frontend.listed_experts import ZEROS, unchosen_parameters
from meshc.frontend.train_step import ROUTED
from meshc.ir import record, records
from meshc.ir.keys import key_of
from meshc.optimizer.spec import GRADIENT, SUM
from meshc.passes.trace.count_experts import LAYOUT, Beside
from meshc.program.program import Port

aten = torch.ops.aten

TURNED: Final = (aten.t.default, aten.permute.default, aten.transpose.int, aten._to_copy.default)
"""Operators that keep rows as they are, in another order of dims or another dtype."""

Places = Mapping[str, tuple[tuple[str, int], ...]]
"""By parameter: (path of a module with experts or clusters, number of the expert or cluster there)."""


class UnchosenExperts:
    """
    places    parameters of experts and clusters that may not be chosen
    counts    by path, the number of rows that have chosen each expert
    clusters  by place, the same numbers of a cluster, one for each call
    """

    def __init__(
        self, call: Callable[..., Node], places: Places, kept: list[tuple[Port, Node]], clusters: Mapping[tuple[str, int], list[Node]]
    ) -> None:
        self.call, self.places, self.clusters = call, places, clusters
        metrics = [(port.name, node) for port, node in kept if port.kind == "metric"]
        self.counts = {name.removeprefix(ROUTED): node for name, node in metrics if name.startswith(ROUTED)}
        self.chosen: dict[tuple[tuple[str, int], ...], Node] = {}

    def keep_state(
        self, name: str, old: Node, new: Node, state: Mapping[str, Node], after: Mapping[str, Node]
    ) -> tuple[Node, dict[str, Node]]:
        """A parameter and its state after an update."""
        places = self.places.get(name, ())
        if not places or new is old or any(path not in self.counts and (path, number) not in self.clusters for path, number in places):
            return new, dict(after)
        if SUM in after:
            _refuse_sums(name)
        if places not in self.chosen:
            found = [count for place in places for count in self._counts(*place)]
            self.chosen[places] = self.call(aten.gt.Scalar, reduce(partial(self.call, aten.add.Tensor), found), 0)
        chosen = self.chosen[places]
        slots = {slot: value if slot == GRADIENT else self._where(chosen, value, state[slot]) for slot, value in after.items()}
        return self._where(chosen, new, old), slots

    def _counts(self, path: str, number: int) -> list[Node]:
        return self.clusters.get((path, number)) or [self.call(aten.select.int, self.counts[path], 0, number)]

    def _where(self, chosen: Node, new: Node, old: Node) -> Node:
        assert record(new).dtype == record(old).dtype
        return new if new is old else self.call(aten.where.self, chosen, new, old)


def zero_gradient_notes(module: nn.Module, gradients: Iterable[str]) -> list[str]:
    """A note where a program returns gradients of parameters that may not be chosen: only an update within a program can skip them."""
    places = unchosen_parameters(module)
    names = [name for name in gradients if name in places]
    if not names:
        return []
    return [
        f"{join_names(names, 2)} {ZEROS} where no row of a batch chooses them, and on one device none: an optimizer with decay or "
        "moments steps them here, and passes them over there\n"
        "  what to do: train by meshc.TrainStep(model, optimizer=...), whose update passes them over too"
    ]


def rows_of_clusters(module: nn.Module, places: Places, entered: Mapping[str, Node], parts: bool) -> dict[tuple[str, int], list[Node]]:
    """By place, the number of targets in clusters of adaptive softmaxes at each call; only of clusters that nothing else calls."""
    found: dict[tuple[str, int], list[Node]] = {}
    for path, each in module.named_modules():
        for number in range(len(each.tail) if isinstance(each, nn.AdaptiveLogSoftmaxWithLoss) else 0):
            first = f"{path}.tail.{number}.0.weight".removeprefix(".")
            entry = entered.get(key_of("parameter", first))
            if first in places and entry is not None:
                masks = [_mask(product, weight) for weight in _as_laid_out(entry) for product in weight.users if _is_read(product)]
                if masks and None not in masks:
                    found[path, number] = [_count(mask, parts) for mask in dict.fromkeys(masks) if mask is not None]
    return found


def _as_laid_out(entry: Node) -> list[Node]:
    """A weight, and the same weight in another order of dims or another dtype."""
    turned = [user for user in entry.users if user.target in TURNED and record(user).phase == "forward"]
    return [entry, *(one for user in turned for one in _as_laid_out(user))]


def _is_read(node: Node) -> bool:
    return records(node)[0].phase == "forward" and node.target not in TURNED


def _mask(product: Node, weight: Node) -> Node | None:
    """The mask of the rows that a product with a weight reads; None where it reads all."""
    other = next((one for one in product.all_input_nodes if one is not weight), None)
    while other is not None and other.target in (*LAYOUT, *TURNED):
        other = other.all_input_nodes[0]
    return other.all_input_nodes[0] if other is not None and getattr(other.target, "overloadpacket", None) is aten.where else None


def _count(mask: Node, parts: bool) -> Node:
    beside = Beside(mask, record(mask).source, parts)
    return beside.whole(beside.call(aten.sum.default, mask))


def _refuse_sums(name: str) -> None:
    raise CompileError(
        f"{name} may be chosen by no row of a batch, and Options(training=Training(accumulate=True)) adds up gradients over calls\n"
        "  why: on one device it has a gradient then if any of those calls has chosen it, and is passed over if none has; which have is\n"
        "  not kept\n"
        "  what to do: TrainStep(..., microbatches=N), which adds up within a call, in the place of program.accumulate(...)"
    )
