"""Operator pins: axis assignments of the operators that a plan's operator pins match.

    pin op:lm_head/backward: batch/dp, vocab/tp      each operator of lm_head's backward that has batch and vocab
    pin op:*.norm/forward: -/tp                      nothing is split along tp there, and nothing stays partial over it

A pin applies to the operators of its pattern that have all factors that it names, and, if it leaves a sum partial, only add up or scale
it. Axes that a pin does not name follow the plan's entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch.fx import Node

from meshc.passes.depth.captured_names import captured_lines
from meshc.passes.phases.choices import Directive
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Instance, Token
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.deferral import may_defer
from meshc.passes.place.operator_names import named_operators
from meshc.passes.place.pins import Pinning
from meshc.passes.place.store_lines import too_many
from meshc.plan.entries import NOTHING, PARTIAL, OperatorPin
from meshc.plan.plan_faults import did_you_mean


def operator_pins(placed: PlacedModel, pinning: Pinning) -> tuple[Mapping[Node, Directive], list[str]]:
    """The assignments by the plan's operator pins, and every fault, each naming the lines of the plan. `pinning`: the plan's pins of
    tensors."""
    if not placed.plan.operators:
        return {}, []
    named = named_operators(placed)
    found: dict[Node, list[tuple[OperatorPin, Directive]]] = {}
    faults: list[str] = []
    for pin in captured_lines(placed.plan.operators, placed.depth):
        told = {name: directive_of_pin(pin, name, instance, placed, pinning.names) for name, instance in named.items() if pin.matches(name)}
        about = {name: each for name, each in told.items() if isinstance(each, Directive)}
        if not about:
            faults.append(f"{pin.where}: {next((each for each in told.values() if isinstance(each, str)), _unknown(pin, named))}")
        for name, each in about.items():
            others = found.setdefault(named[name].node, [])
            for other, theirs in others:
                faults += [f"{other.where} and {pin.where}: {why}" for why in _clashes(name, theirs, each, placed, named)]
            faults += _against_values(name, named[name], pin, each, pinning)
            others.append((pin, each))
    return {node: _merge_directives([each for _, each in pins], placed) for node, pins in found.items()}, list(dict.fromkeys(faults))


def directive_of_pin(pin: OperatorPin, name: str, instance: Instance, placed: PlacedModel, names: FactorNames) -> Directive | str:
    """The assignment that a pin gives an operator of its pattern, or why it does not apply."""
    tokens: dict[Token, tuple[str, ...]] = {}
    for split in pin.splits:
        token = token_called(split.factor, split.number, instance, names)
        if token is None:
            have = ", ".join(names.of[factor] for factor in instance.factor.values()) or "no factors"
            again = "no factor" if split.number == 1 else "not so often the factor"
            return f"{name} has {have}: {again} {split.factor!r}"
        if token in instance.whole:
            return f"{split.factor} stays whole in {name}: what it computes needs all of it"
        fault = too_many(split.axes, placed.real(instance.size[token]), placed, how="split", why="")
        if fault:
            return f"{split.factor} of {name} {fault}"
        tokens[token] = split.axes
        if token in instance.tied:
            tokens[instance.tied[token]] = split.axes
    if pin.partial and not may_defer(instance):
        return f"{name} does more than add up or scale, so no sum can stay partial past it (over {', '.join(pin.partial)})"
    return Directive(pin.axes, tokens, pin.partial)


def token_called(factor: str, number: int, instance: Instance, names: FactorNames) -> Token | None:
    """The number-th token whose factor has this name; where no factor has it as its own, of those that have it as a second name."""
    own = [token for token, each in instance.factor.items() if fnmatchcase(names.of[each], factor)]
    tokens = own or [token for token, each in instance.factor.items() if any(fnmatchcase(name, factor) for name in names.also[each])]
    return tokens[number - 1] if number <= len(tokens) else None


def _unknown(pin: OperatorPin, named: Mapping[str, Instance]) -> str:
    """The message on a pattern that matches no operator."""
    depth = pin.pattern.count("/") + 1
    within = list(dict.fromkeys(name.partition("/")[2] for name in named if fnmatchcase(name.partition("/")[0], pin.modules)))
    if within:
        return f"no operator is called {pin.pattern!r}; those of {pin.modules or 'the model itself'} are {', '.join(within)}"
    return f"no operator is called {pin.pattern!r}{did_you_mean(pin.pattern, {'/'.join(name.split('/')[:depth]) for name in named})}"


# ------------------------------------------------------------------------------------------------------------------- several lines


def _clashes(name: str, one: Directive, other: Directive, placed: PlacedModel, named: Mapping[str, Instance]) -> Iterator[str]:
    for axis in one.axes:
        if axis in other.axes and (mine := _axis_effect(axis, one)) != (theirs := _axis_effect(axis, other)):
            words = {NOTHING: "nothing", PARTIAL: "nothing, sums being partial,"}
            said = [words[what] if isinstance(what, str) else placed.names.of[named[name].factor[what]] for what in (mine, theirs)]
            yield f"in {name} {axis} splits {said[0]} in one and {said[1]} in the other; keep one of the two"
            return
    for token, axes in one.tokens.items():
        shared = set(axes) & set(other.tokens.get(token, ()))
        if [axis for axis in axes if axis in shared] != [axis for axis in other.tokens.get(token, ()) if axis in shared]:
            yield f"in {name} {', '.join(sorted(shared))} stand in another order in the other; keep one of the two"
            return


def _axis_effect(axis: str, told: Directive) -> Token | str:
    """The effect of an axis: the token that it splits, or `PARTIAL` or `NOTHING`."""
    token = next((token for token, axes in told.tokens.items() if axis in axes), None)
    return token or (PARTIAL if axis in told.deferred else NOTHING)


def _against_values(name: str, instance: Instance, pin: OperatorPin, told: Directive, pinning: Pinning) -> Iterator[str]:
    """Faults where a pin of the operator's result wants another sharding."""
    for index, dims in enumerate(instance.results):
        for (dim, position), axes in pinning.values.get((instance.node, index), {}).items():
            token = dims[dim][position]
            mine = told.tokens.get(token, ())
            if any(axis in told.axes and axis not in mine for axis in axes) or (not axes and mine):
                rival = pinning.by[((instance.node, index), dim, position)]
                yield f"{rival.where} and {pin.where}: what {name} makes is split otherwise in one than in the other; keep one of the two"


def _merge_directives(told: Sequence[Directive], placed: PlacedModel) -> Directive:
    """The assignment by several pins of one operator."""
    if len(told) == 1:
        return told[0]
    order = list(placed.sizes)
    tokens: dict[Token, tuple[str, ...]] = {}
    for each in told:
        for token, axes in each.tokens.items():
            have = tokens.get(token, ())
            longer = max(have, axes, key=len)
            tokens[token] = longer if {*have, *axes} == {*longer} else tuple(sorted({*have, *axes}, key=order.index))
    return Directive(
        tuple(dict.fromkeys(axis for each in told for axis in each.axes)), tokens,
        tuple(dict.fromkeys(axis for each in told for axis in each.deferred)),
    )  # fmt: skip
