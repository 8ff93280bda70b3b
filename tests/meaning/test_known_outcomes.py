"""What no input decides, in a trace: numbers of tensors that Python makes, branches on them, draws that cannot come out otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.errors import CaptureError
from meshc.frontend.known_outcomes import is_of
from tests.meaning.checks import module_means_itself


class Model(nn.Module):
    def __init__(self, after: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.after = nn.Linear(4, 6), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.up(x), x)


def dice(h: Tensor, x: Tensor) -> Tensor:
    axes = torch.arange(1, len(h.shape)).tolist()
    for rate in torch.linspace(0, 0.5, 3).tolist():
        h = h * (1 - rate)
    return (2 * (h * h.detach()).sum(dim=axes) + 1) / (h.sum(dim=axes).square() + 2)


def written(h: Tensor, x: Tensor) -> Tensor:
    order = torch.zeros(3, dtype=torch.int64)
    order[1:] += torch.tensor([4, 2])
    return h[:, order.tolist()] * (3.0 if (order == 4).any() else 5.0) * order.max().item()


def drawn(h: Tensor, x: Tensor) -> Tensor:
    if torch.rand(1).item() <= 0.0 or torch.rand(()) >= 1:
        h = h * 7
    if torch.rand_like(x[0, :1])[0] < 1.0:
        h = h + 1
    return F.dropout(h, 0.5)


def asked(h: Tensor, x: Tensor) -> Tensor:
    given = {"x": [h, x]}
    return h if torch.jit.isinstance(given, dict[str, list[Tensor]]) and not torch.jit.isinstance(h, (int, list[Tensor])) else -h


def sized(h: Tensor, x: Tensor) -> Tensor:
    pairs = torch.ones(3, 3).triu(1).nonzero()
    return h.repeat_interleave(torch.tensor([1, 0, 2, 1, 1, 1]), 0) * h[:, pairs[:, 0]].sum() + h[:, pairs[:, 1]].sum()


def paired(h: Tensor, x: Tensor) -> Tensor:
    """Of all pairs those of two rows, as losses of contrasts take them, and those of two columns."""
    others = ~torch.eye(len(h), dtype=torch.bool)
    pairs = (h @ h.t())[others].view(len(h), -1).logsumexp(1)
    columns = torch.einsum("b...c,b...d->...cd", h, h)[..., torch.ones(6, 6).triu(1) == 1]
    apart = torch.ones(len(h), len(h), dtype=torch.bool)
    apart.fill_diagonal_(False)
    seen = (h.detach() @ h.detach().t())[apart].view(len(h), -1).amax(1)
    apart[0] = False
    return pairs.mean() + columns.square().sum() + h.new_ones(6, 6)[apart].view(5, -1).sum() * seen.sum()


def indexed(h: Tensor, x: Tensor) -> Tensor:
    """What a known mask selects may be mixed, and a known number is one."""
    gram, other, first = h.T @ h, ~torch.eye(6).bool(), torch.arange(3)[1]
    gram[other] *= 0.1
    places = torch.where(torch.arange(6) % 2 == 0)[0]
    return h * gram[other].softmax(0)[0] + h[:, first, None] * h[:, places].softmax(-1).prod(-1, keepdim=True)


def rotated(h: Tensor, x: Tensor) -> Tensor:
    """In float32 on one device, and in float64 where that is what is compared."""
    return h * (torch.linspace(0, 3, 3, dtype=torch.float32) / 7).cos().repeat_interleave(2)


def shaped(h: Tensor, x: Tensor) -> Tensor:
    """Sizes that numpy or torch computes of sizes, given as they are: Perceiver's inputs are reshaped so."""
    flat = h.reshape(2, 3, 6).reshape(2, np.prod([3, 6]), -1).unsqueeze(-1)  # type: ignore[arg-type]
    six = torch.tensor([2, 1]).prod()
    six = six + 4
    part = h.repeat(1, six).narrow(1, 0, six) + torch.arange(six) * torch.zeros(six, 1)  # type: ignore[call-overload, arg-type]
    return flat.sum() * h + F.pad(part, (0, six - 6))


def scaled(h: Tensor, x: Tensor) -> Tensor:
    """A norm in single precision, and its share by numpy, as EDM2 has them."""
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True, dtype=torch.float32)
    return h / torch.add(1e-4, norm, alpha=np.sqrt(norm.numel() / h.numel())).to(h.dtype)


@pytest.mark.parametrize("after", [dice, written, drawn, asked, sized, paired, indexed, rotated, shaped])
def test_a_program_has_what_is_known(after: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module_means_itself(Model(after), {"x": torch.randn(6, 4)}, "dp=2,tp=2")


def test_a_norm_in_single_precision_is_verified_in_double() -> None:
    program = meshc.compile(Model(scaled), meshc.Mesh("dp=2,tp=2"), args=(torch.randn(6, 4),))
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-9


def unknown(h: Tensor, x: Tensor) -> Tensor:
    order = torch.zeros(2, dtype=torch.int64)
    order[0] = x[0, 0].long()
    return h[:, : order.tolist()[0]]


def possible(h: Tensor, x: Tensor) -> Tensor:
    return h if torch.rand(1).item() < 0.5 else -h


def rounded(h: Tensor, x: Tensor) -> Tensor:
    """As a whole number a draw is 0."""
    return h if torch.rand(1).to(torch.int64).item() <= 0 else -h


@pytest.mark.parametrize("after", [unknown, possible, rounded])
def test_what_is_not_known_is_refused_with_the_line(after: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=rf"(?s)(order\.tolist\(\)\[0\]|in ({possible.__name__}|{rounded.__name__})).*what to do: "):
        meshc.compile(Model(after), meshc.Mesh("dp=2"), args=(torch.randn(6, 4),))


KINDS = (int, Tensor, list[int], list[list[int]], dict[str, int], tuple[int, str], int | None, (str, list[str]))


@pytest.mark.parametrize("value", [3, None, [1], [[1]], {"a": 1}, {"a": "b"}, (1, "a"), (1,), "a", ["a"]])
def test_a_kind_is_what_torch_says(value: object) -> None:
    assert [is_of(value, kind) for kind in KINDS] == [torch.jit.isinstance(value, kind) for kind in KINDS]
