"""Layers of caches between calls: where buffers of sliding windows begin, and how many places they have."""

from __future__ import annotations

from typing import Any

import torch

from meshc.runtime.run.cache_layers import WindowLayer, window_extent


def test_a_full_buffer_moves_what_the_window_still_shows_to_its_front() -> None:
    buffers: Any = [torch.zeros(1, 1, 64, 2)] * 2
    layer = WindowLayer(buffers, rows=1, length=60, window=8)
    assert window_extent([layer], 61) == (0, 64)
    assert window_extent([layer], 70) == (53, 64)  # 60 tokens, of which the next one sees the last 7
