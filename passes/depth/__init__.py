"""Capture of repeated layers: of layers that are proved equal four blocks are captured, and the per-rank graph is grown to the whole depth.
"""
