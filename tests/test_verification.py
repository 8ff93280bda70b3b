"""`meshc.verify` checks the program that was compiled, wherever it is called from."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import meshc

BF16 = torch.bfloat16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("around", [False, True])
def test_autocast_is_what_was_around_the_compilation(around: bool) -> None:
    """Two halves of a contraction, each rounded to bfloat16 (8 bits), differ from the whole by about 2^-8; float32 would by 1e-7."""
    with torch.autocast("cpu", BF16):
        program = meshc.compile(model(), meshc.Mesh("tp=2"), args=(torch.randn(4, 64),), plan="tp: ffn")
    with torch.autocast("cpu", BF16) if around else nullcontext():
        report = meshc.verify(program)
    assert 1e-4 < report.worst <= report.tolerance == 2e-2


def test_autocast_around_verify_is_not_the_programs() -> None:
    program = meshc.compile(model(), meshc.Mesh("tp=2"), args=(torch.randn(4, 64),), plan="tp: ffn")
    with torch.autocast("cpu", BF16):
        report = meshc.verify(program)
    assert report.worst <= report.tolerance == 1e-5
