"""Compress lines: gradients that travel in fewer bits are one device's under the same line, errors included, whatever the mesh.

`verify` cuts the products that torch runs in backward, which it finds by memory (`runtime/simulator/reference_compression.py`), and keeps
errors of its own, in float64, so that bounds are those of summation alone; every program is proved too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.errors import PlanError, VerifyError
from meshc.ir import record, spmd
from meshc.ir.keys import is_a
from meshc.ops.block_codes import BLOCK
from meshc.optimizer.spec import PART_ERRORS, SUM_ERROR
from meshc.passes.trace.step_state import StepState
from meshc.plan.plan import Plan
from meshc.report.summary import collectives
from meshc.runtime.simulator.reference_compression import round_gradient
from meshc.runtime.simulator.simulation import simulate

MESHES = [
    ("dp=2", "dp: batch\ncompress dp: {}"),
    ("dp=3", "dp: batch; store params, grads, state\ncompress dp: {}"),
    ("dp=2,tp=2", "dp: batch; store state\ntp: ffn, features\ncompress dp: {}"),
    ("dp=1,tp=2", "dp: batch\ntp: ffn\ncompress dp: {} of 4 parts"),
    ("dp_replicate=2,dp_shard=2", "dp_replicate: batch\ndp_shard: batch; store params, grads, state\ncompress dp_replicate: {}"),
    ("dp_replicate=2,dp_shard=2", "dp_replicate: batch\ndp_shard: batch; store params, grads, state\ncompress dp_shard: {} of 4 parts"),
]
"""Every format in turn, so that each meets several plans."""


class Model(nn.Module):
    """Rows of more than a block, of less than one; a norm, biases, a table, which are summed as usual; a weight that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16)
        self.up = nn.Linear(16, 320)
        self.down = nn.Linear(320, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.again = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table.weight[0]
        x = self.norm(self.down(F.gelu(self.up(x))))
        return self.again(F.gelu(self.again(x)))


def step(mesh: str, plan: str, model: nn.Module | None = None, microbatches: int | None = None, **ask: Any) -> meshc.Program:
    torch.manual_seed(0)
    model = model or Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss, clip_grad_norm=0.5, microbatches=microbatches)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(12, 5, 16, dtype=dtype), torch.randn(12, 5, 24, dtype=dtype)
    return meshc.compile(train, meshc.Mesh(mesh), args=inputs[:1], kwargs={"target": inputs[1]}, plan=plan, **ask)


FORMATS = ("int8", "fp8", "sign")


@pytest.mark.parametrize(
    "mesh, plan",
    [(mesh, plan.format(FORMATS[(number + more) % 3])) for more in (0, 1) for number, (mesh, plan) in enumerate(MESHES)],
)
def test_a_line_means_the_same_on_every_mesh(mesh: str, plan: str) -> None:
    report = meshc.verify(step(mesh, plan))
    assert report.worst < 1e-11
    kinds = {kind for kind, _, _ in report.rows}
    assert {f"state {slot} after step 2" for slot in (PART_ERRORS, SUM_ERROR)} <= kinds


