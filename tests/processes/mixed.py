"""Compute lines on real ranks: what torch's FSDP2 does under `MixedPrecisionPolicy`, on as many ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import meshc
from meshc.ir import local_bytes, record, spmd
from tests.processes.reference import furthest
from tests.processes.session import run_checks

STEPS, ROWS = 3, 8


class Block(nn.Module):
    """Asks for the dtype of its weights, as stock models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        wide = self.norm(x).float()
        h = (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(self.gain.dtype) * self.gain
        h = self.down(F.gelu(self.up(h)))
        return x + (h if scale is None else h * scale)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks, self.head = nn.Linear(6, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, scale=torch.full((16,), 0.5))
        return self.head(h.float())


def _model() -> nn.Module:
    torch.manual_seed(5)
    return Blocks()


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def _batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, 6, generator=random), torch.randn(ROWS, 4, generator=random)) for _ in range(STEPS)]


def _of_fsdp(policy: MixedPrecisionPolicy) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of torch's own loop; each rank has its part of the rows."""
    model, ranks, rank = _model(), dist.get_world_size(), dist.get_rank()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for x, y in _batches():
        mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        loss = F.mse_loss(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses, _whole(model)


def _of_program(mesh: Any, line: str) -> tuple[list[float], dict[str, Tensor], meshc.Program]:
    model, found = _model(), _batches()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), loss=F.mse_loss)
    plan = f"dp_shard: batch; store params, grads, state\n{line}"
    program = meshc.compile(step, mesh, args=(found[0][0],), kwargs={"target": found[0][1]}, plan=plan)
    losses = [program(x, target=y).item() for x, y in found]
    program.sync()
    return losses, _whole(model), program


def _bytes(program: meshc.Program, kind: object) -> dict[torch.dtype, int]:
    """By dtype, bytes of the results of gathers, or of the operands of reduce-scatters."""
    found: dict[torch.dtype, int] = {}
    for stage in program.compiled.stages.values():
        for node in stage.graph.nodes:
            if node.target is kind:
                side = record(node if kind is spmd.all_gather else node.all_input_nodes[0])
                assert side.dtype is not None
                found[side.dtype] = found.get(side.dtype, 0) + local_bytes(side)
    return found


POLICIES = {
    "compute bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "compute bf16, reduce f32, master f32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "compute f16, reduce f32": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}


def equals_fsdp(mesh: Any) -> None:
    """Losses and parameters after several steps. FSDP2 divides gradients by the number of ranks and a program the loss: in float16, where
    small gradients have few bits, that is not the same."""
    plain, _ = _of_fsdp(MixedPrecisionPolicy())
    for words, policy in POLICIES.items():
        wanted, parameters = _of_fsdp(policy)
        losses, mine, _ = _of_program(mesh, f"precision blocks.*: {words}")
        worst = furthest(mine, parameters)
        bound = 2e-3 if "f16," in words and "bf16" not in words else 1e-6
        assert worst[0] < bound, (words, worst)
        assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < bound, words
        assert max(abs(a - b) for a, b in zip(plain, wanted, strict=True)) > 1e-5, words


def sends_fewer_bytes(mesh: Any) -> None:
    """Of blocks gathers are bfloat16, half of the bytes, and reductions of the dtype that the line says."""
    *_, plain = _of_program(mesh, "")
    whole, scattered = _bytes(plain, spmd.all_gather)[torch.float32], _bytes(plain, spmd.reduce_scatter)[torch.float32]
    of_blocks = 4 * sum(p.numel() for name, p in copy.deepcopy(_model()).named_parameters() if name.startswith("blocks"))
    for words, reduced in (("compute bf16", torch.bfloat16), ("compute bf16, reduce f32", torch.float32)):
        *_, program = _of_program(mesh, f"precision blocks.*: {words}")
        gathers, sums = _bytes(program, spmd.all_gather), _bytes(program, spmd.reduce_scatter)
        assert gathers.keys() == {torch.float32, torch.bfloat16}
        assert 2 * gathers[torch.bfloat16] + gathers[torch.float32] == whole
        assert gathers[torch.bfloat16] >= of_blocks / 2
        if reduced == torch.float32:
            assert sums == {torch.float32: scattered}
        else:
            assert sums[torch.bfloat16] == of_blocks / 2 and sums[torch.float32] == scattered - of_blocks


CHECKS: tuple[Callable[[Any], None], ...] = (equals_fsdp, sends_fewer_bytes)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
