"""Where the batch of a model's inputs is found, and how parts of it are joined."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.ir.sharding import Sharding
from tests.processes.local_inputs import Masked, Recurrent

SRC, TARGET = torch.randint(12, (6, 4)), torch.randint(12, (6, 4))
STATE = (torch.zeros(2, 4, 8, dtype=torch.float64), torch.zeros(2, 4, 8, dtype=torch.float64))


class Stepping(nn.Module):
    """A cell that a loop calls, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(12, 8), nn.GRUCell(8, 8), nn.Linear(8, 12)

    def forward(self, src: Tensor) -> Tensor:
        h, out = torch.zeros(src.shape[1], 8), []
        for x in self.embed(src):
            h = self.cell(x, h)
            out.append(h)
        return self.head(torch.stack(out))


class RowsFirst(nn.Module):
    """Rows come first, but for the state of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True)

    def forward(self, src: Tensor, hidden: Tensor) -> Tensor:
        return self.rnn(self.embed(src), hidden)[0]


class FeaturesFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x


class Padded(nn.Module):
    """Attention with a mask that is made of positions along the batch and along the sequence, as stock models make it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, src: Tensor, padding: Tensor) -> Tensor:
        rows = torch.arange(src.shape[0])
        keys = torch.arange(src.shape[1])
        x = self.embed(src)[:, None]
        seen = padding[rows[:, None, None, None], keys] & (keys <= keys[:, None])
        return self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=seen)[:, 0])


def loss(output: Any, target: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def step(model: nn.Module) -> meshc.TrainStep:
    return meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)


def enters(program: meshc.Program) -> dict[str, str]:
    """How each input enters, as types have it."""
    return {port.name: _shown(port.sharding) for port in program.compiled.inputs if port.kind == "input"}


def _shown(sharding: Sharding | None) -> str:
    assert sharding is not None
    return ", ".join(" * ".join(map(str, parts)) or "1" for parts in sharding.dims)


@pytest.mark.parametrize(
    "model, inputs, wanted",
    [
        (Recurrent(), {"src": SRC, "hidden": STATE, "target": TARGET}, {"src": "seq 6, batch 4", "hidden.0": "f0 2, batch 4, rnn"}),
        (Recurrent(), {"src": SRC, "hidden": STATE, "target": TARGET.flatten()}, {"target": "seq 6 * batch 4"}),
        (Masked(), {"src": SRC, "mask": torch.zeros(6, 6), "target": TARGET}, {"src": "seq 6, batch 4", "mask": "seq 6, seq 6"}),
        (RowsFirst(), {"src": SRC, "hidden": torch.zeros(1, 6, 8), "target": SRC % 8}, {"src": "batch 6, seq 4", "hidden": "1, batch 6, "}),
        (Stepping(), {"src": SRC, "target": TARGET}, {"src": "batch 6, seq 4"}),  # where it is not clear it is the first
    ],
    ids=["recurrent", "flattened", "masked", "rows-first", "stepping"],
)
def test_an_axis_of_the_batch_splits_it(model: nn.Module, inputs: dict[str, Any], wanted: dict[str, str]) -> None:
    program = meshc.compile(step(model), meshc.Mesh("dp=2"), kwargs=inputs)
    found = enters(program)
    assert {name: found[name][: len(text)] for name, text in wanted.items()} == wanted
    meshc.verify(program, inputs)


@pytest.mark.parametrize(
    "model, inputs, wanted",
    [
        (
            Recurrent(), {"src": SRC[:, :2], "hidden": tuple(one[:, :2] for one in STATE), "target": TARGET[:, :2].flatten()},
            {"src": "seq 6, batch 4/dp", "hidden.0": "f0 2, batch 4/dp, rnn", "target": "seq 6 * batch 4/dp"},
        ),
        (
            Masked(), {"src": SRC[:, :1], "mask": torch.zeros(6, 6), "target": TARGET[:, :1]},
            {"src": "seq 6, batch 2/dp", "mask": "seq 6, seq 6", "target": "seq 6, batch 2/dp"},
        ),
        (
            RowsFirst(), {"src": SRC[:3], "hidden": torch.zeros(1, 3, 8), "target": SRC[:3] % 8},
            {"src": "batch 6/dp, seq 4", "hidden": "1, batch 6/dp, ", "target": "batch 6/dp, seq 4"},
        ),
    ],
    ids=["recurrent", "masked", "rows-first"],
)  # fmt: skip
def test_parts_are_joined_along_the_batch(model: nn.Module, inputs: dict[str, Any], wanted: dict[str, str]) -> None:
    program = meshc.compile(step(model), meshc.Mesh("dp=2"), kwargs=inputs, inputs="local")
    found = enters(program)
    assert {name: found[name][: len(text)] for name, text in wanted.items()} == wanted
    meshc.verify(program)


