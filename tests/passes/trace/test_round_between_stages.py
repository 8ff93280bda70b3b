"""What stages of a pipeline send each other in few bits: as on one device, whatever mesh and schedule, in a quarter of the bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import ir
from meshc.errors import PlanError, VerifyError
from meshc.passes.trace import round_between_stages as stages
from tests.broad import broad

WIDTH, ROWS, TOKENS, PARTS = 64, 8, 16, 4
SPLITS = ("layers.1", "layers.2", "layers.3")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * mask


class Chain(nn.Module):
    """Layers that read what the one before has made, a mask, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, mask = self.embed(ids), (ids > 3).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Skips(Chain):
    """The first values are read by all later stages, whole and in halves, and one is written in place."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first, mask = self.embed(ids), (ids > 3).unsqueeze(-1)
        left, right = first.chunk(2, -1)
        kept, x = first * 2, first
        for number, layer in enumerate(self.layers):
            x = layer(x, mask)
            if number >= 2:
                kept += x
                x = x + first * 0.5 + torch.cat([right, left], -1) + kept
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def step(
    mesh: str, line: str, splits: Any = ("layers.2",), kind: type[Chain] = Chain, schedule: str | None = None, **ask: Any
) -> meshc.Program:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = meshc.TrainStep(model, optimizer=optimizer, loss=lambda loss: loss, **{"microbatches": PARTS, **ask})
    ids = torch.randint(50, (ROWS, TOKENS))
    options = meshc.Options(pipeline=meshc.Pipelining(splits=splits, schedule=schedule))
    return meshc.compile(train, meshc.Mesh(mesh), kwargs={"ids": ids, "labels": ids}, plan=line, options=options)


@pytest.mark.parametrize(
    "mesh, format, splits, schedule, kind",
    [
        ("pp=2", "fp8", ("layers.2",), "1f1b", Chain),
        ("pp=4", "int8", SPLITS, None, Skips),
        broad("pp=2", "fp8", SPLITS, "interleaved", Skips),
        broad("pp=2", "int8", SPLITS, "zb_v", Skips),
        broad("pp=2", "fp8", ("layers.2",), "zb_h1", Skips),
        broad("pp=2,dp=2,tp=2", "fp8", ("layers.2",), None, Chain),
        broad("pp=2,dp_shard=2", "int8", ("layers.1",), "gpipe", Skips),
        broad("pp=2,tp=3", "fp8", ("layers.2.down",), None, Skips),
    ],
)
def test_a_step_equals_one_device(mesh: str, format: str, splits: Any, schedule: str | None, kind: type[Chain]) -> None:
    assert meshc.verify(step(mesh, f"compress pp: {format}", splits, kind, schedule)).worst < 1e-12


def crossing(program: meshc.Program) -> dict[str, list[tuple[torch.dtype | None, int]]]:
    """By the direction of a message, dtype and bytes of its values."""
    compiled: Any = program.compiled
    records = {key: ir.record(node) for stage in compiled.stages.values() for node, key in stage.keys().items()}
    return {
        str(link): [(records[key].dtype, ir.local_bytes(records[key])) for key in keys] for link, keys in compiled.pipeline.messages.items()
    }


def test_messages_are_a_quarter_of_float32() -> None:
    """A byte an element and four for each block of 256 of a row, both ways; a mask is made of what each stage has."""
    rows = ROWS // PARTS * TOKENS
    assert crossing(step("pp=2", "")) == {link: [(torch.float32, rows * WIDTH * 4)] for link in ("F0>1", "B1>0")}
    assert crossing(step("pp=2", "compress pp: fp8")) == {
        link: [(torch.float32, rows * 4), (torch.float8_e4m3fn, rows * WIDTH)] for link in ("F0>1", "B1>0")
    }


def test_values_that_are_read_by_several_stages_travel_once_to_each() -> None:
    found = crossing(step("pp=4", "compress pp: int8", SPLITS, Skips, "1f1b"))
    assert {dtype for values in found.values() for dtype, _ in values} == {torch.float32, torch.int8}
    assert all(size <= ROWS // PARTS * TOKENS * 4 for values in found.values() for dtype, size in values if dtype == torch.float32)


def test_inference_and_other_lines() -> None:
    torch.manual_seed(0)
    ids = torch.randint(50, (ROWS, TOKENS))
    options = meshc.Options(pipeline=meshc.Pipelining(splits=SPLITS, microbatches=2))
    with torch.no_grad():
        program = meshc.compile(
            Skips().eval(), meshc.Mesh("pp=2"), kwargs={"ids": ids, "labels": ids}, plan="compress pp: fp8", options=options
        )
        assert meshc.verify(program).worst < 1e-12
    both = step("pp=2,dp=2", "compress pp: int8\ncompress dp: int8\nprecision layers.*: float8 row, gradients in bf16")
    assert meshc.verify(both).worst < 1e-12
    assert meshc.verify(step("pp=2", "compress pp: fp8\nremat layers.*: layer")).worst < 1e-12


@pytest.mark.parametrize(
    "line, splits, said",
    [
        ("compress pp: fp8", None, "that is left to be chosen"),
        ("compress pp: sign", ("layers.2",), "write `compress pp: fp8` or `compress pp: int8`"),
        ("compress pp: int8 of 4 parts", ("layers.2",), "write `compress pp: fp8` or `compress pp: int8`"),
        ("compress pp: fp8\ncompress pp: int8", ("layers.2",), "one line says how pp sends"),
    ],
)
def test_what_does_not_fit_is_refused(line: str, splits: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        step("pp=2", line, splits)


@pytest.mark.unproved
def test_a_gradient_that_is_not_rounded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = stages._RoundingWriter.write

    def forward_alone(self: Any, node: torch.fx.Node) -> None:
        if ir.record(node).phase == "forward":
            return write(self, node)
        node.replace_all_uses_with(node.all_input_nodes[0])
        self.graph.erase_node(node)

    monkeypatch.setattr(stages._RoundingWriter, "write", forward_alone)
    with pytest.raises(VerifyError, match="does not mean what the model means"):
        meshc.verify(step("pp=2", "compress pp: fp8"))