@pytest.mark.parametrize("mesh, plan", [MESHES[1], MESHES[4]])
def test_ranks_may_have_parts_of_the_batch_of_their_own(mesh: str, plan: str) -> None:
    """Rows of a part are those of a rank of the compressed axis, and of the ranks within."""
    model = Model()
    train = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    ranks = meshc.Mesh(mesh).world_size
    x, target = torch.randn(12, 5, 16), torch.randn(12, 5, 24)
    given = {"args": (x[: 12 // ranks],), "kwargs": {"target": target[: 12 // ranks]}}
    program = meshc.compile(train, meshc.Mesh(mesh), plan=plan.format("int8"), inputs="local", **given)
    assert meshc.verify(program, {"x": x, "target": target}).worst < 1e-11 and program.prove().holds


def test_one_part_is_of_the_outermost_axis() -> None:
    with pytest.raises(PlanError, match=r"the outermost axis of data, and that is dp_replicate\n  what to do: put dp_shard before"):
        step(MESHES[5][0], MESHES[5][1].format("int8"), inputs="local")


@pytest.mark.parametrize("mesh, plan", [MESHES[0], ("pp=2,dp=2", MESHES[0][1]), MESHES[4]])
def test_microbatches_are_added_up_before_they_travel(mesh: str, plan: str) -> None:
    program = step(mesh, plan.format("sign"), microbatches=2)
    assert meshc.verify(program).worst < 1e-11 and program.prove().holds
    for name, stage in program.compiled.stages.items():
        travel = stage.graph.find_nodes(op="call_function", target=spmd.all_to_all)
        assert name.startswith("after") or not [node for node in travel if record(node).dtype == torch.uint8]


def test_gradients_start_amid_backward() -> None:
    nodes = [*step("dp=2", "dp: batch\ncompress dp: int8").compiled.stages["main"].graph.nodes]
    starts = [place for place, node in enumerate(nodes) if node.target is spmd.all_to_all]
    products = [place for place, node in enumerate(nodes) if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)]
    assert sum(start < products[-1] for start in starts) >= 4


def test_16_bit_parameters_are_rounded_from_float32() -> None:
    program = step("dp=2", "dp: batch\ncompress dp: int8", Model().bfloat16())
    kept = {port.dtype for port in program.compiled.inputs if port.name.endswith((PART_ERRORS, SUM_ERROR))}
    assert kept == {torch.float32}
    report = meshc.verify(program)
    assert report.ok and "not compared: the update, by gradients that are compressed" in str(report)


class First(nn.Module):
    """The sequence comes first."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first = layer(8, 16)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return self.out(made[0] if isinstance(made, tuple) else made)


@pytest.mark.parametrize("layer", [nn.Linear, nn.RNN, nn.GRU])
def test_rows_of_the_batch_behind_other_dims_are_cut_too(layer: type[nn.Module]) -> None:
    """Rows of a part are apart in what a product sums over."""
    model, x = First(layer), torch.randn(5, 4, 8)
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    plan, names = "dp: batch\ncompress dp: int8", {"x": (None, "batch", None)}
    program = meshc.compile(train, meshc.Mesh("dp=2"), args=(x,), kwargs={"target": x}, plan=plan, names=names)
    (cut,) = program.lowered.placed.traced.compressed["out.weight"].cut
    assert (cut.lead, cut.parts, cut.rest) == (5, 2, 2)
    assert meshc.verify(program).worst < 1e-11


@pytest.mark.parametrize("format, least", [("int8", 4), ("fp8", 4), ("sign", 32)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula(format: str, least: int, ranks: int) -> None:
    """Of each compressed gradient a rank sends (n - 1) / n of its bits to where tiles of the sum are made, and as many come back: a 4th or
    a 32nd of float32's, and the scales."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 256, bias=False))
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())

    def sent(plan: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for use in collectives(meshc.compile(train, meshc.Mesh(f"dp={ranks}"), args=(torch.randn(8, 512),), plan=plan).compiled):
            found[use.kind] = found.get(use.kind, 0) + use.bytes_per_rank
        return found

    elements = 512 * 512 + 512 * 256
    plain, narrow = sent("dp: batch"), sent(f"dp: batch\ncompress dp: {format}")
    assert plain["all_reduce"] >= 4 * elements
    scales = {"sign": 2 * 4 * ranks}.get(format, 4 * elements // BLOCK)
    there, back = narrow["all_to_all"], narrow["all_gather"]
    assert there == elements * 4 // least + (scales if format != "sign" else 0)
    bits = elements * 4 // least
    assert bits <= back * (1 if back > bits else ranks) and back <= bits + scales
    assert narrow.get("all_reduce", 0) <= 16


def test_attention_that_turns_rows_round_is_cut_by_its_rows() -> None:
    """Within it the sequence comes first, outside of it the batch: products of as many rows are cut in two ways."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1)
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    x, plan = torch.randn(4, 5, 16), "dp: batch\ncompress dp: int8"
    program = meshc.compile(train, meshc.Mesh("dp=2"), args=(x,), kwargs={"target": x}, plan=plan)
    cuts = program.lowered.placed.traced.compressed
    assert {one.lead for name in ("self_attn.in_proj_weight", "linear1.weight") for one in cuts[name].cut} == {1, 5}
    assert meshc.verify(program).worst < 1e-11


def test_what_is_lost_by_rounding_comes_later() -> None:
    """Of ten steps with one gradient, what was applied and the errors are ten gradients, whatever the format."""
    gradient = torch.randn(3, 2, 4, 16, dtype=torch.float64)
    for format in ("int8", "fp8", "sign"):
        parts, error, applied = torch.zeros(2, 4, 16, dtype=torch.float64), torch.zeros(4, 16, dtype=torch.float64), 0
        for _ in range(10):
            wanted = gradient[0] + parts
            sent = torch.stack([round_gradient(part, format) for part in wanted])
            parts, total = wanted - sent, sent.sum(0) + error
            back = round_gradient(total, format)
            error, applied = total - back, applied + back
        torch.testing.assert_close(applied + error + parts.sum(0), 10 * gradient[0].sum(0))


@pytest.mark.parametrize("slot", [PART_ERRORS, SUM_ERROR])
def test_an_error_that_is_lost_is_caught(slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = StepState.leave

    def lose(self: StepState, name: str, kept: str, value: Any) -> None:
        lost = kept == slot and name == "down.weight"
        leave(self, name, kept, self.add.call(torch.ops.aten.zeros_like.default, value) if lost else value)

    with monkeypatch.context() as planted:
        planted.setattr(StepState, "leave", lose)
        with pytest.raises(VerifyError, match=f"state {slot} after step 0, down.weight"):
            meshc.verify(step("dp=2", "dp: batch\ncompress dp: int8"))


def test_an_error_of_another_rank_is_no_proof() -> None:
    """A line of the ranks' program that keeps what was sent in the place of what was lost: the values are of the right shape."""
    program = step("dp=2", "dp: batch\ncompress dp: int8")
    assert program.prove().holds
    graph = program.compiled.stages["main"].graph
    keys = program.compiled.stages["main"].outputs
    out = next(iter(graph.find_nodes(op="output")))
    place = keys.index(f"state:down.weight/{PART_ERRORS}")
    results = list(out.args[0])  # type: ignore[arg-type]
    results[place] = results[place].args[0]  # type: ignore[union-attr]
    out.args = (tuple(results),)
    assert not program.prove().holds


def test_layers_captured_once_are_compressed_alike() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(x)))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(6))
            self.head = nn.Linear(16, 24)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    program = step("dp=2", "dp: batch\ncompress dp: sign", Layers())
    assert program.lowered.depth is not None
    assert len(program.lowered.placed.traced.compressed) == 13
    assert meshc.verify(program).worst < 1e-11


