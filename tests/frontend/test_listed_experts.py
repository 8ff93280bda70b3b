"""Loops over modules of experts: which are read, that they mean what they meant, what training of them equals, what is refused."""

from __future__ import annotations

import linecache
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import ir
from meshc.frontend.expert_capacity import Capacity
from meshc.frontend.expert_tape import NotRows, record
from meshc.frontend.listed_experts import formed_experts, listed_experts, loop_of, unchosen_parameters
from tests.broad import broad
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401
from tests.zoo.loops import EXPERTS, LOOPS, OF_ALL, WIDTH, Expert, Layer, Model

SKIPS = {
    **{"Hit": True, "All": False, "Masked": True, "One": True, "Places": True, "Counted": True, "Repeated": False, "Written": True},
    **dict.fromkeys(OF_ALL, False),
}
"""Whether an expert that nobody has chosen is not called."""


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_is_one_product_that_means_the_same(kind: str) -> None:
    torch.manual_seed(0)
    layer = LOOPS[kind]().double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    wanted = layer(x)
    theirs = torch.autograd.grad(wanted.square().sum(), inputs, allow_unused=True)
    loop = loop_of(layer)
    assert loop is not None and loop.skips == SKIPS[kind] and loop.of_all == (kind in OF_ALL)
    groups = 2 if kind in OF_ALL else 1
    with formed_experts(layer, lambda path: groups), listed_experts(layer):
        assert "forward" in layer.__dict__
        mine = layer(x)
        grads = torch.autograd.grad(mine.square().sum(), inputs, allow_unused=True)
    assert "forward" not in layer.__dict__ and "_meshc_experts" not in layer.__dict__
    torch.testing.assert_close(mine, wanted)
    for grad, their in zip(grads, theirs, strict=True):
        assert grad is not None
        torch.testing.assert_close(grad, torch.zeros_like(grad) if their is None else their)


@pytest.mark.parametrize("kind", OF_ALL)
def test_experts_that_are_given_all_tokens_are_traced_as_they_are_where_no_axis_splits_them(kind: str) -> None:
    layer = LOOPS[kind]()
    with formed_experts(layer, lambda path: 1, capacity=Capacity(1.25, "drop", None, "position")), listed_experts(layer):
        assert "forward" not in layer.__dict__


def trained(model: nn.Module, mesh: str, microbatches: int | None = None) -> meshc.Program:
    """A step with AdamW, whose decay moves whatever it does not pass over."""
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=lambda y: y.square().mean(), clip_grad_norm=1.0, microbatches=microbatches)
    torch.manual_seed(1)
    return meshc.compile(step, meshc.Mesh(mesh), args=(torch.randn(8, 6, WIDTH, dtype=torch.float64),))


LEAN = 1e3


@pytest.mark.parametrize("kind", LOOPS)
def test_what_nobody_may_choose_has_no_gradient_where_a_loop_passes_it_over(kind: str) -> None:
    assert len(unchosen_parameters(Model(kind, lean=LEAN))) == (4 * EXPERTS * 2 if SKIPS[kind] else 0)


@pytest.mark.broad
def test_equal_layers_are_captured_once() -> None:
    found = trained(Model("Hit", layers=6, lean=LEAN), "ep=2")
    assert not any("one by one" in note for note in found.compiled.notes), found.compiled.notes
    assert meshc.verify(found, dtype=torch.float64).ok


