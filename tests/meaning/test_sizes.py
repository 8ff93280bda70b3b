"""Any size on any mesh: tiles that do not divide, ranks that hold nothing, and what lies in the padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

import meshc
from meshc.cost.padding_waste import padding
from meshc.ir import layouts
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding
from meshc.runtime.simulator import reference_comparison as verification
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.captured import Captured
from tests.models import Case, mlp, nanogpt


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


SIZES = [
    ("dp=4", "fsdp", {"batch": 7}),
    ("dp=4", "ddp", {"batch": 2}),  # two ranks without a row
    ("tp=8", "megatron", {"vocab": 257}),
    ("tp=4", "megatron", {"heads": 6, "hidden": 24}),
    ("tp=8", "megatron", {"heads": 3, "hidden": 12}),  # five ranks without a head
    ("tp=4", "megatron_sp", {"seq": 129, "batch": 1}),
    ("cp=4", "ulysses", {"seq": 129, "batch": 1}),
    ("cp=8", "ulysses", {"seq": 5, "batch": 1, "heads": 3, "hidden": 12}),
    ("dp=2,cp=2,tp=2", "fsdp+ulysses+megatron_sp", {"batch": 3, "seq": 9, "heads": 3, "hidden": 12, "vocab": 11}),
]
EVERY_TIME = (SIZES[2], SIZES[8])
OFTEN = ("softmax", "layer norm", "division by a count", "log", "all and any", "extremes", "norm")
"""Of what would leak."""


@pytest.mark.parametrize(
    "mesh,plan,sizes",
    [(pytest.param if cell in EVERY_TIME else broad)(*cell, id=f"{cell[0]}-{cell[2]}") for cell in SIZES],
)
def test_a_decoder_of_any_size_trains(mesh: str, plan: str, sizes: dict[str, int]) -> None:
    source = Captured(nanogpt(layers=1, **{"batch": 2, "seq": 6, **sizes}), train=True, double=True)  # type: ignore[arg-type]
    source.verify_training(mesh, plan, sgd, clip=0.5)


def test_ranks_without_a_head_hold_padding() -> None:
    """Eight tiles of one head for three heads: where heads are split at all, five ranks have none."""
    source = Captured(nanogpt(layers=1, **SIZES[8][2]), train=True, double=True)
    (rows,) = [row for row in padding(source.program("tp=8", "tp: heads")) if row.factor == "heads"]
    assert (rows.size, rows.tile, rows.share) == (3, 1, pytest.approx(5 / 8))
    source.verify_training("tp=8", "tp: heads", sgd)


@pytest.mark.broad
def test_an_axis_larger_than_the_batch_warns() -> None:
    case = mlp()
    with pytest.warns(UserWarning, match=r"axis dp has 16 ranks, more than anything it could split \(batch 6\): 10 of them hold nothing"):
        program = meshc.compile(case.model, meshc.Mesh("dp=16"), kwargs=case.kwargs)
    assert meshc.verify(program, dtype=torch.float64).ok


# ---------------------------------------------------------------------------------------------------------------- what padding holds

Function = Callable[[Tensor, Tensor], Tensor]
SINGULAR: dict[str, Function] = {
    "log": lambda h, g: (h.square() + g).log(),
    "log of chosen": lambda h, g: torch.where(h > 0, h.abs().log(), g),
    "division": lambda h, g: h / g + 1 / (h.square() + g),
    "division by a sum": lambda h, g: h / h.abs().sum(-1, keepdim=True) + h / h.abs().sum(0) * g,
    "division by a count": lambda h, g: h / (h > 0).sum(0).clamp(min=1) * g,
    "sqrt at 0": lambda h, g: (F.relu(h) + 1e-12).sqrt() * g + h.square().sum(1, keepdim=True).sqrt(),
    "norm": lambda h, g: F.normalize(h, dim=0) * g + h / h.norm(dim=1, keepdim=True),
    "deviation": lambda h, g: (h - h.mean(0)) / h.std(0) * g + h * (h.var(1, keepdim=True) + 1e-5).rsqrt(),
    "softmax": lambda h, g: (h * g).softmax(0) + (h / g).log_softmax(1),
    "softmax of -inf": lambda h, g: h.masked_fill(torch.eye(7, 9).bool(), -torch.inf).softmax(1) * g,
    "logsumexp": lambda h, g: h.logsumexp(0) + h.logsumexp(1, keepdim=True) * g,
    "extremes": lambda h, g: h - h.amax(0) + h.amin(1, keepdim=True) * g,
    "product": lambda h, g: h.prod(0) * g + h,
    "power": lambda h, g: h.abs() ** g,
    "finite or not": lambda h, g: torch.nan_to_num(h / g) * torch.isfinite(h / g),
    "all and any": lambda h, g: torch.where((h > 0).all(1, keepdim=True) | (h < 0).any(0), h, g),
    "running sums": lambda h, g: h.cumsum(0) * g + h.cumsum(1),
    "distances": lambda h, g: ((h[:, None] - h[None]).square().sum(-1) + 1e-3).sqrt() @ h * g,
    "layer norm": lambda h, g: F.layer_norm(h, (9,), g) + F.layer_norm(h.t(), (7,)).t(),
}
"""Of h [7, 9] and g [9] > 0: functions, or gradients, that are infinite or NaN at what padding may hold."""


class Singular(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 9), nn.Linear(9, 5), function
        self.g = nn.Parameter(torch.rand(9) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x), self.g))


@pytest.mark.parametrize("name", [name if name in OFTEN else broad(name) for name in SINGULAR])
def test_nothing_leaks_from_padding(name: str) -> None:
    """Seven rows and nine columns on four ranks each: with NaN in all padding that is not known to be zero, then with what comes there."""
    torch.manual_seed(0)
    case = Case(name, Singular(SINGULAR[name]), {"x": torch.randn(7, 6)}, lambda output: output.square().mean())
    source = Captured(case, train=True, double=True)
    columns = "hidden" if name == "layer norm" else "ffn"
    for mesh, plan in (("dp=4", None), ("x=4", f"x: {columns}"), ("dp=4,x=2", f"dp: batch\nx: {columns}")):
        program = source.program(mesh, plan)
        report = verification.Report(1e-10)
        verification.compare_gradients(program, source.reference, report)
        assert report.ok and len(report.rows) == 1 + 5, report
        values = verification.input_values(program, source.reference, 0)
        poisoned, plain = (simulate(program, values, poison=poison) for poison in (True, False))
        for key, value in poisoned.items():
            assert torch.equal(value, plain[key]) and value.isfinite().all(), key


# ------------------------------------------------------------------------------------------------------------ what the summary says


def test_the_summary_prices_padding() -> None:
    """A vocabulary of 257 over 8 is 8 tiles of 33: 7 of 264 positions, in one of the weights, and in its share of the products."""
    source = Captured(nanogpt(layers=1, batch=8, seq=8, vocab=257), train=True, double=False)
    program = source.program("tp=8", "tp: vocab")
    (row,) = padding(program)
    assert (row.factor, row.size, row.axes, row.tile) == ("vocab", 257, ("tp",), 33)
    assert row.share == pytest.approx(7 / 264)
    assert row.kept_bytes == pytest.approx(33 * 32 * 4 * 7 / 264)  # the tied embedding, float32
    tokens, hidden = 64, 32
    head = 3 * 2 * tokens * hidden * 33  # forward, and two products backward
    others = 3 * 2 * tokens * (4 + 8) * hidden * hidden + (4 + 10) * tokens * 8 * hidden  # projections, and attention
    assert row.compute_share == pytest.approx(head / (head + others) * 7 / 264)
    assert "vocab 257/tp" in meshc.report.summary.summary(program)


@pytest.mark.broad
def test_without_padding_there_is_no_table() -> None:
    source = Captured(nanogpt(layers=1, batch=8, seq=8, vocab=64), train=True, double=False)
    program = source.program("tp=8", "tp: vocab")
    assert padding(program) == [] and "padding wastes" not in meshc.report.summary.summary(program)


# ----------------------------------------------------------------------------------------------------------- DTensors at the boundary


@pytest.mark.parametrize(
    "shape,mesh,axes",
    [
        ((129,), "a=2,b=2", (("a", "b"),)),
        ((129, 3), "a=4", (("a",), ())),
        ((7, 5), "a=4,b=2", (("a",), ("b",))),
        ((2, 3), "a=4,b=2", (("a",), ("b",))),
        ((5,), "a=3,b=4", (("a", "b"),)),
        ((10,), "a=2,b=2,c=3", (("a", "b", "c"),)),
        ((257, 12), "a=2,b=4", (("b",), ("a",))),
    ],
)
def test_chunks_are_what_dtensor_expects(shape: tuple[int, ...], mesh: str, axes: tuple[tuple[str, ...], ...]) -> None:
    """Local shapes and offsets against torch's own figures, on every rank."""
    there = Mesh(mesh)
    sharding = Sharding(tuple((Part("f", size, split),) for size, split in zip(shape, axes, strict=True)))
    places = layouts.torch_placements(sharding, there)
    for rank in range(there.world_size):
        at = there.coordinates(rank)
        wanted, offset = _compute_local_shape_and_global_offset(shape, there.shape, [at[axis.name] for axis in there.axes], places)
        ranges = layouts.chunk_ranges(shape, places, there, at)
        assert tuple(length for _, length in ranges) == tuple(wanted)
        if all(wanted):
            assert tuple(start for start, _ in ranges) == tuple(offset)
