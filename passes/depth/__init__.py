"""Depth for free: layers that are proved equal are captured four times each, and the per-rank graph grows to the whole depth."""
