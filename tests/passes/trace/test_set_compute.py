"""Compute lines: parameters stored in one dtype and computed with in another, on every mesh and against the model on one device."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc.ir import record, spmd
from tests.passes.stepped import around, changed

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> Tensor:
        h = self.up(self.norm(x).float().to(self.up.weight.dtype))  # as stock norms do
        return x + self.down(F.gelu(h)) * more["scale"].to(h.dtype)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(12, 16), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 12, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, more={"scale": torch.ones(16)})
        return self.head(h.to(self.head.weight.dtype))


def blocks(tied: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = Blocks().to(dtype)
    if tied:
        model.head.weight = model.embed.weight
    return model


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def step(mesh: str, plan: str, model: nn.Module | None = None, **ask: Any) -> meshc.Program:
    model = model or blocks()
    options, kind = ask.pop("options", meshc.Options()), ask.pop("kind", torch.optim.SGD)
    train = meshc.TrainStep(model, optimizer=kind(model.parameters(), lr=0.1), loss=loss_of, **ask)
    ids = torch.randint(0, 12, (12, 2), generator=torch.manual_seed(1))
    return meshc.compile(train, meshc.Mesh(mesh), args=(ids,), kwargs={"target": ids}, plan=plan, options=options)


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).float().mean()


def test_parameters_and_gradients_get_the_dtype_of_their_storage() -> None:
    model = Dot()
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    made = changed(*around("differentiate", train, "dp=2", x=torch.zeros(4, 3), plan="dp: batch\nprecision *: compute bf16, reduce f32"))
    lines = [line for line in made.splitlines() if line.startswith("+") and ("weight" in line or "widen" in line or "gradient" in line)]
    assert_expected_inline("\n".join(lines), """\
+ weight: "f32[3]" = "parameter:weight",
+ _to_copy_default: "bf16[3]" = aten._to_copy(weight, dtype=bf16)
+ widen_sum_default: "f32[3]" = meshc.widen_sum(mv_1, f32)
+ "gradient:weight": widen_sum_default,""")


LINES = "precision blocks.*: compute bf16, reduce f32, master f32"
ALL = "precision *: compute bf16"
MESHES: list[tuple[str, str, dict[str, Any]]] = [
    ("dp=2", "", {}),
    ("dp_shard=5", "dp_shard: batch; store params, grads, state", {"clip_grad_norm": 0.1}),
    ("dp=2,tp=2", "", {}),
    ("tp=3", "", {}),
    ("dp_shard=2", "dp_shard: batch; store params, grads, state", {"microbatches": 3}),
    ("pp=2,dp=2", "", {"microbatches": 2}),
    ("cp=2", "", {}),
]


@pytest.mark.parametrize("mesh, plan, ask", MESHES)
@pytest.mark.parametrize("lines", [LINES, ALL])
def test_every_mesh_computes_what_one_device_computes(mesh: str, plan: str, ask: dict[str, Any], lines: str) -> None:
    program = step(mesh, f"{plan}\n{lines}", **ask)
    assert meshc.verify(program).ok
    assert program.prove().holds
    assert {port.dtype for port in program.compiled.inputs if port.kind == "parameter"} == {torch.float32}


def sums(program: meshc.Program) -> list[tuple[torch.dtype | None, str]]:
    """Dtype and reason of each sum of gradients over ranks."""
    nodes = [node for stage in program.compiled.stages.values() for node in stage.graph.nodes]
    found = [record(node) for node in nodes if node.target in (spmd.all_reduce, spmd.reduce_scatter) and "sum" in node.args]
    return [(one.dtype, one.reason) for one in found if re.search(r"gradient \w+ of", one.reason)]


@pytest.mark.parametrize("mesh, plan, ask", MESHES[:2] + MESHES[4:6])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_summed_in_the_dtype_of_the_line(mesh: str, plan: str, ask: dict[str, Any], tied: bool) -> None:
    """Of norms, biases, weights, embeddings, and of a weight that is read twice."""
    for words, wanted in (("compute bf16, reduce f32", {torch.float32}), ("compute bf16", {BF16})):
        program = step(mesh, f"{plan}\nprecision *: {words}", blocks(tied), **ask)
        found = sums(program)
        assert {dtype for dtype, _ in found} == wanted
        assert not any("are summed over ranks" in note for note in program.lowered.notes)


def test_modules_and_their_gradients_in_a_loop_of_ones_own() -> None:
    ids = torch.randint(0, 12, (12, 4))
    program = meshc.compile(blocks(), meshc.Mesh("dp_shard=2,tp=2"), args=(ids,), plan=f"dp_shard: batch; store params, grads, state\ntp: ffn\n{ALL}")
    assert meshc.verify(program).ok and program.prove().holds
    with torch.no_grad():
        assert meshc.verify(meshc.compile(blocks(), meshc.Mesh("tp=2"), args=(ids,), plan=ALL)).ok


def test_layers_captured_once() -> None:
    torch.manual_seed(0)
    model = Blocks()
    model.blocks = nn.ModuleList([Block() for _ in range(6)])
    for plan in ("dp_shard: batch; store params", "dp_shard: batch; store params, grads, state"):
        program = step("dp_shard=2", f"{plan}\n{LINES}", model)
        assert program.lowered.depth is not None
        assert meshc.verify(program).ok and program.prove().holds


def test_beside_autocast_formats_masks_scaling_and_state() -> None:
    """Autocast to the same dtype keeps norms in float32; formats round what products read, in the dtype in which they read it."""
    training = meshc.Options(training=meshc.Training(optimizer_state="bf16"))
    for more, ask in (
        ("precision *: float8 row", {}), ("sparse blocks.*: 2:4", {}), ("compress dp_shard: int8", {}), ("", {"options": training, "kind": torch.optim.AdamW}),
        ("", {"scaler": torch.amp.GradScaler("cpu")}),
    ):  # fmt: skip
        compute = "f16" if "scaler" in ask else "bf16"
        program = step("dp_shard=2", f"dp_shard: batch; store params\nprecision *: compute {compute}, reduce f32\n{more}", **ask)
        assert meshc.verify(program).ok and program.prove().holds
    with torch.autocast("cpu", dtype=BF16):
        program = step("dp=2", f"dp: batch\n{ALL}")
        assert meshc.verify(program).ok
        with pytest.raises(meshc.PlanError, match="(?s)`precision \\*: compute f16`: the call is under autocast to bfloat16"):
            step("dp=2", "dp: batch\nprecision *: compute f16")


def test_the_last_line_counts() -> None:
    program = step("dp=2", f"dp: batch\n{ALL}\nprecision blocks.1.down: compute f32\nprecision head: compute f32")
    assert meshc.verify(program).ok
    nodes = [node for stage in program.compiled.stages.values() for node in stage.graph.nodes]
    dtypes = {record(node).source.module: record(node).dtype for node in nodes if str(node.target).startswith(("aten.addmm", "aten.mm")) and record(node).phase == "forward"}
    assert dtypes == {"blocks.0.up": BF16, "blocks.0.down": BF16, "blocks.1.up": BF16, "blocks.1.down": torch.float32, "head": torch.float32}


def test_a_sum_in_fewer_bits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: reductions that may be taken ahead of the cast."""
    monkeypatch.setattr("meshc.passes.place.deferral.DeferredReductions._over", lambda self, instance, chosen, told: [])
    program = step("dp=2", f"dp: batch\n{ALL}, reduce f32")
    assert BF16 in {dtype for dtype, _ in sums(program)}
    (note,) = [note for note in program.lowered.notes if "are summed over ranks in the dtype in which they are computed" in note]
    assert note.startswith("precision: gradients of ")


