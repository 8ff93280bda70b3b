"""torch's products of scaled 8-bit values: what may be split, in models, and operands as kernels of other devices want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType, SwizzleType

import meshc
from meshc.ops import decoded_products
from tests.rules.samples import SAMPLES
from tests.rules.test_rules import splittable

aten, ours = torch.ops.aten, torch.ops.meshc
EIGHT = torch.float8_e4m3fn


def rounded(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """8-bit values, and what they are to be multiplied by."""
    scale = x.abs().amax(tuple(dims), keepdim=True) / 448
    return (x / scale).to(EIGHT), scale


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 256), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = rounded(x, [1]), rounded(self.weight, [1])
        return F.scaled_mm(a, b.t(), scale_a, ScalingType.RowWise, scale_b.t(), ScalingType.RowWise)


class Blocks(nn.Module):
    """Rows of 128 of one factor, squares of 128 of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 512), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        a, scale_a = rounded(x.view(-1, 4, 128), [2])
        b, scale_b = rounded(self.weight.view(2, 128, 4, 128), [1, 3])
        rows, squares = scale_a.squeeze(-1).t().contiguous().t(), scale_b.view(2, 4).contiguous().t()
        columns = b.view(256, 512).t()
        return F.scaled_mm(a.view(-1, 512), columns, rows, ScalingType.BlockWise1x128, squares, ScalingType.BlockWise128x128)


class Groups(nn.Module):
    """A matrix for each of three runs of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 48, 64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = rounded(x, [1]), rounded(self.weight, [2])
        ends = torch.tensor([16, 16, 48], dtype=torch.int32)
        return torch._scaled_grouped_mm(a, b.transpose(1, 2), scale_a.squeeze(1), scale_b.squeeze(2), ends, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=3"])
@pytest.mark.parametrize("model, width", [(Rows, 256), (Blocks, 512), (Groups, 64)])
def test_models_that_call_them_are_one_device(model: type[nn.Module], width: int, mesh: str) -> None:
    """Also where a CPU has no kernel, of blocks and of groups."""
    torch.manual_seed(0)
    program = meshc.compile(model(), meshc.Mesh(mesh), args=(torch.randn(48, width),), plan="dp: batch" * ("tp" not in mesh) or None)
    assert not [note for note in program.compiled.notes if "no rule" in note or "cannot be saved" in note]
    assert "products in few bits" in program.summary()
    report = meshc.verify(program)
    assert report.ok and report.worst < 1e-2, report


def test_what_may_be_split() -> None:
    """k with a scale for each row; not to a result of 8 bits, nor within blocks of 128, nor runs."""
    found = [splittable(op, *one.args, **one.kwargs) for op in (aten._scaled_mm.default,) for one in SAMPLES[op]]
    assert found == ["+k m n", "+k m n", "+k m n", "m n", "+k n"]


def _is_read_by_kernels(call: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether torch's own check of a call for devices that are no CPU takes the operands: strides, sizes, scales."""
    empty = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in args]
    call(*empty, **kwargs)
    return True


@pytest.mark.parametrize("scales", ["tensor", "rows"])
@pytest.mark.parametrize("m, k, n", [(5, 7, 6), (16, 32, 48), (1, 16, 3)])
def test_tiles_of_any_size_and_layout_are_as_kernels_want_them(
    m: int, k: int, n: int, scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What is given to torch's function passes its check, and what comes back is the product of the values decoded."""
    a, b = torch.randn(k, m).to(EIGHT).t(), torch.randn(k, n).to(EIGHT)
    of_a, of_b = (torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5) if scales == "rows" else (torch.tensor(0.5), torch.tensor(2.0))
    bias = torch.randn(n)
    whole = torch._scaled_mm
    calls = list[bool]()

    def checked(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(_is_read_by_kernels(aten._scaled_mm.default, *args, **kwargs))
        return whole(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    monkeypatch.setattr(decoded_products, "has_kernel", lambda *operands: True)
    made = decoded_products.decoded_mm(a, b, of_a, of_b, bias, None, torch.float32, False)
    assert calls == [True] and made.shape == (m, n) and made.is_contiguous()
    torch.testing.assert_close(made, (a.float() * of_a) @ (b.float() * of_b) + bias)


@pytest.mark.parametrize("number", range(4))
def test_groups_are_as_kernels_want_them(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = SAMPLES[aten._scaled_grouped_mm.default][number]
    assert sample.stand_in is not None
    wanted, calls = sample.stand_in(*sample.args), list[bool]()

    def checked(*args: Any, **kwargs: Any) -> Tensor:
        named = {name: value for name, value in kwargs.items() if name != "use_fast_accum"}
        calls.append(_is_read_by_kernels(aten._scaled_grouped_mm.default, *args, **named))
        assert sample.stand_in is not None
        return torch.as_tensor(sample.stand_in(*args))

    monkeypatch.setattr(torch, "_scaled_grouped_mm", checked)
    a, b, of_a, of_b, *ends = sample.args
    assert torch.equal(decoded_products._grouped_by_torch(a, b, of_a, of_b, ends[0] if ends else None, False), wanted)
    assert calls == [True]


class Swizzled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 128), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        scales = [torch.ones(128 * 4, dtype=torch.float8_e8m0fnu) for _ in range(2)]
        kind, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
        return F.scaled_mm(x.to(EIGHT), self.weight.to(EIGHT), scales[0], kind, scales[1], kind, order, order)


def test_scales_in_an_order_of_their_own_go_with_whole_operands_in_the_layout_that_kernels_want() -> None:
    """The second factor is column-major, though the model's is not."""
    program = meshc.compile(Swizzled(), meshc.Mesh("dp=2"), args=(torch.randn(128, 128),))
    targets = [node.target for node in program.compiled.stages["main"].graph.nodes]
    assert aten._scaled_mm_v2.default in targets and ours.decoded_mm.default not in targets


def test_operands_that_do_not_fit_are_refused() -> None:
    a, b, one = torch.ones(4, 8).to(EIGHT), torch.ones(8, 6).to(EIGHT), torch.tensor(1.0)
    for wrong, said in [
        ((a, b.t(), one, one, None, None, torch.float32, False), r"a \[m, k\] and b \[k, n\]"),
        ((a, b, torch.ones(3, 1), one, None, None, torch.float32, False), "each for equal blocks of its values"),
        ((a, b, one, one, torch.ones(5), None, torch.float32, False), "of b's n columns"),
        ((a, b, one, one, None, one, torch.float32, False), "has a scale in 8 bits only"),
    ]:
        with pytest.raises(ValueError, match=said):
            ours.decoded_mm(*wrong)
