"""Recompute: copies in backward of what costs little, and the values that are kept for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Node

import meshc
from meshc import artifact
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.ir import record, records
from meshc.program.program import Stage
from meshc.text.printer import print_program
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt, resnet
from tests.passes.stepped import around, changed

CHEAP = meshc.Options(remat="cheap")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.exp(x @ self.up), 0.5) @ self.down


def test_a_pointwise_value_is_recomputed_of_a_product_and_draws_what_it_drew() -> None:
    """The exponential is kept, which its own backward reads; dropout and its mask are not, and the batch's rows are taken again."""
    before, after = around("recompute", Gated(), "dp=2", options=CHEAP, x=torch.zeros(4, 3))
    assert_expected_inline(changed(before, after), """\
- getitem_1: "b8[batch 4/dp, ffn 4]" = getitem(dropout_default, 1)
- t_default: "f32[ffn 4, batch 4/dp]" = aten.t(getitem)
- shard_1: "f32[batch 4/dp, down.1 3] pad(zero: 0.0)" = shard(tangent_output, 0, 2, coordinate)
+ coordinate_1: "int" = coordinate("dp")
+ tile_start_1: "int" = tile_start(4, [2], [coordinate_1])
+ dropout_default_1: "(f32[2, 4], b8[2, 4])" = meshc.dropout(exp_default, meshc_seed_step, 0, 0.5, [4, 4], [2, 4], [tile_start_1, 0])
+ getitem_2: "f32[batch 4/dp, ffn 4]" = getitem(dropout_default_1, 0)
+ t_default: "f32[ffn 4, batch 4/dp]" = aten.t(getitem_2)
+ shard_1: "f32[batch 4/dp, down.1 3] pad(zero: 0.0)" = shard(tangent_output, 0, 2, coordinate_1)
- dropout_backward_default: "f32[batch 4/dp, ffn 4]" = meshc.dropout_backward(mm_default_3, getitem_1, 0.5)
+ getitem_3: "b8[batch 4/dp, ffn 4]" = getitem(dropout_default_1, 1)
+ dropout_backward_default: "f32[batch 4/dp, ffn 4]" = meshc.dropout_backward(mm_default_3, getitem_3, 0.5)
- t_default_2: "f32[up.0 3, batch 4/dp] pad(zero: 1.0)" = aten.t(shard)
+ shard_2: "f32[batch 4/dp, up.0 3] pad(zero: 0.0)" = shard(x, 0, 2, coordinate_1)
+ t_default_2: "f32[up.0 3, batch 4/dp] pad(zero: 1.0)" = aten.t(shard_2)
""")


def made_in(stage: Stage) -> list[Node]:
    return [node for node in stage.graph.nodes if node.op == "call_function"]


def test_a_saved_program_says_what_it_recomputes(tmp_path: Path) -> None:
    program = meshc.compile(Gated(), meshc.Mesh("dp=2"), kwargs={"x": torch.zeros(4, 3)}, options=CHEAP)
    program.save(tmp_path / "p", weights=False)
    for of in (program.compiled, artifact.load(tmp_path / "p")):
        again = {node.name for stage in of.stages.values() for node in made_in(stage) if records(node)[0].again}
        assert {"dropout_default_1", "coordinate_1"} <= again and "exp_default" not in again
        assert {line.split(":")[0].strip() for line in print_program(of).splitlines() if line.endswith("; recomputed")} <= again
    assert re.search(r"dropout_default_1: .* = meshc.dropout\(exp_default.*; recomputed$", str(program), re.MULTILINE)


def test_nothing_changes_by_default_and_without_a_backward() -> None:
    assert changed(*around("recompute", Gated(), "dp=2", x=torch.zeros(4, 3))) == ""
    with torch.no_grad():
        assert changed(*around("recompute", Gated(), "dp=2", options=CHEAP, x=torch.zeros(4, 3))) == ""


