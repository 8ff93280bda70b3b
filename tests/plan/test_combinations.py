"""The recipes that an expert would try on several axes."""

from __future__ import annotations

from meshc.ir.mesh import Mesh
from meshc.plan.combinations import combinations
from meshc.plan.recipes import resolve


def named(*axes: str, **ask: bool) -> dict[str, str]:
    return {name: "; ".join(str(entry).partition(": ")[2] for entry in entries) for name, entries in combinations(axes, **ask)}


def test_what_has_a_name_is_what_the_name_means() -> None:
    for name, entries in combinations(["dp", "tp"]):
        if " " not in name:
            assert [str(entry) for entry in entries] == str(resolve(name, Mesh("dp=2,tp=2"))).splitlines()


def test_two_axes() -> None:
    assert list(named("dp", "tp")) == [
        "ddp+megatron", "zero1+megatron", "fsdp+megatron", "ddp+megatron_sp", "zero1+megatron_sp", "fsdp+megatron_sp",
        "ddp; ulysses over tp", "zero1; ulysses over tp", "fsdp; ulysses over tp",
        "ddp over dp, tp", "zero1 over dp, tp", "fsdp over dp, tp", "ddp; fsdp over tp",
    ]  # fmt: skip
    assert named("dp", "tp")["ddp; fsdp over tp"] == "batch; batch; store params, grads, state"


def test_a_module_has_no_state_of_its_own_and_a_part_of_the_batch_stays_on_axes_of_data() -> None:
    assert list(named("dp", step=False)) == ["ddp", "fsdp"]
    assert list(named("dp", "tp", local=True)) == [
        "ddp+megatron", "zero1+megatron", "fsdp+megatron", "ddp+megatron_sp", "zero1+megatron_sp", "fsdp+megatron_sp",
        "ddp; ulysses over tp", "zero1; ulysses over tp", "fsdp; ulysses over tp",
    ]  # fmt: skip


def test_other_roles_and_none() -> None:
    assert {"ulysses", "ddp over cp"} <= set(named("cp"))
    assert {"ddp over x", "megatron over x", "ulysses over x"} <= set(named("x"))
    assert "ddp over dp; fsdp over dp_shard" in named("dp", "dp_shard")
