"""Models of layers that repeat, as small as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc

WORDS, WIDTH = 11, 8


class Layer(nn.Module):
    def __init__(self, number: int, hidden: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.relu(self.up(self.norm(x) + shift))))


class Stack(nn.Module):
    """`hidden`: of each layer. The head is the embedding's weight, which is thereby read at both ends."""

    def __init__(self, hidden: Sequence[int], dropout: float = 0.0, layer: Callable[..., nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(layer(number, each, dropout) for number, each in enumerate(hidden))
        self.register_buffer("shifts", torch.linspace(0, 1, 2 * WIDTH).reshape(2, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.shift(number))
        return F.linear(x, self.embed.weight)

    def shift(self, number: int) -> Tensor:
        return self.shifts[0]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def compiled(model: nn.Module, mesh: str = "dp=2", depth: str = "auto", train: bool = True, **options: Any) -> meshc.Program:
    ids = torch.zeros(4, 3, dtype=torch.int64)
    step_options = {name: options.pop(name) for name in ("clip_grad_norm", "microbatches") if name in options}
    options["options"] = meshc.Options(debugging=meshc.Debugging(depth=depth))
    if not train:
        with torch.no_grad():
            return meshc.compile(model.eval(), meshc.Mesh(mesh), kwargs={"ids": ids}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=cross_entropy, **step_options)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs={"ids": ids, "target": ids}, **options)
