"""Ring attention: which attentions pass their keys and values from rank to rank, and which gather them, by predicted time or as requested.

    cp: seq      attention's queries are split by cp, and so are its keys where they are computed:

    gather       k, v = all_gather(k), all_gather(v)                  whole keys on each rank, the messages first, then the work
    ring         n blocks, and n - 1 times a message beside one       a block of them at a time, the messages beside the work

    zigzag       the ring in an order that gives every rank the same work (rules/zigzag.py): half of the work, and two exchanges of halves
                 where tiles have no halves of their own; elsewhere values are in that order already (zigzag_values.py)

By default the predicted faster way: keys of short sequences are gathered, since n - 1 messages have n - 1 latencies, those of long ones
pass round. Both give the same result up to the order of sums. Forward and backward of an attention are priced together, and decided alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Final

from torch.fx import Node

from meshc.cost.devices import Device, devices_of
from meshc.cost.links import fastest, hop_of, link_of, send_seconds
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.ir.spmd import SEQUENTIAL
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.factors import Factors, Instance, Token, Value, value_record
from meshc.passes.place.batch import forward_instances
from meshc.passes.place.token_shardings import sharding_by_tokens
from meshc.passes.place.written_out import written_out
from meshc.passes.place.zigzag_values import has_halves
from meshc.rules.attention import shape_of_mask
from meshc.rules.ring import ring_steps
from meshc.rules.rule import RingLetter
from meshc.rules.zigzag import can_balance

Tokens = Mapping[Token, tuple[str, ...]]
Given = Callable[[Value], Sharding | None]
PASSING: Final = ("ring", "zigzag")
"""Options that request rings."""


@dataclass
class Rings:
    """
    how      "ring" where possible, "zigzag" where possible and else a ring, "gather" always, None: what is predicted to be faster
    grad     whether there is a backward
    balanced rings in zigzag order: under a causal mask, where requested or faster
    refused  operators without a possible ring, with the reason;  slower  operators for which a ring is possible, but slower
    """

    mesh: Mesh
    sizes: Mapping[str, int]
    factors: Factors
    how: str | None
    grad: bool
    balanced: set[Node] = field(default_factory=set)
    refused: dict[Node, str] = field(default_factory=dict)
    slower: set[Node] = field(default_factory=set)

    def along(self, instance: Instance, chosen: Tokens, given: Given) -> dict[Token, tuple[str, ...]]:
        """The axes of key tokens that a ring splits, for an operator with queries split by `chosen`; empty where keys are gathered, or
        whole anyway."""
        if self.how == "gather":
            return {}
        for letter, passing in instance.rule.rings.items():
            other = passing.letter
            axes = {token: axes for token, axes in chosen.items() if token[0] == letter and set(axes) - SEQUENTIAL}
            if (other, 0) not in instance.size:
                continue
            if not axes:
                return self._apart(instance, passing, chosen, given)
            lying = _axis_positions(instance, passing, given)
            if not any(axis in split for split in lying for each in axes.values() for axis in each):
                continue  # every rank has all keys
            elsewhere = {axis for token, split in chosen.items() if token[0] != letter for axis in split}
            why = _why_not(letter, axes, [{axis: at for axis, at in split.items() if axis not in elsewhere} for split in lying])
            if why:
                self.refused[instance.node] = why
                continue
            ring: dict[Token, tuple[str, ...]] = {(other, 0): axes[(letter, 0)]}
            takes = self._seconds(instance, passing, {**chosen, **ring}, ring[other, 0][0])
            if self.how not in PASSING and min(takes, key=takes.__getitem__) == "gather":
                self.slower.add(instance.node)
                continue
            if takes["zigzag"] < (inf if self.how == "zigzag" else takes["ring"]):
                self.balanced.add(instance.node)
            return ring
        return {}

    def _apart(self, instance: Instance, passing: RingLetter, chosen: Tokens, given: Given) -> dict[Token, tuple[str, ...]]:
        """The axis of keys that stay on their ranks while few queries are gathered, if that is faster."""
        taken = {axis for axes in chosen.values() for axis in axes} | SEQUENTIAL
        lying = _axis_positions(instance, passing, given)
        free = [{axis: place for axis, place in split.items() if axis not in taken} for split in lying]
        if not passing.apart or any(split != free[0] for split in free) or list(free[0].values()) != [0]:
            return {}
        (axis,) = free[0]
        split: dict[Token, tuple[str, ...]] = {(passing.letter, 0): (axis,)}
        device, ranks = devices_of(self.mesh).slowest(), self.sizes[axis]
        link = link_of(self.mesh, (axis,), device)
        found = self._figures(instance, passing, {**chosen, **split}, device, ranks)

        def message_seconds(kind: str, size: float) -> float:
            return device.collective_s + fastest(kind, ranks, size, link).seconds(link)

        gather = 2 * message_seconds("all_gather", ranks * found.small) + found.work_s
        apart = message_seconds("all_gather", ranks * found.asked) + found.work_s / ranks + found.joined_s + 2 * device.launch_s
        if self.grad:
            gather += (
                2 * message_seconds("all_gather", ranks * found.small)
                + 2.5 * found.work_s
                + 2 * message_seconds("reduce_scatter", ranks * found.large)
            )
            apart += 2.5 * found.work_s / ranks + message_seconds("all_reduce", found.asked)
        return split if apart < gather else {}

    def _seconds(self, instance: Instance, passing: RingLetter, split: Tokens, axis: str) -> dict[str, float]:
        """Seconds of each way, forward and backward together; infinite for one that is not possible."""
        keys = passing.operands
        device, ranks = devices_of(self.mesh).slowest(), self.sizes[axis]
        link, hop = link_of(self.mesh, (axis,), device), hop_of(self.mesh, (axis,), device)
        found = self._figures(instance, passing, split, device, ranks)

        def gather_seconds(kind: str, size: float) -> float:
            return len(keys) * (device.collective_s + fastest(kind, ranks, ranks * size, link).seconds(link))

        def exchange_seconds(*sizes: float) -> float:
            """An exchange of halves, each copied beside the other half of its tile."""
            return sum(device.collective_s + send_seconds(size / 2, link) + 2 * size / device.bytes_per_s for size in sizes)

        def pass_seconds(size: float) -> float:
            return len(keys) * (device.collective_s + send_seconds(size, hop))

        def beside(work: float, message: float) -> float:
            return max(work + device.contention * message, message)

        blocks = found.steps + 1
        block, joined = found.work_s / blocks + device.launch_s, found.joined_s + device.launch_s
        gather = gather_seconds("all_gather", found.small) + found.work_s
        ring = block + found.steps * (beside(block, pass_seconds(found.small)) + joined)
        part = found.work_s / blocks / 2 + device.launch_s
        zigzag = part + (exchange_seconds(found.asked, found.asked, found.small, found.small) if found.exchanges else 0.0)
        zigzag += found.steps * (beside(part, pass_seconds(found.small)) + joined)
        if self.grad:  # 2.5 times the work, keys again, and their gradients, which share a link with them
            gather += gather_seconds("all_gather", found.small) + 2.5 * found.work_s + gather_seconds("reduce_scatter", found.large)
            ring += 2.5 * block + found.steps * (beside(2.5 * block, 2 * pass_seconds(found.small)) + joined) + pass_seconds(found.small)
            zigzag += 2.5 * part + pass_seconds(found.small)
            zigzag += exchange_seconds(*[found.asked] * 3, *[found.small] * 2) if found.exchanges else 0.0
            zigzag += found.steps * (beside(2.5 * part, 2 * pass_seconds(found.small)) + joined)
        return {"gather": gather, "ring": ring, "zigzag": zigzag if found.balances and passing.zigzag else inf}


    def _figures(self, instance: Instance, passing: RingLetter, split: Tokens, device: Device, ranks: int) -> _RingFigures:
        operands, at = [*zip(instance.values, instance.operands, strict=True)], passing.operands[0]
        (value, dims), (asked, rows) = operands[at], operands[at - 1]
        made = value_record(value)
        assert made.dtype is not None
        tile, queries = self._tile(value, dims, split), self._tile(asked, rows, split)
        whole, length = made.shape[2], value_record(asked).shape[2]
        causal, window, offset = shape_of_mask(instance.node)
        seen = min(whole, window + tile[2]) if window else whole
        large = prod(tile) * made.dtype.itemsize
        return _RingFigures(
            small=large * _unrepeated_fraction(value, self.factors),
            large=large,
            asked=prod(queries) * made.dtype.itemsize,
            work_s=4.0 * prod(queries) * seen / device.rate(made.dtype, attention=True),
            joined_s=4.0 * prod(queries) * max(4, made.dtype.itemsize) / device.bytes_per_s,
            steps=ring_steps(length, whole, tile[2], ranks, causal, window, offset),
            balances=can_balance(length, whole, tile[2], causal, window, offset),
            exchanges=not has_halves(instance, passing.letter, ranks),
        )

    def _tile(self, value: Value, dims: tuple[tuple[Token, ...], ...], split: Tokens) -> tuple[int, ...]:
        """The local shape of an operand."""
        whole = Sharding(tuple(tuple(Part("", self.factors.size[factor]) for factor in row) for row in self.factors.dims[value]))
        return local_shape(sharding_by_tokens(whole, dims, split), self.sizes)


@dataclass(frozen=True)
class _RingFigures:
    """Figures of one rank: bytes of the keys that travel, before layout repeats them (`small`) and after (`large`), and of the queries
    (`asked`); seconds of the arithmetic and of joining two partial results; the number of ring steps; whether zigzag order is possible;
    whether halves are exchanged at each attention (`zigzag_values.py`)."""

    small: float
    large: float
    asked: float
    work_s: float
    joined_s: float
    steps: int
    balances: bool
    exchanges: bool


def _unrepeated_fraction(value: Value, factors: Factors) -> float:
    """The fraction of a value's bytes before layout operators repeat them."""
    sizes = [prod(value_record(value).shape)]
    while (instance := factors.instances.get(value[0])) is not None and instance.kind == "layout":
        value = instance.values[0]
        sizes.append(prod(value_record(value).shape))
    return min(sizes) / max(1, sizes[0])


