"""Ways to hold less: what backward recomputes, what lies on the host, a budget. Under each of them every kind of model means on every mesh
what it means on one device: loss, gradients, parameters and state after two steps; or it is refused with these words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

import meshc
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.ir import calls, records, spmd
from tests.broad import broad
from tests.models import Case, bert, gpt2, llama, mlp, nanogpt, resnet, vit

SHARE: Final = 60
"""Per cent of what a rank holds that recomputes nothing."""


@dataclass(frozen=True)
class Kind:
    """
    layers  what the values are called that go to the host, as a plan names modules
    full    so many rows that values of forward are most of what is held
    parts   microbatches over a pipeline
    """

    make: Callable[..., Case]
    layers: str
    full: dict[str, int]
    parts: int = 2


TOKENS: Final = {"batch": 32, "seq": 24}
KINDS: Final = {
    "llama": Kind(llama, "model.layers.*", TOKENS), "gpt2": Kind(gpt2, "transformer.h.*", TOKENS),
    "bert": Kind(bert, "bert.encoder.layer.*", TOKENS), "vit": Kind(vit, "vit.*", {"batch": 48}),
    "resnet": Kind(resnet, "blocks.*", {"batch": 32}, parts=1), "mlp": Kind(mlp, "*", {"batch": 512}),
    "nanogpt": Kind(nanogpt, "h.*", TOKENS),
}  # fmt: skip
MESHES: Final = ("dp=2", "dp=2,tp=2", "dp_shard=2,tp=2", "pp=2,dp=2")
WAYS: Final = ("selective", "layer", "state", "values", "budget")

REFUSED: Final = {
    "mlp": MESHES, "resnet": MESHES, "vit": MESHES[1:], "nanogpt": MESHES[3:], "gpt2": MESHES[3:], "bert": ("dp=2", "pp=2,dp=2"),
}  # fmt: skip
"""Where nothing keeps the budget: what is left are products that backward reads, gradients and parameters."""
NOTHING_TO_MAKE: Final = {("mlp", "layer", "dp_shard=2,tp=2")}
"""Its modules are in no list, so that it has no layers; what else is recomputed there is what backward gathers in any case."""


def step_of(kind: Kind, mesh: str, plan: str = "", rows: dict[str, int] | None = None, **options: Any) -> meshc.Program:
    case, pipelined = kind.make(**({"batch": 8} if rows is None else rows)), "pp" in mesh
    step = meshc.TrainStep(
        case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9), loss=case.loss, clip_grad_norm=1.0,
        microbatches=kind.parts if pipelined else 1,
    )  # fmt: skip
    options = {"schedule": "1f1b" if pipelined else None, **options}
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, options=meshc.Options(**options))


def held(program: meshc.Program) -> int:
    return peak_memory.peak_rank(program.compiled).total


def again(program: meshc.Program) -> int:
    """How many values backward recomputes."""
    return sum(records(node)[0].again for stage in program.compiled.stages.values() for node in calls(stage.graph))


def offloaded(program: meshc.Program) -> int:
    """How many values of forward go to the host."""
    nodes = [node for stage in program.compiled.stages.values() for node in calls(stage.graph)]
    return sum(node.target is spmd.to_host and len(node.args) == 1 for node in nodes)


def compiled(name: str, way: str, mesh: str) -> meshc.Program:
    """That it holds less in the way that was asked for."""
    kind = KINDS[name]
    if way in ("selective", "layer"):
        program = step_of(kind, mesh, remat=way)
        assert (again(program) > 0) == ((name, way, mesh) not in NOTHING_TO_MAKE)
    elif way == "state":
        program = step_of(kind, mesh, "offload state", remat="none")
        assert all(port.storage == "host" for port in program.compiled.inputs if port.kind == "state" and port.shape)
    elif way == "values":
        program = step_of(kind, mesh, f"offload value:{kind.layers}", remat="none")
        assert offloaded(program) > 0
    else:
        program = within_budget(kind, mesh, refused=mesh in REFUSED.get(name, ()))
    return program


def within_budget(kind: Kind, mesh: str, refused: bool) -> meshc.Program:
    """Of a budget that is refused, the least that the refusal names."""
    budget = held(step_of(kind, mesh, rows=kind.full, remat="none")) * SHARE // 100
    if refused:
        with pytest.raises(PlanError) as caught:
            step_of(kind, mesh, rows=kind.full, memory_budget=budget)
        said = rf"a rank (of the pipeline )?may hold {budget:,} bytes \(Options\(memory_budget={budget}\)\), but .*?holds ([\d,]+)"
        found = re.match(said, str(caught.value))
        assert found is not None and "\n  what to do: " in str(caught.value), str(caught.value)
        budget = int(found[2].replace(",", ""))
    program = step_of(kind, mesh, rows=kind.full, memory_budget=budget)
    assert held(program) <= budget
    return program


QUICK: Final = {("mlp", "selective", "dp=2")}
CELLS: Final = [(name, way, mesh) for name in KINDS for mesh in MESHES for way in WAYS]


@pytest.mark.parametrize("name, way, mesh", [cell if cell in QUICK else broad(*cell) for cell in CELLS])
def test_a_step_that_holds_less_means_what_it_means(name: str, way: str, mesh: str) -> None:
    program = compiled(name, way, mesh)
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}
