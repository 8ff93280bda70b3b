"""Indices that their reader has no row for: refused where torch refuses them, whatever is split, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.runtime.simulator.simulation import simulate
from meshc.text import parse, printer

VOCABULARY, WIDTH, BATCH, SEQ = 32, 8, 4, 6


class Shifted(nn.Module):
    """A language model of two lines, whose loss reads the labels from the second on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def step(mesh: str, microbatches: int = 1, **options: Any) -> meshc.Program:
    model = Shifted()
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=microbatches)
    return meshc.compile(train, meshc.Mesh(mesh), kwargs=batch(), options=meshc.Options(**options))


def batch(ids: int = 3, labels: int = 5, place: tuple[int, int] = (2, 3)) -> dict[str, Tensor]:
    """Both legal but for what is given, which stands at `place`."""
    found = {"ids": torch.full((BATCH, SEQ), 3), "labels": torch.full((BATCH, SEQ), 5)}
    found["ids"][place], found["labels"][place] = ids, labels
    return found


@pytest.mark.parametrize("mesh, microbatches", [("dp=1", 1), ("dp=2,tp=2", 1), ("tp=3", 1), ("dp=2", 2), ("pp=2", 2)])
def test_ids_and_labels_of_a_step(mesh: str, microbatches: int) -> None:
    program = step(mesh, microbatches)
    message = r"ids holds 40, where 0 to 31 is legal\n  in your model: test_index_guards\.py:\d+ embed"
    with pytest.raises(meshc.InputError, match=message) as found:
        meshc.verify(program, batch(ids=40))
    assert found.value.of_all
    with pytest.raises(meshc.InputError, match=r"labels holds -5, where 0 to 31 is legal, and -100, which is ignored"):
        meshc.verify(program, batch(labels=-5))


def test_ignored_labels_and_those_that_nothing_reads() -> None:
    program = step("dp=2,tp=2")
    meshc.verify(program, batch(labels=-100))
    meshc.verify(program, batch(labels=99, place=(1, 0)))


def test_every_input_of_a_global_program_is_checked_before_anything_is_sent() -> None:
    lines = str(step("dp=2,tp=2")).splitlines()
    checks = [number for number, line in enumerate(lines) if "meshc.check_index(" in line]
    assert len(checks) == 2
    assert max(checks) < min(number for number, line in enumerate(lines) if "= all_reduce(" in line)


def test_the_check_can_be_left_out() -> None:
    program = step("tp=2", check_indices=False)
    assert "check_index" not in str(program)


def test_checks_are_part_of_the_text() -> None:
    for stage in step("dp=2", microbatches=2).compiled.stages.values():
        printed = printer.print_stage(stage, comments=False)
        assert printer.print_stage(parse.parse_stage(printed), comments=False) == printed


ROWS = 6
Reader = Callable[[Tensor, Tensor], Tensor]
READERS: dict[str, Reader] = {
    "embedding": lambda table, index: F.embedding(index, table),
    "embedding_bag": lambda table, index: F.embedding_bag(index.unsqueeze(-1), table, mode="sum"),
    "bags_of_unequal_sizes": lambda table, index: F.embedding_bag(index, table, torch.tensor([0, 1]), mode="sum"),
    "gather": lambda table, index: table.gather(0, index.unsqueeze(-1).expand(-1, table.shape[1])),
    "take_along_dim": lambda table, index: table.take_along_dim(index.unsqueeze(-1), 0),
    "index_select": lambda table, index: table.index_select(0, index),
    "index": lambda table, index: table[index],
    "index_of_both": lambda table, index: table[index, index],
    "index_of_a_part": lambda table, index: torch.cat([table[:1], table]).split([1, ROWS])[1][index],
    "index_by_sorted_values": lambda table, index: table[index.sort()[0]],
    "take": lambda table, index: table.t().take(index),
    "one_hot": lambda table, index: F.one_hot(index, ROWS).to(table.dtype) @ table,
    "scatter": lambda table, index: torch.zeros_like(table).scatter(0, index.unsqueeze(-1).expand(-1, table.shape[1]), table[: len(index)]),
    "scatter_add": lambda table, index: table.scatter_add(0, index.unsqueeze(-1).expand(-1, table.shape[1]), table[: len(index)]),
    "index_add": lambda table, index: table.index_add(0, index, table[: len(index)]),
    "index_copy": lambda table, index: table.index_copy(0, index, table[: len(index)]),
    "index_fill": lambda table, index: table.index_fill(0, index, 1.5),
    "index_put": lambda table, index: table.index_put((index,), table[: len(index)], accumulate=True),
    "nll_loss": lambda table, index: F.nll_loss(table[: len(index)], index),
    "weighted_cross_entropy": lambda table, index: F.cross_entropy(table[: len(index)], index, weight=torch.ones(table.shape[1])),
    "smooth_cross_entropy": lambda table, index: F.cross_entropy(table[: len(index)], index, label_smoothing=0.1),
}


