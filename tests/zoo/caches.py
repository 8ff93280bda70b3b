"""Caches of transformers that a machine without a GPU cannot make by their constructor."""

from __future__ import annotations

from unittest import mock

import torch
from transformers import DynamicCache


def offloaded() -> DynamicCache:
    """Made on a machine without a GPU too, where a torch for CUDA has no stream to copy on."""
    with mock.patch.object(torch, "Stream"):
        return DynamicCache(offloading=True)
