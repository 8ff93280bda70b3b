"""Ranges of keys that queries see: as the masks themselves where these can be computed; what is no range is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from meshc.ir import Record, set_record
from meshc.passes.trace.fold_masks import KnownValues, SeenRanges, pattern_of, pattern_of_ranges

Q, K = 24, 30
aten = torch.ops.aten


def rows() -> Tensor:
    return torch.arange(Q).view(1, 1, Q, 1)


def columns() -> Tensor:
    return torch.arange(K).view(1, 1, 1, K)


def bias(seen: Tensor) -> Tensor:
    return torch.where(seen, torch.zeros(()), torch.full((), -torch.inf))


MASKS: dict[str, Callable[[], Tensor]] = {
    "causal": lambda: bias(columns() <= rows()),
    "causal, queries last": lambda: bias(columns() <= rows() + 6),
    "mirrored": lambda: bias(rows() >= columns()),
    "strict": lambda: bias(rows() + 1 > columns()),
    "windowed": lambda: bias((columns() > rows() - 5) & (columns() <= rows())),
    "of one key": lambda: bias(rows() == columns()),
    "both sides": lambda: bias((columns() > rows() - 5) & (columns() < rows() + 5)),
    "chunked": lambda: bias((rows() // 6 * 6 <= columns()) & (columns() <= rows())),
    "behind a cache": lambda: bias((columns() <= rows()) & torch.ones((), dtype=torch.bool)),
    "all": lambda: bias((columns() <= rows()) | torch.ones((), dtype=torch.bool)),
    "hidden": lambda: bias(torch.logical_not(columns() > rows())),
    "later keys": lambda: bias(columns() > rows()),
    "least": lambda: (1.0 - (columns() <= rows()).float()) * torch.finfo(torch.float32).min,
    "soft": lambda: (columns() > rows()).float() * -3.0,
    "expanded": lambda: bias((columns() <= rows()).expand(3, 2, Q, K)),
    "packed, one document": lambda: bias(
        (columns().repeat(3, 1, 1, 1) * 0 == rows().repeat(3, 1, 1, 1) * 0) & (columns() <= rows()).expand(3, 1, Q, K)
    ),
    "rows that differ": lambda: bias(columns() <= rows() + torch.arange(3).view(3, 1, 1, 1)),
    "two ranges": lambda: bias((columns() < rows() - 5) | (columns() > rows() + 5)),
    "strided": lambda: bias(columns() % 3 <= rows()),
    "falling": lambda: bias(29 - columns() <= rows()),
    "distances": lambda: bias((rows() - columns()).abs() < 5),
}
NOT_KNOWN = {"rows that differ", "two ranges", "strided", "falling", "distances"}


def followed(mask: Callable[[], Tensor]) -> tuple[Tensor, SeenRanges, torch.fx.Node]:
    traced: GraphModule = make_fx(mask)()
    for node in traced.graph.nodes:
        if node.op == "call_function":
            value = node.meta["val"] if "val" in node.meta else node.meta["tensor_meta"]
            set_record(node, Record(tuple(value.shape), value.dtype))
    (end,) = (node for node in traced.graph.nodes if node.op == "output")
    return mask(), SeenRanges(KnownValues({})), end.args[0]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_its_ranges_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshc.passes.trace.fold_masks.LARGEST", 100)  # rows and columns are known, masks are not
    value, ranges, node = followed(MASKS[name])
    found = ranges.of(node)
    assert (found is None) == (name in NOT_KNOWN)
    if found is not None:
        at = torch.arange(K)
        seen = (at >= found.begin.view(-1, 1)) & (at < found.end.view(-1, 1))
        assert torch.equal(torch.where(seen, found.inside, found.outside).expand(value.shape), value)
        assert pattern_of_ranges(found, Q) == pattern_of(value, Q)
    assert ranges.known.of(node) is None


def test_patterns_are_found() -> None:
    found = {name for name, mask in MASKS.items() if pattern_of(mask(), Q) is not None}
    assert found == {
        "causal", "causal, queries last", "mirrored", "strict", "windowed", "of one key", "both sides", "behind a cache", "all", "hidden",
        "least", "expanded", "distances", "packed, one document",
    }  # fmt: skip
