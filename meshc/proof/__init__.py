"""Proof that a per-rank program computes what the traced graph does, at full size, without running either.

    traced.py             the traced graph as terms       terms.py          terms, by number: equal numbers, equal values
    tiles.py              what a rank has of a value      moves.py          what only moves it
    evaluate.py           what a call makes of operands   held.py           what may be known of a value
    joined_values.py      what travels together           chunks.py         chunks of the head
    lowering_recorder.py  what a rule's lowering writes   replay.py         the same as terms, and how its results are sharded
    facts.py              which tiles are which value     erasure.py        line by line
    stages.py             stage by stage                  outcome.py        the result

Nothing of `passes/` is imported. Taken on trust are operators' rules and lowerings, which tests prove by brute force, and torch.
"""
