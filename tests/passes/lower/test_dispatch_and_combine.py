"""What is sent of the tokens that experts are handed: bytes by the formula, and all rows where that is faster."""

from __future__ import annotations

from math import comb

import pytest
import torch

import meshc
from meshc import ir
from meshc.cost.links import payload
from meshc.ir import spmd
from meshc.program.program import PlainProgram
from tests.broad import broad
from tests.zoo.experts import shallow

TOKENS, HIDDEN, BYTES, LAYERS = 4 * 12, 32, 4, 1


def program(family: str, mesh: str) -> meshc.Program:
    case = shallow(family)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1), loss=lambda output: output.loss)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs)


def sent(found: meshc.Program, kind: spmd.Function) -> list[tuple[str, int]]:
    """(phase, bytes) of each collective of a kind that experts have."""
    compiled = found.compiled
    assert isinstance(compiled, PlainProgram)
    nodes = [node for stage in compiled.stages.values() for node in stage.graph.nodes if node.target is kind]
    return [(ir.record(node).phase, payload(node, compiled.axis_sizes)) for node in nodes]


@pytest.mark.parametrize(
    "family, mesh, ranks, experts, chosen, tokens",
    [
        ("mixtral", "ep=4", 4, 4, 2, TOKENS),
        broad("olmoe", "ep=4", 4, 8, 3, TOKENS),
    ],
)
def test_bytes_are_the_formulas(family: str, mesh: str, ranks: int, experts: int, chosen: int, tokens: int) -> None:
    """Each way once a layer: a token goes to a rank if one of the k that it chooses, of E, is among the E / n there. Weights go with rows
    that are handed out, and their gradients with what comes back of them."""
    share = 1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen)
    alone, beside = (int(round(share, 4) * (ranks - 1) / ranks * tokens * width * BYTES) for width in (HIDDEN, HIDDEN + chosen))
    found = program(family, mesh)
    assert sent(found, spmd.gather_rows) == [("forward", beside)] * LAYERS + [("backward", alone)] * LAYERS
    assert sent(found, spmd.scatter_rows) == [("forward", alone)] * LAYERS + [("backward", beside)] * LAYERS
    choices = [node for node in exchanged(found) if node.target is spmd.all_gather and ".mlp" in str(ir.record(node).source.module)]
    assert [ir.record(node).dtype for node in choices] == [torch.int64] * LAYERS
    assert not any(node.target is spmd.reduce_scatter for node in exchanged(found))


def exchanged(found: meshc.Program) -> list[torch.fx.Node]:
    assert isinstance(found.compiled, PlainProgram)
    nodes = [node for stage in found.compiled.stages.values() for node in stage.graph.nodes if spmd.is_collective(node.target)]
    return [node for node in nodes if ir.record(node).phase != "update"]


@pytest.mark.broad
def test_where_most_tokens_go_to_a_rank_in_any_case_all_rows_travel() -> None:
    """Two of two experts a token: both ranks have one of each token's."""
    case = shallow("mixtral")
    config = type(case.model.config)(**{**case.model.config.to_dict(), "num_local_experts": 2})
    model = type(case.model)(config).train()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda output: output.loss)
    found = meshc.compile(step, meshc.Mesh("ep=2"), kwargs=case.call_kwargs)
    assert not sent(found, spmd.gather_rows) and not sent(found, spmd.scatter_rows)
    assert meshc.verify(found, dtype=torch.float64).ok


@pytest.mark.parametrize("mesh", ["ep=4", broad("ep=4,tp=2")])
def test_what_is_sent_so_equals_one_device(mesh: str) -> None:
    found = program("mixtral", mesh)
    assert sent(found, spmd.gather_rows)
    assert meshc.verify(found, dtype=torch.float64).ok