def test_errors_of_two_ranks_are_those_of_four() -> None:
    """Four parts on two meshes, in float32 and from random values: errors of one step."""
    plans = [("dp=2", "dp: batch\ncompress dp: int8 of 4 parts"), ("dp=4", "dp: batch; store state\ncompress dp: int8")]
    found = []
    for mesh, plan in plans:
        program = step(mesh, plan)
        generator = torch.Generator().manual_seed(3)
        values = {port.key: torch.randn(port.shape, generator=generator).to(port.dtype) for port in program.compiled.inputs if port.shape}
        values |= {port.key: torch.tensor(0.5, dtype=port.dtype) for port in program.compiled.inputs if not port.shape}
        values |= {key: value.abs() for key, value in values.items() if key.endswith("exp_avg_sq")}
        found.append(simulate(program.compiled, values))
    for key, value in found[0].items():
        if is_a(key, "state") and key.endswith((PART_ERRORS, SUM_ERROR)):
            torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-4)


def test_what_is_summed_as_usual_is_said() -> None:
    notes = "\n".join(step("dp=2", "dp: batch\ncompress dp: sign").compiled.notes)
    assert "compress dp: sign: table.weight is summed as usual: they are no sums of products alone" in notes
    assert "up.bias, norm.weight, norm.bias, again.bias are summed as usual: they have fewer than two dims" in notes


TP = r"tp reduces no gradient: it splits ffn\n  what to do: write a line for an axis of data, `compress dp: int8`"


@pytest.mark.parametrize(
    "mesh, plan, said",
    [
        ("dp=2", "dp: batch\ncompress ep: int8", "the mesh has no axis ep"),
        ("dp=2,tp=2", "dp: batch\ntp: ffn\ncompress tp: int8", TP),
        ("dp=2,tp=2", "dp: batch\ntp: auto\ncompress tp: int8", "tp reduces no gradient: its factors are left to a search"),
        ("dp=2", "dp: batch\ncompress dp: int4", r"int4 is no format of gradients \(did you mean int8\?\); formats are"),
        ("dp=2", "dp: batch\ncompress dp:", "a format belongs here: 'int8', 'fp8', 'sign'"),
        ("dp=2", "dp: batch\ncompress dp: int8 of many parts", "a number of parts belongs here"),
        ("dp=2", "dp: batch\ncompress dp: int8 of 3 parts", "2 ranks of dp do not share 3 parts of the batch equally"),
        ("dp=2", "dp: batch\ncompress dp: int8 of 8 parts", "no gradient(.|\n)*a batch of 12 rows is not cut into 8 equal parts"),
        ("dp=2,dp_shard=2", "dp: batch\ndp_shard: batch\ncompress dp: int8\ncompress dp_shard: int8", "compressed over one axis"),
    ],
)
def test_what_does_not_fit_is_refused(mesh: str, plan: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        step(mesh, plan)


def test_a_module_has_no_step_that_keeps_errors() -> None:
    with pytest.raises(PlanError, match=r"compiled without one\n  what to do: compile meshc.TrainStep"):
        meshc.compile(Model(), meshc.Mesh("dp=2"), args=(torch.randn(4, 5, 16),), plan="dp: batch\ncompress dp: int8")


def test_an_evaluation_under_the_plan_of_its_training_compresses_nothing() -> None:
    model, plan = Model(), "dp: batch\ncompress dp: int8"
    with torch.no_grad():
        program = meshc.compile(model, meshc.Mesh("dp=2"), args=(torch.randn(4, 5, 16),), plan=plan)
    assert "compress dp: int8: no gradients are computed here, so none are compressed" in program.summary()
    assert meshc.verify(program).ok


def test_lines_are_text() -> None:
    for text in ("compress dp: int8", "compress dp_shard: sign of 4 parts"):
        plan = Plan(f"dp: batch\n{text}")
        assert str(plan).splitlines()[-1] == text and Plan(str(plan)) == plan
        assert Plan({"dp": "batch", "compress": [text.removeprefix("compress ")]}) == plan
        assert copy.deepcopy(plan) == plan
