"""Precision lines: products in few bits are the model's on one device under the same line, whatever the mesh.

`verify` runs the model itself, whose products it replaces by what it finds in memory (`runtime/simulator/reference_formats.py`), in
float64, so that bounds are those of summation alone; every program is proved too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import meshc
from meshc.errors import PlanError, VerifyError
from meshc.ir import records
from meshc.ir.formats import FORMATS
from meshc.ops import quantize as _quantize  # noqa: F401 - registers its operators
from meshc.report.summary import collectives
from meshc.runtime.simulator.simulation import node_values, simulate, whole

ours = torch.ops.meshc
MESHES = ("dp=4", "dp_shard=3", "tp=4", "dp_shard=2,tp=2", "cp=2,dp=2", "pp=2,dp=2")
UNEVEN = "dp=3,tp=2"
ROUNDED = (ours.scale_of.default, ours.quantize.default)


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    """Blocks, a router's product that decides which half of the values are read, a head."""

    def __init__(self, width: int = 128, inner: int = 384, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.router = nn.Linear(width, 4)
        self.head = nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        weight, best = self.router(x).softmax(-1).topk(2, -1)
        return self.head(x * weight.sum(-1, keepdim=True) + best.sum(-1, keepdim=True))


def step(mesh: str, line: str, layers: int = 2, **ask: Any) -> meshc.Program:
    torch.manual_seed(0)
    model = Stack(layers=layers)
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss, **ask)
    inputs = torch.randn(16, 32, 128), torch.randn(16, 32, 24)
    return meshc.compile(train, meshc.Mesh(mesh), args=inputs[:1], kwargs={"target": inputs[1]}, plan=line)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_the_same_on_uneven_tiles(name: str) -> None:
    report = meshc.verify(step(UNEVEN, f"precision layers.*: {name}"))
    assert report.worst < (1e-12 if FORMATS[name].is_scaled else 2e-2)


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_and_blocks_are_the_same_on_every_mesh(mesh: str) -> None:
    program = step(mesh, "precision layers.*: float8 block\nprecision layers.*.down: float8 row")
    assert meshc.verify(program).worst < 1e-12


def test_depth_is_one_layer_many_times() -> None:
    program = step("dp_shard=2", "precision layers.*: float8 row\nprecision layers.1: bf16", layers=6)
    formats = program.lowered.placed.traced.precision
    assert formats["layers.4.down.weight"] == (FORMATS["float8 row"],) and formats["layers.1.down.weight"] == (FORMATS["bf16"],)
    assert len(formats) == 18
    assert meshc.verify(program, dtype=torch.float32).ok


def test_a_mean_of_parts_rounds_each_part_alone() -> None:
    program = step("dp=2", "precision layers.*: float8 tensor", microbatches=2, batch_mix="mean_of_parts")
    assert meshc.verify(program).worst < 1e-12


def test_scales_along_the_batch_wait_for_all_microbatches() -> None:
    program = step("dp=2", "precision layers.*: float8 row", microbatches=2)
    assert meshc.verify(program).worst < 1e-12 and "are made once all microbatches have run" in program.summary()
    with pytest.raises(PlanError, match="need all microbatches at once, of which a stage has one at a time"):
        step("pp=2", "precision layers.*: float8 row", microbatches=2)
    assert meshc.verify(step("pp=2", "precision layers.*: float8 block", microbatches=2)).worst < 1e-12


@pytest.mark.parametrize("mesh", ["dp=3", "dp_shard=2,tp=2", "tp=3"])
@pytest.mark.parametrize("name", ["float8 tensor", "float8 row", "float8 block", "nvfp4"])
def test_scales_and_operands_are_those_of_one_device_bit_for_bit(name: str, mesh: str) -> None:
    """Of a product whose three operands are inputs, of 16 bits."""
    layer = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
    x = torch.randn(20, 128, 256, dtype=torch.bfloat16)
    program = meshc.compile(nn.Sequential(layer), meshc.Mesh(mesh), args=(x,), plan=f"precision 0: {name}")
    plain, joint = program.compiled, program.lowered.joint
    values = {port.key: torch.randn(port.shape, generator=torch.Generator().manual_seed(7)).to(port.dtype) for port in plain.inputs}
    wanted = node_values(joint.graph, [values[port.key] for port in joint.inputs])
    truth = {f"{node.name}.0": value for node, value in wanted.items() if node.target in ROUNDED}
    seen = set[str]()

    def observe(node: Node, ranks: list[Any]) -> None:
        made = records(node)[0] if node.op == "call_function" and "meshc" in node.meta else None
        if made is None or made.sharding is None or made.sharding.partial or made.of not in truth:
            return
        given, right = whole(ranks, made.sharding, plain), truth[made.of]
        assert given.dtype == right.dtype and torch.equal(given.float(), right.float()), f"{node.name} on {mesh}"
        seen.add(made.of)

    simulate(plain, values, observe=observe)
    operands = {f"{node.name}.0" for node in wanted if node.target is ours.quantize.default}
    assert seen >= operands and len(operands) >= 3


def test_weights_are_gathered_in_eight_bits() -> None:
    """A byte an element, where bfloat16 takes two, once for forward and once for what of backward reads the weight; scales beside them."""
    weights, rows = 2 * 3 * 128 * 384, 2 * (384 + 384 + 128)
    sent = Counter[torch.dtype | None]()
    for use in collectives(step("dp_shard=4", "precision layers.*: float8 row").compiled):
        sent[use.dtype] += use.bytes_per_rank * (use.kind == "all_gather")
    assert weights + weights * 2 // 3 <= sent[torch.float8_e4m3fn] <= 2 * weights
    assert sent[torch.float32] <= 4 * (2 * rows + 3 * 128 * 24 + 2 * 384) + 4096


