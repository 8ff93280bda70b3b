"""Head and loss in chunks: what runs, what it means, what it holds, and what runs whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import meshc
from meshc import artifact
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.ir import op_name, record
from meshc.ir.regions import region_of
from tests.broad import broad
from tests.models import Case, bert, gpt2, llama, nanogpt


class Tagger(nn.Module):
    """A head over rows, and hardly anything below it."""

    def __init__(self, words: int = 200) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def smooth(output: Tensor, target: Tensor) -> Tensor:
    """Smoothed labels, and a term that keeps the normaliser near one."""
    rows = output.flatten(0, -2)
    return F.cross_entropy(rows, target.flatten(), label_smoothing=0.1) + 1e-2 * torch.logsumexp(rows, -1).square().mean()


def with_logits(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return cross_entropy(output, target), {"logits": output}


def over_rows(output: Tensor, target: Tensor) -> Tensor:
    """A softmax over the sequence reads all of its rows."""
    return cross_entropy(output.softmax(-2) * output, target)


def tagged(
    chunks: int, mesh: str = "dp=2", plan: str = "dp: batch", loss: Callable[..., object] = cross_entropy, **ask: str
) -> meshc.Program:
    torch.manual_seed(0)
    model = Tagger().double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    target = torch.where(torch.rand(8, 6) < 0.3, -100, torch.randint(200, (8, 6)))
    lines = f"{plan}\nchunk head: {chunks}"
    return meshc.compile(step, meshc.Mesh(mesh), args=(torch.randn(8, 6, 4).double(),), kwargs={"target": target}, plan=lines, **ask)


def calls_of(program: meshc.Program, name: str) -> list[Node]:
    (stage,) = program.compiled.stages.values()
    return [node for node in stage.graph.nodes if node.op == "call_function" and op_name(node) == name]


def tallest(program: meshc.Program, words: int = 200) -> int:
    """Rows of the tallest value that has a column for each word."""
    (stage,) = program.compiled.stages.values()
    shapes = [record(node).shape for node in stage.graph.nodes if node.op == "call_function" and not isinstance(node.meta["meshc"], tuple)]
    return max(int(torch.Size(shape[:-1]).numel()) for shape in shapes if shape and shape[-1] == words)


def held(program: meshc.Program) -> int:
    return peak_memory.peak_rank(program.compiled).total


def said(program: meshc.Program) -> list[str]:
    return [note for note in program.compiled.notes if "chunks" in note]


def test_nothing_is_taller_than_a_chunk_and_sums_grow_by_a_part_of_each() -> None:
    """A rank has 4 rows of 6 tokens. The weight's gradient, the bias's and the loss grow in the memory of their first part."""
    whole, chunked = tagged(1), tagged(4)
    assert (tallest(whole), tallest(chunked)) == (24, 6)
    assert len(calls_of(chunked, "aten.addmm")) == 4 and len(calls_of(chunked, "aten.cat")) - len(calls_of(whole, "aten.cat")) == 1
    grown = [node for node in calls_of(chunked, "aten.add.Tensor") if record(node).chunk is not None]
    assert sorted(record(node).shape for node in grown) == sorted(3 * [(), (1, 200), (200, 4)])
    assert str(chunked).count("; over its operand\" = aten.add.Tensor(") == 9
    assert held(chunked) < 0.6 * held(whole) and said(chunked) == []
    meshc.verify(chunked, dtype=torch.float64)


@pytest.mark.parametrize(
    "mesh, plan, chunks",
    [
        ("tp=2", "tp: vocab", 4),
        ("dp=2,tp=2", "dp: batch; store params, grads, state\ntp: vocab > seq", 3),
        pytest.param("dp=2,tp=3", "dp: batch\ntp: seq", 5, marks=pytest.mark.unproved),  # the fifth chunk has no rows
    ],
    ids=str,
)  # fmt: skip
def test_a_chunk_is_of_whatever_factor_ranks_have_most_of(mesh: str, plan: str, chunks: int) -> None:
    """Of the batch, where that goes into chunks evenly; of the sequence; of one that pads it. Axes that split the vocabulary reduce chunk
    by chunk, and one that splits rows is outside the chunks."""
    program = tagged(chunks, mesh, plan)
    assert said(program) == []
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}


def test_smoothed_labels_and_a_second_term_of_rows_run_in_chunks_too() -> None:
    program = tagged(4, loss=smooth)
    assert tallest(program) == 6 and said(program) == []
    meshc.verify(program, dtype=torch.float64)


def test_what_needs_the_tokens_of_all_chunks_runs_whole_with_a_note_that_names_the_line() -> None:
    line = over_rows.__code__.co_firstlineno + 2
    for loss, mesh, why in ((with_logits, "dp=2", "is wanted whole"), (over_rows, "dp=4", f"test_write_chunks.py:{line} is wanted whole")):
        program = tagged(3, mesh, loss=loss)
        (note,) = said(program)
        assert note.startswith("the head and loss run whole, and not in chunks: ") and why in note, note
        assert str(program)[str(program).index("def ") :] == (text := str(tagged(1, mesh, loss=loss)))[text.index("def ") :]


@pytest.mark.unproved  # the fifth chunk has no rows
def test_a_saved_program_is_sound(tmp_path: Path) -> None:
    """Its text says nothing of chunks but what each of their lines does; rows that pad a chunk are zeros."""
    program = tagged(5, "dp=2,tp=2", "dp: batch; store params, grads, state\ntp: vocab")
    program.save(tmp_path / "tagged.meshc")
    assert artifact.load(tmp_path / "tagged.meshc").axis_sizes == {"dp": 2, "tp": 2}


def test_only_a_step_has_a_head_and_lines_must_be_about_one() -> None:
    model, x = Tagger(), torch.zeros(8, 6, 4)
    program = meshc.compile(model, meshc.Mesh("dp=2"), args=(x,), plan="dp: batch\nchunk head: 2")
    assert "line 2, `chunk head: 2`: only a TrainStep knows" in program.compiled.notes[-1]
    with pytest.raises(PlanError, match="line 2, `chunk body: 4`: forward makes no product of rows and a weight in such a module"):
        step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters()), loss=cross_entropy)
        target = {"target": torch.zeros(8, 6, dtype=torch.long)}
        meshc.compile(step, meshc.Mesh("dp=2"), args=(x,), kwargs=target, plan="dp: batch\nchunk body: 4")


def test_a_budget_that_nothing_recomputed_keeps_is_kept_in_chunks() -> None:
    """Of such a model there is nothing to recompute but what is as tall as the logits."""
    torch.manual_seed(0)
    model, inputs = Tagger(), {"args": (torch.randn(64, 6, 4),), "kwargs": {"target": torch.randint(200, (64, 6))}}
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=cross_entropy)
    whole = held(meshc.compile(step, meshc.Mesh("dp=2"), plan="dp: batch", **inputs))
    budget = whole // 3
    program = meshc.compile(step, meshc.Mesh("dp=2"), plan="dp: batch", options=meshc.Options(memory_budget=budget), **inputs)
    assert held(program) <= budget and tallest(program) == 24
    assert said(program)[-1] == "memory: to hold no more than it may, the head and loss run in 8 chunks of their tokens"
    meshc.verify(program, dtype=torch.float64)


def test_each_chunk_has_regions_of_its_own_for_a_backend_that_compiles() -> None:
    program = tagged(4, backend="inductor")
    regions = [region_of(node) for node in calls_of(program, "aten.addmm")]
    assert len(set(regions)) == 4 and regions == sorted(regions, key=lambda one: one or 0)


def step(case: Case, mesh: str, plan: str, microbatches: int, **options: str) -> meshc.Program:
    made = meshc.TrainStep(
        case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9), loss=case.loss, clip_grad_norm=1.0,
        microbatches=microbatches,
    )  # fmt: skip
    return meshc.compile(made, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, options=meshc.Options(**options))


FSDP = "dp: batch; store params, grads, state"
SPLIT = "tp: heads, ffn, vocab > seq"


@pytest.mark.parametrize(
    "make, mesh, lines, microbatches, options",
    [
        broad(llama, "dp=2,tp=2", [FSDP, SPLIT, "chunk lm_head: 3"], 1, {}),
        broad(llama, "tp=2", ["tp: heads, ffn, vocab", "chunk lm_head: 4"], 1, {}),
        broad(llama, "dp=4,tp=2", [FSDP, SPLIT, "remat *: layer", "chunk lm_head: 5"], 1, {}),
        broad(llama, "dp=2", [FSDP, "chunk lm_head: 2"], 2, {}),
        broad(llama, "pp=2,dp=2", ["dp: batch", "chunk lm_head: 2"], 2, {"schedule": "1f1b"}),
        broad(llama, "pp=2", ["chunk lm_head: 2"], 4, {"schedule": "zb_h1"}),
        broad(gpt2, "dp=2,tp=2", [FSDP, SPLIT, "chunk *: 4"], 1, {}),
        broad(gpt2, "dp=2", ["dp: batch", "chunk *: 4"], 2, {"remat": "cheap"}),
        broad(bert, "dp=2,tp=2", ["dp: batch", SPLIT, "chunk *: 4"], 1, {}),
        broad(nanogpt, "dp=2,tp=2", ["dp: batch", SPLIT, "chunk *: 4"], 2, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_a_step_of_a_stock_model_means_what_it_means(
    make: Callable[..., Case], mesh: str, lines: list[str], microbatches: int, options: dict[str, str]
) -> None:
    program = step(make(batch=8), mesh, "\n".join(lines), microbatches, **options)
    assert said(program) == []
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}


@pytest.mark.parametrize(
    "mesh, line, options, height",
    [
        broad("cp=2", "cp: seq", {"attention": "ring"}, 16),
        broad("cp=2", "cp: seq", {"attention": "zigzag"}, 16),
        broad("cp=2", "cp: heads@attention > seq", {}, 16),
        broad("cp=4", "cp: heads*seq@attention > seq", {"attention": "ring"}, 8),
    ],
)  # fmt: skip
def test_a_split_sequence_goes_in_chunks_however_keys_come(mesh: str, line: str, options: dict[str, str], height: int) -> None:
    """Of 8 rows of 12 tokens two ranks have 48 and four have 24, and no rank ever has more than a third of their logits."""
    program = step(llama(batch=8, hidden=8), mesh, f"{line}\nchunk lm_head: 3", 1, **options)
    assert said(program) == [] and tallest(program, 65) == height
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}
