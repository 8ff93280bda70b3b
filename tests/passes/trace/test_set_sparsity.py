"""Sparse lines: masked products are the model's on one device under the same line, whatever the mesh.

`verify` runs the model itself, whose weights it masks by what it finds in memory (`runtime/simulator/reference_masks.py`); every program
is proved too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import meshc
from meshc.errors import PlanError, VerifyError
from meshc.ir import record, records
from meshc.ir.formats import FORMATS
from meshc.optimizer.optimizer import numbers
from meshc.passes.trace import set_sparsity
from meshc.plan.precision_lines import SparseLine
from meshc.proof.program_proof import prove
from meshc.report.summary import collectives
from meshc.runtime.simulator.simulation import simulate, whole

ours = torch.ops.meshc
WIDTH, INNER = 24, 36
MESHES = ("dp=4", "dp_shard=3", "tp=2,sp=2", "dp_shard=2,tp=2", "cp=2,dp=2", "pp=2,dp=2", "dp=3,tp=2", "tp=3")
"""Groups of 4 are 6 and 9: on two ranks, and 6 on four, they are uneven."""
LINE = "sparse layers.*: 2:4"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Stack(nn.Module):
    """Rows of a table, blocks, a router's product that decides which values are read, a head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.router = nn.Linear(WIDTH, 4)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x + self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        weight, best = self.router(x).softmax(-1).topk(2, -1)
        return self.head(x * weight.sum(-1, keepdim=True) + best.sum(-1, keepdim=True))


def inputs() -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(12, 4, WIDTH), torch.randint(0, 10, (12, 4))), torch.randn(12, 4, 8)


def step(mesh: str, line: str = LINE, layers: int = 2, model: Stack | None = None, **ask: Any) -> meshc.Program:
    torch.manual_seed(0)
    model = model or Stack(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss, **ask)
    args, target = inputs()
    return meshc.compile(train, meshc.Mesh(mesh), args=args, kwargs={"target": target}, plan=line)


def largest(weight: Tensor, n: int = 2, m: int = 4) -> Tensor:
    """Whether an entry is among the n largest of its m along the last dim, by a sort."""
    groups = weight.detach().abs().unflatten(-1, (-1, m))
    order = groups.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros(groups.shape, dtype=torch.bool).scatter(-1, order[..., :n], True).flatten(-2)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_is_the_same_on_every_mesh(mesh: str) -> None:
    assert meshc.verify(step(mesh)).worst < 1e-12


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "dp=3,tp=2"])
def test_a_mask_comes_before_what_is_rounded(mesh: str) -> None:
    program = step(mesh, f"{LINE}\nprecision layers.*: float8 row\nsparse layers.1.down: 1:3, decay 0.01")
    found = program.lowered.placed.traced
    assert found.sparsity["layers.1.down.weight"].line.m == 3 and found.precision["layers.1.down.weight"] == (FORMATS["float8 row"],)
    assert meshc.verify(program).worst < 1e-12


@pytest.mark.parametrize("ask", [{"microbatches": 3}, {"microbatches": 3, "batch_mix": "mean_of_parts"}, {"clip_grad_norm": 0.1}], ids=str)
def test_the_decay_is_added_once_ahead_of_clipping(ask: dict[str, Any]) -> None:
    assert meshc.verify(step("dp_shard=2", f"{LINE}, decay 0.5", **ask)).worst < 1e-12


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "pp=2,dp=2", "dp=3"])
def test_weights_that_are_not_read_are_zero_from_the_first_step_on(mesh: str) -> None:
    program = step(mesh, "sparse layers.*: 2:4, fixed\nsparse layers.1.up: 2:4", clip_grad_norm=0.5)
    assert meshc.verify(program).worst < 1e-12


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weights_that_come_sparse_keep_their_zeros(optimizer: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 8)
    layer.weight.data *= largest(layer.weight)
    before, made = layer.weight.detach().clone(), layer.weight.detach().clone()
    chosen = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]([*layer.parameters()], lr=0.1, weight_decay=0.1)
    train = meshc.TrainStep(nn.Sequential(layer, nn.Linear(8, 4)), optimizer=chosen, loss=F.mse_loss)
    args = (torch.randn(6, 24),)
    program = meshc.compile(train, meshc.Mesh("dp=2"), args=args, kwargs={"target": torch.randn(6, 4)}, plan="sparse 0: 2:4, fixed")
    assert meshc.verify(program).worst < 1e-12
    last = nn.Linear(8, 4)
    values = {"parameter:0.weight": made, "parameter:0.bias": layer.bias.detach()}
    values |= {"input:input": args[0], "input:target": torch.randn(6, 4)}
    values |= {"parameter:1.weight": last.weight.detach(), "parameter:1.bias": last.bias.detach()}
    rows = numbers(chosen)
    for port in program.compiled.inputs:
        if port.kind == "number":
            group, _, name = port.name.partition(".")
            values[port.key] = torch.tensor(rows[int(group)][name], dtype=torch.float64)
        elif port.kind == "state":
            values[port.key] = torch.zeros(port.shape, dtype=port.dtype)
    for _ in range(2):
        values |= {key: value for key, value in simulate(program.compiled, values).items() if key in values}
    after = values["parameter:0.weight"]
    assert torch.equal(after != 0, before != 0) and not torch.equal(after, before)


