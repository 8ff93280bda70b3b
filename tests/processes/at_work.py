"""A saved program at work on real ranks, whose experts move by their load after each call: `FOLDER PART`; part 1 goes on from part 0."""

from __future__ import annotations

from meshc import rules
from meshc.runtime.saved.run_saved import RunRequest, run_saved

CALLS = 2
"""Of a part."""


def run(folder: str, part: str) -> None:
    batches = (f"{folder}/batch.safetensors",) * CALLS
    state = None if part == "0" else f"{folder}/state_0"
    out, left = f"{folder}/out_{part}", f"{folder}/state_{part}"
    run_saved(RunRequest(f"{folder}/program", batches, out, state=state, save_state=left, rebalance_every=1, rules=rules))
