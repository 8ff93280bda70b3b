"""Proof that a model is a few of its layers, repeated: the captured depth, or the first difference.

    run the whole model without values; find where equal layers repeat; run it again with the lists cut; nothing else may differ

A difference outside the lists comes from code that depends on the number of layers (a scale), or reads a layer that would be left out.
Such a model is captured whole, with a note of the first difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from meshc.frontend.listed_experts import is_listed
from meshc.passes.depth.comparable_values import comparable_value
from meshc.passes.depth.layer_settings import LayerSettings
from meshc.passes.depth.probe import LEAST, UNKNOWN, Log, Origin, RecordedCall, probe
from meshc.passes.depth.slice_layers import slice_layers
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.captured_depth import INSIDE, Depth, Stretch
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.request import Request


def with_depth(outset: CompilationPhase, whole_ends: bool = False) -> CompilationPhase:
    """The phase with the captured depth, or with a note of why all layers are captured."""
    if outset.request.options.debugging.depth == "whole":
        return outset
    if any(str(name).isdecimal() for place in outset.request.numbers for _, name in place.steps):
        return outset.with_notes(whole_note("a number that is an input is one layer's"))
    if outset.plan.stage_compressions:
        return outset.with_notes(whole_note("what is rounded between stages differs from layer to layer"))
    try:
        return replace(outset, depth=prove(outset.request, whole_ends))
    except Unequal as difference:
        return outset.with_notes(whole_note(difference))


def whole_note(difference: object) -> str:
    return f"all layers of the model are compiled, one by one: {difference}"


def prove(request: Request, whole_ends: bool = False) -> Depth | None:
    """The depth to capture; None if the model has no list of layers of which any could be left out. Raises Unequal. `whole_ends`: where
    blocks have several layers, a whole block is captured at each end, not one layer."""
    lists = [*_lists(request.module)]
    if not lists or request.dynamic:
        return None

    def layers_of(log: Log, said: LayerSettings) -> dict[str, Layers]:
        return {path: Layers(path, [*request.module.get_submodule(path).children()], log, said) for path in lists}

    whole, said = _log(request, lists, "its code does what tensors without values cannot"), LayerSettings(request)
    faces = layers_of(whole, said)
    runs = {path: layers.runs(whole_ends) for path, layers in faces.items()}
    runs = {path: found for path, found in runs.items() if any(run.left_out for run in found)}
    if not runs:
        raise Unequal(next(iter(faces.values())).difference())
    captured = {path: _captured_layers(found) for path, found in runs.items()}
    stretches = tuple(stretch for path, found in runs.items() for stretch in _stretches(path, found))
    assert whole.output is not None
    depth = Depth(stretches, captured, whole.output)
    with slice_layers(request.module, depth):
        part = _log(request, lists, "its code does not go over its lists alone: with fewer layers in them it raises")
        cut = layers_of(part, said.among(depth))
    numbers = {path: _numbers(found) for path, found in runs.items()}
    numbers |= {path: {number: number for number in range(len(layers.faces))} for path, layers in faces.items() if path not in runs}
    _compare_layers(faces, cut, numbers)
    _compare_outside(whole, part, numbers)
    return depth


def _log(request: Request, lists: list[str], otherwise: str) -> Log:
    try:
        return probe(request, lists)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise Unequal(f"{otherwise}: {type(error).__name__}: {first}") from error


def _lists(module: nn.Module) -> Iterator[str]:
    """Paths of the lists of layers, without nested ones. Raises Unequal if one layer occurs in several places."""
    within = [path for path, each in module.named_modules() if is_listed(each)]  # lists of experts are none
    places: dict[nn.Module, str] = {}
    for path, each in module.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in within)
        if isinstance(each, nn.ModuleList) and len(each) >= LEAST and not inside:
            within.append(path)
            for number, layer in enumerate(each):
                place = places.setdefault(layer, f"{path}.{number}")
                if place != f"{path}.{number}":
                    raise Unequal(f"{place} and {path}.{number} are one module")
            yield path


def _captured_layers(runs: list[LayerRun]) -> tuple[int, ...]:
    """Numbers of the captured layers: of each run the layers ahead, two blocks, and the layers behind. Where the list's only shortened run
    is its last, as many layers from the front, so that each keeps its number in the list."""
    numbers: list[int] = []
    for run in runs:
        back = run.seam + run.period if run.left_out else run.layers
        numbers += [*range(run.first, run.first + back), *range(run.first + back + run.left_out, run.first + run.layers)]
    longest = [run for run in runs if run.left_out]
    return tuple(range(len(numbers))) if longest == [runs[-1]] else tuple(numbers)


def _numbers(runs: list[LayerRun]) -> dict[int, int]:
    """The layers that are not left out, counted from both ends of each run: number in the list -> number among the captured ones."""
    found: dict[int, int] = {}
    for run, first in _captured_first(runs):
        kept = [place for place in range(run.layers) if not run.seam <= place < run.seam + run.left_out]
        found |= {run.first + place: number for number, place in enumerate(kept, first)}
    return found


def _stretches(path: str, runs: list[LayerRun]) -> Iterator[Stretch]:
    for run, first in _captured_first(runs):
        if run.left_out:
            yield Stretch(path, first, run.period, run.blocks, run.ends, behind=run.layers - run.left_out - run.seam - run.period)


def _captured_first(runs: list[LayerRun]) -> Iterator[tuple[LayerRun, int]]:
    """Each run with the number of its first layer among the captured ones."""
    first = 0
    for run in runs:
        yield run, first
        first += run.layers - run.left_out


# ------------------------------------------------------------------------------------------------------------------ whole and part

Numbers = Mapping[str, Mapping[int, int]]
"""By the path of a list: number of a layer in the whole model -> in the part."""


def _compare_layers(whole: Mapping[str, Layers], part: Mapping[str, Layers], numbers: Numbers) -> None:
    """The part's layers do the same as the whole model's layers that they stand for. Raises Unequal."""
    for path, row in numbers.items():
        for number, kept in row.items():
            mine, theirs = whole[path].faces[number], part[path].faces[kept]
            origins = zip(mine.origins, theirs.origins, strict=False)
            if not mine.same(theirs) or not all(_is_same_in_part(x, y, numbers) or is_same_origin(x, y, kept - number) for x, y in origins):
                raise Unequal(f"{path}.{number} is given other things where there are fewer layers")


def _compare_outside(whole: Log, part: Log, numbers: Numbers) -> None:
    """Both models do the same outside the layers. Raises Unequal."""
    for mine, other in zip(whole.outside, part.outside, strict=False):
        if mine.what != other.what:
            raise Unequal(f"outside the layers {_call_name(mine)} is another call where there are fewer of them")
        for x, y in zip(mine.origins, other.origins, strict=True):
            if x == UNKNOWN:
                raise Unequal(f"outside the layers {_call_name(mine)} reads a tensor that was not made by a function of torch")
            if not _is_same_in_part(x, y, numbers):
                raise Unequal(
                    f"outside the layers {_call_name(mine)} reads {_origin_text(x)}, and {_origin_text(y)} where there are fewer of them"
                )
    if len(whole.outside) != len(part.outside):
        shorter, longer = sorted((whole.outside, part.outside), key=len)
        raise Unequal(f"outside the layers {_call_name(longer[len(shorter)])} is called once for each of them")
    calls = [((path, numbers[path][number]), rows) for (path, number), rows in whole.calls if number in numbers[path]]
    if calls != part.calls:
        raise Unequal("the layers are not called in their order, once each")
    leaves = [_origin_in_part(leaf, numbers) for leaf in whole.leaves if leaf is not None]
    if UNKNOWN in leaves or [leaf for leaf in leaves if leaf != LEFT_OUT] != [leaf for leaf in part.leaves if leaf is not None]:
        raise Unequal("the output is made of other values where there are fewer layers")


LEFT_OUT: Origin = ("left out",)


def _is_same_in_part(origin: Origin, other: Origin, numbers: Numbers) -> bool:
    """Whether an origin in the whole model is `other` in the part."""
    return origin != UNKNOWN and _origin_in_part(origin, numbers) == other


def _origin_in_part(origin: Origin, numbers: Numbers) -> Origin:
    """An origin of the whole model, as the part has it."""
    if origin[0] == "layer" and origin[1] in numbers:
        number = numbers[origin[1]].get(origin[2])
        return LEFT_OUT if number is None else (*origin[:2], number, *origin[3:])
    if origin[0] == "parameter":
        for path, row in numbers.items():
            if origin[1].startswith(f"{path}."):
                number, _, rest = origin[1][len(path) + 1 :].partition(".")
                return ("parameter", f"{path}.{row[int(number)]}.{rest}") if int(number) in row else LEFT_OUT
    return origin


def _call_name(row: RecordedCall) -> str:
    named = row.what[0]
    return str(getattr(named, "__name__", named[0] if isinstance(named, tuple) else named))


def _origin_text(origin: Origin) -> str:
    if origin[0] == "layer":
        return f"what {origin[1]}.{origin[2]} makes"
    return " ".join(map(str, origin[:2]))


# Runs of equal layers in a list of modules: which layers are equal, and with which period blocks of them repeat.
#
#     0 0 0 1 1 1 1 1 1 1     dense layers, then routed ones      stretches: 0 0 0 (three, all captured); 1 1 1 1 1 1 1
#     0 1 0 1 0 1 0 1 0 1     local and global attention          stretch of period 2: 01 01 01 01 01
#
# Two layers are equal if they make the same calls, on tensors of their own, on common ones, or on ones from equally many layers back; if
# their modules have the same classes, attributes and hooks (compared with gradients only: without, calls show all); and if the request's
# settings are the same for both (groups of the optimizer, pins, storage of parameters). Integers that grow in equal steps (`layer_idx`) do
# not make layers differ: what depends on them shows in calls.


HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PARTS: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_call_impl", *HOOKS)


Parts = tuple[tuple[str, Any], ...]
"""The compared parts of a layer, by their names in messages."""


@dataclass(frozen=True)
class LayerRun:
    """`layers` layers from `first` on that repeat with `period`: each is equal to the one a period before, except the first `ends` layers
    and the block behind these, which have none before them. The `ends` layers at both ends may be anything: they are captured, with two
    blocks from inside."""

    first: int
    layers: int = 1
    period: int = 1
    ends: int = 1

    @property
    def blocks(self) -> int:
        """Number of blocks that are left out."""
        return max(0, (self.layers - 2 * self.ends) // self.period - len(INSIDE))

    @property
    def left_out(self) -> int:
        return self.blocks * self.period

    @property
    def seam(self) -> int:
        """Number of the run's layers before those that are left out."""
        return self.ends + self.period


