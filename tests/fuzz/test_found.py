"""Programs that random ones have been made small to, each with the mesh and plan under which it once gave the wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import artifact
from meshc.check import check_program
from meshc.program.program import PlainProgram
from meshc.runtime.simulator.simulation import simulate


def product_of_a_partial_mean_with_itself(x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(x, y)
    return loss * loss + loss


def triangle_of_one_row(x: Tensor, y: Tensor) -> Tensor:
    return x[:1].masked_fill(torch.ones(1, 5, dtype=torch.bool).triu(1), -3.0).softmax(-1)


def group_norm_of_one_element(x: Tensor, y: Tensor) -> Tensor:
    return F.group_norm(x, 5) + x


def bernoulli_in_float64(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.4))


FOUND: list[tuple[Callable[[Tensor, Tensor], Tensor], str, str]] = [
    (product_of_a_partial_mean_with_itself, "a=2", "a: batch"),
    (triangle_of_one_row, "a=2", "a: weight.0"),
    (group_norm_of_one_element, "a=2", "a: batch"),
    (bernoulli_in_float64, "a=3", "a: batch"),
]


class Found(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x * self.weight, y)


@pytest.mark.parametrize("function, mesh, plan", FOUND, ids=[function.__name__ for function, _, _ in FOUND])
def test_found(function: Callable[[Tensor, Tensor], Tensor], mesh: str, plan: str) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    inputs = {"x": x, "y": torch.tensor([0, 4, 1, 2, 2, 3, 0])}
    program = meshc.compile(Found(function), meshc.Mesh(mesh), kwargs=inputs, plan=plan)
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


def product_of_rows_and_their_weights(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("ab,abe->e", x, w).sin()


def product_of_no_columns(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x.expand(12, -1, -1), w)


def cuts_that_do_not_meet(x: Tensor, w: Tensor) -> Tensor:
    """12, 25 is no grouping of 5, 2, 6, 5: that both end in 5 ties nothing."""
    rows = x.reshape(12, 25)
    return rows.expand(6, -1, -1).reshape(3, 2, -1, 2, 5, 5) * w


def all_rows_written_alike(x: Tensor, w: Tensor) -> Tensor:
    rows = x.clone()
    rows[:, x[0].argmax(-1)] = w
    return rows * 2


def matrices_that_tokens_choose(x: Tensor, w: Tensor) -> Tensor:
    tokens = x.reshape(-1, 1)
    index = (tokens * torch.arange(1.0, 7.0)).topk(3, -1)[1]
    return torch.einsum("td,tkdn->tkn", tokens, w[index]).sum(1)


def norm_over_groups_of_rows(x: Tensor, w: Tensor) -> Tensor:
    """A rank has one group of three rows, and no line says in which dim of what is masked the one stands."""
    return F.normalize(x * w, dim=0) + x.unflatten(0, (2, 3)).cos().flatten(0, 1)


def groups_of_other_sizes(x: Tensor, w: Tensor) -> Tensor:
    """3 * 7 * 7 is cut at 3 and at 21, 7, 3, 7 at 7 and at 21: that both end in 7 ties nothing."""
    return x.flatten(1, 3).reshape(7, 7, 3, 7) * w


def a_channel_a_rank(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(w, x, groups=2)


def channels_of_a_row_a_rank(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w, groups=4) + F.conv_transpose1d(x, w, groups=4)[..., 1:3]


def channels_and_windows(x: Tensor, w: Tensor) -> Tensor:
    """A rank has one channel, and a tile of what its kernel goes over: no line says how that lies between the halos and their sums."""
    settings: dict[str, int] = {"padding": 1, "groups": x.shape[1]}
    if x.dim() == 3:
        return F.conv1d(x, w, **settings) + F.conv_transpose1d(x, w, **settings)
    return F.conv2d(x, w, **settings) + F.conv_transpose2d(x, w, **settings)


TYPED: list[tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...], str, str]] = [
    (product_of_rows_and_their_weights, (3, 2), (3, 2, 9), "b=3", "b: batch"),
    (product_of_rows_and_their_weights, (3, 2), (3, 2, 9), "a=2,b=3", "a: -\nb: batch"),
    (product_of_no_columns, (12, 8), (12, 8, 0), "a=2", "a: -"),
    (all_rows_written_alike, (8, 10, 4), (8, 1, 4), "a=2", "a: -"),
    (matrices_that_tokens_choose, (3, 12, 1), (6, 1, 5), "a=4", "a: batch"),
    (norm_over_groups_of_rows, (6, 9), (9,), "a=4", "a: batch"),
    (groups_of_other_sizes, (7, 3, 7, 7), (7,), "b=2", "b: -"),
    (a_channel_a_rank, (2, 1, 3), (5, 2, 6), "a=2", "a: batch"),
    (channels_of_a_row_a_rank, (2, 4, 4), (4, 1, 3), "a=2,b=2", "a: batch\nb: weight.0"),
    (channels_and_windows, (2, 3, 8), (3, 1, 3), "a=2,b=3", "a: length\nb: weight.0"),
    (channels_and_windows, (1, 2, 4, 5), (2, 1, 3, 3), "a=2,b=2,c=2", "a: height\nb: weight.0\nc: width"),
    (cuts_that_do_not_meet, (5, 2, 6, 5), (5,), "a=3", "a: -"),
]
"""Programs that were right, and whose types were taken for wrong."""


class Typed(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize("function, shape, weight, mesh, plan", TYPED, ids=[f"{one[0].__name__}-{one[3]}" for one in TYPED])
def test_types_are_right(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], weight: tuple[int, ...], mesh: str, plan: str
) -> None:
    inputs = {"x": torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()}
    program = meshc.compile(Typed(function, weight), meshc.Mesh(mesh), kwargs=inputs, plan=plan)
    assert isinstance(program.compiled, PlainProgram)
    check_program(program.compiled, "the program")
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


class Classes(nn.Module):
    """`one_hot` checks its classes with calls that make no value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return (F.one_hot(x.argmax(-1), 5).float() @ self.weight).square().sum()


