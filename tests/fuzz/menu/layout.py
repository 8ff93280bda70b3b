"""Views, permutations, slices, joins: what moves or shows elements without computing."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tests.fuzz.menu.entry import Entry

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer


def _view(d: Drawer) -> tuple[str, list[str]]:
    """Cut dims into factors and join others: 2 * 3 * 4 as any product of the same factors, in order."""
    x = d.floating(1, 5, filled=True)
    factors: list[int] = []
    for extent in d.shape(x):
        while d.coin(0.7) and (cuts := [n for n in range(2, extent) if extent % n == 0]):
            first = d.one(cuts)
            factors.append(first)
            extent //= first
        factors.append(extent)
    shape = [1]
    for factor in factors:
        if d.coin(0.4):
            shape[-1] *= factor
        else:
            shape.append(factor)
    shape = shape[1:] if shape[0] == 1 and len(shape) > 1 and d.coin(0.9) else shape
    if d.coin(0.2):
        shape[d.number(0, len(shape) - 1)] = -1
    return f"{{0}}.reshape({shape})", [x]


def _regroup(d: Drawer) -> tuple[str, list[str]]:
    """[6, 4] as [8, 3]: no factor in common."""
    x = d.floating(1, 4, filled=True)
    total = prod(d.shape(x))
    first = d.one([n for n in range(1, total + 1) if total % n == 0])
    return f"{{0}}.reshape({first}, {total // first})", [x]


def _flatten(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 5)
    rank = len(d.shape(x))
    start = d.number(0, rank - 1)
    return f"{{0}}.flatten({start}, {d.number(start, rank - 1)})", [x]


def _unflatten(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    dim = d.dim(x)
    extent = d.shape(x)[dim]
    first = d.one([n for n in range(1, extent + 1) if extent % n == 0])
    return f"{{0}}.unflatten({dim}, ({first}, {extent // first}))", [x]


def _permute(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 5)
    rank = len(d.shape(x))
    return f"{{0}}.permute({d.chance.sample(range(rank), rank)})", [x]


def _transpose(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 5)
    return d.one((f"{{0}}.transpose({d.dim(x)}, {d.dim(x)})", "{0}.mT", f"{{0}}.movedim({d.dim(x)}, {d.dim(x)})")), [x]


def _ones(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4)
    return d.one((f"{{0}}.unsqueeze({d.dim(x)})", "{0}[None]", "{0}.squeeze()", "{0}[..., None]", "{0}.unsqueeze(-1).squeeze(-1)")), [x]


def _expand(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(0, 3)
    shape = [d.extent() if extent == 1 else -1 for extent in d.shape(x)]
    lead = [d.extent() for _ in range(d.number(0 if -1 not in shape or len(shape) != shape.count(-1) else 1, 2))]
    return f"{{0}}.expand({[*lead, *shape]})", [x]


def _repeat_heads(d: Drawer) -> tuple[str, list[str]]:
    """[a, b, c] with each of b several times, as grouped-query attention has it."""
    x = d.floating(2, 4, filled=True)
    dim = d.number(0, len(d.shape(x)) - 1)
    count = d.number(2, 3)
    shape = d.shape(x)
    wide = [*shape[: dim + 1], count, *shape[dim + 1 :]]
    shape[dim] *= count
    return f"{{0}}.unsqueeze({dim + 1}).expand({wide}).reshape({shape})", [x]


def _slice(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 5, filled=True)
    dim = d.number(0, len(d.shape(x)) - 1)
    extent = d.shape(x)[dim]
    start = d.number(0, extent - 1)
    end = d.number(start + (0 if d.coin(0.1) else 1), extent)
    step = d.one([1, 1, 1, 2, 3])
    return f"{{0}}[{':, ' * dim}{start}:{end}{f':{step}' if step != 1 else ''}]", [x]


def _half(d: Drawer) -> tuple[str, list[str]]:
    """One of the equal parts of a dim, or the two halves the other way round."""
    x = d.floating(1, 4, filled=True)
    dim = d.one([i for i, extent in enumerate(d.shape(x)) if extent % 2 == 0])
    size = d.shape(x)[dim] // 2
    lead = ":, " * dim
    pieces = [f"{{0}}[{lead}:{size}]", f"{{0}}[{lead}{size}:]"]
    return d.one((*pieces, f"torch.cat([-{pieces[1]}, {pieces[0]}], {dim})")), [x]


def _select(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 5, filled=True)
    dim = d.number(0, len(d.shape(x)) - 1)
    extent = d.shape(x)[dim]
    return f"{{0}}.select({dim}, {d.number(-extent, extent - 1)})", [x]


def _split(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    dim = d.number(0, len(d.shape(x)) - 1)
    extent = d.shape(x)[dim]
    count = d.number(1, min(4, extent))
    size = -(-extent // count)
    pieces = -(-extent // size)
    outs = ", ".join(f"{{out{index}}}" for index in range(pieces))
    if pieces == 1:
        return f"{{0}}.split({size}, {dim})[0]", [x]
    if d.coin(0.3):
        sizes = [1] * (pieces - 1) + [extent - pieces + 1]
        return f"{outs} = torch.split({{0}}, {sizes}, {dim})", [x]
    return f"{outs} = {{0}}.{d.one(('split', 'split', 'chunk'))}({size}, {dim})".replace(f"chunk({size},", f"chunk({pieces},"), [x]


def _unbind(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    dim = d.one([i for i, extent in enumerate(d.shape(x)) if 2 <= extent <= 4])
    outs = ", ".join(f"{{out{index}}}" for index in range(d.shape(x)[dim]))
    return f"{outs} = {{0}}.unbind({dim})", [x]


def _cat(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4)
    shape = d.shape(x)
    dim = d.number(0, len(shape) - 1)
    operands = [x]
    for _ in range(d.number(1, 2)):
        operands.append(d.like(shape if d.coin(0.6) else [d.extent() if i == dim else extent for i, extent in enumerate(shape)]))
    d.chance.shuffle(operands)
    names = ", ".join(f"{{{index}}}" for index in range(len(operands)))
    return f"torch.cat([{names}], {dim})", operands


def _stack(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(0, 3)
    count = d.number(1, 3)
    operands = [x, *(d.like(d.shape(x)) for _ in range(count))]
    names = ", ".join(f"{{{index}}}" for index in range(len(operands)))
    return f"torch.stack([{names}], {d.number(0, len(d.shape(x)))})", operands


def _pad(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4)
    dims = d.number(1, min(2, len(d.shape(x))))
    amounts = [d.number(-1 if d.coin(0.2) else 0, 2) for _ in range(2 * dims)]
    if d.coin(0.2):
        return f"F.pad({{0}}, {[1] * 2 * dims}, mode='{d.one(('reflect', 'replicate', 'circular'))}')", [d.floating(dims + 1, dims + 2)]
    return f"F.pad({{0}}, {amounts}, value={d.one((0.0, 0.0, 1.5))})", [x]


def _roll(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4)
    if d.coin(0.15):
        return f"torch.roll({{0}}, {d.number(-3, 5)})", [x]
    dims = d.some(len(d.shape(x)))[:2]
    return f"torch.roll({{0}}, {[d.number(-4, 4) for _ in dims]}, {dims})", [x]


def _flip(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4)
    return f"{{0}}.flip({d.some(len(d.shape(x)))})", [x]


def _repeat(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 3)
    if d.coin(0.3):
        return f"{{0}}.repeat_interleave({d.number(1, 3)}, {d.dim(x)})", [x]
    return f"{{0}}.repeat({[d.number(1, 2) for _ in range(len(d.shape(x)) + d.coin(0.2))]})", [x]


def _written(d: Drawer) -> tuple[str, list[str]]:
    """A slice of a copy, overwritten."""
    x = d.floating(1, 4, filled=True)
    shape = d.shape(x)
    dim = d.number(0, len(shape) - 1)
    start = d.number(0, shape[dim] - 1)
    end = d.number(start + 1, shape[dim])
    lead = ":, " * dim
    return f"{{out}} = {{0}}.clone()\n{{out}}[{lead}{start}:{end}] {d.one(('=', '+=', '*='))} {{1}}", [
        x, d.broadcasting([end - start if i == dim else extent for i, extent in enumerate(shape)])]  # fmt: skip


def _selected_written(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 4, filled=True)
    shape = d.shape(x)
    dim = d.number(0, len(shape) - 1)
    at = d.number(0, shape[dim] - 1)
    rest = [extent for i, extent in enumerate(shape) if i != dim]
    text = d.one((f"{{out}} = {{0}}.select_scatter({{1}}, {dim}, {at})", f"{{out}} = {{0}} + 0.0\n{{out}}.select({dim}, {at}).mul_({{1}})"))
    return text, [x, d.like(rest)]


def _windows(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 3, filled=True)
    dim = d.number(0, len(d.shape(x)) - 1)
    extent = d.shape(x)[dim]
    return f"{{0}}.unfold({dim}, {d.number(1, min(3, extent))}, {d.number(1, 2)})", [x]


def _diagonal(d: Drawer) -> tuple[str, list[str]]:
    text = d.one(("torch.diagonal({0}, 0, -2, -1)", "torch.tril({0})", "torch.triu({0}, 1)", "torch.tril({0}, -1)", "{0}.diagonal(1, 0, 1)",
                  "torch.rot90({0}, 1, [0, 1])"))  # fmt: skip
    return text, [d.floating(2, 4)]


MENU: dict[str, Entry] = {
    "view": _view,
    "view again": _view,
    "regroup": _regroup,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "permute": _permute,
    "transpose": _transpose,
    "dims of one": _ones,
    "expand": _expand,
    "repeated heads": _repeat_heads,
    "slice": _slice,
    "half": _half,
    "select": _select,
    "split": _split,
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
    "pad": _pad,
    "roll": _roll,
    "flip": _flip,
    "repeat": _repeat,
    "written slice": _written,
    "written select": _selected_written,
    "windows": _windows,
    "diagonal": _diagonal,
}