def test_an_update_that_passes_experts_over_reads_what_it_has_not_written() -> None:
    """One in place for many would have overwritten it: such parameters have one each."""
    found = trained(Model("Hit", layers=1), "ep=2").compiled
    names = [ir.op_name(node) for stage in found.stages.values() for node in ir.calls(stage.graph)]  # type: ignore[union-attr]
    assert names.count("meshc.adam_many_") == 1 and names.count("meshc.adam") == 4 * EXPERTS


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda x: x - x.mean(0), "aten.mean.dim is not known to keep its rows apart"),
        (lambda x: x.softmax(0), "aten._softmax.default"),
        (lambda x: x.flip(0), "aten.flip.default"),
        (lambda x: x @ x.T @ x, "aten.permute.default"),
        (lambda x: x * x.shape[0], "mul reads how many rows there are"),
        (lambda x: x[:1], "aten.slice.Tensor"),
    ],
)  # fmt: skip
def test_an_expert_whose_rows_know_of_each_other_is_not_taken(made: Any, said: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return made(self.linear(x))

    with pytest.raises(NotRows, match=re.escape(said)):
        record(Odd())


def test_what_works_within_a_row_is_taken() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.up(x).chunk(2, dim=-1)
            return F.layer_norm(self.down(F.gelu(gate) * up.softmax(-1)).view(x.shape[0], 2, 4), (4,)).flatten(1)

    tape = record(Gated())
    assert tape.weights == (("up", "weight"), ("up", "bias"), ("down", "weight"), ("down", "bias")) and not tape.draws


def test_experts_of_two_kinds_are_refused_with_the_line() -> None:
    model = Model("All", layers=1)
    model.layers[0].experts[3] = Expert(16)  # type: ignore[union-attr, operator]
    with pytest.raises(meshc.CaptureError, match="expert 0 and expert 3 differ: ") as raised:
        trained(model, "ep=2")
    assert "loops.py:" in str(raised.value) and "what to do: experts of one class and size" in str(raised.value)


class Given(Layer):
    """Choices that come from outside."""

    def forward(self, x: Tensor, weights: Tensor, selected: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(selected == i)
            if token.numel() == 0:
                continue
            out[token] += weights[token, nth, None] * expert(x[token])
        return out


def test_of_one_expert_that_a_token_has_chosen_twice_what_stands_last_counts() -> None:
    """As torch writes rows with one index on a CPU."""
    torch.manual_seed(0)
    layer = Given().double()
    given = torch.randn(3, WIDTH).double(), torch.rand(3, 3).double(), torch.tensor([[2, 0, 2], [1, 3, 4], [5, 5, 5]])
    wanted = layer(*given)
    for groups in (1, 2):
        with formed_experts(layer, lambda path, groups=groups: groups), listed_experts(layer):
            torch.testing.assert_close(layer(*given), wanted)


class Places(Layer):
    """Writes rows of tokens that have two choices each: the last expert's stand."""

    def forward(self, x: Tensor) -> Tensor:
        selected = torch.topk(self.gate(x), 2)[1]
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out[torch.where(selected == i)[0]] = expert(x[torch.where(selected == i)[0]])
        return out


def test_rows_that_several_experts_write_are_refused() -> None:
    with pytest.raises(meshc.CaptureError, match=r"writes a row for each token, and has choices \[16, 2\] for tokens \[16, 8\]"):
        meshc.compile(Places(), meshc.Mesh("dp=2"), args=(torch.randn(16, WIDTH),))


class Summed(Layer):
    """A statement in the loop that no product can stand for."""

    def forward(self, x: Tensor) -> Tensor:
        selected = self.gate(x).argmax(-1)
        out, before = torch.zeros_like(x), torch.zeros_like(x[0, 0])
        for i, expert in enumerate(self.experts):
            row, place = torch.where(selected == i)
            before = before + x[row, place].sum(0)
            out[row, place] += expert(x[row, place] + before)
        return out


def test_another_loop_is_of_rows_that_are_selected() -> None:
    assert loop_of(Summed()) is None
    torch.manual_seed(0)
    model = Summed().double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    x, target = torch.randn(2, 4, 3, WIDTH, dtype=torch.float64)
    report = meshc.verify(meshc.compile(step, meshc.Mesh("dp=2"), args=(x,), kwargs={"target": target}))
    assert report.worst < 1e-12


def looped(*statements: str, before: str = "", behind: str = "return out") -> nn.Module:
    """A layer with a loop of these statements, whose choices and weights come from outside."""
    lines = ["token, nth = torch.where(selected == i)", *statements]
    inner = "\n        ".join(lines)
    text = f"def forward(self, x, weights, selected):\n    out = torch.zeros_like(x)\n    {before}\n"
    text += f"    for i, expert in enumerate(self.experts):\n        {inner}\n    {behind}\n"
    name = f"loop of {abs(hash(text))}"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    found: dict[str, Any] = {}
    exec(compile(text, name, "exec"), {"torch": torch, "F": F, "SEEN": []}, found)
    return type("Looped", (Layer,), found)().double()  # type: ignore[no-any-return]


ADDED = "out[token] += weights[token, nth, None] * expert(x[token])"


@pytest.mark.parametrize(
    "statements",
    [
        ("if token.numel() > 3:", f"    {ADDED}"),
        ("if token.numel():", f"    {ADDED}", "else:", "    out = out + 0 * expert(x[:1]).sum()"),
        ("y = expert(x[token]) if token.numel() else x[token]", "out[token] += weights[token, nth, None] * y"),
        ("h = F.dropout(x)", "out[token] += weights[token, nth, None] * expert(h[token])"),
        ("SEEN.append(token)", ADDED),
        ("self.num_experts += 1", ADDED),
        (ADDED, "x = x * 2"),
        ("out[token] += weights[token, nth, None] * expert(x[token] + out[token])",),
        ("out[token] += weights[token, nth, None] * expert(x[token]) * token.numel()",),
        ("if i == 3:", "    continue", ADDED),
        ("if i == 3:", "    break", ADDED),
    ],
)
def test_a_loop_that_does_more_than_add_each_expert_is_left_to_torch(statements: tuple[str, ...]) -> None:
    layer = looped(*statements)
    assert loop_of(layer) is None
    assert layer.num_experts == EXPERTS


@pytest.mark.parametrize(
    "before, statements",
    [
        ("", ("if self.num_experts > 100:", "    print(token)", ADDED)),
        ("", ("h = expert(x[token])", "h *= weights[token, nth].unsqueeze(1)", "out[token] = out[token] + h")),
        ("", ("out[token] += (weights * 2)[token, nth, None] * expert(x.view(-1, 8)[token])",)),
        (
            "import torch.nn.functional as F; mask = F.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)",
            ("place, at = torch.where(mask[i])", "out[at] += weights[at, place, None] * self.experts[i](x[at])"),
        ),
    ],
)
def test_a_loop_may_be_written_in_other_words(before: str, statements: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layer = looped(*statements, before=before)
    given = torch.randn(3, WIDTH).double(), torch.rand(3, 2).double(), torch.tensor([[2, 0], [1, 3], [5, 4]])
    wanted = layer(*given)
    with formed_experts(layer, lambda path: 2), listed_experts(layer):
        assert "forward" in layer.__dict__
        torch.testing.assert_close(layer(*given), wanted)


class Sorted(nn.Module):
    """Rows by expert, as people write it who want torch's product of runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).int()
        made = torch._grouped_mm(x[order].bfloat16(), self.up, offs=ends)
        return torch.zeros_like(x).index_add(0, order, made.to(x.dtype)) * weight[:, None]


def test_rows_that_a_model_has_sorted_are_split_by_no_axis_and_the_error_has_their_line() -> None:
    said = r"whose runs no axis splits: test_listed_experts.py:\d+ `made = torch._grouped_mm\(.*\n.*what to do: give experts as modules"
    with pytest.raises(meshc.PlanError, match=said):
        meshc.compile(Sorted(), meshc.Mesh("ep=2"), args=(torch.randn(16, WIDTH),))
    assert meshc.compile(Sorted(), meshc.Mesh("dp=2"), args=(torch.randn(16, WIDTH),)).compiled is not None


class Runs(nn.Module):
    """The same in the model's own type, by both of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).int()
        made = F.grouped_mm(torch._grouped_mm(x[order], self.up, offs=ends).relu(), self.down, offs=ends)
        return torch.zeros_like(x).index_add(0, order, made) * weight[:, None]


@pytest.mark.parametrize("mesh", ["dp=2", broad("tp=2"), broad("dp=2,tp=2")])
def test_such_products_are_of_any_type(mesh: str) -> None:
    """torch's own take no float32 in a trace, and no float64 at all."""
    model = Runs()
    torch.manual_seed(0)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    program = meshc.compile(step, meshc.Mesh(mesh), args=(torch.randn(16, WIDTH),))
    assert meshc.verify(program, dtype=torch.float64).ok


def test_dropout_inside_experts_is_refused_where_axes_split_them() -> None:
    model = Model("All", layers=1)
    for index in range(EXPERTS):
        model.layers[0].experts[index].down = nn.Sequential(nn.Dropout(0.5), nn.Linear(12, WIDTH))  # type: ignore[union-attr, operator]
    with pytest.raises(meshc.CaptureError, match="these experts have dropout"):
        trained(model, "ep=2")


def test_a_capacity_of_a_loop_is_counted() -> None:
    model = Model("Hit", layers=1).double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    options = meshc.Options(experts=meshc.Experts(capacity=0.75))
    found = meshc.compile(step, meshc.Mesh("ep=2"), options=options, args=(torch.randn(8, 6, WIDTH, dtype=torch.float64),))
    assert {port.name for port in found.compiled.outputs if port.kind == "metric"} >= {"routed:layers.0", "dropped:layers.0"}


class Lower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Model("Counted", layers=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made: Tensor = self.inner(x)
        return made.float()


def test_under_autocast_experts_multiply_in_its_type_as_their_linears_do() -> None:
    model = Lower()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    found = meshc.compile(step, meshc.Mesh("ep=2"), args=(torch.randn(4, 5, WIDTH),))
    nodes = [node for stage in found.compiled.stages.values() for node in ir.calls(stage.graph)]
    products = [node for node in nodes if ir.op_name(node) == "meshc.used_mm"]
    assert len(products) > 2 and {ir.record(node).dtype for node in products} == {torch.bfloat16}
    assert meshc.verify(found).ok
