"""Normalisations and pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.menu.entry import Entry

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer


def _layer_norm(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4, filled=True)
    shape = d.shape(x)[-d.number(1, min(2, len(d.shape(x)))) :]
    if d.coin(0.3):
        return f"F.layer_norm({{0}}, {shape})", [x]
    if d.coin(0.3):
        return f"F.rms_norm({{0}}, {shape}, {{1}})", [x, d.like(shape)]
    return f"F.layer_norm({{0}}, {shape}, {{1}}, {{2}})", [x, d.like(shape), d.like(shape)]


def _group_norm(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 4, filled=True)
    channels = d.shape(x)[1]
    groups = d.one([n for n in range(1, channels + 1) if channels % n == 0])
    if d.coin(0.4):
        return f"F.group_norm({{0}}, {groups})", [x]
    return f"F.group_norm({{0}}, {groups}, {{1}}, {{2}})", [x, d.like([channels]), d.like([channels])]


def _batch_norm(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 4, filled=True)
    channels = d.shape(x)[1]
    if d.coin(0.2):
        return "F.instance_norm({0})", [d.floating(3, 4, filled=True)]
    return "F.batch_norm({0}, None, None, {1}, {2}, training=True)", [x, d.like([channels]), d.like([channels])]


def _pool(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(3, 4, filled=True)
    space = len(d.shape(x)) - 2
    size = d.number(1, 3)
    text = d.one((f"F.max_pool{space}d({{0}}, {size})", f"F.avg_pool{space}d({{0}}, {size}, {d.number(1, 2)})",
                  f"F.adaptive_avg_pool{space}d({{0}}, {size})",
                  f"F.max_pool{space}d({{0}}, {size}, {d.number(1, 2)}, {size // 2})",
                  f"F.avg_pool{space}d({{0}}, {size}, padding={size // 2})",
                  f"F.adaptive_max_pool{space}d({{0}}, {size})", f"F.lp_pool{space}d({{0}}.abs() + 0.1, 2, {size})"))  # fmt: skip
    return text, [x]


def _resize(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(4, 4, filled=True)
    return d.one(("F.interpolate({0}, scale_factor=2)", "F.interpolate({0}, size=(3, 5), mode='bilinear')",
                  "F.pixel_unshuffle(F.interpolate({0}, scale_factor=2), 2)",
                  "F.interpolate({0}, size=(4, 2), mode='nearest')")), [x]  # fmt: skip


def _kept(d: Drawer) -> tuple[str, list[str]]:
    """Buffers that a step reads and writes: running statistics, averages, counters, what was seen last."""
    x = d.floating(2, 4, filled=True)
    shape = d.shape(x)
    if d.coin(0.4):
        running = [d.buffer([shape[1]]), d.buffer([shape[1]])]
        text = d.one(("F.batch_norm({0}, {1}, {2}, training=True, momentum=0.3)",
                      "F.batch_norm({0}, {1}, {2}.abs() + 0.5, training=False)"))  # fmt: skip
        return text, [x, *running]
    if d.coin(0.2):
        return "{1}.add_(1)\n{out} = {0} / {1}", [x, d.buffer([], "int64", 3)]
    if d.coin():
        dims = list(range(len(shape) - 1))
        text = d.one((f"{{1}}.mul_(0.9).add_({{0}}.detach().mean({dims}), alpha=0.1)\n{{out}} = {{0}} - {{1}}",
                      f"{{out}} = {{0}} - {{1}}\n{{1}}.lerp_({{0}}.detach().amax({dims}), 0.2)",
                      "{1}[:1] += {0}.detach().flatten()[:1]\n{out} = {0} * {1}",
                      "{out} = {0} * {1}.roll(1, 0)\n{1}.copy_({1}.roll(1, 0))"))  # fmt: skip
        return text, [x, d.buffer(shape[-1:])]
    text = d.one(("{out} = {0} + {1}\n{1}.copy_({0}.detach())", "{1}.mul_(0.5).add_({0}.detach())\n{out} = {0} * {1}.sin()"))
    return text, [x, d.buffer(shape)]


MENU: dict[str, Entry] = {
    "kept": _kept,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "pool": _pool,
    "resize": _resize,
}
