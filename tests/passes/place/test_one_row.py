"""One row: a batch of 1 that an axis is to split is padded, unless the model takes one row apart; then a warning says where it does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import meshc
from meshc import artifact
from meshc.cost import divided_work
from meshc.text import printer

ROW = torch.randn(1, 8, generator=torch.Generator().manual_seed(3))


def inferred(model: nn.Module, mesh: str = "dp=2", plan: str = "dp: batch", inputs: Any = None, **how: Any) -> meshc.Program:
    with torch.no_grad():
        return meshc.compile(model, meshc.Mesh(mesh), kwargs=inputs or {"x": ROW}, plan=plan, **how)


class Rows(nn.Module):
    """What `forward` does is up to a test."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.own, self.weight, self.table = forward, nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.own(self, x)
        return found


def test_a_batch_of_one_has_a_factor_and_a_tile_on_every_rank(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"axis dp has 2 ranks, more than anything it could split \(batch 1\): 1 of them hold nothing but"):
        program = inferred(Rows(lambda self, x: x @ self.weight))
    lines = [line for line in printer.print_program(program.compiled, comments=False).splitlines() if " = " in line]
    assert '    shard: "f32[batch 1/dp, weight.0 8] pad(zero: 0.0)" = shard(x, 0, 2, coordinate)' in lines
    assert '    mm_default: "f32[batch 1/dp, weight.1 4]" = aten.mm(shard, weight)' in lines
    assert "n_batch" not in str(program) and program.compiled is program.general
    assert [row.flops for row in divided_work.work_rows(program.compiled) or []] == [2.0 * 1 * 8 * 4]
    assert meshc.verify(program).ok
    program.save(tmp_path / "row.meshc")
    assert printer.print_program(artifact.load(tmp_path / "row.meshc"), comments=False) == printer.print_program(
        program.compiled, comments=False
    )


def test_an_axis_that_is_too_large_is_warned_of_once_for_all_sizes() -> None:
    """As prompts of many lengths are, of one row each."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program = inferred(Rows(lambda self, x: x @ self.weight), inputs={"x": torch.ones(1, 3, 8)})
        for tokens in (4, 5):
            with torch.no_grad():
                program.prepare((), {"x": torch.ones(1, tokens, 8)})
    assert len([one for one in seen if "nothing but padding" in str(one.message)]) == 1 and len(program.compilations.kept) == 3


def test_axes_that_have_something_else_to_split_leave_the_row_alone() -> None:
    """Under `batch > features` an axis splits features, as it does where the batch has no factor at all."""
    model = Rows(lambda self, x: x @ self.weight)
    alone = printer.print_program(inferred(model, "dp=2", "dp: batch > features").compiled)
    assert "batch 1/dp" not in alone and "weight.0 8/dp" in alone or "weight.1 4/dp" in alone
    with pytest.warns(UserWarning, match="axis dp has 2 ranks"):
        beside = printer.print_program(inferred(model, "dp=2,x=2", "dp: batch\nx: batch > features").compiled)
    assert "batch 1/dp" in beside and "batch 1/dp/x" not in beside and ("weight.1 4/x" in beside or "weight.0 8/x" in beside)


def test_rows_that_the_user_names_are_rows() -> None:
    turned = {"x": ROW.t().contiguous()}
    model = Rows(lambda self, x: self.weight.t() @ x)
    with pytest.warns(UserWarning, match="nothing but padding"):
        program = inferred(model, inputs=turned, names={"x": ("hidden", "batch")})
    assert "batch 1/dp" in str(program) and meshc.verify(program).ok


def test_shapes_that_are_worked_out_first_are_the_same_shapes() -> None:
    """As GPT-2's projections do: torch's graph has a size then, where at 1 it has numbers."""
    model = Rows(lambda self, x: torch.mm(x.view(-1, x.size(-1)), self.weight).view(x.size()[:-1] + (4,)))
    with pytest.warns(UserWarning, match="nothing but padding"):
        program = inferred(model, "a=2,b=2", "a: batch\nb: batch", {"x": ROW[:, None].expand(1, 3, 8)})
    assert "[batch 1/a/b * seq 3, " in str(program) and meshc.verify(program).ok


def test_two_axes_may_take_one_row() -> None:
    with pytest.warns(UserWarning, match="nothing but padding"):
        program = inferred(Rows(lambda self, x: x @ self.weight), "a=2,b=3", "a: batch\nb: batch")
    assert "batch 1/a/b" in str(program) and meshc.verify(program).ok


def branches(self: Rows, x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        return x @ self.weight
    return (x * 2) @ self.weight


@pytest.mark.parametrize(
    "forward, why",
    [
        (branches, r"one row than for several: test_one_row.py:\d+ \(return x @ self.weight\)"),
        (lambda self, x: (x @ self.weight).squeeze() * 2, r"one row than for several: test_one_row.py:\d+"),
        (lambda self, x: (x + self.table) @ self.weight, r"must match the size of tensor b \(5\).*\(in your model: .*test_one_row.py:\d+"),
        (lambda self, x: x.expand(3, -1) @ self.weight, "traced with its size open, the model fixes dim 0 of x at 3"),
        (lambda self, x: x @ self.weight * (2.0 if len(x) == 1 else 1.0), "one row than for several"),
        (lambda self, x: (x @ self.weight, len(x)), r"the model returns a number \(output 1\)"),
        (lambda self, x: x.std(0), "has no value at"),
        (lambda self, x: x @ self.weight + torch.tensor([2.0 if len(x) == 1 else 1.0]), "one row than for several"),
    ],
    ids=["a branch", "squeeze", "a table that it broadcasts to", "expand", "a number", "an output", "a deviation", "a constant"],
)
def test_a_model_that_takes_one_row_apart_keeps_it_whole(forward: Any, why: str) -> None:
    with pytest.warns(UserWarning, match=r"axis dp has nothing to split \(batch 1\)[^\n]*\n  why the batch of 1 is not padded: .*" + why):
        program = inferred(Rows(forward))
    assert not any(port.sharding and port.sharding.split_axes() for port in program.compiled.inputs) and "coordinate" not in str(program)


def test_what_the_user_says_is_no_batch_leaves_the_rest_to_be_padded() -> None:
    """A position of one token is no row, though it begins with a dim of 1."""

    class Placed(nn.Linear):
        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return super().forward(x) * position.expand(4)

    inputs = {"x": ROW, "position": torch.ones(1)}
    with pytest.warns(UserWarning, match="why the batch of 1 is not padded: "):
        inferred(Placed(8, 4), inputs=inputs)
    with pytest.warns(UserWarning, match="nothing but padding"):
        program = inferred(Placed(8, 4), inputs=inputs, names={"position": ("seq",)})
    assert "[batch 1/dp, " in str(program) and meshc.verify(program).ok


def test_a_batch_of_one_beside_open_sizes_stays_whole() -> None:
    options = meshc.Options(dynamic={"x": {1: Dim("seq", max=64)}})
    with pytest.warns(UserWarning, match=r"it is not padded where Options\(dynamic=...\) leaves other sizes open"):
        program = inferred(Rows(lambda self, x: x.cos()), inputs={"x": ROW}, options=options)
    assert "n_seq" in str(program)
