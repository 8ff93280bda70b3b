"""Updates of whole matrices, each on a rank of its own: beside one device, what a rank computes and sends, what stays on every rank."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Node

import meshc
from meshc import artifact
from meshc.cost import devices, divided_work
from meshc.cost.flops import flops
from meshc.cost.links import payload
from meshc.ir import calls_of, spmd
from meshc.passes.lower.divide_updates import divide
from meshc.program.program import Stage
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage
from tests.broad import broad
from tests.optimizer.others import Orthogonal, Shampoo, Soap
from tests.passes.stepped import around, changed

Build = Callable[[Any], torch.optim.Optimizer]


class Equal(nn.Module):
    """Matrices of two shapes, `layers` of each."""

    def __init__(self, layers: int = 4, hidden: int = 6, ffn: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, ffn, bias=False), nn.GELU(), nn.Linear(ffn, hidden, bias=False)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


CPU = devices.device("cpu")
NEAR = replace(CPU, collective_s=1e-6, inside_node=devices.Link(1e-6, 1e10), between_nodes=devices.Link(1e-6, 1e10))
"""A CPU whose messages take little: small matrices are divided too."""


def compiled(build: Build, mesh: str, plan: str | None = None, layers: int = 4, device: devices.Device = NEAR, **sizes: int) -> meshc.Program:
    model = Equal(layers, **sizes).double()
    width = model.layers[0][0].in_features
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, width, generator=generator, dtype=torch.float64) for _ in range(2))
    parts = 2 if "pp" in mesh else 1
    step = meshc.TrainStep(model, optimizer=build(model.parameters()), loss=F.mse_loss, microbatches=parts)
    with devices.assume_device(device):
        return meshc.compile(step, meshc.Mesh(mesh), args=(x,), kwargs={"target": y}, plan=plan)


def note_of(program: meshc.Program) -> str:
    (note,) = [note for note in program.compiled.notes if note.startswith("updates of whole matrices")]
    return note


def updates(stage: Stage) -> list[Node]:
    return calls_of(stage.graph, "update")


def products(program: meshc.Program) -> float:
    """Multiplications and additions of a rank's update."""
    return sum(flops(node) for stage in program.compiled.stages.values() for node in updates(stage))


def of_newton_schulz(rows: int, columns: int) -> float:
    """Five steps, each of two products of the short side with the long one, and one of squares."""
    m, n = min(rows, columns), max(rows, columns)
    return 5 * (2 * 2.0 * m * m * n + 2.0 * m**3)


class Gram(torch.optim.Optimizer):
    """A step along g g^T g."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad @ p.grad.T @ p.grad, alpha=-self.param_groups[0]["lr"])


def change(mesh: str, model: nn.Module) -> str:
    """Lines of a step that the pass takes away, and those that it writes."""
    step = meshc.TrainStep(model, optimizer=Gram(model.parameters()), loss=F.mse_loss)
    with devices.assume_device(NEAR):
        return changed(*around("divide_updates", step, mesh, x=torch.zeros(4, 6), target=torch.zeros(4, 6)))


def test_tiles_go_to_a_rank_and_come_back() -> None:
    assert_expected_inline(change("dp_shard=2", Equal(1, 6, 6)), """\
