"""The mesh as a value: text, coordinates, groups, and what it says about bad input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshc.errors import PlanError
from meshc.ir.mesh import DATA_ROLES, ROLES, Axis, Mesh, role


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.lists(st.sampled_from([*ROLES, "x", "y_2"]), min_size=1, max_size=3, unique=True))
    axes = [Axis(name, draw(st.integers(1, 4))) for name in names]
    count = Mesh.from_axes(axes).world_size
    ranks = draw(st.none() | st.permutations(range(count)) | st.just(range(3, 3 + count)))
    return Mesh.from_axes(axes, device=draw(st.sampled_from(["cpu", "cuda"])), ranks=ranks)


def test_text() -> None:
    mesh = Mesh(" dp = 2, tp=4 ")
    assert mesh.axes == (Axis("dp", 2), Axis("tp", 4))
    assert (mesh.names, mesh.shape, mesh.world_size, mesh.size("tp"), mesh.device_type) == (("dp", "tp"), (2, 4), 8, 4, "cpu")
    assert str(mesh) == "dp=2,tp=4"
    assert str(Mesh("dp=2", device="cuda")) == "dp=2 on cuda"
    assert Mesh("dp=2", device="cuda") != Mesh("dp=2")
    assert hash(Mesh("dp=2,tp=4")) == hash(mesh)
    assert Mesh("dp=1").world_size == 1


@given(meshes())
def test_text_round_trips(mesh: Mesh) -> None:
    assert Mesh(str(mesh)) == mesh


def test_row_major_coordinates() -> None:
    mesh = Mesh("dp=2,tp=3")
    assert [mesh.coordinates(rank) for rank in (0, 1, 3, 5)] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 0},
        {"dp": 1, "tp": 2},
    ]
    assert list(mesh.coordinates(0)) == ["dp", "tp"]


@given(meshes())
def test_coordinates_and_ranks_invert(mesh: Mesh) -> None:
    assert [mesh.rank(mesh.coordinates(rank)) for rank in mesh.ranks] == list(mesh.ranks)


def test_groups() -> None:
    mesh = Mesh("dp=2,tp=3")
    assert mesh.groups("tp") == [[0, 1, 2], [3, 4, 5]]
    assert mesh.groups("dp") == [[0, 3], [1, 4], [2, 5]]
    assert mesh.groups(["dp", "tp"]) == [[0, 1, 2, 3, 4, 5]]
    assert mesh.groups(["tp", "dp"]) == [[0, 3, 1, 4, 2, 5]]
    assert mesh.groups([]) == [[0], [1], [2], [3], [4], [5]]


def test_ranks_with_one_part_of_a_batch() -> None:
    mesh = Mesh("tp=2,dp=2,pp=1,ep=1")
    assert (mesh.data_axes, mesh.data_ranks, mesh.data_groups()) == (("dp",), 2, [[0, 2], [1, 3]])
    assert (Mesh("tp=3").data_ranks, Mesh("tp=3").data_groups()) == (1, [[0, 1, 2]])
    assert Mesh("dp=2,ep=2").data_groups() == [[0], [1], [2], [3]]


@given(meshes(), st.data())
def test_groups_partition_the_ranks(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.names), unique=True))
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
    for group in groups:
        others = [{name: at for name, at in mesh.coordinates(rank).items() if name not in axes} for rank in group]
        assert others == [others[0]] * len(group)


def test_of_device_mesh(eight_ranks: None) -> None:
    device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh = Mesh.of(device_mesh)
    assert mesh == Mesh("dp=2,tp=4")
    assert mesh.device_mesh is device_mesh
    assert Mesh.of(mesh) is mesh
    assert Mesh("dp=2,tp=4").device_mesh is None


def test_of_device_mesh_keeps_its_rank_table(eight_ranks: None) -> None:
    mesh = Mesh.of(DeviceMesh("cpu", [[0, 2, 4, 6], [1, 3, 5, 7]], mesh_dim_names=("dp", "tp")))
    assert mesh.coordinates(3) == {"dp": 1, "tp": 1}
    assert mesh.groups("dp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert str(mesh) == "dp=2,tp=4 ranks 0 2 4 6 1 3 5 7"
    assert mesh != Mesh("dp=2,tp=4")


def test_of_device_mesh_without_names(eight_ranks: None) -> None:
    with pytest.raises(PlanError) as caught:
        Mesh.of(init_device_mesh("cpu", (2, 4)))
    assert 'init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))' in str(caught.value)


def test_roles() -> None:
    assert [role(name) for name in ("dp", "batch", "dp_replicate", "dp_shard", "fsdp")] == [
        "dp",
        "dp",
        "dp_replicate",
        "dp_shard",
        "dp_shard",
    ]
    assert [role(name) for name in ("tp", "sp", "cp", "ep", "pp")] == ["tp", "sp", "cp", "ep", "pp"]
    assert role("TP") is None and role("model") is None
    assert DATA_ROLES == {"dp", "dp_replicate", "dp_shard", "ep"}


def test_bad_text_marks_every_fault() -> None:
    with pytest.raises(PlanError) as caught:
        Mesh("dp=0,tp=2,tp=3,4")
    assert str(caught.value) == (
        "this mesh cannot be read:\n"
        "    dp=0,tp=2,tp=3,4\n"
        "       ^ a size is at least 1\n"
        "              ^ axis tp is there twice\n"
        "                   ^ an axis is NAME=SIZE\n"
        'for example: Mesh("dp=2,tp=4") or Mesh("dp=2,tp=4", device="cuda")'
    )


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=-1", "dp=2,", "2=dp", "dp=2 tp=4", "dp=2 on"])
def test_bad_text(text: str) -> None:
    with pytest.raises(PlanError, match="an axis is NAME=SIZE"):
        Mesh(text)


def test_other_faults() -> None:
    with pytest.raises(PlanError, match=r"should hold 2 different ranks"):
        Mesh("dp=2 ranks 0 0")
    with pytest.raises(PlanError, match=r"on cuda, but device='cpu' was given"):
        Mesh("dp=2 on cuda", device="cpu")
    with pytest.raises(PlanError, match=r"'cuda:0' is no device type"):
        Mesh("dp=2", device="cuda:0")
    with pytest.raises(PlanError, match=r"axis 'pp' is not in the mesh dp=2, whose axes are dp"):
        Mesh("dp=2").size("pp")
    with pytest.raises(PlanError, match=r"rank 7 is not in the mesh dp=2, whose 2 ranks are 0, 1"):
        Mesh("dp=2").coordinates(7)
    with pytest.raises(PlanError, match=r"axis tp is not in the mesh; axis dp has coordinates 0 to 1, not 2"):
        Mesh("dp=2").rank({"tp": 0, "dp": 2})
    with pytest.raises(PlanError, match=r"a mesh is a torch.distributed.DeviceMesh or a meshc.Mesh, not int"):
        Mesh.of(4)  # type: ignore[arg-type]
