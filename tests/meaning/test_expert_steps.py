"""Steps of models with routed experts, one table: whatever is asked of the experts, a step equals one on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshc
from meshc import Experts
from tests.broad import broad
from tests.frontend import test_inline_experts as inline
from tests.models import Case
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401
from tests.zoo import experts, loops

MESHES = ("ep=2", "ep=4", "ep=3", "dp=2,ep=2", "ep=2,tp=2", "dp_shard=2,ep=2", "pp=2,ep=2")
LOOP_MESHES = ("dp=2", "ep=2", "ep=4", "ep=3", "dp=2,ep=2", "ep=2,tp=2")
BOTH = "dp: experts@*.experts > batch\ntp: experts@*.experts > heads, ffn"
"""A plan that splits experts over the axes that all else has for its own."""
EACH = {"capacity": 0.75}
PASSED = {**EACH, "overflow": "pass", "priority": "weight"}
BOUND, BIAS, IN_TWO = {"bound": 1.9}, {"bias_update": 0.05}, {"microbatches": 2}
ROUNDED, INT8 = ({"plan": f"precision *.experts*: {name}"} for name in ("float8 row", "int8 row"))
ALL_ROUNDED = {"plan": "precision *: float8 row"}


def rows() -> Iterator[Any]:
    """The model, the mesh, what is asked of `Experts`, what is asked of the step. The first of each kind are what `make test` has."""
    yield from (
        ("shallow mixtral", "ep=2", {}, {}),
        ("shallow mixtral", "dp=2,ep=2", EACH, {}),
        ("shallow mixtral", "ep=4", BOUND, {}),
        ("loop Gated", "ep=2", {}, {}),
        ("loop One, one chosen by all", "ep=2", {}, {}),
        ("stack Eager", "dp=2", {}, {}),
        ("shallow mixtral", "ep=4", {}, ROUNDED),
        ("shallow mixtral", "dp=2,ep=2", EACH, INT8),
    )
    yield from _by_hand(
        *((family, mesh, {}, {}) for family in experts.FAMILIES for mesh in MESHES),
        *((family, "dp=2,tp=2", {}, {"plan": BOTH}) for family in experts.FAMILIES),
        ("mixtral, two chosen by all", "ep=2", {}, {}), ("mixtral, all alike", "ep=2", {}, {}),
        # a capacity
        ("gpt_oss", "cp=2,ep=2", PASSED, {}), ("mixtral", "ep=4", PASSED, {}), ("mixtral", "cp=3", EACH, {}),
        ("mixtral", "pp=2,ep=2", EACH, {}), ("mixtral", "dp=2,tp=2", {**EACH, "group": 6}, {}), ("olmoe", "ep=3", EACH, {}),
        ("deepseek_v3", "ep=2,tp=2", PASSED, {}),
        ("phimoe", "dp_shard=2,ep=2", EACH, {}), ("qwen3_moe", "dp=2,cp=2", {**EACH, "group": 6}, {}),
        ("granitemoe", "ep=2", {**EACH, "group": 24}, {}),
        *(("deepseek_v3", mesh, EACH, IN_TWO) for mesh in ("dp=2", "ep=2", "pp=2")),
        ("loop Hit", "ep=2", EACH, {}), ("stack Eager", "ep=2", EACH, {}),
        # a bound
        ("gpt_oss", "dp=2,ep=2", BOUND, {}), ("olmoe", "ep=3", BOUND, {}), ("deepseek_v3", "pp=2,ep=2", BOUND, {}),
        ("phimoe", "ep=2,tp=2", BOUND, {}),
        # biases that go towards experts that were chosen less
        *(("deepseek_v3", mesh, BIAS, {}) for mesh in ("ep=4", "ep=2,tp=2", "dp_shard=2,ep=2")),
        ("deepseek_v3", "pp=2,ep=2", BIAS, IN_TWO), ("glm4_moe", "dp=2,ep=2", BIAS, {}), ("glm4_moe", "dp=2", BIAS, IN_TWO),
        ("deepseek_v3", "ep=2", BIAS, {**IN_TWO, "batch_mix": "mean_of_parts"}),
        # experts that may be moved, and copied
        ("mixtral", "ep=2", {"placement": "movable"}, {}), ("mixtral", "dp=2,ep=2", {"placement": "movable", "copies": 1}, {}),
        # in few bits: rows are rounded before they are handed out
        *((family, "ep=2", {}, ROUNDED) for family in experts.FAMILIES if family not in ("switch_transformers", "nllb_moe")),
        *(("mixtral", mesh, {}, ROUNDED) for mesh in ("dp=2,ep=2", "ep=2,tp=2", "dp_shard=2,ep=2", "pp=2,ep=2", "cp=2", "tp=2")),
        ("olmoe", "ep=3", BOUND, INT8), ("gpt_oss", "ep=2,tp=2", PASSED, ROUNDED), ("deepseek_v3", "pp=2,ep=2", {}, {**ROUNDED, **IN_TWO}),
        ("mixtral", "ep=2", {"placement": "movable"}, ROUNDED), ("loop Hit", "ep=2", {}, ALL_ROUNDED),
        ("loop One", "dp=2,ep=2", {}, ALL_ROUNDED), ("stack Matmul", "ep=2", {}, ALL_ROUNDED),
        ("stack Eager", "ep=2,tp=2", {}, ALL_ROUNDED),
        # loops
        *((f"loop {kind}, some chosen by none", mesh, {}, {}) for mesh in LOOP_MESHES for kind in loops.LOOPS),
        *(("loop Hit, some chosen by none", mesh, {}, IN_TWO) for mesh in LOOP_MESHES),
        *(("loop One, one chosen by all", mesh, {}, {}) for mesh in ("ep=3", "dp=2,ep=2", "ep=2,tp=2")),
        ("stack Eager", "ep=2,tp=2", {}, {}), ("stack Matmul", "dp=2,ep=2", {}, {}), ("stack Matmul", "ep=4", {}, IN_TWO),
        ("stack Eager", "ep=3", {}, IN_TWO),
    )  # fmt: skip


def _by_hand(*values: tuple[Any, ...]) -> Iterator[Any]:
    yield from (broad(*each) for each in values)


def words(value: Any) -> str:
    """A cell as it stands in the name of its case."""
    said = " ".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else str(value)
    return said.replace(BOTH, "both")


def made(name: str) -> Case:
    """A family of `tests/zoo/experts.py`, a loop of `tests/zoo/loops.py`, or a stack of `test_inline_experts.py`."""
    kind, _, lean = name.partition(", ")
    form, _, which = kind.rpartition(" ")
    if form in ("loop", "stack"):
        model = loops.Model(which, 2 if lean != "one chosen by all" else 1) if form == "loop" else inline.Model(which)
        for layer in model.layers if lean else ():  # type: ignore[union-attr]
            with torch.no_grad():
                layer.gate.bias += 1e3 * torch.tensor(LEAN[lean])  # type: ignore[operator, union-attr]
        x = torch.randn(8, 6, loops.WIDTH, generator=torch.Generator().manual_seed(1)).double()
        return Case(name, model.double(), {"x": x}, lambda y: y.square().mean())
    found = experts.shallow(which) if form == "shallow" else experts.FAMILIES[which].case(which)
    for path, parameter in found.model.named_parameters() if lean else ():
        if path.endswith("mlp.gate.weight"):
            with torch.no_grad():
                parameter.zero_()[:, 0] = 1e3 * torch.tensor(LEAN[lean])
    return found


LEAN = {
    "some chosen by none": [0.0, 0.0, 0.0, 0.0, -1.0, -1.0],
    "one chosen by all": [0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    "two chosen by all": [1.0, 1.0, 0.0, 0.0],
    "all alike": [0.0] * 4,
}
"""What is added to a token's score of each expert, in thousands; of a family by the sign of the token's first feature, and nothing else."""


@pytest.mark.parametrize("model, mesh, asked, of_step", [*rows()], ids=words)
def test_a_step_equals_one_device(model: str, mesh: str, asked: dict[str, Any], of_step: dict[str, Any]) -> None:
    """Loss, every gradient, three steps of parameters, buffers and of AdamW's state, whose decay moves whatever it does not pass over; its
    eps is above the rounding of gradients that are zero in exact arithmetic."""
    found, how = made(model), dict(of_step)
    plan = how.pop("plan", None)
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)
    loss = found.loss or (lambda output: output.loss)
    step = meshc.TrainStep(found.model, optimizer=optimizer, loss=loss, clip_grad_norm=1.0, **how)
    options = meshc.Options(experts=Experts(**asked))
    report = meshc.verify(meshc.compile(step, meshc.Mesh(mesh), plan=plan, options=options, kwargs=found.call_kwargs), dtype=torch.float64)
    assert report.ok, report
    if "bias_update" in asked:
        assert sum("buffer after step" in kind for kind, _, _ in report.rows) == 3, "later steps choose by what changed"