+ stack_default: "f32[2, 3, 6]" = aten.stack([reduce_scatter, reduce_scatter_1])
+ reshape_default: "f32[2, 3, 6]" = aten.reshape(stack_default, [2, 3, 6])
+ all_to_all: "f32[1, 6, 6]" = all_to_all(reshape_default, ["dp_shard"], 0, 1)
+ reshape_default_1: "f32[6, 6]" = aten.reshape(all_to_all, [6, 6])
+ t_default_14: "f32[6, 6]" = aten.t(reshape_default_1)
+ t_default_15: "f32[6, 6]" = aten.t(t_default_14)
+ permute_default_2: "f32[6, 6]" = aten.permute(t_default_15, [1, 0])
+ mm_default_9: "f32[6, 6]" = aten.mm(t_default_15, permute_default_2)
+ mm_default_10: "f32[6, 6]" = aten.mm(mm_default_9, t_default_15)
+ reshape_default_2: "f32[1, 6, 6]" = aten.reshape(mm_default_10, [1, 6, 6])
+ reshape_default_3: "f32[1, 6, 6]" = aten.reshape(reshape_default_2, [1, 6, 6])
+ all_to_all_1: "f32[2, 3, 6]" = all_to_all(reshape_default_3, ["dp_shard"], 1, 0)
+ select_int: "f32[ffn 6/dp_shard, layers.0.0.weight.1 6] pad(zero: 0.0)" = aten.select.int(all_to_all_1, 0, 0)
+ select_int_1: "f32[layers.0.0.weight.1 6/dp_shard, ffn 6] pad(zero: 0.0)" = aten.select.int(all_to_all_1, 0, 1)
- all_gather_3: "f32[ffn 6, layers.0.0.weight.1 6] pad(zero: 0.0)" = all_gather(reduce_scatter, ["dp_shard"], 0)
- t_default_10: "f32[layers.0.0.weight.1 6, ffn 6] pad(zero: 1.0)" = aten.t(all_gather_3)
- t_default_11: "f32[ffn 6, layers.0.0.weight.1 6] pad(zero: 0.0)" = aten.t(t_default_10)
- permute_default: "f32[layers.0.0.weight.1 6, ffn 6] pad(zero: 1.0)" = aten.permute(t_default_11, [1, 0])
- mm_default_5: "f32[ffn 6, ffn 6]" = aten.mm(t_default_11, permute_default)
- mm_default_6: "f32[ffn 6, layers.0.0.weight.1 6]" = aten.mm(mm_default_5, t_default_11)
- shard_2: "f32[ffn 6/dp_shard, layers.0.0.weight.1 6] pad(zero: 0.0)" = shard(mm_default_6, 0, 2, coordinate)
- mul_tensor_3: "f32[ffn 6/dp_shard, layers.0.0.weight.1 6]" = aten.mul.Tensor(shard_2, neg_default)
+ mul_tensor_3: "f32[ffn 6/dp_shard, layers.0.0.weight.1 6]" = aten.mul.Tensor(select_int, neg_default)
- all_gather_4: "f32[layers.0.0.weight.1 6, ffn 6] pad(zero: 0.0)" = all_gather(reduce_scatter_1, ["dp_shard"], 0)
- t_default_12: "f32[ffn 6, layers.0.0.weight.1 6] pad(zero: 1.0)" = aten.t(all_gather_4)
- t_default_13: "f32[layers.0.0.weight.1 6, ffn 6] pad(zero: 0.0)" = aten.t(t_default_12)
- permute_default_1: "f32[ffn 6, layers.0.0.weight.1 6] pad(zero: 1.0)" = aten.permute(t_default_13, [1, 0])
- mm_default_7: "f32[layers.0.0.weight.1 6, layers.0.0.weight.1 6]" = aten.mm(t_default_13, permute_default_1)
- mm_default_8: "f32[layers.0.0.weight.1 6, ffn 6]" = aten.mm(mm_default_7, t_default_13)
- shard_3: "f32[layers.0.0.weight.1 6/dp_shard, ffn 6] pad(zero: 0.0)" = shard(mm_default_8, 0, 2, coordinate)
- mul_tensor_4: "f32[layers.0.0.weight.1 6/dp_shard, ffn 6]" = aten.mul.Tensor(shard_3, neg_default_1)
+ mul_tensor_4: "f32[layers.0.0.weight.1 6/dp_shard, ffn 6]" = aten.mul.Tensor(select_int_1, neg_default_1)
""")


def test_whole_matrices_are_chosen_from() -> None:
    assert_expected_inline(change("dp=2", Equal(1, 6, 6)), """\
