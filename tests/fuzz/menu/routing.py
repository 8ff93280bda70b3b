"""Tokens that choose a few of several experts: gates, and the ways in which models give an expert its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.menu.entry import Entry

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer

GATES = ("torch.softmax({scores}, -1)", "torch.sigmoid({scores})", "{scores}")
"""How scores become what experts are chosen by."""

WAYS = (
    # the matrix of each choice is gathered
    "{out} = (torch.einsum('td,tkdn->tkn', {x}, {w}[index]) * weight.unsqueeze(-1)).sum(1)",
    # every expert has all tokens, and a gate that is zero where it is not chosen
    "gate = torch.zeros({tokens}, {experts}, dtype=torch.float64).scatter(1, index, weight)\n"
    "{out} = torch.einsum('te,ten->tn', gate, torch.einsum('td,edn->ten', {x}, {w}))",
    "gate = (F.one_hot(index, {experts}).double() * weight.unsqueeze(-1)).sum(1)\n"
    "{out} = (gate.unsqueeze(-1) * torch.einsum('td,edn->ten', {x}, {w})).sum(1)",
    # likewise, one after the other, under a mask
    "{out} = sum(torch.where((index == e).any(-1, keepdim=True), {x} @ {w}[e], 0.0)"
    " * (weight * (index == e)).sum(-1, keepdim=True) for e in range({experts}))",
    # rows in the order of their experts, and put back
    "order = index.flatten().argsort(stable=True)\n"
    "rows = torch.bmm({x}[order // {chosen}].unsqueeze(1), {w}[index.flatten()[order]]).squeeze(1)\n"
    "rows = rows * weight.flatten()[order].unsqueeze(-1)\n"
    "{out} = torch.zeros({tokens}, {width}, dtype=torch.float64).index_add(0, order // {chosen}, rows)",
    # likewise by the inverse of the order
    "order = index.flatten().argsort(stable=True)\n"
    "rows = torch.bmm({x}.repeat_interleave({chosen}, 0)[order].unsqueeze(1), {w}[index.flatten()[order]]).squeeze(1)\n"
    "{out} = (rows[order.argsort()].view({tokens}, {chosen}, {width}) * weight.unsqueeze(-1)).sum(1)",
)  # fmt: skip


def _routed(d: Drawer) -> tuple[str, list[str]]:
    x = d.floating(2, 3, filled=True)
    *several, inner = d.shape(x)
    experts, width = d.number(2, 6), max(d.extent(), 1)
    chosen = d.number(1, min(experts, 4))
    names = {"x": "tokens", "w": "{2}", "tokens": several[0] if len(several) == 1 else several[0] * several[1], "experts": experts}
    names |= {"chosen": chosen, "width": width, "out": "made" if len(several) == 2 else "{out}"}
    lines = [f"tokens = {{0}}.reshape(-1, {inner})" if len(several) == 2 else "tokens = {0}"]
    lines.append(f"weight, index = {d.one(GATES).format(scores='(tokens @ {1})')}.topk({chosen}, -1)")
    if d.coin(0.3):
        lines.append("weight = weight / (weight.abs().sum(-1, keepdim=True) + 0.1)")
    if d.coin(0.15):  # some choices are dropped
        lines.append(f"weight = weight * (torch.arange({names['tokens']}) % 3 > 0).unsqueeze(-1)")
    lines.append(d.one(WAYS).format(**names))
    if len(several) == 2:
        lines.append(f"{{out}} = made.reshape({several[0]}, {several[1]}, {width})")
    return "\n".join(lines), [x, d.like([inner, experts]), d.like([experts, inner, width])]


def _balance(d: Drawer) -> tuple[str, list[str]]:
    """The loss that keeps experts alike; of equal shares it is no whole number but for roundings."""
    x = d.floating(2, 2, filled=True)
    experts = d.number(2, 6)
    chosen = d.number(1, 2)
    text = (
        "scores = torch.softmax({0} @ {1}, -1)\n"
        f"share = F.one_hot(scores.topk({chosen}, -1)[1], {experts}).double().sum(1).mean(0)\n"
        f"{{out}} = {0.9 * experts:.1f} * (share * scores.mean(0)).sum()"
    )
    return text, [x, d.like([d.shape(x)[1], experts])]


def _in_places(d: Drawer) -> tuple[str, list[str]]:
    """Each expert has so many places, which go to the first that choose it."""
    x = d.floating(2, 2, filled=True)
    tokens, inner = d.shape(x)
    experts, places = d.number(2, 4), d.number(1, 4)
    text = (
        "taken = F.one_hot(({0} @ {1}).argmax(-1), " f"{experts})\n"
        "place = (taken.cumsum(0) - 1).clamp(min=0)\n"
        f"kept = (F.one_hot(place.clamp(max={places}), {places + 1})[..., :{places}] * taken.unsqueeze(-1)).double()\n"
        "{out} = torch.einsum('tec,ecd->td', kept, torch.tanh(torch.einsum('tec,td->ecd', kept, {0})))"
    )  # fmt: skip
    return text, [x, d.like([inner, experts])]


MENU: dict[str, Entry] = {"routed": _routed, "balance of experts": _balance, "experts with places": _in_places}
