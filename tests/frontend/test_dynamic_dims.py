"""One program for all sizes in a range, proved at several of them; sizes that it does not serve are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import meshc
from meshc import artifact
from meshc.errors import CompileError, InputError, PlanError
from meshc.program import instance
from meshc.text import printer
from meshc.text.parse import parse_stage
from tests.broad import broad
from tests.models import IGNORED, gpt2, llama
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401

SIZES = ((7, 13), (2, 3))
EVEN = (8, 12)
"""Uneven; fewer rows than a mesh of (2, 2) has ranks, and a last tile of the sequence that is empty on a mesh of 3."""


def tokens(vocabulary: int, batch: int, seq: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + seq)
    ids = torch.randint(vocabulary, (batch, seq), generator=generator)
    labels = ids.clone()
    labels[0, 0] = IGNORED
    return {"input_ids": ids, "labels": labels}


def open_dims(names: Any) -> dict[str, Any]:
    batch, seq = Dim("batch", max=64), Dim("seq", max=30)
    return {name: {0: batch, 1: seq} for name in names}


class Rows(nn.Module):
    """Strided windows along the sequence, means over it, and a division by its length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Conv1d(3, 8, 4, padding=3), nn.Conv1d(8, 8, 2, stride=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)[..., : x.shape[-1]].relu()
        return self.head(self.second(y).relu().mean(-1) + x.sum((1, 2))[:, None] / x.shape[-1])


def step(model: nn.Module, **changes: Any) -> meshc.TrainStep:
    return meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **changes)


