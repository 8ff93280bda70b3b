"""Proof that a per-rank program computes what the traced graph does, at full size, without running either.

The core, which is to be read first:
    tiles.py            which positions of a value a rank has   terms.py       terms, by number: equal numbers, equal values
    evaluate.py         what a call makes of its operands       held.py        what may be known of a value
    erasure.py          line by line

What it asks:
    traced.py           the traced graph as terms               facts.py, regrouped.py   which tiles are which value
    moves.py, sliced_tiles.py, tile_moves.py, uneven.py         what only moves positions, and places without one
    exchanged_tiles.py, tile_cuts.py, places.py                 what ranks make of each other's tiles, and by their places
    lowered_lines.py, moved_lowerings.py, repeated_lowerings.py lines that a rule writes
    operand_forms.py, replay.py, emitter.py, lowering_recorder.py, recorded_letters.py, recorded_windows.py
                                                                what a rule writes for some operands

A feature each:
    added_values.py, chunks.py, chunk_tiles.py, joined_values.py, divided.py, proved_updates.py, memory.py, stages.py, over_stages.py,
    open_sizes.py, compacted_rows.py, rows_in_use.py, dispatched_rows.py, receivers.py
The result: program_proof.py, outcome.py

Nothing of `passes/` is imported. Taken on trust are operators' rules and lowerings, which tests prove by brute force, and torch.
"""