+ stack_default: "f32[2, 6, 6]" = aten.stack([t_default_6, t_default_8])
+ coordinate_1: "int" = coordinate("dp")
+ shard_2: "f32[1, 6, 6]" = shard(stack_default, 0, 2, coordinate_1)
+ reshape_default: "f32[6, 6]" = aten.reshape(shard_2, [6, 6])
+ permute_default_2: "f32[6, 6]" = aten.permute(reshape_default, [1, 0])
+ mm_default_9: "f32[6, 6]" = aten.mm(reshape_default, permute_default_2)
+ mm_default_10: "f32[6, 6]" = aten.mm(mm_default_9, reshape_default)
+ neg_default_2: "f64[]" = aten.neg(number_0_lr)
+ mul_tensor_5: "f32[6, 6]" = aten.mul.Tensor(mm_default_10, neg_default_2)
+ reshape_default_1: "f32[1, 6, 6]" = aten.reshape(mul_tensor_5, [1, 6, 6])
+ all_gather: "f32[2, 6, 6]" = all_gather(reshape_default_1, ["dp"], 0)
+ select_int: "f32[ffn 6, layers.0.0.weight.1 6]" = aten.select.int(all_gather, 0, 0)
+ select_int_1: "f32[layers.0.0.weight.1 6, ffn 6]" = aten.select.int(all_gather, 0, 1)
- permute_default: "f32[layers.0.0.weight.1 6, ffn 6]" = aten.permute(t_default_6, [1, 0])
- mm_default_5: "f32[ffn 6, ffn 6]" = aten.mm(t_default_6, permute_default)
- mm_default_6: "f32[ffn 6, layers.0.0.weight.1 6]" = aten.mm(mm_default_5, t_default_6)
- neg_default: "f64[] whole" = aten.neg(number_0_lr)
- mul_tensor_3: "f32[ffn 6, layers.0.0.weight.1 6]" = aten.mul.Tensor(mm_default_6, neg_default)
- add_tensor_2: "f32[ffn 6, layers.0.0.weight.1 6]" = aten.add.Tensor(layers_0_0_weight, mul_tensor_3)
- permute_default_1: "f32[ffn 6, layers.0.0.weight.1 6]" = aten.permute(t_default_8, [1, 0])
- mm_default_7: "f32[layers.0.0.weight.1 6, layers.0.0.weight.1 6]" = aten.mm(t_default_8, permute_default_1)
- mm_default_8: "f32[layers.0.0.weight.1 6, ffn 6]" = aten.mm(mm_default_7, t_default_8)
- neg_default_1: "f64[] whole" = aten.neg(number_0_lr)
- mul_tensor_4: "f32[layers.0.0.weight.1 6, ffn 6]" = aten.mul.Tensor(mm_default_8, neg_default_1)
- add_tensor_3: "f32[layers.0.0.weight.1 6, ffn 6]" = aten.add.Tensor(layers_0_2_weight, mul_tensor_4)
+ add_tensor_2: "f32[ffn 6, layers.0.0.weight.1 6]" = aten.add.Tensor(layers_0_0_weight, select_int)
+ add_tensor_3: "f32[layers.0.0.weight.1 6, ffn 6]" = aten.add.Tensor(layers_0_2_weight, select_int_1)
""")


IN_TURN = '''@ranks("dp=2")
def main(
    g: "f32[a 4/dp, b 4]" = "value:g",
    h: "f32[a 4/dp, b 4]" = "value:h",
):
    rank: "int" = coordinate("dp")
    whole_0: "f32[a 4, b 4]" = all_gather(g, ["dp"], 0)
    square_0: "f32[a 4, b 4]" = aten.mm(whole_0, whole_0)
    fourth_0: "f32[a 4, b 4]" = aten.mm(square_0, square_0)
    eighth_0: "f32[a 4, b 4]" = aten.mm(fourth_0, fourth_0)
    product_0: "f32[a 4, b 4]" = aten.mm(eighth_0, eighth_0)
    tile_0: "f32[a 4/dp, b 4]" = shard(product_0, 0, 2, rank)
    next: "f32[a 4/dp, b 4]" = aten.relu(FROM)
    whole_1: "f32[a 4, b 4]" = all_gather(next, ["dp"], 0)
    square_1: "f32[a 4, b 4]" = aten.mm(whole_1, whole_1)
    fourth_1: "f32[a 4, b 4]" = aten.mm(square_1, square_1)
    eighth_1: "f32[a 4, b 4]" = aten.mm(fourth_1, fourth_1)
    product_1: "f32[a 4, b 4]" = aten.mm(eighth_1, eighth_1)
    tile_1: "f32[a 4/dp, b 4]" = shard(product_1, 0, 2, rank)
    return {
        "value:0": tile_0,
        "value:1": tile_1,
    }
'''


@pytest.mark.parametrize(("source", "count"), [("tile_0", 0), ("h", 2)])
def test_what_is_made_of_another_is_not_taken_together_with_it(source: str, count: int) -> None:
    text = IN_TURN.replace("FROM", source)
    stage = parse_stage(text, {name: {"phase": "update"} for name in re.findall(r"(?m)^    (\w+): \"f32.*(?:mm|shard|relu|all_gather)\(", text)})
    before = print_stage(stage)
    assert divide(stage.graph, meshc.Mesh("dp=2"), NEAR).divided == count
    assert (print_stage(stage) == before) == (count == 0)


@pytest.mark.parametrize(
    ("build", "mesh", "plan", "layers"),
    [
        broad(Orthogonal, "dp=2", None, 2, id="whole"),
        broad(Orthogonal, "dp_shard=2", None, 3, id="tiles"),
        pytest.param(Orthogonal, "dp=2,tp=2", "dp: batch\ntp: ffn; store params, grads, state", 4, id="two axes"),
        broad(Orthogonal, "dp=2,tp=2", "dp: batch; store params, grads, state\ntp: ffn; store params, grads, state", 5, id="tiles of two axes"),
        broad(Orthogonal, "dp=2,tp=2", "dp: batch; store params, grads, state\ntp: ffn", 2, id="fewer than ranks"),
        broad(Orthogonal, "dp_replicate=2,dp_shard=2", None, 4, id="hsdp"),
        broad(Orthogonal, "fsdp=4", None, 6, id="four tiles, the last of two short"),
        broad(Orthogonal, "pp=2,dp=2", None, 4, id="stages"),
        broad(Orthogonal, "pp=2,dp_shard=2", None, 4, id="stages in tiles"),
        broad(Orthogonal, "dp=3", None, 2, id="one rank without"),
        broad(Shampoo, "dp_shard=2", None, 2, id="Shampoo"),
        broad(Shampoo, "dp=2", None, 2, id="Shampoo whole"),
        broad(Shampoo, "dp=2,tp=2", "dp: batch\ntp: ffn; store params, grads, state", 4, id="Shampoo on two axes"),
        broad(Soap, "dp_shard=2", None, 2, id="SOAP"),
        broad(Soap, "fsdp=4", None, 4, id="SOAP in four tiles"),
        broad(lambda params: torch.optim.Muon(params, lr=0.1), "dp_shard=2", None, 2, id="Muon"),
        broad(lambda params: torch.optim.Muon(params, lr=0.1), "dp=2,tp=2", "dp: batch\ntp: ffn; store params, grads, state", 4, id="Muon on two"),
    ],
)  # fmt: skip
def test_equals_one_device(build: Build, mesh: str, plan: str | None, layers: int, tmp_path: Path) -> None:
    """Parameters and state after each of three steps (one of torch's Muon, in bfloat16); and what is saved loads."""
    program = compiled(build, mesh, plan, layers)
    assert re.search(r" [1-9]\d* of \d+ computations are divided over the ranks of ", note_of(program)), note_of(program)
    report = meshc.verify(program, dtype=torch.float64)
    errors = [(error, kind, name) for kind, name, error in report.rows if kind.startswith(("parameter after", "state"))]
    assert len(errors) >= 4 * layers and max(errors)[0] < 1e-8, max(errors)
    program.save(tmp_path / "saved")
    assert artifact.load(tmp_path / "saved").outputs


def test_matrices_whose_dims_have_names_of_their_own(tmp_path: Path) -> None:
    """What goes together is of no one type then, and its lines say sizes alone."""
    model = nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(4))).double()
    step = meshc.TrainStep(model, optimizer=Orthogonal(model.parameters()), loss=F.mse_loss)
    x, y = (torch.randn(8, 9, dtype=torch.float64) for _ in range(2))
    with devices.assume_device(NEAR):
        program = meshc.compile(step, meshc.Mesh("dp_shard=2"), args=(x,), kwargs={"target": y})
    assert re.search(r'stack\w*: "f64\[2, 5, 9\]" = aten.stack', str(program)) and "4 of 4 computations" in note_of(program)
    report = meshc.verify(program, dtype=torch.float64)
    assert max(error for _, _, error in report.rows) < 1e-10
    program.save(tmp_path / "saved")
    assert artifact.load(tmp_path / "saved").outputs