@pytest.mark.parametrize("train", [False, True])
def test_classes_made_by_the_program_are_saved_and_read_again(train: bool, tmp_path: Path) -> None:
    model, x = Classes(), torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    wanted = model(x)
    what = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) if train else model
    with torch.set_grad_enabled(train):
        meshc.compile(what, meshc.Mesh("a=2"), kwargs={"x": x}, plan="a: batch").save(tmp_path / "p.meshc")
    program = artifact.load(tmp_path / "p.meshc")
    numbers = {port.key: torch.tensor(0.1, dtype=torch.float64) for port in program.inputs if port.kind == "number"}
    found = simulate(program, {"parameter:weight": model.weight.detach(), "input:x": x, **numbers})
    (output,) = [found[port.key] for port in program.outputs if port.kind == "output"]
    torch.testing.assert_close(output, wanted.detach())


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.weight.sin()).sum()


def test_microbatches_of_a_step_that_reads_no_batch() -> None:
    model = Weights()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=2)
    program = meshc.compile(step, meshc.Mesh("a=2"), kwargs={"x": torch.ones(4)}, plan="a: weight.0")
    assert "parameter after step 2" in {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}


class LargestOfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((1,), 0.3, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.amax() + F.prelu(y, self.slope).mean()


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_a_maximum_over_microbatches_is_no_sum(mesh: str) -> None:
    inputs = {"x": torch.randn(4, dtype=torch.float64), "y": torch.randn(9, 7, dtype=torch.float64)}
    model = LargestOfBatch()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=4)
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs=inputs)
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


