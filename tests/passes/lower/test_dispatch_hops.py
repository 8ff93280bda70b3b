"""Rows that cross to a node once and are spread inside it: the same as one device, and bytes by the formula, link by link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import comb
from typing import Any

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import meshc
from meshc import ir
from meshc.cost.devices import Link, assume_device, device
from meshc.cost.links import payload, rows_by_link
from meshc.errors import PlanError
from meshc.ir import spmd
from meshc.program.program import PlainProgram
from tests.broad import broad
from tests.zoo.experts import FAMILIES

ROWS, SEQ, WIDTH, LAYERS, BYTES = 8, 6, 16, 1, 4
SLOW = Link(20e-6, 1e5)
"""Between nodes; the table's `cpu` has another inside."""


@contextmanager
def nodes_of(ranks: int, between: Link = SLOW, inside: Link | None = None) -> Iterator[None]:
    cpu = device("cpu")
    with assume_device(replace(cpu, ranks_per_node=ranks, between_nodes=between, inside_node=inside or Link(1e-6, 1e11), memory_Bps=1e12)):
        yield


def model(experts: int = 8, chosen: int = 2) -> OlmoeForCausalLM:
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=33, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=2, num_experts=experts,
        num_experts_per_tok=chosen, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return OlmoeForCausalLM(config)


def program(
    mesh: str, dispatch: str = "hierarchical", of: OlmoeForCausalLM | None = None, plan: str | None = None, microbatches: int = 1,
    **more: Any,
) -> meshc.Program:  # fmt: skip
    of = model() if of is None else of
    step = meshc.TrainStep(of, optimizer=torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9), microbatches=microbatches)
    ids = torch.randint(33, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    options = meshc.Options(experts=meshc.Experts(dispatch=dispatch), **more)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs={"input_ids": ids, "labels": ids}, options=options, plan=plan)


def exchanges(found: meshc.Program) -> list[torch.fx.Node]:
    assert isinstance(found.compiled, PlainProgram)
    return [node for stage in found.compiled.stages.values() for node in stage.graph.nodes if node.target in spmd.OF_ROWS]


def hops(found: meshc.Program) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(ir.record(node).phase, node.target.__name__, tuple(node.args[1])) for node in exchanges(found)]  # type: ignore[union-attr, arg-type]


def share(experts: int, here: int, chosen: int) -> float:
    """Of tokens that have one of `here` experts among those that they choose."""
    return round(1 - comb(experts - here, chosen) / comb(experts, chosen), 4)


@pytest.mark.parametrize("mesh, ranks_per_node", [
    ("ep=4", 2),
    broad("ep=8", 4),
    broad("ep=8", 2),
    broad("dp=2,ep=4", 2),
    broad("ep=4,tp=2", 4),
    broad("pp=2,ep=4", 2),
])  # fmt: skip
def test_rows_that_go_in_two_hops_are_the_models_own(mesh: str, ranks_per_node: int) -> None:
    with nodes_of(ranks_per_node):
        found = program(mesh)
        gather = [(("forward"), "gather_rows", ("ep_across",)), ("forward", "gather_rows", ("ep_inside",))]
        scatter = [("forward", "scatter_rows", ("ep_inside",)), ("forward", "scatter_rows", ("ep_across",))]
        forward = [one for one in hops(found) if one[0] == "forward"]
        assert forward == (gather + scatter) * LAYERS and len(hops(found)) == 2 * len(forward)
        assert meshc.verify(found, dtype=torch.float64).ok


@pytest.mark.parametrize("chosen", [broad(1), broad(2), broad(4), broad(8)])
def test_any_number_of_experts_a_token(chosen: int) -> None:
    with nodes_of(2):
        assert meshc.verify(program("ep=4", of=model(16, chosen)), dtype=torch.float64).ok


@pytest.mark.parametrize("favoured", [broad([3, 4]), broad([0, 1]), broad([7, 0])])
def test_all_tokens_at_two_experts(favoured: list[int]) -> None:
    """One in each node, both on one rank, or in the order in which a rank does not have them; nobody chooses the others."""
    with nodes_of(2):
        of = model()
        for layer in of.model.layers:
            layer.mlp.gate.weight.data.zero_()  # logits that are equal: the first are chosen
            layer.mlp.gate.weight.data[favoured] = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3)).abs() * 50
            layer.post_attention_layernorm.weight.data.abs_()
        assert meshc.verify(program("ep=4", of=of), dtype=torch.float64).ok