@pytest.mark.parametrize(("mesh", "ranks"), [broad("dp=2", 2), ("dp_shard=2", 2), broad("fsdp=4", 4), broad("dp=2,tp=2", 4)])
def test_a_rank_computes_its_share(mesh: str, ranks: int) -> None:
    """Of two matrices a layer, of as many layers as ranks."""
    assert products(compiled(Orthogonal, mesh, layers=ranks)) == 2 * ranks * of_newton_schulz(8, 6) / ranks


def moves(program: meshc.Program) -> dict[object, list[int]]:
    """Bytes of what the update moves, by kind, but for the gradients themselves and their norm."""
    (stage,) = program.compiled.stages.values()
    sizes = {axis.name: axis.size for axis in program.compiled.mesh.axes}
    found: dict[object, list[int]] = {}
    for node in updates(stage):
        if node.target in (spmd.all_to_all, spmd.all_gather):
            found.setdefault(node.target, []).append(payload(node, sizes))
    return found


def test_tiles_are_exchanged_twice() -> None:
    """Of four matrices on four ranks each sends three tiles of a quarter, and three of the results; gathers would send each tile thrice."""
    program = compiled(Orthogonal, "fsdp=4", layers=4, hidden=8, ffn=12)
    tile = 8 * 12 // 4 * 8
    assert moves(program) == {spmd.all_to_all: [4 * tile] * 4}
    assert f"and sends {2 * 2 * 3 * tile:,} bytes for those that are divided in place of {2 * 4 * 3 * tile:,}" in note_of(program)


