"""Store prefix of one start of a job, so that restarts by `torchrun --max-restarts` do not read an earlier start's keys.

torchrun's agents keep the store of a start for the next one, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start its own. What
ranks of an earlier start wrote is still in it then: that a rank died, what they agreed on. So each start has a place of its own.

    first start      meshc/failure    {rank 1 died at step 10}
    second start     meshc/1/failure  nothing yet

Agents on several nodes count restarts by themselves, and may count differently: there a restart wants a store of its own.
"""

from __future__ import annotations

import os

from meshc.errors import StateError


def place_of_this_start() -> str:
    """The prefix of all that meshc writes to the process group's store, the same on all ranks. Raises StateError on a node that torchrun
    has restarted beside others, with a store that it has kept."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "meshc"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise StateError(
            "torchrun has restarted this job with the store of the earlier start, in which stands what ranks told each other then\n"
            "  what to do: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts ... on every node, which gives each start its own"
        )
    return f"meshc/{restarts}"
