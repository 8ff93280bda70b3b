"""Matrix products, einsum, linear layers, attention, convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.menu.entry import Entry

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer


def _matmul(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4)
    inner = d.shape(x)[-1]
    right = d.like([inner, d.extent()]) if d.coin(0.7) else d.like([inner])
    return d.one(("torch.matmul({0}, {1})", "{0} @ {1}")), [x, right]


def _batched(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(3, 4)
    *lead, _, inner = d.shape(x)
    return "torch.matmul({0}, {1})", [x, d.like([*lead, inner, d.extent()])]


def _bmm(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(3, 3)
    batch, rows, inner = d.shape(x)
    columns = d.extent()
    if d.coin(0.3):
        bias = d.broadcasting([batch, rows, columns])
        return "torch.baddbmm({0}, {1}, {2})", [bias, x, d.like([batch, inner, columns])]
    return "torch.bmm({0}, {1})", [x, d.like([batch, inner, columns])]


def _gram(d: Drawer) -> tuple[str, list[str]]:
    return d.one(("{0} @ {0}.mT", "{0}.mT @ {0}", "torch.softmax({0} @ {0}.mT, -1) @ {0}")), [d.floating(2, 4)]


def _linear(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 4)
    out = d.extent()
    weight = d.like([out, d.shape(x)[-1]])
    if d.coin():
        return "F.linear({0}, {1})", [x, weight]
    return "F.linear({0}, {1}, {2})", [x, weight, d.like([out])]


def _addmm(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 2)
    rows, inner = d.shape(x)
    columns = d.extent()
    text = d.one(("torch.addmm({0}, {1}, {2})", "torch.addmm({0}, {1}, {2}, beta=0.5, alpha=2.0)"))
    return text, [d.broadcasting([rows, columns]), x, d.like([inner, columns])]


def _vectors(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(1, 1)
    other = d.like(d.shape(x))
    return d.one(("torch.dot({0}, {1})", "torch.outer({0}, {1})", "torch.mv({0}.outer({1}), {1})", "torch.kron({0}, {1}[:2])")), [x, other]


def _einsum(d: Drawer) -> tuple[str, list[str]]:
    """Two operands whose letters are drawn: kept, summed, or in one operand alone."""
    x = d.floating(2, 4)
    letters = "abcd"[: len(d.shape(x))]
    extents = dict(zip(letters, d.shape(x), strict=True))
    shared = "".join(letters[i] for i in d.some(len(letters)))
    other = shared + "e" * d.coin(0.7)
    extents["e"] = d.extent()
    every = sorted(set(letters + other))
    out = "".join(every[i] for i in d.some(len(every)))
    d.chance.random()
    return f"torch.einsum('{letters},{other}->{out}', {{0}}, {{1}})", [x, d.like([extents[letter] for letter in other])]


def _attention(d: Drawer) -> tuple[str, list[str]]:
    batch, heads, queries, keys, size = (max(d.extent(), 1) for _ in range(5))
    if batch * heads * max(queries * keys, max(queries, keys) * size) > 2048:
        heads = 2
    causal = d.coin(0.4)
    keys = queries if causal or d.coin() else keys
    q, k, v = d.like([batch, heads, queries, size]), d.like([batch, heads, keys, size]), d.like([batch, heads, keys, size])
    if causal:
        return "F.scaled_dot_product_attention({0}, {1}, {2}, is_causal=True)", [q, k, v]
    if d.coin(0.4):
        shape = [d.one([1, batch]), d.one([1, heads]), queries, keys]
        return "F.scaled_dot_product_attention({0}, {1}, {2}, attn_mask={3})", [q, k, v, d.like(shape)]
    return "F.scaled_dot_product_attention({0}, {1}, {2}, scale=0.3)", [q, k, v]


def _self_attention(d: Drawer) -> tuple[str, list[str]]:
    """Rows [batch, seq, heads * size] into heads, attention, and back."""
    x = d.floating(3, 3, filled=True)
    batch, seq, width = d.shape(x)
    heads = d.one([n for n in (1, 2, 3, 4, 6) if width % n == 0])
    qkv = d.like([width, 3 * width])
    text = (
        f"{{out}} = ({{0}} @ {{1}} * 0.2).view({batch}, {seq}, 3, {heads}, {width // heads}).permute(2, 0, 3, 1, 4)\n"
        f"{{out}} = F.scaled_dot_product_attention({{out}}[0], {{out}}[1], {{out}}[2], is_causal={d.coin()})\n"
        f"{{out}} = {{out}}.transpose(1, 2).reshape({batch}, {seq}, {width})"
    )
    return text, [x, qkv]


def _convolution(d: Drawer) -> tuple[str, list[str]]:
    space = d.number(1, 2)
    x = d.floating(space + 2, space + 2, filled=True)
    channels = d.shape(x)[1]
    groups = d.one([1, 1, *(n for n in (2, 3, channels) if channels % n == 0)])
    out = groups * d.number(1, 4)
    kernel = [d.number(1, 3) for _ in range(space)]
    stride, padding, dilation = d.number(1, 2), d.number(0, 1), d.one([1, 1, 2])
    options = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}"
    if d.coin(0.25):
        weight = d.leaf([channels, out // groups, *kernel])
        return f"F.conv_transpose{space}d({{0}}, {{1}}, {options}) * 0.3", [x, weight]
    weight = d.leaf([out, channels // groups, *kernel])
    if d.coin(0.4):
        return f"F.conv{space}d({{0}}, {{1}}, {{2}}, {options}) * 0.3", [x, weight, d.like([out])]
    return f"F.conv{space}d({{0}}, {{1}}, {options}) * 0.3", [x, weight]


MENU: dict[str, Entry] = {
    "matmul": _matmul,
    "matmul of batches": _batched,
    "bmm": _bmm,
    "gram": _gram,
    "linear": _linear,
    "addmm": _addmm,
    "vectors": _vectors,
    "einsum": _einsum,
    "attention": _attention,
    "self-attention": _self_attention,
    "convolution": _convolution,
}
