"""What a rank of these tests does: joins the others, runs checks by name on one mesh, and says which have passed."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshc
from meshc.runtime.failure.failed_rank import world_board

Check = Callable[[Any], None]


def device_mesh(text: str) -> torch.distributed.DeviceMesh:
    mesh = meshc.Mesh(text)
    return init_device_mesh("cpu", tuple(axis.size for axis in mesh.axes), mesh_dim_names=mesh.names)


def run_checks(checks: Iterable[Check], mesh: str, names: Iterable[str]) -> None:
    """Runs all that are asked for, whether or not one fails, so that one launch tells as much as it can.

    A check in which a rank fails on purpose comes last: no collective works after it.
    """
    dist.init_process_group("gloo")
    where = device_mesh(mesh)
    table = {check.__name__: check for check in checks}
    failed = False
    for name in names:
        try:
            table[name](where)
            print(name, flush=True)
        except Exception:
            failed = True
            traceback.print_exc(limit=-4)
    if failed:
        sys.exit(1)
    with contextlib.suppress(meshc.PeerError):
        world_board().check()
        dist.barrier()
        dist.destroy_process_group()
