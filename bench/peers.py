"""The contenders: each builds the same model from the same seed, splits it its own way, and offers one training step.

    single      the plain model on rank 0 with the whole batch, while rank 1 waits
    ddp         DistributedDataParallel
    fsdp        fully_shard on each block and on the whole (FSDP2): gathers in forward and again in backward
    megatron    parallelize_module; vocabulary-parallel embedding, head and loss (`loss_parallel`); one gathered input a block
    megatron_sp the same with the sequence split between the blocks
    ring, gather  attention over a split sequence by hand (`sequence_peers.py`)
    all-to-all  experts over ranks by hand (`expert_peers.py`)
    meshc       the program compiled under the plan of that name, through the public interface alone

All use AdamW with the same hyperparameters. meshc's update is one fused kernel, so peers get `fused=True` too unless `fused` is False.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from checkpointed import checkpointed
from models import Batch, Decoder, SplitAttention, Workload
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

PIPELINES = ("gpipe-4", "gpipe-8", "1f1b-4", "1f1b-8")
"""A schedule and how many microbatches."""
AXIS_OF = {"ddp": "dp", "fsdp": "dp_shard", "megatron": "tp", "megatron_sp": "tp", **dict.fromkeys(PIPELINES, "pp"), "cp": "cp", "ep": "ep"}
ADAMW = {"lr": 3e-4, "weight_decay": 0.1}

Step = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Contender:
    """What to build. `system` is "single", "peer" or "meshc"; `compiled` means torch.compile, for meshc its Inductor backend."""

    system: str
    compiled: bool = False
    fused: bool = True
    remat: str | None = None
    """meshc's policy; None: its default."""
    way: str | None = None
    """Of a peer by hand, how it is done; of meshc another plan than that of the row."""
    budget: int | None = None
    """Bytes that a rank may hold: meshc's `memory_budget`."""
    again: str | None = None
    """Of DDP and FSDP2: how layers are recomputed (`checkpointed.py`)."""

    def title(self, plan: str) -> str:
        peers = {"ddp": "DDP", "fsdp": "FSDP2", "megatron": "parallelize_module", "megatron_sp": "parallelize_module, sequence"}
        peers |= dict.fromkeys(PIPELINES, "torch pipelining") | dict.fromkeys(("cp", "ep"), f"by hand, {self.way}")
        name = {"single": "single process", "peer": peers[plan], "meshc": "meshc"}[self.system]
        name += "" if self.remat is None else f", remat {self.remat}"
        name += f", {self.way}" if self.system == "meshc" and self.way is not None else ""
        name += "" if self.budget is None else f", {self.budget / 2**20:.1f} MiB"
        name += "" if self.again is None else f", checkpoint {self.again}"
        return name if self.fused else f"{name}, default AdamW"

    @property
    def mode(self) -> str:
        return "compiled" if self.compiled else "eager"


@dataclass
class Built:
    """`step(batch)` trains on a global batch. `mean_of_ranks` says that its loss is the rank's own, to be averaged when it is looked at."""

    step: Step
    mean_of_ranks: bool = False
    program: Any = None
    """meshc's program, for its timings."""


def build(contender: Contender, workload: Workload, plan: str, mesh: DeviceMesh) -> Built:
    if contender.system == "meshc":
        return _meshc(contender, workload, plan, mesh)
    if contender.system == "single":
        model = workload.build()
        return _trainer(model, workload, contender)
    if plan in PIPELINES:
        return _pipelined(contender, workload, plan, mesh)
    make = {"ddp": _ddp, "fsdp": _fsdp, "cp": _sequence, "ep": _experts}.get(plan, _tensor_parallel)
    return make(contender, workload, plan, mesh)


def _meshc(contender: Contender, workload: Workload, plan: str, mesh: DeviceMesh) -> Built:
    import meshc  # here, so that the peers can be measured without it

    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    schedule, _, count = plan.partition("-")
    step = meshc.TrainStep(model, optimizer=optimizer, loss=workload.loss, microbatches=int(count or 1))
    options = meshc.Options(
        pipeline=meshc.Pipelining(schedule=schedule if count else None), remat=contender.remat, memory_budget=contender.budget
    )
    backend = "inductor" if contender.compiled else "eager"
    text = contender.way or (None if count or plan in ("cp", "ep") else plan)
    examples = workload.batches(1)[0] if text is not None and "*" in text else {}  # how far heads go is known when it is traced
    program = meshc.compile(step, mesh, kwargs=examples, plan=text, backend=backend, options=options)
    return Built(lambda batch: program(**batch), program=program)


def _ddp(contender: Contender, workload: Workload, plan: str, mesh: DeviceMesh) -> Built:
    model = workload.build()
    checkpointed(model, _blocks(model), contender.again)
    if contender.again is not None:
        torch._dynamo.config.optimize_ddp = False  # it refuses the operator that a checkpoint is in a graph
    model = DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    return _trainer(model, workload, contender, part=_part)


