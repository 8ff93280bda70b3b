"""Training steps on real ranks against plain PyTorch in one process: losses, and every entry of the state dict."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import meshc
from meshc.cost import peak_memory
from meshc.cost.devices import assume_device, device
from meshc.runtime.comm import disk, host
from tests.models import FACTORIES, FLOAT32_INSIDE, Case, mlp
from tests.processes.reference import SEED, adamw, close, furthest, sgd, train
from tests.processes.session import device_mesh
from tests.zoo.experts import FAMILIES as EXPERTS
from tests.zoo.plain import PLAIN
from tests.zoo.recurrent import FAMILIES as RECURRENT
from tests.zoo.stock import STOCK


@dataclass(frozen=True)
class Sample:
    """Recurrent families take SGD: their states are float32, and gradients of 1e-8 round to either side, of which AdamW makes a step."""

    kind: str
    mesh: str
    plan: str | None = None
    optimizer: str = "adamw"
    microbatches: int | None = None
    backend: str = "eager"
    attention: str | None = None
    node: int | None = None
    """Ranks of a node, by which rows of experts go in two hops."""
    recurrence: str | None = None


OFFLOADED = "offload *\noffload state"
PARAMETERS = "offload params\noffload state"
UPDATES = "offload state, update"
APART = "cp: heads*seq@attention > seq"
ON_DISK = "offload state: disk"
TWO = (
    Sample("nanogpt", "dp_shard=2", OFFLOADED),
    Sample("mlp", "dp_shard=2", UPDATES),
    Sample("mlp", "dp_shard=2", ON_DISK),
    Sample("mlp", "dp=2", "zero2", "sgd", 2),
    Sample("selected", "dp=2"),
    Sample("resnet", "cp=2", "cp: height", "sgd"),
    Sample("llama", "cp=2", "cp: seq", attention="ring"),
    Sample("lstm", "cp=2", "cp: seq"),
)
MORE_OF_TWO = (
    Sample("vit", "tp=2", "megatron_sp"),
    Sample("qwen3_next", "cp=2", "cp: seq", "sgd", recurrence="join"),
    Sample("mixtral", "ep=2"),
    Sample("nanogpt", "cp=2"),
    Sample("llama", "dp=2"),
    Sample("llama", "tp=2", OFFLOADED, microbatches=3),
    Sample("nanogpt", "dp_shard=2", PARAMETERS, microbatches=2),
    Sample("nanogpt", "dp_shard=2", UPDATES + "\noffload params", microbatches=2),
    Sample("gpt2", "tp=2"),
    Sample("mamba", "cp=2", "cp: seq", "sgd", recurrence="join"),
    Sample("qwen3_next", "cp=2", "cp: seq", "sgd", recurrence="turns"),
    Sample("lstm", "cp=2", "cp: batch@lstm > seq"),
    Sample("rwkv", "cp=2", "cp: seq", "sgd"),
    Sample("t5", "cp=2", "cp: seq", attention="ring"),
    Sample("resnet", "dp=2", "fsdp", "sgd"),
)
INDUCTOR = (
    Sample("mlp", "dp_shard=2", "fsdp", "sgd", 2, backend="inductor"),
)
MORE_OF_INDUCTOR = (
    Sample("nanogpt", "dp_shard=2", OFFLOADED, backend="inductor"),
    Sample("mlp", "dp=2", "ddp", "sgd", 2, backend="inductor"),
    Sample("nanogpt", "dp_shard=2", backend="inductor"),
    Sample("llama", "tp=2", "megatron_sp", backend="inductor"),
    Sample("llama", "cp=2", "cp: seq", backend="inductor", attention="ring"),
)
FOUR = (
    Sample("gpt2", "dp_shard=2,tp=2"),
    Sample("nanogpt", "dp=2,cp=2", "zero1+ulysses", microbatches=3),
)
STORED = """
store norm.*: hidden/tp/dp
store up.weight params: _, hidden/dp
store middle.weight state: middle.weight.0/dp/tp, ffn!
store down.weight: vocab/tp/dp, _
"""
MORE_OF_FOUR = (
    Sample("mlp", "dp=2,tp=2", STORED),
    Sample("mlp", "dp=2,dp_shard=2", "fsdp", "sgd", 3),
    Sample("mlp", "tp=4"),
    Sample("llama", "dp=2,tp=2"),
    Sample("llama", "tp=4", "megatron_sp"),
    Sample("bert", "dp_replicate=2,dp_shard=2"),
    Sample("resnet", "dp=4", optimizer="sgd"),
    Sample("nanogpt", "cp=4", "cp: seq", attention="ring"),
    Sample("llama", "cp=4", "cp: seq", attention="zigzag"),
    Sample("llama", "cp=4", APART, attention="ring"),
    Sample("llama", "pp=2,cp=2", "cp: seq", microbatches=2, attention="ring"),
    Sample("mamba", "cp=4", "cp: seq", "sgd", recurrence="join"),
    Sample("mamba", "cp=4", "cp: seq", "sgd", recurrence="turns"),
    Sample("lstm", "dp=2,cp=2", "dp: batch\ncp: seq", microbatches=2),
    Sample("lstm", "cp=4", "cp: seq"),
    Sample("qwen3_next", "cp=2,tp=2", "cp: seq\ntp: heads, ffn", "sgd"),
    Sample("mixtral", "dp=2,ep=2"),
    Sample("deepseek_v3", "ep=4"),
    Sample("gpt_oss", "dp_shard=2,ep=2"),
)
NODES = (
    Sample("deepseek_v3", "ep=4", node=2),
    Sample("mixtral", "ep=4", optimizer="sgd", node=2),
)
FAMILIES = {**EXPERTS, **RECURRENT, "mamba": STOCK["mamba"], "t5": STOCK["t5"]}
SAMPLES = {
    "two": TWO, "more of two": MORE_OF_TWO, "four": FOUR, "more of four": MORE_OF_FOUR,
    "nodes": NODES, "inductor": INDUCTOR, "more of inductor": MORE_OF_INDUCTOR,
}  # fmt: skip


def check(sample: Sample) -> str:
    """Of one sample, on nodes of as many ranks as it says."""
    cpu = device("cpu")
    if sample.node is None:
        return _check(sample)
    with assume_device(replace(cpu, ranks_per_node=sample.node)):
        return _check(sample)


def _check(sample: Sample) -> str:
    """One line that says how close two steps came. Losses to 1e-10 and the state to 1e-9 in float64; models that compute some values in
    float32 whatever their dtype: 1e-5."""
    small = {"batch": 8} if sample.kind == "resnet" else {"batch": 12} if sample.kind in ("mlp", "selected") else {"batch": 12, "layers": 1}
    case = _stock(sample.kind) if sample.kind in FAMILIES else _factory(sample.kind)(torch.float64, **small)
    build = {"adamw": adamw, "sgd": sgd}[sample.optimizer]
    start = copy.deepcopy(case.model)
    step = meshc.TrainStep(
        case.model, optimizer=build(case.model.parameters()), loss=case.loss if case.name in ("mlp", "resnet", "lstm") else _loss_of(case),
        clip_grad_norm=1.0, microbatches=sample.microbatches,
    )  # fmt: skip
    dispatch = "auto" if sample.node is None else "hierarchical"
    options = meshc.Options(
        seed=SEED,
        sequence=meshc.SplitSequence(attention=sample.attention, recurrence=sample.recurrence),
        experts=meshc.Experts(dispatch=dispatch),
    )
    gc.collect()  # a compiled model and its program hold each other: what the sample before had on the host goes
    host.HELD.begin()
    before, on_disk = host.HELD.now, disk.HELD.now
    examples = case.call_kwargs if sample.plan == APART else {}  # heads are counted before anything is compiled
    program = meshc.compile(step, device_mesh(sample.mesh), kwargs=examples, plan=sample.plan, backend=sample.backend, options=options)
    losses = [program(**case.call_kwargs).item() for _ in range(2)]
    assert sample.node is None or all(f', ["{axis}"], ' in str(program) for axis in ("ep_across", "ep_inside")), sample
    offloaded = host.HELD.most - before
    predicted = peak_memory.peak_rank(program.compiled)
    wanted_there = predicted.host
    assert disk.HELD.now - on_disk == predicted.beside["on its disk"], (sample, disk.HELD.now - on_disk, predicted.beside)
    assert offloaded >= wanted_there and offloaded <= 1.02 * wanted_there, (sample, offloaded, wanted_there)
    state = program.state_dict(full=True)
    if dist.get_rank():
        return ""
    wanted, twin, _ = train(start, case.loss_of, case.kwargs, build)
    inside = case.name in FLOAT32_INSIDE or sample.kind in FAMILIES
    close(losses, wanted, 1e-5 if inside else 1e-10)
    worst, name = furthest(state["model"], twin.state_dict())
    assert worst <= (1e-4 if inside else 1e-9), (sample, worst, name)
    return f"{sample.kind} on {sample.mesh}: loss {losses[-1]:.6f}, state to {worst:.1e}"


def selected(dtype: torch.dtype, batch: int) -> Case:
    """A loss of rows that a mask selects, of which the second half of the batch has none."""
    case = mlp(dtype, batch)
    targets = case.target_kwargs["target"].clone()
    targets[0] = -100
    targets[batch // 2 :] = -100

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        kept = target != -100
        return F.cross_entropy(logits[kept], target[kept]) + logits[kept].square().sum() / kept.sum()

    return replace(case, loss=loss, target_kwargs={"target": targets})


def _factory(kind: str) -> Callable[..., Case]:
    if kind == "selected":
        return selected
    return FACTORIES[kind] if kind in FACTORIES else _plain(kind)


def _plain(kind: str) -> Callable[..., Case]:
    def made(dtype: torch.dtype, **_: int) -> Case:
        torch.manual_seed(0)
        case = PLAIN[kind]()
        case.model.to(dtype)
        return case

    return made


def _stock(kind: str) -> Case:
    """A plain model with experts loops over them: torch's grouped product takes no float64."""
    case = FAMILIES[kind].case(kind)
    case.model.double()
    for module in case.model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    return case


def _loss_of(case):  # type: ignore[no-untyped-def]
    return None if case.loss is None else (lambda output: case.loss(output))


def run(which: str) -> None:
    dist.init_process_group("gloo")
    for sample in SAMPLES[which]:
        line = check(sample)
        if line:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()