class Layers:
    """The layers of one list, for comparison."""

    def __init__(self, path: str, modules: Sequence[nn.Module], log: Log, said: LayerSettings) -> None:
        self.path = path
        values = log.values()
        parts: dict[int, list[Parts]] = {}
        self.faces = [_LayerSignature.of(path, number, module, log, values, said, parts) for number, module in enumerate(modules)]

    def runs(self, whole_ends: bool) -> list[LayerRun]:
        """The runs in order. Each is the one from its first layer that leaves out most, unless one from the next layer on leaves out more:
        then its first layer stands alone (T5's first layer computes what all others are passed). `whole_ends`: a whole block is captured
        at each end."""
        found: list[LayerRun] = []
        first = 0
        while first < len(self.faces):
            best = self._best(first, whole_ends)
            if 0 < best.left_out < (after := self._best(first + 1, whole_ends)).left_out:
                found, best = [*found, LayerRun(first)], after
            found.append(best)
            first = best.first + best.layers
        return found

    def _best(self, first: int, whole_ends: bool) -> LayerRun:
        """The run from layer `first` on that leaves out most."""
        found = [LayerRun(first)]
        for period in range(1, (len(self.faces) - first - 2) // (len(INSIDE) + 1) + 1):
            ends = period if whole_ends else 1
            found.append(LayerRun(first, self._layers(first, period, ends), period, ends))
        return max(found, key=lambda run: (run.left_out, -run.period))

    def _layers(self, first: int, period: int, ends: int) -> int:
        """The number of layers from `first` on that repeat; each place of a block has its own step of integers."""
        steps: dict[int, tuple[int, ...]] = {}
        for number in range(first + ends + period, len(self.faces)):
            step = self._step(number - period, number)
            if step is None or steps.setdefault((number - first) % period, step) != step:
                return number - first
        return len(self.faces) - first

    def _step(self, one: int, other: int) -> tuple[int, ...] | None:
        """The differences between the integers of two equal layers; None if the layers are not equal."""
        a, b = self.faces[one], self.faces[other]
        if not a.same(b) or not all(is_same_origin(x, y, other - one) for x, y in zip(a.origins, b.origins, strict=True)):
            return None
        return tuple(y - x for x, y in zip(a.integers, b.integers, strict=True))

    def difference(self) -> str:
        """The first difference between the second layer and the third, as text; for lists in which nothing repeats."""
        if len(self.faces) < 3:
            return ""
        a, b = self.faces[1], self.faces[2]
        for (name, mine), (_, theirs) in zip(a.parts, b.parts, strict=True):
            if mine != theirs:
                return f"{self.path}.1 and {self.path}.2 differ in {name}: {_first(mine, theirs)}"
        return f"{self.path}.1 and {self.path}.2 are given other things"


def is_same_origin(one: Origin, other: Origin, apart: int) -> bool:
    """Whether two layers, `apart` apart, read the same: one tensor, or results from equally many layers back."""
    if one == other:
        return one != UNKNOWN
    return one[0] == other[0] == "layer" and one[1] == other[1] and one[3:] == other[3:] and other[2] - one[2] == apart


@dataclass(frozen=True)
class _LayerSignature:
    """Signature of one layer for comparison.

    parts     named parts that do not depend on other layers, one object for equal layers of a list;  body: their hash
    origins   origins of tensors that the layer reads from outside, in order
    integers  integers among its attributes
    """

    body: int
    parts: Parts
    origins: tuple[Origin, ...]
    integers: tuple[int, ...]

    @classmethod
    def of(
        cls, path: str, number: int, module: nn.Module, log: Log, values: Sequence[int], said: LayerSettings, known: dict[int, list[Parts]]
    ) -> _LayerSignature:
        """`known`: the parts of the layers before, by hash, so that equal parts become one object and compare fast."""
        prefix = f"{path}.{number}"
        calls, origins = _calls(log.layers.get((path, number), []), prefix, (path, number), values)
        integers: list[int] = []
        attributes = tuple(_attributes(name, each, integers) for name, each in module.named_modules() if said.grad)
        tensors = tuple(
            (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, type(tensor))
            for table in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
            for name, tensor in table
        )
        parts = (
            ("calls", calls),
            ("attributes", attributes),
            ("parameters", tensors),
            ("what the plan and the optimizer say of them", said.of(prefix, module)),
        )
        body = hash(parts)
        alike = known.setdefault(body, [])
        found = next((one for one in alike if one == parts), parts)
        if found is parts:
            alike.append(parts)
        return cls(body, found, origins, tuple(integers))

    def same(self, other: _LayerSignature) -> bool:
        """Whether two layers are equal, apart from the values of `origins`, of which they have equally many."""
        if self.body != other.body or len(self.origins) != len(other.origins):
            return False
        return self.parts is other.parts or self.parts == other.parts


def _calls(
    rows: Sequence[RecordedCall], prefix: str, place: tuple[str, int], values: Sequence[int]
) -> tuple[tuple[Any, ...], tuple[Origin, ...]]:
    found, origins = [], list[Origin]()
    for row in rows:
        own: list[Any] = []
        for origin in row.origins:
            if origin[0] == "parameter" and origin[1].startswith(f"{prefix}."):
                own.append(("own", origin[1][len(prefix) :]))
            elif origin[0] == "layer" and origin[1:3] == place:
                own.append(("own", *origin[3:]))
            else:
                own.append(None)
                origins.append(("outside", values[origin[1]], *origin[2:]) if origin[0] == "outside" else origin)
        found.append((row.what, tuple(own)))
    return tuple(found), tuple(origins)


# ---------------------------------------------------------------------------------------------------------------------- attributes


def _attributes(name: str, module: nn.Module, integers: list[int]) -> tuple[Any, ...]:
    """A module's class and its attributes other than parameters and modules. Integers are appended to `integers`."""
    held = tuple((key, comparable_value(value, integers)) for key, value in sorted(vars(module).items()) if key not in PARTS)
    hooks = tuple((key, tuple(comparable_value(hook, integers) for hook in getattr(module, key).values())) for key in HOOKS)
    return name, type(module), held, hooks


def _first(mine: Any, theirs: Any) -> str:
    """The first place at which two nested tuples differ."""
    while isinstance(mine, tuple) and isinstance(theirs, tuple) and mine and theirs:
        mine, theirs = next(((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), (len(mine), len(theirs)))
    return f"{str(mine)[:120]} and {str(theirs)[:120]}"