def _fsdp(contender: Contender, workload: Workload, plan: str, mesh: DeviceMesh) -> Built:
    model = workload.build()
    for block in checkpointed(model, _blocks(model), contender.again):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trainer(model, workload, contender, part=_part)


def _sequence(contender: Contender, workload: Workload, plan: str, mesh: DeviceMesh) -> Built:
    from sequence_peers import split

    model, part = split(workload.build(), contender.way or "", mesh.get_group())
    return _trainer(model, workload, contender, part=part)


def _experts(contender: Contender, workload: Workload, plan: str, mesh: DeviceMesh) -> Built:
    from expert_peers import split

    return _trainer(split(workload.build(), mesh.get_group()), workload, contender, part=_part)


def _blocks(model: nn.Module) -> list[nn.Module]:
    for path in ("model.layers", "h"):
        try:
            return list(model.get_submodule(path))  # type: ignore[call-overload]
        except AttributeError:
            continue
    return list(model.children())


def _pipelined(contender: Contender, workload: Workload, plan: str, mesh: DeviceMesh) -> Built:
    from pipeline_peers import Pipelined  # torch.distributed.pipelining is slow to import

    model = workload.build()
    assert isinstance(model, Decoder)
    return Built(Pipelined(model, plan, mesh, contender.compiled, ADAMW).step)


def _tensor_parallel(contender: Contender, workload: Workload, plan: str, mesh: DeviceMesh) -> Built:
    model = workload.build()
    sequence = plan == "megatron_sp"
    {"llama": _split_llama, "nanogpt": _split_decoder, "mlp": _split_mlp}[workload.name](model, mesh, sequence)
    context = nullcontext if workload.loss is not None else loss_parallel
    return _trainer(model, workload, contender, context=context)


def _block_input(sequence: bool, keyword: str | None = None) -> ParallelStyle:
    """Gathers a block's input once for all the projections that read it, so that backward reduces once too."""
    given, wanted = (Shard(1) if sequence else Replicate()), Replicate()
    if keyword is None:
        return PrepareModuleInput(input_layouts=(given,), desired_input_layouts=(wanted,))
    return PrepareModuleInput(input_kwarg_layouts={keyword: given}, desired_input_kwarg_layouts={keyword: wanted})


def _split_llama(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    between = Shard(1) if sequence else Replicate()
    layer = "model.layers.*"
    styles: dict[str, ParallelStyle] = {
        # Left a DTensor, because the model reads the sequence's length from it.
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=not sequence),
        f"{layer}.self_attn": _block_input(sequence, "hidden_states"),
        f"{layer}.mlp": _block_input(sequence),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        styles[f"{layer}.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        styles[f"{layer}.{name}"] = RowwiseParallel(output_layouts=between)
    if sequence:
        for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
            styles[name] = SequenceParallel()
        styles["model.layers.0"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True)
    parallelize_module(model, mesh, styles)


def _split_decoder(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    assert isinstance(model, Decoder)
    between = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=not sequence),
        "h.*.attn": _block_input(sequence),
        "h.*.mlp": _block_input(sequence),
        "h.*.attn.c_proj": RowwiseParallel(output_layouts=between),
        "h.*.mlp.up": ColwiseParallel(),
        "h.*.mlp.down": RowwiseParallel(output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("q", "k", "v"):
        styles[f"h.*.attn.{name}"] = ColwiseParallel()
    if sequence:
        for name in ("h.*.ln_1", "h.*.ln_2", "ln_f"):
            styles[name] = SequenceParallel()
        styles["h.0"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True)
        # Each rank looks up the positions of its own part of the sequence.
        parallelize_module(model.wpe, mesh, PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)))
        styles["wpe"] = SequenceParallel(sequence_dim=0)
    for block in model.h:
        block.attn = SplitAttention(block.attn)
    parallelize_module(model, mesh, styles)
    model.lm_head.weight = model.wte.weight  # both are split by vocabulary; parallelize_module unties them


def _split_mlp(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})


def _part(batch: Batch) -> Batch:
    """This rank's rows of a global batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {name: value.chunk(ranks)[rank] for name, value in batch.items()}


def _adamw(model: nn.Module, fused: bool) -> torch.optim.AdamW:
    """DTensors and plain tensors in groups of their own, since torch's fused kernel refuses a list of both."""
    groups: dict[bool, list[Tensor]] = {}
    for parameter in model.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], fused=fused or None, **ADAMW)


def _trainer(
    model: nn.Module,
    workload: Workload,
    contender: Contender,
    part: Callable[[Batch], Batch] | None = None,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Built:
    optimizer = _adamw(model, contender.fused)

    def loss_of(batch: Batch) -> Tensor:
        return workload.loss_of(model, batch)

    # The loss, not the model, is compiled: of an output with logits beside the loss, backward expects a gradient for both.
    called = torch.compile(loss_of) if contender.compiled else loss_of

    def step(batch: Batch) -> Tensor:
        with context():
            loss = called(part(batch) if part is not None else batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Built(step, mean_of_ranks=part is not None)
