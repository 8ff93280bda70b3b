"""Proof that a model is a few of its layers, repeated: the captured depth, or the first difference.

    run the whole model without values; find where equal layers repeat; run it again with the lists cut; nothing else may differ

A difference outside the lists comes from code that depends on the number of layers (a scale), or reads a layer that would be left out.
Such a model is captured whole, with a note of the first difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from meshc.frontend.listed_experts import is_listed
from meshc.passes.depth.layer_runs import LayerRun, Layers, is_same_origin
from meshc.passes.depth.layer_settings import LayerSettings
from meshc.passes.depth.probe import LEAST, UNKNOWN, Log, Origin, RecordedCall, probe
from meshc.passes.depth.slice_layers import slice_layers
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.captured_depth import Depth, Stretch
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.request import Request


def with_depth(outset: CompilationPhase, whole_ends: bool = False) -> CompilationPhase:
    """The phase with the captured depth, or with a note of why all layers are captured."""
    if outset.request.options.debugging.depth == "whole":
        return outset
    if any(str(name).isdecimal() for place in outset.request.numbers for _, name in place.steps):
        return outset.with_notes(whole_note("a number that is an input is one layer's"))
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
            if not mine.same(theirs) or not all(_is_same_origin(x, y, numbers) or is_same_origin(x, y, kept - number) for x, y in origins):
                raise Unequal(f"{path}.{number} is given other things where there are fewer layers")


def _compare_outside(whole: Log, part: Log, numbers: Numbers) -> None:
    """Both models do the same outside the layers. Raises Unequal."""
    for mine, other in zip(whole.outside, part.outside, strict=False):
        if mine.what != other.what:
            raise Unequal(f"outside the layers {_call_name(mine)} is another call where there are fewer of them")
        for x, y in zip(mine.origins, other.origins, strict=True):
            if x == UNKNOWN:
                raise Unequal(f"outside the layers {_call_name(mine)} reads a tensor that was not made by a function of torch")
            if not _is_same_origin(x, y, numbers):
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


def _is_same_origin(origin: Origin, other: Origin, numbers: Numbers) -> bool:
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