@pytest.mark.parametrize("mesh, ranks, inside, experts, chosen", [("ep=4", 4, 2, 8, 2), broad("ep=8", 8, 4, 16, 3)])
def test_bytes_of_each_link_are_the_formulas(mesh: str, ranks: int, inside: int, experts: int, chosen: int) -> None:
    tokens, nodes = ROWS * SEQ, ranks // inside
    with nodes_of(inside):
        by_node, at_once = (program(mesh, dispatch, model(experts, chosen)) for dispatch in ("hierarchical", "flat"))
        size = {axis.name: axis.size for axis in by_node.compiled.mesh.axes}
        for node in exchanges(by_node):
            whole = tokens * width(node, chosen) * BYTES
            crossing = (nodes - 1) / ranks * whole * share(experts, experts // nodes, chosen)
            spreading = (inside - 1) / inside * whole * share(experts, experts // ranks, chosen)
            wanted = crossing if node.args[1] == ["ep_across"] else spreading
            assert payload(node, size) == int(wanted)
            near, far = rows_by_link(node, by_node.compiled.mesh, device_there())
            assert (near == 0) == (wanted == crossing) and (far == 0) == (wanted == spreading)
        for node in exchanges(at_once):
            whole = tokens * width(node, chosen) * BYTES
            near, far = rows_by_link(node, at_once.compiled.mesh, device_there())
            assert near == pytest.approx((inside - 1) / ranks * whole * share(experts, experts // ranks, chosen), rel=1e-3)
            assert far == pytest.approx((ranks - inside) / ranks * whole * share(experts, experts // ranks, chosen), rel=1e-3)
            assert (nodes - 1) / ranks * whole * share(experts, experts // nodes, chosen) < far


def width(node: torch.fx.Node, chosen: int) -> int:
    """Of what a token sends: its weights go out with it, and their gradients come back."""
    beside = (ir.record(node).phase, node.target) in (("forward", spmd.gather_rows), ("backward", spmd.scatter_rows))
    return WIDTH + chosen if beside else WIDTH


def device_there() -> Any:
    from meshc.cost.devices import devices_of

    return devices_of(meshc.Mesh("a=2")).slowest()


@pytest.mark.parametrize("between, dispatch, wanted", [
    (SLOW, "auto", {("ep_across",), ("ep_inside",)}),
    broad(Link(1e-6, 1e11), "auto", {("ep_across", "ep_inside")}),
    broad(SLOW, "flat", {("ep",)}),
])  # fmt: skip
def test_what_is_chosen_follows_from_the_links(between: Link, dispatch: str, wanted: set[tuple[str, ...]]) -> None:
    """Where a byte costs more between nodes, rows cross once; where both links are alike they go at once, which has fewer messages."""
    with nodes_of(2, between):
        found = program("ep=4", dispatch)
        assert {axes for *_, axes in hops(found)} == wanted
        assert str(found.compiled.mesh) == ("ep=4" if dispatch == "flat" else "ep_across=2,ep_inside=2")


@pytest.mark.parametrize("microbatches, options", [
    broad(2, {}), broad(1, {"expert_capacity": 1.25}), broad(1, {"expert_placement": "movable"}), broad(1, {"remat": "layer"}),
])  # fmt: skip
def test_beside_what_else_there_is(microbatches: int, options: dict[str, Any]) -> None:
    with nodes_of(2):
        found = program("ep=4", microbatches=microbatches, **options)
        assert {axes for *_, axes in hops(found)} == {("ep_across",), ("ep_inside",)}
        assert meshc.verify(found, dtype=torch.float64).ok


@pytest.mark.parametrize("family", [broad("deepseek_v3"), broad("gpt_oss"), broad("mixtral")])
def test_families(family: str) -> None:
    """Shared experts, groups of experts, sinks; what the axis does beside them stays as it was."""
    case = FAMILIES[family].case(family)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1), loss=lambda output: output.loss)
    with nodes_of(2):
        options = meshc.Options(experts=meshc.Experts(dispatch="hierarchical"))
        found = meshc.compile(step, meshc.Mesh("ep=4"), kwargs=case.call_kwargs, options=options)
        assert {axes for *_, axes in hops(found)} == {("ep_across",), ("ep_inside",)}
        assert meshc.verify(found, dtype=torch.float64).ok


@pytest.mark.broad
def test_axes_that_a_mesh_has_already_are_taken_as_they_are() -> None:
    """Experts over dp, from node to node, and tp, inside: nothing is taken apart."""
    with nodes_of(2):
        plan = "dp: experts > batch\ntp: experts > batch"
        found = program("dp=2,tp=2", plan=plan)
        assert str(found.compiled.mesh) == "dp=2,tp=2" and {axes for *_, axes in hops(found)} == {("dp",), ("tp",)}
        assert meshc.verify(found, dtype=torch.float64).ok


def test_lines_about_an_axis_are_about_both_of_its_parts() -> None:
    with nodes_of(2):
        plan = (
            "ep: experts > batch\npin model.layers.0.mlp.experts.down_proj: experts/ep, _, _\n"
            "store model.embed_tokens.weight: vocab/ep, _\npin op:lm_head/forward: batch/ep"
        )
        found = program("ep=4", plan=plan)
        said = str(found.compiled.plan)
        for line in ("ep_across: experts > batch\nep_inside: experts > batch", "down_proj: experts/ep_across/ep_inside, _, _",
                     "embed_tokens.weight: vocab/ep_across/ep_inside, _", "pin op:lm_head/forward: batch/ep_across/ep_inside"):  # fmt: skip
            assert line in said


def test_what_cannot_go_in_two_hops_says_why() -> None:
    with pytest.raises(PlanError, match=r"none leads to other nodes.*cpu has 8 ranks a node"):
        program("ep=4")
    with nodes_of(2), pytest.raises(PlanError, match="none leads to other nodes"):
        program("ep=2,dp=2")
    with nodes_of(4), pytest.raises(PlanError, match="tokens of model.layers.0.mlp.experts do not lie along the axes"):
        program("ep=4,dp=2")
    with pytest.raises(PlanError, match="use 'auto', 'flat' or 'hierarchical'"):
        meshc.Options(experts=meshc.Experts(dispatch="two"))
