"""Capture of repeated layers: of layers that are proved equal four blocks are captured; the per-rank graph is grown to the whole depth.

Others import `blocks`, `captured_names`, `copies`, `grow`, `mentions`, `multiplicity`, `prove_depth`, `slice_layers` and `unequal`.
"""
