"""A saved program at work on real ranks, whose experts move by their load or stay: `FOLDER EVERY`, where 0 lets them stay."""

from __future__ import annotations

from meshc.passes import rules
from meshc.runtime.saved.launched import Run, run_saved

CALLS = 4


def run(folder: str, every: str) -> None:
    """Two runs of two calls each, the second from the state that the first has left."""
    for part in range(2):
        state = None if part == 0 else f"{folder}/state_0_{every}"
        run_saved(
            Run(
                f"{folder}/program", (f"{folder}/batch.safetensors",) * (CALLS // 2), f"{folder}/out_{part}_{every}", state=state,
                save_state=f"{folder}/state_{part}_{every}", rebalance_every=int(every) or None, rules=rules,
            )
        )  # fmt: skip
