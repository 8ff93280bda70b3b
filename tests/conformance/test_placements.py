"""What our rules say of placements is what torch finds by trying, and the table counts it. All of it: `make placements`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from meshc.testing.brute_force import Sample
from tests.broad import broad
from tests.conformance import dtensor
from tests.conformance.ours import placements
from tests.conformance.placements import operators, said
from tests.conformance.placements_table import table
from tests.conformance.refuted import REFUTED, Counterexample
from tests.conformance.torch_samples import entries
from tests.rules.samples import f

aten = torch.ops.aten
ENTRIES = entries()


def known(op: object, *args: object) -> set[str]:
    return set(map(said, placements(Sample(op, args))))


def test_letters_and_what_rides_are_placements() -> None:
    assert known(aten.mv.default, f(4, 6), f(6)) == {
        "S(0), R -> S(0)", "S(1), S(0) -> P(sum)", "P(sum), R -> P(sum)", "R, P(sum) -> P(sum)", "P(avg), R -> P(avg)",
        "R, P(avg) -> P(avg)",
    }  # fmt: skip
    assert known(aten.sub.Tensor, f(4), f(4)) == {
        "S(0), S(0) -> S(0)", "P(sum), P(sum) -> P(sum)", "P(avg), P(avg) -> P(avg)", "P(avg), R -> P(avg)", "R, P(avg) -> P(avg)",
        "P(max), R -> P(max)", "P(min), R -> P(min)", "R, P(max) -> P(min)", "R, P(min) -> P(max)",
    }  # fmt: skip


def test_a_constant_lets_averages_through_and_no_sums() -> None:
    assert {said for said in known(aten.add.Scalar, f(4), 2.0) if "sum" in said or "avg" in said} == {"P(avg) -> P(avg)"}


def test_a_mean_over_a_split_dim_is_the_average_of_the_parts_means() -> None:
    assert {said for said in known(aten.mean.dim, f(4, 6), [1]) if "S" in said} == {"S(0) -> S(0)", "S(1) -> P(avg)"}


NAMES = ("nn_functional_channel_shuffle", "take")
MORE = ("mm", "maximum", "nn_functional_mse_loss", "lerp")


@pytest.fixture
def group() -> Iterator[None]:
    """The process group that sends nothing, for as long as a test."""
    dtensor.start()
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", [*NAMES, *map(broad, MORE)])
def test_what_we_say_is_valid(name: str) -> None:
    """Of operators that a rank runs alone, whatever is split."""
    (operator,) = operators(ENTRIES[name])
    valid, _ = dtensor.compare(operator)
    mine = placements(operator.sample)
    assert mine and sorted(map(said, mine - valid)) == []


@pytest.mark.parametrize("counterexample", REFUTED.values(), ids=map(str, REFUTED))
def test_what_is_refuted_is_wrong(counterexample: Counterexample) -> None:
    whole, together = counterexample.results()
    assert not torch.allclose(whole, together)


def test_the_table_counts_and_names_what_only_dtensor_knows() -> None:
    rows = [
        {"operator": "aten.mm.default", "valid": ["a", "b", "P(avg) -> c"], "dtensor": ["a", "P(avg) -> c"], "meshc": ["a", "b"]},
        {"operator": "aten.add.Tensor", "valid": ["d -> P(max)", "d -> R"], "dtensor": [], "meshc": ["d -> P(max)", "d -> R"]},
    ]
    told = table(rows, {"aten.mm", "aten.relu"})
    assert "2 calls; ours know more in 1, DTensor's in 0." in told
    assert "| all | 5 | 4 | 2 |" in told and "| without `P(avg)` | 4 | 4 | 1 |" in told
    assert "| without what is said again of a whole result | 4 | 3 | 2 |" in told
    assert "on 1 of 2 operators, of which the zoo uses 1.\nOf the 2 operators of" in told and "\n1 are among those tried." in told
    assert "- `aten.mm`: P(avg) -> c\n" in told and "| aten.add.Tensor |  | 2 | 2 | 0 |" in told
