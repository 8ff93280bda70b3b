"""Proof that a per-rank program computes what the traced graph does, at full size, without running either.

    program_proof.py      sizes, constants, memory        erasure.py        line by line
    stages.py             stage by stage                  proved_updates.py writes in place
    traced.py             the traced graph as terms       terms.py          terms, by number: equal numbers, equal values
    tiles.py              what a rank has of a value      moves.py          what only moves it
    evaluate.py           what a call makes of operands   held.py           what may be known of a value
    facts.py              which tiles are which value     outcome.py        the result
    lowering_recorder.py  what a rule's lowering writes   replay.py         the same as terms, and how its results are sharded
    memory.py             what is written over            joined_values.py  what travels together
    chunks.py             chunks of the head              divided.py        what is another value on each rank
    compacted_rows.py     experts' used rows              dispatched_rows.py  rows that are sent to some ranks
    uneven.py             places without a position       open_sizes.py     all sizes of what is open
    repeated_lowerings.py  layers that are alike

Nothing of `passes/` is imported. Taken on trust are operators' rules and lowerings, which tests prove by brute force, and torch.
"""
