"""Small models whose operators go by windows: an encoder and decoder of images, and a mixer with a causal depthwise convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """Down by a strided convolution and by max pooling, up by nearest interpolation and by a transposed convolution, with skips."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 2 * width)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=2, dilation=2)
        self.up = nn.Conv2d(4 * width, width, 5, padding=2)
        self.last = nn.ConvTranspose2d(width, width, 4, stride=2, padding=1)
        self.leave = nn.Conv2d(2 * width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        wide = F.relu(self.enter(images))
        half = F.silu(self.norm(self.down(wide)))
        deep = F.relu(self.middle(F.max_pool2d(half, 2)))
        half = F.relu(self.up(torch.cat([half, F.interpolate(deep, scale_factor=2.0)], 1)))
        return self.leave(torch.cat([wide, self.last(half)], 1))


class CausalMixer(nn.Module):
    """Mamba's block without its scan: two projections, a causal depthwise convolution along the sequence, a gate."""

    def __init__(self, hidden: int = 8, width: int = 12, kernel: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.x_proj = nn.Linear(hidden, width, bias=False)
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.conv1d = nn.Conv1d(width, width, kernel, groups=width, padding=kernel - 1)
        self.out_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        h = self.norm(states)
        x = self.x_proj(h).transpose(1, 2)
        x = F.silu(self.conv1d(x)[..., : states.shape[1]]).transpose(1, 2)
        return states + self.out_proj(x * F.silu(self.gate_proj(h)))