class Table(nn.Module):
    """A table of tokens and their loss: labels of whole batches go from the ranks of one axis to those of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(33, 8), nn.Linear(8, 33)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(input_ids)).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Drops(nn.Module):
    """Dropout over a dim of one size and two that are open, and what the rest of it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x).relu(), 0.3, self.training)
        return F.cross_entropy(self.second(hidden).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", broad("dp=3")])
def test_dropout_draws_the_same_at_any_size(mesh: str) -> None:
    def inputs(batch: int, seq: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(batch, seq, 6, generator=generator, dtype=torch.float64)
        return {"x": x, "target": torch.randint(5, (batch, seq), generator=generator)}

    options = meshc.Options(dynamic=open_dims(inputs(8, 6)))
    program = meshc.compile(step(Drops().double()), meshc.Mesh(mesh), kwargs=inputs(8, 6), options=options)
    for batch, seq in SIZES:
        assert meshc.verify(program, inputs(batch, seq), dtype=torch.float64).ok


def test_a_batch_that_two_axes_split_is_uneven_at_each() -> None:
    """The integer for 8 rows was 7: tiles of 4, and those of 2 evenly, so that a gather was taken for even at all sizes."""
    batch = Dim("batch", max=64)
    program = meshc.compile(
        step(Table()), meshc.Mesh("dp_replicate=2,dp_shard=2"), kwargs=tokens(33, 8, 6), plan="hsdp",
        options=meshc.Options(dynamic={name: {0: batch} for name in ("input_ids", "labels")}),
    )  # fmt: skip
    assert '@sizes("batch 2..64 5")' in printer.print_program(program.general)
    for rows in (7, 4):
        meshc.verify(program, tokens(33, rows, 6))


@pytest.mark.parametrize(
    "build, mesh, plan, microbatches, sizes",
    [
        broad(llama, "dp=2,tp=2", "fsdp+megatron_sp", 2, SIZES),
        broad(llama, "cp=3", None, None, (EVEN, *SIZES)),
        broad(gpt2, "tp=2", None, None, (EVEN, *SIZES)),
    ],
)
def test_a_step_serves_all_sizes(build: Any, mesh: str, plan: str | None, microbatches: int | None, sizes: Any) -> None:
    case = build(layers=1)
    program = meshc.compile(
        step(case.model, clip_grad_norm=1.0, microbatches=microbatches), meshc.Mesh(mesh), kwargs=case.kwargs, plan=plan,
        options=meshc.Options(dynamic=open_dims(case.kwargs)),
    )  # fmt: skip
    before = printer.hash_program(program.general)
    assert "n_batch" in str(program) and "n_batch" not in printer.print_program(program.compiled)
    for batch, seq in sizes:
        report = meshc.verify(program, tokens(65, batch, seq), dtype=torch.float64)
        assert report.ok and {kind for kind, *_ in report.rows} >= {"gradient", "parameter after step 2"}
    assert printer.hash_program(program.general) == before


@pytest.mark.parametrize("mesh, sizes", [broad("cp=3", SIZES[1:]), broad("cp=3", SIZES[:1]), broad("dp=2,tp=2", SIZES)])
def test_a_modules_outputs_and_gradients_serve_all_sizes(mesh: str, sizes: Any) -> None:
    case = llama(layers=1)
    inputs = {"input_ids": case.kwargs["input_ids"]}
    options = meshc.Options(dynamic=open_dims(inputs))
    program = meshc.compile(case.model, meshc.Mesh(mesh), kwargs=inputs, options=options)
    for batch, seq in sizes:
        assert meshc.verify(program, {"input_ids": tokens(65, batch, seq)["input_ids"]}, dtype=torch.float64).ok


UNEVEN = ((7, 33), (2, 5))
"""At 5 positions windows of two lie in two tiles; at 20 each in one."""


@pytest.mark.parametrize(
    "mesh, plan, called",
    [
        ("dp=2,cp=2", "dp: batch\ncp: length", UNEVEN[1:]), broad("dp=2,cp=2", "dp: batch\ncp: length", UNEVEN[:1]),
        broad("dp=2,cp=2", "dp: batch\ncp: length", ((8, 20),)), broad("dp=3", None, ((8, 20), *UNEVEN)),
    ],
)  # fmt: skip
def test_windows_and_means_of_open_dims(mesh: str, plan: str | None, called: Any) -> None:
    def inputs(batch: int, seq: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(batch, 3, seq, generator=generator, dtype=torch.float64)
        return {"x": x, "target": torch.randint(5, (batch,), generator=generator)}

    batch, seq = Dim("batch", max=64), Dim("length", max=99)
    options = meshc.Options(dynamic={"x": {0: batch, 2: seq}, "target": (batch,)})
    program = meshc.compile(step(Rows().double(), loss=F.cross_entropy), meshc.Mesh(mesh), kwargs=inputs(8, 20), plan=plan, options=options)
    for sizes in called:
        assert meshc.verify(program, inputs(*sizes), dtype=torch.float64).ok


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(lambda ids, table: table(ids[:, :-1].flatten(0, 1)), id="all but the last"),
        broad(lambda ids, table: table(torch.cat([ids[:, 2:], ids], 1).flatten(0, 1)), id="joined"),
    ],
)
def test_rows_that_are_taken_off_open_dims_are_flattened(seen: Any) -> None:
    """Their sizes are products of sums: a view's elements are as many as its operand's however that is written."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(65, 8)

        def forward(self, input_ids: Tensor) -> Any:
            return seen(input_ids, self.table)

    inputs = {"input_ids": tokens(65, 8, 12)["input_ids"]}
    program = meshc.compile(Table(), meshc.Mesh("dp=2,tp=2"), kwargs=inputs, options=meshc.Options(dynamic=open_dims(inputs)))
    for sizes in (EVEN, SIZES[0]):
        assert meshc.verify(program, {"input_ids": tokens(65, *sizes)["input_ids"]}).ok


@pytest.mark.parametrize("layers", [broad(0), broad(1), broad(2)])
def test_no_decision_hangs_on_the_integers_that_stand_for_sizes(layers: int) -> None:
    """Other example inputs, and so other primes, give the same program but for those primes. Without a layer: the table and its loss."""

    def printed(batch: int, seq: int) -> list[str]:
        inputs, mesh = tokens(33, batch, seq), meshc.Mesh("dp=2,tp=2")
        model = llama(layers=layers).model if layers else Table()
        plan, options = "fsdp+megatron_sp" if layers else "fsdp+megatron", meshc.Options(dynamic=open_dims(inputs))
        program = meshc.compile(step(model), mesh, kwargs=inputs, plan=plan, options=options)
        lines = printer.print_program(program.general, comments=False).splitlines()
        return [line for line in lines if not line.startswith(("@sizes", "sizes ="))]

    assert printed(6, 12) == printed(16, 22)


def saved(tmp_path: Path) -> Any:
    options = meshc.Options(dynamic={"x": {0: Dim("batch", max=64), 2: Dim("length", max=99)}})
    with torch.no_grad():
        program = meshc.compile(Rows(), meshc.Mesh("dp=2"), kwargs={"x": torch.randn(8, 3, 20)}, options=options)
    program.save(tmp_path / "rows.meshc")
    return program


def test_a_saved_program_keeps_its_sizes_open(tmp_path: Path) -> None:
    program = saved(tmp_path)
    loaded = artifact.load(tmp_path / "rows.meshc")
    assert printer.print_program(loaded, comments=False) == printer.print_program(program.general, comments=False)
    assert loaded.dynamic == program.general.dynamic and loaded.constraints == program.general.constraints
    stage = printer.print_stage(loaded.stage, loaded, comments=False)
    assert '@sizes("batch 2..64 ' in stage and printer.print_stage(parse_stage(stage), loaded, comments=False) == stage
    at_7, again = (instance.program_for_shapes(one, {"x": (7, 3, 31)}) for one in (loaded, program.general))
    assert at_7.port("input:x").shape == (7, 3, 31) and "n_batch" not in printer.print_program(at_7)
    assert printer.print_program(at_7, comments=False) == printer.print_program(again, comments=False)


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    general = saved(tmp_path).general
    with pytest.raises(InputError, match="batch is 65; the program serves batch from 2 to 64"):
        instance.program_for_shapes(general, {"x": (65, 3, 20)})
    with pytest.raises(InputError, match="length is 1; the program serves length from 2 to 99"):
        instance.program_for_shapes(general, {"x": (8, 3, 1)})
    with pytest.raises(InputError, match="x has 2 dims, the program takes 3"):
        instance.program_for_shapes(general, {"x": (8, 3)})
    with pytest.raises(InputError, match="no input has batch"):
        instance.program_for_shapes(general, {})
    case = llama(layers=1)
    options = meshc.Options(dynamic=open_dims(case.kwargs))
    wrong = {"input_ids": torch.zeros(4, 6, dtype=torch.int64), "labels": torch.zeros(4, 7, dtype=torch.int64)}
    with pytest.raises(InputError, match="seq is 6 in dim 1 of input_ids and 7 in dim 1 of labels"):
        meshc.compile(step(case.model), meshc.Mesh("dp=2"), kwargs=wrong, options=options)


def test_what_the_model_asks_of_its_sizes_narrows_ranges_or_is_a_constraint() -> None:
    options = meshc.Options(dynamic={"x": {0: Dim("rows", max=64)}})

    def table(x: Tensor) -> Tensor:
        return x + torch.arange(10.0)[: x.shape[0], None]

    program = meshc.compile(table, meshc.Mesh("dp=2"), kwargs={"x": torch.randn(8, 4)}, options=options)
    assert [(size.low, size.high) for size in program.general.dynamic] == [(2, 10)] and not program.general.constraints
    with pytest.raises(InputError, match="rows is 12; the program serves rows from 2 to 10"):
        instance.program_for_shapes(program.general, {"x": (12, 4)})
    assert meshc.verify(program, {"x": torch.randn(9, 4)}).ok

    def parity(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 else x * 3

    program = meshc.compile(parity, meshc.Mesh("dp=2"), kwargs={"x": torch.randn(9, 4)}, options=options)
    assert program.general.constraints == ("(n_rows % 2) != 0",)
    assert meshc.verify(program, {"x": torch.randn(5, 4)}).ok
    with pytest.raises(InputError, match=r"\(n_rows % 2\) != 0 does not hold at rows 8"):
        meshc.compile(parity, meshc.Mesh("dp=2"), kwargs={"x": torch.randn(8, 4)}, options=options)

    def fixed(x: Tensor) -> Tensor:
        return x + torch.arange(7.0)[:, None]

    with pytest.raises((CompileError, meshc.CaptureError), match="rows|size of tensor"):
        meshc.compile(fixed, meshc.Mesh("dp=2"), kwargs={"x": torch.randn(7, 4)}, options=options)


@pytest.mark.parametrize(
    "dynamic, said",
    [
        ((Dim("batch"),), "is a dict by input"),
        ({"x": {0: 3}}, 'say torch.export.Dim\\("seq", min=2, max=2048\\)'),
        ({"x": {0: Dim.AUTO}}, "dim 0 of x is .*AUTO"),
        ({"x": {0: 2 * Dim("half")}}, "with a name"),
        ({"x": {0: Dim("batch", min=1, max=4)}}, "batch may be 1; tracing takes sizes of 1 apart"),
        ({"x": {0: Dim("n", max=4)}, "y": {0: Dim("n", max=5)}}, "n has two ranges, from 2 to 4 and from 2 to 5"),
    ],
)
def test_what_options_refuse(dynamic: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        meshc.Options(dynamic=dynamic)


def test_an_unknown_input_is_named_with_those_there_are() -> None:
    options = meshc.Options(dynamic={"ids": {0: Dim("batch", max=64)}})
    with pytest.raises(PlanError, match=r"names ids, which is no tensor input; they are: x"), torch.no_grad():
        meshc.compile(Rows(), meshc.Mesh("dp=2"), kwargs={"x": torch.randn(8, 3, 20)}, options=options)