def test_tiles_are_sent_in_the_bits_that_a_chain_reads() -> None:
    """Muon's products are in bfloat16, whatever its matrices are in."""
    program = compiled(lambda params: torch.optim.Muon(params, lr=0.1), "dp_shard=2", layers=2, hidden=8, ffn=12)
    assert moves(program) == {spmd.all_to_all: [2 * (8 * 12 // 2) * 2] * 4}


def test_whole_matrices_are_chosen_from_and_results_gathered() -> None:
    program = compiled(Orthogonal, "dp=2", layers=2)
    assert moves(program) == {spmd.all_gather: [2 * 8 * 6 * 8] * 2}


def test_the_account_of_work_knows_what_is_divided() -> None:
    rows = [row for row in divided_work.work_rows(compiled(Orthogonal, "dp_shard=2", layers=3).compiled) or [] if row.phase == "update"]
    split = sum(row.flops for row in rows if row.by_axis == {"dp_shard": divided_work.SPLIT})
    total = sum(row.flops for row in rows)
    assert total == pytest.approx(6 * of_newton_schulz(8, 6)) and split == pytest.approx(4 * of_newton_schulz(8, 6))


def test_what_has_no_equal_stays_on_every_rank() -> None:
    program = compiled(Orthogonal, "dp_shard=2", layers=1)
    assert "every rank computes all 2" in note_of(program)
    assert products(program) == 2 * of_newton_schulz(8, 6)


class Rooted(torch.optim.Optimizer):
    """Shampoo of one gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            values, vectors = torch.linalg.eigh(p.grad @ p.grad.T)
            p.add_((vectors * values.clamp(min=1e-2).pow(-0.5)) @ vectors.T @ p.grad, alpha=-self.param_groups[0]["lr"])


def test_what_leads_to_a_product_through_one_result_of_several_is_whole_too() -> None:
    """Nothing is cut and gathered between eigenvectors and the products that they go into: each gradient is gathered, once."""
    assert moves(compiled(Rooted, "dp_shard=2", layers=1)) == {spmd.all_gather: [8 * 6 * 8] * 2}


def test_where_messages_are_dear_every_rank_computes_all() -> None:
    """Of 8 x 6 products; of 128 x 96 they are worth a message of gloo's."""
    cpu = devices.device("cpu")
    program = compiled(Orthogonal, "dp=2", layers=2, device=cpu)
    assert "every rank computes all 4" in note_of(program) and not moves(program)
    assert moves(compiled(Orthogonal, "dp=2", layers=2, device=cpu, hidden=96, ffn=128)) == {spmd.all_gather: [2 * 96 * 128 * 8] * 2}