class Stream(nn.Module):
    """Norms read a sum that goes through all layers; it is of higher precision than what the layers add, which would be less to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (8,)).float()).double()
        return x


@pytest.mark.broad
def test_what_goes_through_all_layers_is_not_recomputed_from_its_beginning() -> None:
    """The sums of all layers would be in memory at once; of each few one is kept."""
    program = meshc.compile(Stream(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 8),), options=CHEAP)
    saved = {key: node for node, key in program.compiled.stages["backward"].keys().items() if key.startswith("saved:")}
    assert [key for key, node in saved.items() if record(node).dtype == torch.float64] == ["saved:add_tensor_1", "saved:add_tensor_6"]
    assert sum(record(node).dtype == torch.float32 for node in saved.values()) == 9
    meshc.verify(program, dtype=torch.float64)


def step_of(case: Case, mesh: str, remat: str, microbatches: int = 1) -> meshc.Program:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    options = meshc.Options(remat=remat, pipeline=meshc.Pipelining(schedule="1f1b" if "pp" in mesh else None))
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, options=options)


def small() -> Case:
    return nanogpt(torch.float64, layers=1)


@pytest.mark.parametrize(
    "make, mesh, remat, microbatches",
    [
        (small, "dp_shard=2,tp=2", "cheap", 1), broad(nanogpt, "dp=2", "layer", 2), broad(llama, "pp=2,dp=2", "cheap", 2),
        broad(llama, "dp=2,tp=2", "selective", 1), broad(gpt2, "tp=2", "layer", 1), broad(gpt2, "pp=2", "sqrt", 2),
        broad(resnet, "dp=2", "cheap", 1), broad(resnet, "dp=2", "layer", 1), broad(llama, "pp=2,tp=2", "layer", 4),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_a_step_means_what_it_means_and_holds_less(make: Callable[[], Case], mesh: str, remat: str, microbatches: int) -> None:
    """Gradients and three steps in double precision; and the peak of the same step that keeps everything."""
    program = step_of(make(), mesh, remat, microbatches=microbatches)
    assert {"gradient", "parameter after step 2"} <= {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert (
        peak_memory.peak_rank(program.compiled).total
        < peak_memory.peak_rank(step_of(make(), mesh, "none", microbatches=microbatches).compiled).total
    )


def test_a_module_in_autograd_saves_less() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Tanh(), nn.Linear(4, 3))).double(), torch.randn(4, 4).double()
    kept, again = (
        meshc.compile(model, meshc.Mesh("dp=2"), args=(x,), options=meshc.Options(remat=remat)) for remat in ("none", "cheap")
    )
    saved = [{key for key in one.compiled.stages["forward"].outputs if key.startswith("saved:")} for one in (kept, again)]
    assert len(saved[1]) < len(saved[0])
    meshc.verify(again, dtype=torch.float64)


def test_lines_of_a_plan_say_it_of_modules_and_of_values() -> None:
    """The second of two layers keeps what it made; of the first, what its activation returns is kept, of which its product is not."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4)) for _ in range(2))).double()
    saved = []
    for lines in ("", "remat *: cheap\nremat 1: none", "remat *: cheap\nremat 1: none\nkeep value:0.1", "remat 0: cheap"):
        program = meshc.compile(model, meshc.Mesh("dp=2"), args=(torch.randn(4, 4).double(),), plan=f"dp: batch\n{lines}")
        saved.append([key.removeprefix("saved:") for key in program.compiled.stages["forward"].outputs if key.startswith("saved:")])
        meshc.verify(program, dtype=torch.float64)
    assert saved[0] == ["shard", "addmm_default", "softplus_default", "addmm_default_1", "addmm_default_2", "softplus_default_1"]
    assert saved[1] == saved[3] == ["addmm_default", "addmm_default_1", "addmm_default_2", "softplus_default_1"]
    assert saved[2] == ["addmm_default", "softplus_default", "addmm_default_1", "addmm_default_2", "softplus_default_1"]


def test_lines_about_nothing_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        plan = "dp: batch\nremat layers.*: cheap\nkeep value:mlp"
        meshc.compile(nn.Linear(4, 4), meshc.Mesh("dp=2"), args=(torch.randn(4, 4),), plan=plan)
    assert str(caught.value) == (
        "the plan does not fit this model:\n"
        "  line 2, `remat layers.*: cheap`: forward runs no operator in such a module; "
        "name modules as model.named_modules() does, with * for any text, or leave the line out\n"
        "  line 3, `keep value:mlp`: no module of this name returns a value; "
        "name modules as model.named_modules() does, with * for any text, or leave the line out"
    )


def test_without_a_policy_lines_that_keep_change_nothing_but_must_be_about_something() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softplus()), torch.randn(4, 4)
    plain, kept = (str(meshc.compile(model, meshc.Mesh("dp=2"), args=(x,), plan=f"dp: batch{line}")) for line in ("", "\nkeep value:0"))
    assert plain[plain.index("def forward") :] == kept[kept.index("def forward") :]
    with pytest.raises(PlanError, match="line 2, `keep value:7`: no module of this name returns a value"):
        meshc.compile(model, meshc.Mesh("dp=2"), args=(x,), plan="dp: batch\nkeep value:7")


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Options\(remat='all'\): use one of none, cheap, selective, layer, sqrt"):
        meshc.Options(remat="all")
