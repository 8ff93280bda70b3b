"""Communication is what the literature says, and none of it is superfluous.

Counts are per layer: the difference between a model of two layers and one of one. Collectives under 1 KiB (norms, biases, single numbers)
are left out. Bytes are those of the larger side of a collective on each rank.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from meshc.errors import VerifyError
from meshc.ir import local_bytes, record, spmd
from meshc.optimizer.optimizer import OptimizerSpec, describe
from meshc.program.program import PlainProgram
from meshc.report import summary
from meshc.runtime.simulator import reference_comparison as verification
from tests import models
from tests.broad import broad
from tests.captured import Captured

SMALL = 1024
HIDDEN, SEQ = 32, 32
CLIP = 0.5  # below the gradients' norm, so that it acts
ATTENTION_AND_FFN = {"llama": 7, "gpt2": 4, "nanogpt": 4}
"""Weight matrices of a layer."""
KINDS = [broad("llama"), broad("gpt2"), "nanogpt"]
"""Three products of one input, and one that is cut."""


@cache
def captured(kind: str, layers: int) -> Captured:
    return Captured(models.FACTORIES[kind](batch=4, seq=SEQ, hidden=HIDDEN, layers=layers), train=True, double=False)


@cache
def step(kind: str, layers: int, mesh: str, plan: str) -> PlainProgram:
    source = captured(kind, layers)
    return source.program(mesh, plan, optimizer=describe(torch.optim.SGD(source.reference.module.parameters(), lr=0.1)))


def large(program: PlainProgram) -> Counter[tuple[str, str, str]]:
    """(phase, collective, axes) -> how often. Gradients are reduced where the update reads them; the phase is then `update`."""
    found: Counter[tuple[str, str, str]] = Counter()
    for use in summary.collectives(program):
        parts = sum(size >= SMALL for size in bytes_of_parts(program, use))
        if parts:
            found[(use.phase, use.kind, "/".join(use.axes))] += use.times * parts
    return found


def bytes_of_parts(program: PlainProgram, use: summary.CollectiveUse) -> list[int]:
    """What travels together counts as what it is made of."""
    node = next(node for node in program.stages[use.stage].graph.nodes if node.name == use.node)
    if node.args[0].target is not torch.ops.aten.cat.default:
        return [use.bytes_per_rank]
    sizes = [local_bytes(record(part)) for part in node.args[0].args[0]]
    assert use.bytes_per_rank % sum(sizes) == 0
    return [size * (use.bytes_per_rank // sum(sizes)) for size in sizes]


def per_layer(kind: str, mesh: str, plan: str) -> dict[tuple[str, str, str], int]:
    two, one = large(step(kind, 2, mesh, plan)), large(step(kind, 1, mesh, plan))
    return {key: two[key] - one[key] for key in {*one, *two} if two[key] != one[key]}


@pytest.mark.parametrize("kind", KINDS)
def test_megatron_two_all_reduces_each_way(kind: str) -> None:
    assert per_layer(kind, "tp=2", "megatron") == {("forward", "all_reduce", "tp"): 2, ("backward", "all_reduce", "tp"): 2}


@pytest.mark.parametrize("kind", KINDS)
def test_megatron_with_sequence_parallelism(kind: str) -> None:
    """Two gathers and two reduce-scatters each way, and two gathers more in backward, since the layer's inputs are saved split."""
    assert per_layer(kind, "tp=2", "megatron_sp") == {
        ("forward", "all_gather", "tp"): 2,
        ("forward", "reduce_scatter", "tp"): 2,
        ("backward", "all_gather", "tp"): 2 + 2,
        ("backward", "reduce_scatter", "tp"): 2,
    }