def test_masks_are_made_ahead_of_casts() -> None:
    """In float32 under autocast, where verification runs the model twice on casts that torch would keep."""
    torch.manual_seed(0)
    model, (args, target) = Stack(), inputs()
    train = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = meshc.compile(train, meshc.Mesh("dp_shard=2"), args=args, kwargs={"target": target}, plan=LINE)
        assert meshc.verify(program, dtype=torch.float32).ok
    traced = program.lowered.joint.graph
    assert {records(node)[0].dtype for node in traced.nodes if node.target is ours.keep_largest.default} == {torch.float32}


def test_a_hook_comes_before_the_decay() -> None:
    model = Stack()
    model.layers[0].up.weight.register_hook(torch.zeros_like)
    assert meshc.verify(step("dp_shard=2", model=model)).worst < 1e-12


@pytest.mark.parametrize("grad", [True, False])
def test_modules_read_masked_weights_and_return_gradients_with_their_decay(grad: bool) -> None:
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        program = meshc.compile(Stack(), meshc.Mesh("dp_shard=2,tp=2"), args=inputs()[0], plan=LINE)
        assert meshc.verify(program).worst < 1e-12


@pytest.mark.parametrize("check", ["1", "values"])
def test_passes_behind_the_line_are_verified_by_what_it_says(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_VERIFY", check)
    meshc.compile(Stack(), meshc.Mesh("dp_shard=2"), args=inputs()[0], plan=f"{LINE}\nprecision layers.1: bf16")
    step("dp_shard=2", f"{LINE}, fixed", layers=1)


def test_depth_is_one_layer_many_times() -> None:
    program = step("dp_shard=2", f"{LINE}\nsparse layers.1: 1:4", layers=6)
    found = program.lowered.placed.traced.sparsity
    assert len(found) == 12 and [found[f"layers.{layer}.up.weight"].line.n for layer in range(6)] == [2, 1, 2, 2, 2, 2]
    assert meshc.verify(program).worst < 1e-12


@pytest.mark.parametrize("mesh", ["dp=3", "dp_shard=3", "dp_shard=2,tp=2", "tp=4", "cp=2,dp=2"])
def test_masks_are_those_of_one_device_bit_for_bit(mesh: str) -> None:
    """With many entries of one magnitude."""
    model = Stack()
    for parameter in model.parameters():
        parameter.data = (4 * torch.randn(parameter.shape)).round() / 4
    program = step(mesh, model=model).compiled
    parameters = dict(model.named_parameters())
    values = {port.key: parameters[port.name].detach() for port in program.inputs if port.kind == "parameter"}
    (x, tokens), target = inputs()
    values |= {"input:x": x, "input:tokens": tokens, "input:target": target}
    values |= {port.key: torch.zeros((), dtype=torch.float64) for port in program.inputs if port.kind == "number"}
    sparse = [parameter for name, parameter in parameters.items() if name.startswith("layers") and parameter.dim() == 2]
    wanted = [parameter * largest(parameter) for parameter in sparse]
    seen = []

    def observe(node: Node, ranks: list[Any]) -> None:
        if node.target is ours.keep_largest.default:
            made = records(node)[0]
            assert made.sharding is not None
            value = whole(ranks, made.sharding, program).flatten(-2)
            seen.append(next(number for number, one in enumerate(wanted) if torch.equal(one, value)))

    simulate(program, values, observe=observe)
    assert sorted(set(seen)) == [0, 1, 2, 3] and len(seen) == 8


def test_a_step_by_hand() -> None:
    """One weight, straight-through: gradient, its decay, the norm of both, and the update."""
    torch.manual_seed(0)
    layer, x, target = nn.Linear(8, 4, bias=False).double(), torch.randn(6, 8).double(), torch.randn(6, 4).double()
    first = layer.weight.detach().clone()
    masked = (first * largest(first)).requires_grad_()
    F.mse_loss(x @ masked.t(), target).backward()
    assert masked.grad is not None
    gradient = masked.grad + 0.25 * torch.where(largest(first), 0.0, first)
    train = meshc.TrainStep(
        nn.Sequential(layer), optimizer=torch.optim.SGD(layer.parameters(), lr=0.5), loss=F.mse_loss, clip_grad_norm=0.1
    )
    program = meshc.compile(train, meshc.Mesh("dp=2"), args=(x,), kwargs={"target": target}, plan="sparse 0: 2:4, decay 0.25").compiled
    numbers = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    values = {"parameter:0.weight": first, "input:input": x, "input:target": target}
    values |= {port.key: torch.tensor(numbers[port.name.partition(".")[2]]).double() for port in program.inputs if port.kind == "number"}
    found = simulate(program, values)
    torch.testing.assert_close(found["metric:grad_norm"], gradient.norm())
    torch.testing.assert_close(found["parameter:0.weight"], first - 0.5 * gradient * (0.1 / (gradient.norm() + 1e-6)).clamp(max=1.0))


class Experts(nn.Module):
    """Every expert on all tokens; the einsum of the first reads its weights in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 8, 12)), nn.Parameter(torch.randn(4, 12, 8))
        self.gate = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("etf,efh->eth", torch.einsum("th,ehf->etf", x, self.first).relu(), self.second)
        return torch.einsum("eth,te->th", made, self.gate(x).softmax(-1))


@pytest.mark.parametrize("mesh", ["ep=2", "ep=2,tp=2"])
def test_stacked_experts_have_groups_along_what_each_sums_over(mesh: str) -> None:
    torch.manual_seed(0)
    program = meshc.compile(Experts(), meshc.Mesh(mesh), args=(torch.randn(6, 8),), plan="sparse *: 2:4")
    assert {name: one.dim for name, one in program.lowered.placed.traced.sparsity.items()} == {"first": 1, "second": 1, "gate.weight": 1}
    assert meshc.verify(program).worst < 1e-12


class Runs(nn.Module):
    """Runs of rows with a matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        made = torch._grouped_mm(x, self.up, offs=ends).relu()
        return self.last(torch._grouped_mm(made, self.down, offs=ends).relu())


@pytest.mark.parametrize("form", ["", "precision *: float8 row", "precision *: bf16"])
def test_masks_come_before_roundings_in_runs_of_rows(form: str) -> None:
    torch.manual_seed(0)
    args = torch.randn(12, 8), torch.tensor([3, 5, 9, 12], dtype=torch.int32)
    program = meshc.compile(Runs(), meshc.Mesh("tp=2"), args=args, plan=f"sparse *: 2:4\n{form}")
    found = program.lowered.placed.traced
    assert {name: one.dim for name, one in found.sparsity.items()} == {"up": 1, "down": 1}
    assert set(found.precision) == ({"up", "down"} if form else set())
    assert meshc.verify(program).worst < (2e-2 if "bf16" in form else 1e-12)


def test_a_mask_is_made_ahead_of_a_gather_and_again_in_backward() -> None:
    program = step("dp_shard=2", layers=1).compiled
    nodes = [node for stage in program.stages.values() for node in stage.graph.nodes if node.target is ours.keep_largest.default]
    assert [(records(node)[0].phase, records(node)[0].sharding.split_axes()) for node in nodes] == [  # type: ignore[union-attr]
        ("forward", {"dp_shard"}), ("forward", {"dp_shard"}), ("backward", {"dp_shard"}), ("backward", {"dp_shard"}),
    ]  # fmt: skip
    dense = step("dp_shard=2", "", layers=1).compiled
    sent = [sorted(use.bytes_per_rank for use in collectives(one) if use.kind == "all_gather") for one in (program, dense)]
    assert sent[0] == sent[1]


def test_a_mask_by_tile_is_caught() -> None:
    """Of each row the largest of what a rank has of it, whatever its groups."""
    program = step("tp=3", layers=1)
    joint, plain = program.lowered.joint, program.compiled
    assert prove(plain, joint.as_stage(), joint.constants).holds
    (*_, node) = (node for stage in plain.stages.values() for node in stage.graph.nodes if node.target is ours.keep_largest.default)
    node.args = (node.args[0], node.args[1], 1)
    proof = prove(plain, joint.as_stage(), joint.constants)
    assert not proof.holds and "keep_largest" in str(proof)


def test_other_groups_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sixth entry is a group: a program that is proved, and is not what the line says."""

    def mask_strided(self: set_sparsity.MaskWriter, at: Node, weight: Node) -> Node:
        sparse, shape = self.weights[weight], record(weight).shape
        groups = [*shape[:-1], 4, shape[-1] // 4]
        view = self._emit(at, weight, groups, torch.ops.aten.reshape.default, weight, groups)
        kept = self._emit(at, weight, groups, ours.keep_largest.default, view, sparse.line.n, 1)
        return self._emit(at, weight, shape, torch.ops.aten.reshape.default, kept, list(shape))

    monkeypatch.setattr(set_sparsity.MaskWriter, "_mask_weight", mask_strided)
    with pytest.raises(VerifyError, match="the first that is too far off"):
        meshc.verify(step("tp=3", layers=1))


def test_a_head_and_a_router_stay_dense_unless_they_are_named() -> None:
    program = step("dp=2", "sparse *: 2:4\nsparse router: 1:2", layers=1)
    found = program.lowered.placed.traced.sparsity
    assert set(found) == {"layers.0.up.weight", "layers.0.down.weight", "router.weight"}
    assert "sparse: head stays as it is" in program.summary()
    assert "sparse: table.weight stays dense: no product that masks are for reads it" in program.summary()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(12, 8)), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(((x @ self.weight).relu() @ self.weight.t()).relu())


def test_a_weight_has_one_mask() -> None:
    with pytest.raises(PlanError, match=r"weight \[12, 8\] has one mask, along dim 0 by `sparse \*: 2:4`, and .* sums along dim 1"):
        meshc.compile(Tied(), meshc.Mesh("dp=2"), args=(torch.randn(6, 12),), plan="sparse *: 2:4")


@pytest.mark.parametrize(
    "line, said",
    [
        ("sparse table: 2:4", "table is an embedding: its rows are looked up, no product sums over them, and masks would save nothing"),
        ("sparse layers.*: 2:7", r"layers.0.up sums over 24 entries of layers.0.up.weight \[36, 24\], which are no groups of 7"),
        ("sparse blocks.*: 2:4", "no product with a weight is in such a module; name modules as"),
        ("sparse layers.*: 4:4", "4:4 leaves 4 of 4 weights"),
        ("sparse layers.*: 0:4", "0:4 leaves 0 of 4 weights"),
        ("sparse layers.*: half", "how many weights are left of how many belongs here: `2:4`"),
        ("sparse layers.*", "then comes a colon, and how many weights are left of how many"),
        ("sparse layers.*: 2:4, decay -1", "a decay is a number from 0 on"),
        ("sparse layers.*: 2:4 decay 1", "a sparse line ends after `every COUNT`, `until STEP`, `decay NUMBER` or `fixed`"),
        ("sparse layers.*: 2:4, static", "behind the comma stands `decay NUMBER`, `every COUNT`, or `fixed`"),
    ],
)
def test_what_does_not_fit_is_refused(line: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        step("dp=2", line, layers=1)


def test_a_line_is_read_as_it_is_printed() -> None:
    text = "dp: batch\nsparse layers.*: 2:4\nsparse layers.1: 1:8, decay 0.001\nsparse head: 2:4, decay 0.0\nsparse *: 2:4, fixed"
    plan = meshc.Plan(text)
    assert str(plan) == text and meshc.Plan(str(plan)) == plan
    assert meshc.Plan({"dp": "batch", "sparse": ["a.*: 2 : 4"]}).sparsities == (SparseLine("a.*", 2, 4),)