class Reads(nn.Module):
    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader
        self.table = nn.Parameter(torch.arange(ROWS * ROWS, dtype=torch.float32).reshape(ROWS, ROWS) / 10)

    def forward(self, index: Tensor) -> Tensor:
        return self.reader(self.table * 1.0, index)


@pytest.mark.parametrize("name", READERS)
def test_what_torch_refuses_is_refused(name: str) -> None:
    """Nothing else is, and what is not refused means what it means on one device."""
    model = Reads(READERS[name])
    plan = "tp: vocab > hidden" if name in ("embedding", "embedding_bag") else "tp: table.0 > table.1"
    with torch.no_grad():
        program = meshc.compile(model, meshc.Mesh("tp=2"), args=(torch.tensor([0, 3, 1]),), plan=plan)
        for value in (-ROWS - 1, -ROWS, -1, ROWS - 1, ROWS):
            inputs = {"input:index": torch.tensor([1, value, 2]), "parameter:table": model.table.data}
            try:
                expected = model(inputs["input:index"])
            except (IndexError, RuntimeError):
                with pytest.raises(meshc.InputError, match=rf"holds {value}, where"):
                    simulate(program.compiled, inputs)
            else:
                torch.testing.assert_close(simulate(program.compiled, inputs)["output:output"], expected)


class Offsets(nn.Module):
    """Indices of four kinds: moved by a number, positions, places, and a buffer's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("order", torch.tensor([2, 0, 1, 5, 4, 3]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids + 20) + self.table(torch.arange(ids.shape[1]))
        best = x.topk(2, dim=1)[1]
        return x.gather(1, best)[:, :1] + x[:, self.order]


def test_what_is_looked_at_and_what_messages_call_it() -> None:
    program = meshc.compile(Offsets(), meshc.Mesh("tp=2"), args=(torch.zeros(2, 6, dtype=torch.int64),))
    assert str(program).count("meshc.check_index(") == 2  # neither the positions nor the places that topk finds
    with pytest.raises(meshc.InputError, match="an index made of ids holds 33, where 0 to 31 is legal"):
        meshc.verify(program, {"ids": torch.full((2, 6), 13)})
    assert '"the buffer order"' in str(program)


def test_padding_is_not_looked_at() -> None:
    """Three rows on two ranks: the fourth is padding, which the model moves out of range."""

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x.long() - 1)  # floating, so that no rank has all of it

    program = meshc.compile(Moved(), meshc.Mesh("dp=2"), args=(torch.ones(3, 2),))
    assert "check_index" in str(program) and "True)" not in str(program).split("check_index", 1)[1].split("\n")[0]
    meshc.verify(program, {"x": torch.ones(3, 2)})
    with pytest.raises(meshc.InputError, match="an index that the model makes holds 4"):
        meshc.verify(program, {"x": torch.tensor([[1.0, 1], [2, 2], [5, 4]])})
