"""A model and an optimizer made of operators that are not torch's: proved, compiled, compared with one device, saved. No GPU, no ranks.

    python examples/own_operator/train.py OUT            prints the steps below, and saves to the folder OUT
    cd examples/own_operator
    torchrun --nproc-per-node 4 -m meshc run OUT --allow mylib --inputs OUT.safetensors --outputs results
"""

from __future__ import annotations

import sys
from typing import Any

import mylib
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import meshc
from meshc.testing import prove_rule


class Block(nn.Module):
    """Half of a transformer's layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(mylib.my_gate(self.up(mylib.my_rmsnorm(x, self.scale))))


def build() -> tuple[meshc.TrainStep, tuple[Any, ...], dict[str, Any]]:
    """What is compiled, and its example inputs."""
    torch.manual_seed(0)
    model = Block()
    step = meshc.TrainStep(model, optimizer=mylib.MyOptimizer(model.parameters()), loss=lambda made, target: (made - target).pow(2).mean())
    return step, (torch.randn(8, 6, 16),), {"target": torch.randn(8, 6, 16)}


def main(out: str) -> None:
    rows, scale = torch.randn(5, 3, 7), torch.randn(7)
    print(prove_rule("mylib::my_rmsnorm", [(rows, scale), (rows[0], scale)]))
    print(prove_rule("mylib::my_rmsnorm_backward", [(rows, rows + 1, scale)]))
    print(prove_rule("mylib::my_gate", [(rows,)]))
    print(prove_rule("mylib::my_update", [(rows, rows + 1, rows - 1, torch.tensor(0.1), torch.tensor(0.9))]))

    step, args, kwargs = build()
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=args, kwargs=kwargs, plan="dp: batch; store params, state\ntp: ffn")
    print(program.summary())
    print(meshc.verify(program))
    program.save(out)
    save_file({"x": args[0], **kwargs}, f"{out}.safetensors")
    print(f"saved to {out}: meshc show {out} --allow mylib")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "own_operator.meshc")
