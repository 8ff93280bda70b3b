"""Pin lines of a plan for all operators that need one: few, and true of every operator that they match.

    model.layers.0.mlp.up_proj/forward/mm  ffn/tp
    model.layers.1.mlp.up_proj/forward/mm  ffn/tp            pin op:model.layers.*.mlp.up_proj: ffn/tp
    model.layers.0.mlp.up_proj/backward/mm  ffn/tp    ...

A line is true if all operators that it matches are decided as it says; it may therefore match operators that need no pin. An operator that
such a line would change along another axis is then pinned along all axes. Lines are chosen by greedy set cover (`cover_patterns.py`). Equal
operators of several layers count as one: the number of lines does not grow with the number of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from meshc.passes.phases.choices import Directive
from meshc.passes.phases.factors import Instance, Token
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.operator_names import named_operators
from meshc.passes.place.resolve_operator_pins import directive_of_pin, token_called
from meshc.passes.planner.cover_patterns import greedy_cover
from meshc.passes.planner.layer_globs import factor_of_layers, operator_of_layers
from meshc.passes.planner.needed_pins import NeededPins
from meshc.plan.entries import OperatorPin, OperatorSplit

Needs = Mapping[Node, Sequence[frozenset[str]]]
"""By operator that needs a pin: sets of axes, each of which is sufficient."""


@dataclass(frozen=True)
class _LayerOperators:
    """Operators of several layers with equal assignments; the first stands for all.

    name   with wildcards for layer numbers, or of the one operator;  members  names of all
    told   the decided assignment;  does  the same as a pin;  needs  sufficient sets of axes, empty if no pin is needed
    """

    name: str
    members: tuple[str, ...]
    instance: Instance
    told: Directive
    does: OperatorPin
    needs: tuple[frozenset[str], ...]


def choose_pins(placed: PlacedModel, walked: NeededPins) -> tuple[OperatorPin, ...]:
    """Pin lines for all operators that need one by `walked.needs`. `placed` has been annotated and has choices."""
    named = named_operators(placed)
    kinds = list(_layer_operators(placed, named, walked.needs))
    while True:
        cover = _PinCover(placed, kinds)
        lines = cover.lines()
        misled = {at for at, name, axes in cover.covered_operators(lines) if not walked.does(named[name], axes)}
        if not misled:
            return lines
        kinds = [replace(kind, needs=(frozenset(kind.told.axes),)) if at in misled else kind for at, kind in enumerate(kinds)]


def _layer_operators(placed: PlacedModel, named: Mapping[str, Instance], needs: Needs) -> Iterator[_LayerOperators]:
    alike: dict[str, list[_LayerOperators]] = defaultdict(list)
    for name, instance in named.items():
        told = placed.choices.directive(instance.node) if placed.choices is not None else None
        if told is not None:
            does = _pin_of_directive(placed, name, instance, told)
            alike[operator_of_layers(name)].append(
                _LayerOperators(name, (name,), instance, told, does, tuple(needs.get(instance.node, ())))
            )
    for name, members in alike.items():
        first = members[0]
        if all((one.does, one.needs) == (first.does, first.needs) for one in members):
            yield replace(first, name=name, members=tuple(one.name for one in members))
        else:
            yield from members


def _pin_of_directive(placed: PlacedModel, name: str, instance: Instance, told: Directive) -> OperatorPin:
    splits: list[OperatorSplit] = []
    for token, axes in told.tokens.items():
        partner = instance.tied.get(token)
        if partner is None or list(instance.size).index(token) < list(instance.size).index(partner):
            splits.append(_split_of_token(placed, instance, token, axes))
    idle = (axis for axis in told.axes if axis not in told.deferred and not any(axis in axes for axes in told.tokens.values()))
    return OperatorPin("", tuple(splits), tuple(idle), told.deferred)


def _split_of_token(placed: PlacedModel, instance: Instance, token: Token, axes: tuple[str, ...]) -> OperatorSplit:
    factor = factor_of_layers(placed.names.of[instance.factor[token]])
    number = 1
    while token_called(factor, number, instance, placed.names) != token:
        number += 1
    return OperatorSplit(factor, axes, number)


def _pin_along(does: OperatorPin, axes: Collection[str]) -> OperatorPin:
    """The part of a pin about `axes`."""
    splits = (replace(split, axes=tuple(axis for axis in split.axes if axis in axes)) for split in does.splits)
    return OperatorPin(
        does.pattern, tuple(split for split in splits if split.axes),
        tuple(axis for axis in does.whole if axis in axes), tuple(axis for axis in does.partial if axis in axes),
    )  # fmt: skip


class _PinCover:
    """Greedy cover of kinds by pin lines. A set of kinds is an integer, its n-th bit the n-th kind.

    about  by pattern: kinds that match, and kinds with a member that matches;  false  by pin: kinds that are decided otherwise
    tells  by pin: kinds for which the pin is sufficient;  hears  kinds to which the pin applies
    """

    def __init__(self, placed: PlacedModel, kinds: Sequence[_LayerOperators]) -> None:
        self.placed, self.kinds = placed, kinds
        self.about: dict[str, tuple[int, int]] = {}
        self.false: dict[OperatorPin, int] = {}
        self.tells: dict[OperatorPin, int] = {}
        self.hears: dict[OperatorPin, int] = {}

    def lines(self) -> tuple[OperatorPin, ...]:
        left = sum(1 << at for at, kind in enumerate(self.kinds) if kind.needs)
        covers = {line: cover for line, cover in self._candidates() if cover}
        # `write_plan.difference` finds what no pin can say (sizes that it may not split so)
        taken = greedy_cover(covers, left, lambda line: (len(str(line)), str(line)))
        return tuple(sorted(taken, key=lambda line: (covers[line] & -covers[line], str(line))))

    def covered_operators(self, lines: Sequence[OperatorPin]) -> Iterator[tuple[int, str, frozenset[str]]]:
        """(kind, operator, axes of its pins) of each operator that `lines` match."""
        axes: dict[tuple[int, str], set[str]] = defaultdict(set)
        for line in lines:
            heard = self.about[line.pattern][1] & self.hears[replace(line, pattern="")]
            for at, kind in enumerate(self.kinds):
                if heard >> at & 1:
                    for name in filter(line.matches, kind.members):
                        axes[at, name].update(line.axes)
        yield from ((at, name, frozenset(told)) for (at, name), told in axes.items())

    def _candidates(self) -> Iterator[tuple[OperatorPin, int]]:
        seen: set[OperatorPin] = set()
        for kind in self.kinds:
            for said in self._sayings(kind):
                for pattern in _patterns(kind.name):
                    line = replace(said, pattern=pattern)
                    if line not in seen:
                        seen.add(line)
                        yield line, self._cover(said, pattern)

    def _sayings(self, kind: _LayerOperators) -> Iterable[OperatorPin]:
        """Pins, without a pattern, of a kind that needs one: of each sufficient set of axes, and of all axes."""
        return dict.fromkeys(_pin_along(kind.does, axes) for axes in (*kind.needs, kind.told.axes)) if kind.needs else ()

    def _cover(self, said: OperatorPin, pattern: str) -> int:
        """Kinds that a line covers, none if it is false of an operator that it matches."""
        if pattern not in self.about:
            self.about[pattern] = self._matches(OperatorPin(pattern))
        every, some = self.about[pattern]
        if said not in self.false:
            self._classify(said)
        return 0 if some & self.false[said] else every & self.tells[said]

    def _matches(self, line: OperatorPin) -> tuple[int, int]:
        every = some = 0
        numbered = any(part.isdigit() for part in line.modules.split("."))
        for at, kind in enumerate(self.kinds):
            if line.matches(kind.name):
                every |= 1 << at
                some |= 1 << at
            elif numbered and any(map(line.matches, kind.members)):
                some |= 1 << at
        return every, some

    def _classify(self, said: OperatorPin) -> None:
        self.false[said] = self.tells[said] = self.hears[said] = 0
        axes = frozenset(said.axes)
        for at, kind in enumerate(self.kinds):
            told = directive_of_pin(said, kind.name, kind.instance, self.placed, self.placed.names)
            if not isinstance(told, Directive):
                continue
            self.hears[said] |= 1 << at
            if not _agrees(told, kind.told):
                self.false[said] |= 1 << at
            elif any(enough <= axes for enough in kind.needs):
                self.tells[said] |= 1 << at


def _agrees(told: Directive, done: Directive) -> bool:
    """Whether an operator decided as `done` follows `told`."""
    mine = done.along(told.axes)
    return dict(told.tokens) == dict(mine.tokens) and set(told.deferred) == set(mine.deferred)


def _patterns(name: str) -> Iterator[str]:
    """Patterns that match the operator `name`, from its own name to all operators of its kind or phase."""
    module, phase, operator = name.split("/")
    parts = module.split(".")
    modules = [module, *(".".join((*parts[:count], "*")) for count in range(len(parts) - 1, 0, -1)), "*"]
    kind = operator.partition(".")[0]
    for modules_of in dict.fromkeys(modules):
        for rest in dict.fromkeys((f"{phase}/{operator}", f"{phase}/{kind}*", f"*/{kind}*", phase, "")):
            if modules_of or rest:
                yield f"{modules_of}/{rest}".rstrip("/")
