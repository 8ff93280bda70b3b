"""What the ranks of `failure/test_restarts.py` run: the second start of a job, whose store has what the first one wrote."""

from __future__ import annotations

import os

import torch.distributed as dist

from meshc.runtime.agreement import compare
from meshc.runtime.failure.failed_rank import world_board


def agrees(store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1"}
    kept = dist.PrefixStore("meshc", dist.group.WORLD.get_group_store())
    if dist.get_rank() == 0:
        kept.set("failure", '{"rank": 1, "step": 10, "instruction": "all_reduce(dp)", "message": null}')
        kept.set("agreement/0/1", '{"what they do": "compile", "the plan": "another"}')
    dist.barrier()
    compare.agree(world_board(), "compile", {"the plan": "dp: batch"})
    print("agreed", flush=True)
    dist.barrier()
    dist.destroy_process_group()