def _axis_positions(instance: Instance, passing: RingLetter, given: Given) -> list[dict[str, int]]:
    """For keys and values, axis -> index of the letter's factor that the axis splits where they are computed."""
    pairs = [(given(instance.values[at]) or Sharding(), instance.operands[at]) for at in passing.operands]
    return [
        {axis: row[d][place][1] for d, place, part in lies.parts() for axis in part.axes if row[d][place][0] == passing.letter}
        for lies, row in pairs
    ]


def _why_not(letter: str, axes: Tokens, lying: Sequence[Mapping[str, int]]) -> str:
    """Why keys cannot pass round; "" if they can. `lying`: for keys and values, the axes that split them and that no other letter takes
    here."""
    over = list(dict.fromkeys(axis for each in axes.values() for axis in each))
    if len(over) > 1:
        return f"its queries are split by several axes ({', '.join(over)}), and a ring is along one"
    if (letter, 0) not in axes:
        return f"{over[0]} splits an inner factor of its queries, which follow each other no more"
    if any(split != {over[0]: 0} for split in lying):
        return f"its keys and values are not both split by {over[0]} alone where they are made"
    return ""


WRITTEN_OUT: Final = (
    "it is written out in several operators, as it is with a score_mod, values of another size than keys, or weights that it returns"
)


def gathered_written_out(assignment: Assignment) -> list[Node]:
    """Attentions in several operators whose keys are split where they are computed and whose queries are split too."""
    found: list[Node] = []
    for instance in forward_instances(assignment.factors):
        node, lies = instance.node, assignment.given.get((instance.node, 0))
        if "weighs" in instance.rule.roles.values() and node in assignment.chosen and written_out(instance, assignment.factors) is not None:
            if lies is not None and len(lies.dims) > 1 and any(part.axes for part in lies.dims[-2]):
                found.append(node)
    return found