def test_what_autocast_rounds_is_gathered_behind_the_cast() -> None:
    """Float32 weights at two bytes an element."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = step("dp_shard=4", "")
    gathered = [use for use in collectives(program.compiled) if use.kind == "all_gather"]
    assert gathered and {use.dtype for use in gathered} == {torch.bfloat16}


def test_a_head_and_a_router_stay_as_they_are_unless_they_are_named() -> None:
    def formats(line: str) -> set[str]:
        return {name.removesuffix(".weight") for name in step("dp=2", line, layers=1).lowered.placed.traced.precision}

    assert formats("precision *: float8 row") == {"layers.0.up", "layers.0.gate", "layers.0.down"}
    assert formats("precision *: float8 row\nprecision head: float8 row") >= {"head"}
    assert formats("precision router: bf16") == {"router"}
    program = step("dp=2", "precision *: float8 row", layers=1)
    assert "head stays as it is" in program.summary() and "router stays as it is" in program.summary()


class Added(nn.Module):
    """Products with some rows of a weight, added to a value with factors of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 48))
        self.out = nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.addmm(x[:, :24].repeat(1, 2), x, self.weight, beta=0.5, alpha=2.0)
        return self.out(first + F.pad(F.linear(x, self.weight.t()[8:40]), (0, 16)))


@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_summands_and_parts_of_weights(mesh: str) -> None:
    program = meshc.compile(Added(), meshc.Mesh(mesh), args=(torch.randn(16, 32),), plan="precision *: float8 row")
    assert set(program.lowered.placed.traced.precision) == {"weight"}
    assert meshc.verify(program).worst < 1e-12


class Tied(nn.Module):
    """One weight, in a product that is rounded, also once more from a checkpoint, and in a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 32))
        self.between = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        def begin(x: Tensor) -> Tensor:
            return F.silu(x @ self.table)

        return F.silu(self.between(checkpoint(begin, x, use_reentrant=False))) @ self.table


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "dp=3"])
def test_a_weight_of_several_products_is_rounded_where_the_line_says(mesh: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    inputs = {"args": (torch.randn(16, 32),), "kwargs": {"target": torch.randn(16, 32)}}
    program = meshc.compile(train, meshc.Mesh(mesh), plan="precision *: float8 row", **inputs)
    assert program.lowered.placed.traced.precision == {"table": (FORMATS["float8 row"], None), "between.weight": (FORMATS["float8 row"],)}
    assert meshc.verify(program).worst < 1e-12


class Recurrent(nn.Module):
    """A recurrent layer whose weight another product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(32, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.layer(x)[0] @ self.layer.weight_hh_l0[:32]))


def test_what_the_model_on_one_device_cannot_tell_is_said() -> None:
    program = meshc.compile(Recurrent(), meshc.Mesh("tp=2"), args=(torch.randn(4, 8, 32),), plan="precision *: float8 row")
    with pytest.raises(VerifyError, match="layer.weight_hh_l0, of which the program has 1, and the model on one device runs more"):
        meshc.verify(program)
    assert program.prove().holds


def test_sizes_that_blocks_do_not_fit_are_said() -> None:
    model = nn.Sequential(nn.Linear(100, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    program = meshc.compile(model, meshc.Mesh("dp=2"), args=(torch.randn(128, 100),), plan="precision *: float8 block")
    assert "0 stays as it is: float8 block takes sizes in multiples of 128, and it has 100" in program.summary()


@pytest.mark.parametrize(
    "line, said",
    [
        ("precision layers.*: float9 row", "float9 row is no format"),
        ("precision layers.*: float8", "float8 is no format; say what one scale covers: float8 tensor, float8 tensor, delayed, float8 row"),
        ("precision layers.*", "then comes a colon, and a format"),
        ("precision blocks.*: bf16", "no product with a weight is in such a module; name modules as"),
    ],
)
def test_what_does_not_fit_is_refused(line: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        step("dp=2", line, layers=1)


def test_activations_are_gathered_in_eight_bits_for_sequence_parallelism() -> None:
    """In forward the one of their two roundings that is read there, at a byte an element, once for the two products that read it."""
    program = step("sp=4", "precision layers.*: float8 row")
    forward = [use for use in collectives(program.compiled) if use.kind == "all_gather" and use.phase == "forward"]
    assert {use.dtype: use.bytes_per_rank for use in forward} == {torch.float8_e4m3fn: 16 * 32 * 128, torch.float32: 16 * 32 * 4}
    assert meshc.verify(program).worst < 1e-12


def test_blocks_that_several_ranks_store_are_gathered_in_eight_bits() -> None:
    """A scale of a block is then the least of theirs: three blocks of rows, or one, over four ranks."""
    program = step("dp_shard=4", "precision layers.*: float8 block")
    gathered = [use for use in collectives(program.compiled) if use.kind == "all_gather" and use.phase == "forward"]
    weights = sum(use.bytes_per_rank for use in gathered if use.dtype == torch.float8_e4m3fn)
    assert weights == 2 * 3 * 128 * 384 and meshc.verify(program).worst < 1e-12
