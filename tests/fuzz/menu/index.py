"""Indexing by data, and values made of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.menu.entry import Entry

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer


def _embedding(d: Drawer) -> tuple[str, list[str]]:
    rows, width = max(d.extent(), 1), d.extent()
    index = d.indices(d.any_shape(1, 3), rows)
    options = f", padding_idx={d.number(0, rows - 1)}" if d.coin(0.3) else ""
    return f"F.embedding({{0}}, {{1}}{options})", [index, d.like([rows, width])]


def _index_select(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    dim = d.dim(x)
    return f"torch.index_select({{0}}, {dim}, {{1}})", [x, d.indices([max(d.extent(), 1)], d.shape(x)[dim])]


def _gather(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    shape = d.shape(x)
    dim = d.number(0, len(shape) - 1)
    short = [max(d.extent(), 1) if i == dim else (d.number(1, extent) if d.coin(0.15) else extent) for i, extent in enumerate(shape)]
    return f"{{0}}.gather({dim}, {{1}})", [x, d.indices(short, shape[dim])]


def _scatter(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    shape = d.shape(x)
    dim = d.number(0, len(shape) - 1)
    short = [max(d.extent(), 1) if i == dim else extent for i, extent in enumerate(shape)]
    index = d.indices(short, shape[dim])
    if d.coin(0.2):
        return f"{{0}}.scatter({dim}, {{1}}, 0.5)", [x, index]
    text = d.one((f"{{0}}.scatter_add({dim}, {{1}}, {{2}})",
                  f"{{0}}.scatter_reduce({dim}, {{1}}, {{2}}, '{d.one(('amax', 'amin', 'sum'))}')"))
    return text, [x, index, d.like(short)]


def _index_add(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    shape = d.shape(x)
    dim = d.number(0, len(shape) - 1)
    count = max(d.extent(), 1)
    source = d.like([count if i == dim else extent for i, extent in enumerate(shape)])
    return f"{{0}}.index_add({dim}, {{1}}, {{2}})", [x, d.indices([count], shape[dim]), source]


def _indexed(d: Drawer) -> tuple[str, list[str]]:
    """x[i], x[:, i], x[i, j], x[i, :, j]."""
    x = d.floating(1, 4, filled=True)
    shape = d.shape(x)
    at = d.some(len(shape))[:2]
    extents = [max(d.extent(), 1) for _ in range(d.number(1, 2))]
    operands = [x, *(d.indices(extents if d.coin(0.8) else extents[-1:], shape[dim]) for dim in at)]
    places = iter(range(1, len(operands)))
    inside = ", ".join(f"{{{next(places)}}}" if dim in at else ":" for dim in range(at[-1] + 1))
    return f"{{0}}[{inside}]", operands


def _index_put(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 3, filled=True)
    shape = d.shape(x)
    dim = d.number(0, len(shape) - 1)
    count = max(d.extent(), 1)
    places = ":, " * dim + "{1}"
    index = d.indices([count], shape[dim])
    if d.coin(0.3):
        return f"{{out}} = {{0}}.clone()\n{{out}}[{places}] = 0.75", [x, index]
    adds = dim < 2 and d.coin(0.7)
    # of rows written twice any may stay, so they must be equal
    values = d.broadcasting([(count if adds else 1) if i == dim else extent for i, extent in enumerate(shape)])
    if not adds:
        return f"{{out}} = {{0}}.clone()\n{{out}}[{places}] = {{2}}", [x, index, values]
    before = f"torch.arange({shape[0]})[:, None], " * dim
    return f"torch.index_put({{0}}, ({before}{{1}},), {{2}}, accumulate=True)", [x, index, values]


def _by_truths(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    return d.one(("{out} = {0}.clone()\n{out}[{1}] = 0.25", "{0}.masked_fill({1}, 0.0)", "torch.where({1}, {0}, {0}.sum())")), [
        x, d.truths(d.shape(x))]  # fmt: skip


def _one_hot(d: Drawer) -> tuple[str, list[str]]:
    classes = max(d.extent(), 1)
    return f"F.one_hot({{0}}, {classes}).double()", [d.indices(d.any_shape(1, 2), classes)]


def _positions(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    extent = d.shape(x)[-1]
    text = d.one((f"{{0}} + torch.arange({extent}, dtype=torch.float64)",
                  f"{{0}} * torch.linspace(0.0, 1.0, {extent}, dtype=torch.float64)",
                  f"{{0}}.masked_fill(torch.arange({extent}) > {extent // 2}, -1.0)", f"{{0}} + torch.arange(1, {2 * extent + 1}, 2) * 0.1",
                  f"{{0}} * (torch.arange({extent}).unsqueeze(1) >= torch.arange({extent})).double().sum(1)",
                  f"{{0}} + torch.eye({extent})[0]",
                  f"{{0}} - torch.ones({extent}).cumsum(0)", f"{{0}} * torch.full(({extent},), 0.5)",
                  f"{{0}} + torch.tensor({[0.5 * i for i in range(extent)]})"))  # fmt: skip
    return text, [x]


def _causal(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 4, filled=True)
    rows, columns = d.shape(x)[-2:]
    mask = f"torch.ones({rows}, {columns}, dtype=torch.bool)"
    return d.one((f"{{0}}.masked_fill({mask}.triu(1), -3.0).softmax(-1)", f"{{0}} * {mask}.tril()",
                  f"torch.where({mask}.triu(1), {{0}}, 0.0)")), [x]


def _searched(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 3, filled=True)
    return d.one(("torch.bucketize({0}, torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64))",
                  "torch.take_along_dim({0}, {0}.argsort(-1), -1)",
                  "{0}.gather(-1, {0}.argmax(-1, keepdim=True))",
                  "{0}.index_select(-1, torch.arange({0}.shape[-1] - 1, -1, -1))")), [x]  # fmt: skip


MENU: dict[str, Entry] = {
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _scatter,
    "index_add": _index_add,
    "indexed": _indexed,
    "index_put": _index_put,
    "by truths": _by_truths,
    "one_hot": _one_hot,
    "positions": _positions,
    "causal": _causal,
    "searched": _searched,
}
