"""An axis that does not divide the heads of an attention: asked for it pads them, by its name alone it leaves them."""

from __future__ import annotations

import pytest
import torch

import meshc
from tests.meaning.test_rings import Attends, trained


@pytest.mark.parametrize(
    "heads, plan, lies",
    [
        (6, None, "f32[2, 6, 2, 4]"),
        (8, None, "f32[2, 2, 8, 4]"),
        (6, "ulysses", "f32[2, 2, 8, 4]"),
        (6, "cp: heads@attention > seq", "f32[2, 2, 8, 4]"),
    ],
)
def test_by_its_name_alone_an_axis_pads_no_heads(heads: int, plan: str | None, lies: str) -> None:
    """Six heads over four ranks are left alone, and their positions stay split; asked for they are padded."""
    model = Attends(4 * heads, heads, is_causal=True)
    program = trained(model, "cp=4", {"x": torch.randn(2, 8, 4 * heads)}, "gather", plan)
    assert f'attention_default: "({lies}' in str(program)
    assert meshc.verify(program, dtype=torch.float64).ok