@pytest.mark.parametrize("inputs, rows", [("global", 6), ("local", 3)])
def test_a_batch_of_as_many_rows_as_tokens_is_told_from_the_tokens(inputs: str, rows: int) -> None:
    """Positions along the two are equal in numbers alone."""
    kwargs = {"src": torch.randint(12, (rows, 6)), "padding": torch.ones(rows, 6, dtype=torch.bool), "target": torch.randint(12, (rows, 6))}
    program = meshc.compile(step(Padded()), meshc.Mesh("dp=2"), kwargs=kwargs, inputs=inputs)
    batch = "batch 6" if inputs == "global" else "batch 6/dp"
    assert enters(program) == dict.fromkeys(kwargs, f"{batch}, seq 6")
    meshc.verify(program)


def test_features_that_come_first_are_no_batch() -> None:
    program = meshc.compile(FeaturesFirst().requires_grad_(False), meshc.Mesh("dp=2"), args=(torch.randn(6, 3),), inputs="local")
    assert enters(program)["x"].endswith(", batch 6/dp")


def test_rows_that_come_first_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshc.passes.driver import joined_batch

    monkeypatch.setattr(joined_batch, "join_along", None)
    kwargs = {"src": SRC[:3], "hidden": torch.zeros(1, 6, 8), "target": SRC[:3] % 8}
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    meshc.compile(step(model), meshc.Mesh("dp=2"), args=(kwargs["src"],), kwargs={"target": kwargs["target"]}, inputs="local")


def test_what_is_not_clear_is_refused_with_the_line_to_write() -> None:
    """And that line is right: labels of which nothing is said are joined along the same dim, though their number would be the same along
    the other."""
    inputs = {"src": SRC[:, :2], "target": TARGET[:, :2]}
    with pytest.raises(meshc.CompileError, match=r"which dim of src \[6, 2\] is the batch is not clear") as raised:
        meshc.compile(step(Stepping()), meshc.Mesh("dp=2"), kwargs=inputs, inputs="local")
    text = str(raised.value)
    assert "dim 0: its positions are picked out by number, test_batch.py:" in text and "names={'src': (None, 'batch')}" in text
    program = meshc.compile(step(Stepping()), meshc.Mesh("dp=2"), kwargs=inputs, inputs="local", names={"src": (None, "batch")})
    assert {name: text[-10:] for name, text in enters(program).items()} == {"src": "batch 4/dp", "target": "batch 4/dp"}
    meshc.verify(program)


def test_rows_that_are_counted_before_the_model_is_looked_at_are_said() -> None:
    options = meshc.Options(local_inputs=meshc.LocalInputs(uneven_rows=True))
    tokens = nn.Sequential(nn.Embedding(12, 8), nn.TransformerEncoderLayer(8, 2, 16))
    with pytest.raises(meshc.CompileError, match=r"(?s)dim 1 of input.*uneven_rows=True.*names={'input': \(None, 'batch', ...\)}"):
        meshc.compile(step(tokens), meshc.Mesh("dp=2"), args=(SRC,), kwargs={"target": TARGET % 8}, inputs="local", options=options)
    inputs = {"src": SRC, "mask": torch.zeros(6, 6), "target": TARGET}
    with pytest.raises(meshc.CaptureError, match=r"(?s)attn_mask.*counted along dim 0 of src, dim 0 of mask"):
        meshc.compile(step(Masked()), meshc.Mesh("dp=2"), kwargs=inputs, inputs="local", options=options)


class Contrast(nn.Module):
    """Rows against rows, and which is whose."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, whose: Tensor | None = None) -> Tensor:
        h = self.up(x)
        return F.cross_entropy(h @ h.T, torch.arange(x.shape[0]) if whose is None else whose)


class Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.up(x)
        return torch.zeros_like(h).index_add(0, edges[:, 1], h[edges[:, 0]])


class Last(nn.Module):
    """The last token of each row, whose number is one of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.up(x)[torch.arange(x.shape[0]), lengths - 1]


@pytest.mark.parametrize(
    "model, inputs, said",
    [
        (Contrast(), {"x": torch.randn(4, 8), "whose": torch.arange(4)}, "by whose rows of the batch are picked at .*test_batch.py"),
        (Edges(), {"x": torch.randn(4, 8), "edges": torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])}, "by edges rows of the batch"),
        (Contrast(), {"x": torch.randn(4, 8)}, ""),
        (Last(), {"x": torch.randn(4, 6, 8), "lengths": torch.tensor([1, 2, 3, 6])}, ""),
    ],
    ids=["labels", "edges", "made-in-the-model", "of-the-sequence"],
)
def test_numbers_of_rows_that_each_rank_counts_for_itself_are_refused(model: nn.Module, inputs: dict[str, Any], said: str) -> None:
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out: out.square().mean())
    compiling = partial(meshc.compile, step, meshc.Mesh("dp=2"), kwargs=inputs)
    compiling()  # the whole batch on every rank: its numbers are the model's
    if not said:
        compiling(inputs="local")
        return
    with pytest.raises(meshc.CompileError, match=said):
        compiling(inputs="local")