class LastReadByNothing(nn.Module):
    """Of the bias, which only the first rank adds, the gradient needs nothing of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, y).mean()


class UpdatedWhole(nn.Module):
    """The parameter is stored split, the momentum whole: what forward reads and what is updated are gathered one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 5, dtype=torch.float64))
        self.register_buffer("largest", torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = (self.weight - self.largest).sum()
        self.largest.lerp_(self.weight.detach().amax(0), 0.2)
        return found + (x * y).sum()


class Biased(nn.Module):
    """A bias that is the same for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 1, 9, 9, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias).sum() * y


class ReadTwice(nn.Module):
    """One index, as two operators' operands of different places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.one_hot(y, 3).double() @ self.weight + x, y)


class InGroups(nn.Module):
    """What is moved between ranks is one place of two factors, of which each rank has one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 9, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        taken = F.one_hot((self.weight @ x).argmax(-1), 3)
        place = (taken.cumsum(0) - 1).clamp(min=0)
        kept = (F.one_hot(place.clamp(max=2), 3)[..., :2] * taken.unsqueeze(-1)).double()
        found = torch.einsum("tec,ecd->td", kept, torch.tanh(torch.einsum("tec,td->ecd", kept, self.weight)))
        return (torch.softmax(found @ y, -1).mean(0) ** 2).sum()


class BiasAlone(nn.Module):
    """Of a convolution whose channels are split only the bias has a gradient, which has none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.conv1d(x, y, self.bias, stride=2, padding=1).sin().mean()


class InTurns(nn.Module):
    """How many of a rank's positions are steps is another number on each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 6, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x)[0] * y).sum()


class TwoSums(nn.Module):
    """The gradients of both sums are one number, expanded to as many positions of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in (4, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.first * x).sin().sum() + (self.second * y).cos().sum()).square()


@pytest.mark.parametrize(
    "model, mesh, plan, shapes",
    [
        (LastReadByNothing(), "a=4,b=2", "a: batch > bias.1; store params, state\nb: bias.1", ((2, 4), (4, 2))),
        (UpdatedWhole(), "a=2", "a: batch; store params", ((2, 5), (2, 5))),
        (InTurns(), "cp=3", "cp: seq", ((4, 7, 4), ())), (BiasAlone(), "a=4", "a: seq", ((3, 7, 3), (4, 7, 3))),
        (LastReadByNothing(), "a=4", "a: batch", ((2, 4), (4, 2))), (Biased(), "a=2", "a: -", ((3, 9, 9, 6), ())),
        (ReadTwice(), "a=3", "a: batch", ((8, 3), None)), (InGroups(), "a=2", "a: f1, batch", ((9, 3), (9, 2))),
        (TwoSums(), "a=2,b=3", "a: first.0\nb: second.0", ((), ())),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
def test_a_step_that_the_checker_takes(model: nn.Module, mesh: str, plan: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)
    x, y = (torch.arange(8) % 3 if shape is None else torch.randn(shape, dtype=torch.float64) for shape in shapes)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs={"x": x, "y": y}, plan=plan)
    check_program(program.compiled, "the program")
    assert meshc.verify(program, dtype=torch.float64).ok


def test_a_step_reads_the_gradient_of_a_bias_alone() -> None:
    """All three gradients of the convolution are asked for: its operands are inputs that require one, too."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in ((3, 7, 3), (4, 7, 3)))
    model = BiasAlone()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    program = meshc.compile(step, meshc.Mesh("a=4"), kwargs={"x": x, "y": y}, plan="a: seq")
    check_program(program.compiled, "the program")
    assert meshc.verify(program, dtype=torch.float64).ok


def test_many_operands_of_one_operator_are_checked() -> None:
    """Of thirty there are a billion parts."""

    def joined(x: Tensor) -> Tensor:
        return torch.cat([x * float(index) for index in range(30)])

    program = meshc.compile(joined, meshc.Mesh("a=2"), kwargs={"x": torch.ones(4, 3)}, plan="a: batch")
    check_program(program.compiled, "the program")


class RowsByRows(nn.Module):
    """Dims of the product are both the first of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ y * self.weight).softmax(-1).square().mean()