@pytest.mark.parametrize(
    "line, message",
    [
        ("precision *: compute", "a dtype belongs here: bf16, f16, f32"),
        ("precision *: compute fp16", r"fp16 is no dtype \(did you mean f16\?\)"),
        ("precision *: compute bf16, sum f32", "behind the comma stands `reduce DTYPE` or `master DTYPE`"),
        ("precision *: compute bf16, reduce f16", "or in f32: in fewer bits a sum would depend on the mesh"),
        ("precision *: compute f32, reduce bf16", "a `compress` line sends fewer"),
        ("precision *: compute bf16, reduce f32, reduce f32", "reduce is there twice"),
        ("precision *: compute bf16 f32", "a comma, and `reduce DTYPE`"),
        ("precision layers.*: compute bf16", "no such module has parameters"),
        (f"{ALL}\nprecision *: compute f16", "later lines say otherwise of all modules that it names"),
        ("precision *: compute bf16, master bf16", "head.weight is float32, and parameters are stored and updated as the model has them"),
    ],
)
def test_bad_words(line: str, message: str) -> None:
    with pytest.raises(meshc.PlanError, match=message):
        step("dp=2", f"dp: batch\n{line}")


def test_masters_and_ties() -> None:
    with pytest.raises(meshc.PlanError, match=r"(?s)is bfloat16.*build the model in float32.*master_weights=True"):
        step("dp=2", f"dp: batch\n{LINES}", blocks(dtype=BF16))
    kept = meshc.Options(training=meshc.Training(master_weights=True))
    assert meshc.verify(step("dp=2", f"dp: batch\n{LINES}", blocks(dtype=BF16), options=kept, kind=torch.optim.AdamW)).ok
    with pytest.raises(meshc.PlanError, match="(?s)embed.weight and head.weight are one parameter.*lines that name both"):
        step("dp=2", "dp: batch\nprecision head: compute bf16", blocks(tied=True))
    text = "precision blocks.*: compute bf16, reduce f32, master f32"
    assert str(meshc.Plan(f"dp: batch\n{text}")) == f"dp: batch\n{text}"


def test_a_module_that_no_line_names_and_that_gets_its_results() -> None:
    class Head(nn.Sequential):
        pass

    model = Head(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(meshc.CaptureError, match="(?s)products of different dtypes.*let one name this module too"):
        meshc.compile(model, meshc.Mesh("dp=2"), args=(torch.randn(4, 4),), plan="dp: batch\nprecision 0: compute bf16")
