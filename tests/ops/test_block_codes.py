"""State in 8 bits: the compiled kernel and plain torch give the same codes, whatever the values are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshc.ops import block_codes, philox

SEED_STEP = torch.tensor([7, 3])


def values() -> Tensor:
    """Rows with magnitudes over twenty decades, exact codes, zeros, a block of zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(5)
    found = torch.randn(24, 700, generator=generator) * 10.0 ** torch.randint(-12, 8, (24, 700), generator=generator)
    found[3], found[4, :256] = 0.0, 0.0
    found[5, :127], found[5, 127:256] = block_codes.magnitudes(True)[1:], -1.0
    found[6, 10], found[7, 600], found[8, 300] = torch.inf, -torch.inf, torch.nan
    found[9] = 1e-42  # below the smallest normal number
    return found


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_give_the_same_codes(signed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert philox.library() is not None
    value = values().to(dtype)
    value = value if signed else value.abs()
    mine = block_codes.encode(value, signed), block_codes.encode_by_draw(value, signed, SEED_STEP, "w/exp_avg")
    monkeypatch.setattr(philox, "library", lambda: None)
    plain = block_codes.encode(value, signed), block_codes.encode_by_draw(value, signed, SEED_STEP, "w/exp_avg")
    for one, other in zip(mine, plain, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_kept_is_the_value_on_average(signed: bool) -> None:
    """Of 64 draws the mean is within six of its standard deviations, where the nearest code may be off by half a step."""
    value = torch.linspace(-0.6 if signed else 0.1, 0.7, 256)
    value[0] = 1.0
    drawn = [block_codes.encode_by_draw(value, signed, torch.tensor([7, step]), "w") for step in range(64)]
    wide = torch.stack([block_codes.decode(*one, signed, torch.float64) for one in drawn])
    known = block_codes.magnitudes(signed).double()
    upper = torch.searchsorted(known, value.double().abs()).clamp(min=1)
    step, share = known[upper] - known[upper - 1], (value.abs() - known[upper - 1]) / (known[upper] - known[upper - 1])
    deviation = step * (share * (1 - share)).clamp(min=0).sqrt()
    assert ((wide.mean(0) - value).abs() <= 6 * deviation / 8 + 1e-7).all()
    assert (deviation > step / 4).sum() > 200