def test_rows_of_all_microbatches_are_refused_where_nothing_is_summed_over_them() -> None:
    """Ranks have a row each, so no sum goes over microbatches; but the product takes the other dim along the ranks, and rows are cut before
    and gathered behind it."""
    x, y = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (4, 6)))
    optimized = RowsByRows()
    step = meshc.TrainStep(optimized, optimizer=torch.optim.SGD(optimized.parameters(), lr=0.1), microbatches=3)
    few = r"has 3 rows, and each of 4 ranks along a takes a row of every microbatch, at test_found.py"
    with pytest.raises(meshc.CompileError, match=few) as raised:
        meshc.compile(step, meshc.Mesh("a=4"), kwargs={"x": x, "y": y}, plan="a: batch")
    assert not isinstance(raised.value, meshc.errors.CompilerFault) and "microbatches=1, or 12 rows" in str(raised.value)
    more = {"x": torch.randn(12, 4, dtype=torch.float64), "y": y}
    assert meshc.verify(meshc.compile(step, meshc.Mesh("a=4"), kwargs=more, plan="a: batch"), more).ok, "as it says"


class Resized(nn.Module):
    """Which columns are read is made once for all microbatches; a rank has one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x * self.weight, size=(4, 2), mode="nearest").sin().mean()


def test_a_column_a_rank_is_read_by_every_microbatch() -> None:
    x = torch.randn(2, 2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = Resized()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=2)
    program = meshc.compile(step, meshc.Mesh("a=4"), kwargs={"x": x}, plan="a: f3")
    check_program(program.compiled, "the program")
    assert meshc.verify(program, dtype=torch.float64).ok


class ChosenRows(nn.Module):
    """Where the gradient's rows add up is made once for all microbatches, in lines of plain types; a rank has one row of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x.argmax(-1)].sin().square().mean()


def test_one_row_a_rank_is_added_where_an_index_says() -> None:
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = ChosenRows()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=2)
    program = meshc.compile(step, meshc.Mesh("a=2"), kwargs={"x": x}, plan="a: batch")
    check_program(program.compiled, "the program")
    assert meshc.verify(program, dtype=torch.float64).ok


class Rotated(nn.Module):
    """The halves of a dim are its outer part: both axes leave one position a rank, or padding."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([-x[2:], x[:2]]).sum() + (x + x).sum() * y.mean()


class EveryThird(nn.Module):
    """Positions of rows in a dim of two parts, each split by an axis of its own: their numbers have no names."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return rows * (torch.arange(len(rows)) % 3 > 0).unsqueeze(-1)


class Halves(nn.Module):
    """Gradients are added to rows and columns that indices choose; a rank has one half of the rows, masked, and one column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.weight, size=(4, 2), mode="nearest").reshape(16, 2, 2) * x


@pytest.mark.parametrize(
    "model, mesh, plan, shapes",
    [
        (Rotated(), "a=2,b=3", "a: batch\nb: batch", ((4,), (4, 3))),
        (EveryThird(), "a=4,b=2", "a: batch\nb: seq", ((12, 3, 5),)),
        (Halves(), "a=2,b=4", "a: f1\nb: f0", ((2, 2),)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_program_that_the_checker_takes(model: nn.Module, mesh: str, plan: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in zip("xy", shapes, strict=False)}
    program = meshc.compile(model, meshc.Mesh(mesh), kwargs=inputs, plan=plan)
    check_program(program.compiled, "the program")
    assert meshc.verify(program, dtype=torch.float64).ok


class Kronecker(nn.Module):
    """A vector's one position a rank, as a row and as a column: equal views of a tile, of which backward makes one and recomputes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        chosen = self.weight[rows, columns]
        return torch.kron(chosen, chosen[:2])


def test_a_recomputed_view_is_not_one_of_another_sharding() -> None:
    inputs = {"rows": torch.tensor([0, 1]), "columns": torch.tensor([1, 1])}
    options = meshc.Options(remat="cheap")
    program = meshc.compile(Kronecker(), meshc.Mesh("a=4"), kwargs=inputs, plan="a: batch", options=options)
    check_program(program.compiled, "the program")
    assert meshc.verify(program, dtype=torch.float64).ok