@pytest.mark.broad
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_and_data_parallel_together_are_the_sum(kind: str) -> None:
    weights = ATTENTION_AND_FFN[kind]
    assert per_layer(kind, "dp_shard=2,tp=2", "fsdp+megatron") == {
        ("forward", "all_reduce", "tp"): 2,
        ("backward", "all_reduce", "tp"): 2,
        ("forward", "all_gather", "dp_shard"): weights,
        ("backward", "all_gather", "dp_shard"): weights,
        ("update", "reduce_scatter", "dp_shard"): weights,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_zero3_one_gather_each_way_and_one_reduce_scatter_a_parameter(kind: str) -> None:
    weights = ATTENTION_AND_FFN[kind]
    assert per_layer(kind, "dp_shard=2", "fsdp") == {
        ("forward", "all_gather", "dp_shard"): weights,
        ("backward", "all_gather", "dp_shard"): weights,
        ("update", "reduce_scatter", "dp_shard"): weights,
    }
    whole = large(step(kind, 1, "dp_shard=2", "fsdp"))
    # outside the layers: embeddings (a lookup has no use for its weight in backward) and the head, which may be the token embedding
    assert whole[("forward", "all_gather", "dp_shard")] - weights == 2
    assert whole[("backward", "all_gather", "dp_shard")] - weights == 1
    assert whole[("update", "reduce_scatter", "dp_shard")] - weights == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["zero1", "zero2"])
def test_zero1_and_2_reduce_scatter_gradients_and_gather_parameters(kind: str, plan: str) -> None:
    weights = ATTENTION_AND_FFN[kind]
    assert per_layer(kind, "dp=2", plan) == {("update", "reduce_scatter", "dp"): weights, ("update", "all_gather", "dp"): weights}
    moved: Counter[str] = Counter()
    for use in summary.collectives(step(kind, 2, "dp=2", plan)):
        if use.bytes_per_rank > 64:
            moved[use.kind] += use.bytes_per_rank
    parameters = parameter_bytes(step(kind, 2, "dp=2", plan))
    assert moved == {"reduce_scatter": parameters, "all_gather": parameters}


@pytest.mark.parametrize("kind", KINDS)
def test_data_parallel_moves_each_gradient_once(kind: str) -> None:
    program = step(kind, 2, "dp=2", "ddp")
    uses = summary.collectives(program)
    assert {use.kind for use in uses} == {"all_reduce"}
    numbers_apart = sum(use.bytes_per_rank for use in uses) - parameter_bytes(program)
    assert 0 <= numbers_apart <= 64, "beside the gradients only a few numbers: the loss and the count of its labels"


@pytest.mark.parametrize("kind,exchanges", [broad("llama", 4), broad("gpt2", 2), ("nanogpt", 2)])
def test_ulysses(kind: str, exchanges: int) -> None:
    """Queries, keys, values and the output; with one projection for the first three, two."""
    found = per_layer(kind, "cp=2", "ulysses")
    update = {key: count for key, count in found.items() if key[0] == "update"}
    assert {key: count for key, count in found.items() if key not in update} == {
        ("forward", "all_to_all", "cp"): exchanges,
        ("backward", "all_to_all", "cp"): exchanges,
    }
    assert {key[1] for key in update} <= {"all_reduce"}, "what is left are the gradients, summed over the sequence's parts"


@pytest.mark.parametrize("kind", ["nanogpt", broad("llama"), broad("gpt2")])
def test_hybrid_sharding_reduces_the_shard_over_replicas(kind: str) -> None:
    uses = summary.collectives(step(kind, 2, "dp_replicate=2,dp_shard=2", "hsdp"))
    shards = sum(use.bytes_per_rank for use in uses if use.axes == ("dp_replicate",))
    whole = sum(use.bytes_per_rank for use in uses if use.axes == ("dp_shard",) and use.kind == "reduce_scatter")
    assert whole / 2 <= shards <= whole / 2 + 1024


def parameter_bytes(program: PlainProgram) -> int:
    return sum(prod(port.shape) * port.dtype.itemsize for port in program.inputs if port.kind == "parameter")


# ------------------------------------------------------------------------------------------------------------- none is superfluous

