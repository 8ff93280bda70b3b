"""How parameters, gradients and state lie between steps: where the axes that store them go, and what that moves."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.passes.place.storage import in_names_of, stored_split
from meshc.plan.plan import Plan
from meshc.program.program import PlainProgram
from meshc.report.summary import collectives
from tests.broad import broad
from tests.passes.place.trained import adamw, captured, momentum

ALL = "; store params, grads, state"


def base(text: str) -> Sharding:
    """`64/tp, 3 * 4`: dims, each of parts that are a size and the axes that split it."""
    rows = []
    for d, dim in enumerate(text.split(", ")):
        parts = [part.split("/") for part in dim.split(" * ")]
        rows.append(tuple(Part(f"{'abc'[d]}{p}", int(size), tuple(axes)) for p, (size, *axes) in enumerate(parts)))
    return Sharding(tuple(rows))


def said(sharding: Sharding) -> str:
    return ", ".join(" * ".join("/".join((str(part.size), *part.axes)) for part in dim) for dim in sharding.dims)


@pytest.mark.parametrize(
    "own, theirs, found",
    [
        ("16, 8", "16/tp, 8", "16/tp, 8"),
        ("16, 8", "4/tp * 4, 8", "16/tp, 8"),
        ("4 * 4, 8", "16/tp, 8", "4/tp * 4, 8"),
        ("4 * 4, 8", "16, 2 * 4", "4 * 4, 8"),
        ("16, 8", "4/tp/dp * 4, 8", "16/tp/dp, 8"),
        ("16, 8", "4 * 4/tp, 8", None),
        ("12, 8", "3/tp * 4, 8", None),
    ],
)
def test_another_programs_storage_is_said_in_the_factors_that_this_one_has(own: str, theirs: str, found: str | None) -> None:
    if found is None:
        with pytest.raises(PlanError, match=r"(?s)up.weight lies as .*what to do: a plan that keeps it whole"):
            in_names_of(base(own), "up.weight", base(theirs), {"tp": 2, "dp": 2})
    else:
        renamed = in_names_of(base(own), "up.weight", base(theirs), {"tp": 2, "dp": 2})
        assert said(renamed) == found and renamed.whole() == base(own)


def stored(text: str, plan: str, mesh: str) -> list[str]:
    """How a parameter, its gradient and its state lie; each once, if all are alike."""
    sizes = {axis.name: axis.size for axis in Mesh(mesh).axes}
    stores = {entry.axis: entry.store for entry in Plan(plan).axes if entry.store}
    found = [said(stored_split(base(text), kind, stores, sizes)) for kind in ("parameter", "gradient", "state")]
    return found[:1] if len(set(found)) == 1 else found


CASES = [
    # one axis: a dim that divides, else the first; not one that is split already, if there is another
    ("20, 24", f"dp: batch{ALL}", "dp=2", ["20/dp, 24"]),
    ("21, 24", f"dp: batch{ALL}", "dp=2", ["21, 24/dp"]),
    ("21, 25", f"dp: batch{ALL}", "dp=2", ["21/dp, 25"]),
    ("64/tp, 32", f"dp: batch{ALL}", "dp=2,tp=2", ["64/tp, 32/dp"]),
    ("64/tp", f"dp: batch{ALL}", "dp=2,tp=2", ["64/tp/dp"]),
    ("3 * 4, 21", f"dp: batch{ALL}", "dp=2", ["3 * 4/dp, 21"]),
    ("1", f"dp: batch{ALL}", "dp=2", ["1"]),
    # two axes: one dim by both, which is chosen as if they were one axis of all their ranks
    ("20, 24", f"dp: batch{ALL}\ndp_shard: batch{ALL}", "dp=2,dp_shard=2", ["20/dp/dp_shard, 24"]),
    ("10, 24", f"dp: batch{ALL}\ndp_shard: batch{ALL}", "dp=2,dp_shard=2", ["10, 24/dp/dp_shard"]),
    ("21, 10", f"dp: batch{ALL}\ndp_shard: batch{ALL}", "dp=3,dp_shard=2", ["21/dp/dp_shard, 10"]),
    ("64/tp, 32", f"dp: batch{ALL}\ndp_shard: batch{ALL}", "dp=2,dp_shard=2,tp=2", ["64/tp, 32/dp/dp_shard"]),
    # no dim is large enough for both
    ("3, 5", f"dp: batch{ALL}\ndp_shard: batch{ALL}", "dp=3,dp_shard=2", ["3/dp, 5/dp_shard"]),
    # kinds apart: the state's split begins with the gradient's, and that with the parameter's
    ("20, 24", f"dp: batch; store state\ndp_shard: batch{ALL}", "dp=2,dp_shard=2",
     ["20/dp_shard, 24", "20/dp_shard, 24", "20/dp_shard/dp, 24"]),
    ("6, 24", f"dp: batch; store state\ndp_shard: batch{ALL}", "dp=2,dp_shard=2",
     ["6, 24/dp_shard", "6, 24/dp_shard", "6, 24/dp_shard/dp"]),
    ("20, 24", f"dp: batch; store grads, state\ndp_shard: batch{ALL}", "dp=2,dp_shard=2",
     ["20/dp_shard, 24", "20/dp_shard/dp, 24", "20/dp_shard/dp, 24"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "plan", "mesh", "expected"), CASES)
def test_where_the_axes_go(text: str, plan: str, mesh: str, expected: list[str]) -> None:
    assert stored(text, plan, mesh) == expected


# ------------------------------------------------------------------------------------------------------- two axes in one collective


@pytest.mark.parametrize(
    ("kind", "mesh", "plan", "make", "microbatches"),
    [
        ("mlp", "dp=3,dp_shard=2", "fsdp", adamw, 1),
        ("mlp", "dp=2,dp_shard=2", f"dp: batch; store state\ndp_shard: batch{ALL}", momentum, 3),
        broad("gpt2", "dp=2,dp_shard=2", "fsdp", momentum, 2),
        broad("mlp", "dp=2,dp_shard=2,tp=2", "fsdp+megatron", adamw, 1),
        broad("mlp", "dp=3,dp_shard=2", "zero2", momentum, 1),
        broad("gpt2", "dp=2,dp_shard=2", f"dp: batch; store grads, state\ndp_shard: batch{ALL}", adamw, 1),
        broad("llama", "dp=2,dp_shard=2", "fsdp", adamw, 2),
        broad("llama", "dp=2,dp_shard=2", "zero1", momentum, 1),
        broad("llama", "pp=2,dp=2,dp_shard=2", "fsdp", adamw, 2),
    ],
)
def test_a_step_is_that_of_one_device(kind: str, mesh: str, plan: str, make, microbatches: int) -> None:  # type: ignore[no-untyped-def]
    report = captured(kind).verify_training(mesh, plan, make, clip=0.5, microbatches=microbatches)
    assert report.ok, report


def moved(program: PlainProgram) -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for use in collectives(program):
        found[use.kind, use.phase, "/".join(use.axes)] += use.bytes_per_rank
    return found


def test_each_parameter_is_gathered_once_each_way_and_its_gradient_scattered_once() -> None:
    """Over both axes at once; bytes are those of the tiles of all six ranks, padding included. Backward reads no bias of a product."""
    program = captured("mlp").program("dp=3,dp_shard=2", "fsdp")
    sizes = program.axis_sizes
    tiles = {
        port.name: prod(local_shape(port.sharding, sizes)) * port.dtype.itemsize * 6
        for port in program.inputs
        if port.kind == "parameter" and port.sharding is not None
    }
    assert tiles["down.weight"] == 12 * 21 * 8 and tiles["middle.bias"] == 24 * 8, "10 over 3 and 2 are 4, then 2; 21 are 7, then 4"
    again = {"norm.weight", "norm.bias", "up.weight", "middle.weight", "down.weight"}
    found = moved(program)
    assert found["all_gather", "forward", "dp/dp_shard"] == sum(tiles.values())
    assert found["all_gather", "backward", "dp/dp_shard"] == sum(tiles[name] for name in again)
    assert found["reduce_scatter", "backward", "dp/dp_shard"] == sum(tiles.values())
    assert {axes for _, _, axes in found} == {"dp/dp_shard"}


@pytest.mark.parametrize("kind", ["nanogpt", broad("gpt2"), broad("llama")])
def test_two_axes_move_what_one_of_all_their_ranks_does(kind: str) -> None:
    one, two = (moved(captured(kind).program(mesh, "fsdp")) for mesh in ("dp_shard=4", "dp=2,dp_shard=2"))
    assert two == {(way, phase, "dp/dp_shard"): count for (way, phase, _), count in one.items()}
