"""A search under precision lines prices products in few bits, gathers of a byte an element, and scales, which want values as they lie."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.cost.devices import assume_device, device

WIDTH, INNER, ROWS = 4096, 14336, 16384
LINE = "precision layers.*: float8 row"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@cache
def searched(line: str) -> meshc.Program:
    with torch.device("meta"):
        model = Blocks().to(torch.bfloat16)
        inputs = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16), torch.empty(ROWS, 64, dtype=torch.bfloat16)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    with assume_device(device("h100")):
        return meshc.compile(step, meshc.Mesh("x=8"), args=inputs[:1], kwargs={"target": inputs[1]}, plan=f"x: auto\n{line}")


@pytest.mark.parametrize("line", ["", LINE])
def test_prices_are_near_the_clock(line: str) -> None:
    """As near as without lines: scales of gradients of weights, along the batch, ask for no gather of activations."""
    priced = [one for one in searched(line).lowered.weighed if one.seconds is not None and one.estimated is not None]
    assert priced and all(0.8 < one.estimated / one.seconds < 1.15 for one in priced if one.estimated and one.seconds), priced


def test_what_is_found_is_faster_than_without_the_line_and_adds_none() -> None:
    plain, few = searched(""), searched(LINE)
    assert not plain.plan.precisions and list(map(str, few.plan.precisions)) == [LINE]
    assert (few.lowered.weighed[0].seconds or 0) < 0.95 * (plain.lowered.weighed[0].seconds or 0)


def test_weights_are_rounded_where_they_are_stored_and_gathered_at_half_the_price() -> None:
    """What FSDP sends more than ZeRO-1 is half of it, and it rounds an eighth of each weight, of which ZeRO-1 rounds all on each rank."""
    prices = [{one.name: one.modelled or 0.0 for one in searched(line).lowered.weighed} for line in ("", LINE)]
    more = [found["fsdp over x"] - found["zero1 over x"] for found in prices]
    h100, weights = device("h100"), 4 * 2 * WIDTH * INNER
    gathered_s = 2 * weights / h100.links[0].bandwidth_Bps  # twice a call, a byte an element less
    rounded_s = 2 * weights * (2 + 2 + 1) / h100.bytes_per_s  # along rows and columns: read for the scale, read and made for the value
    assert more[0] - more[1] == pytest.approx((gathered_s + rounded_s) * 7 / 8, rel=0.15)