CASES = [
    ("llama", "tp=2", "megatron"),
    ("llama", "tp=2", "megatron_sp"),
    ("llama", "dp_shard=2", "fsdp"),
    ("gpt2", "cp=2", "ulysses"),
    ("gpt2", "dp=2", "zero1"),
    ("bert", "tp=2", "megatron"),
    ("mlp", "dp=2,tp=2", "ddp+megatron"),
    ("resnet", "dp=2", "ddp"),
]
SLOW = {"bert", "resnet", "gpt2", "megatron", "megatron_sp"}


@cache
def small(kind: str) -> Captured:
    """Parameters are moved off their initial values: tiles of a norm's weight that are all ones need no gathering."""
    factory = models.FACTORIES[kind]
    case = factory() if kind in ("mlp", "resnet") else factory(layers=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return Captured(case, train=True, double=True)


@pytest.mark.parametrize(
    "kind,mesh,plan", [(broad if SLOW & {*case} else pytest.param)(*case, id=f"{case[0]}-{case[2]}") for case in CASES]
)
def test_taking_out_any_one_collective_is_noticed(kind: str, mesh: str, plan: str) -> None:
    source = small(kind)
    source.restore()
    optimizer = torch.optim.SGD(source.reference.module.parameters(), lr=0.1, momentum=0.9)
    spec = describe(optimizer)
    program = source.program(mesh, plan, optimizer=spec, clip_grad_norm=CLIP)
    assert wrong(program, source, optimizer, spec) == "", "the program itself is right"
    names = [use.node for use in summary.collectives(program)]
    assert names
    unnoticed = [name for name in names if not wrong(without(program, name), source, optimizer, spec)]
    assert not unnoticed, f"of {len(names)} collectives these can go and nobody notices: {unnoticed}"


def without(program: PlainProgram, name: str) -> PlainProgram:
    """The program with one collective replaced by something local of the same shape, made of this rank's own tile."""
    stages = dict(program.stages)
    for key, stage in stages.items():
        graph: Graph = copy.deepcopy(stage.graph)
        for node in graph.nodes:
            if node.name == name:
                with graph.inserting_before(node):
                    made = graph.call_function(alone, (node.args[0], node.target.__name__, *_shape(program, node)))
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
                graph.erase_node(node)
                break
        stages[key] = replace(stage, graph=graph)
    return replace(program, stages=stages)


def _shape(program: PlainProgram, node: Node) -> tuple[Any, ...]:
    count = prod(program.axis_sizes[axis] for axis in node.args[1])  # type: ignore[union-attr]
    return (count, *(argument for argument in node.args[2:] if isinstance(argument, int)))


def alone(x: torch.Tensor, kind: str, count: int, *dims: int) -> torch.Tensor:
    """What a rank has that thinks itself alone: its own sum, its own tile in every place, the first tile of its own."""
    if kind == "all_reduce":
        return x.clone()
    if kind == "all_gather":
        return torch.cat([x] * count, dims[0])
    if kind == "reduce_scatter":
        return x.chunk(count, dims[0])[0].contiguous()
    return torch.cat([x.chunk(count, dims[0])[0]] * count, dims[1])


def wrong(program: PlainProgram, source: Captured, optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> str:
    """The first result of one step that is not the model's, or that ranks do not agree on; "" if there is none."""
    source.restore()
    optimizer.state.clear()
    report = verification.Report(verification.TOLERANCE[torch.float64])
    try:
        source.compare_steps(program, optimizer, spec, report, clip=CLIP, steps=1)
    except VerifyError as error:
        return str(error)
    return "" if report.ok else str(report)


def test_the_walk_sees_every_collective() -> None:
    program = step("nanogpt", 1, "dp_shard=2,tp=2", "fsdp+megatron")
    nodes = [node for stage in program.stages.values() for node in stage.graph.nodes if spmd.is_collective(node.target)]
    assert sorted(node.name for node in nodes) == sorted(use.node for use in summary.collectives(program))
    assert all(record(node).phase in summary.PHASES for node in nodes)
