"""Error of a tensor beside another: max|a - b| / max(max|b|, 1e-3 of the largest |entry| among tensors of its kind).

The floor is there since some gradients are zero in exact arithmetic, where two correct orders of summation differ by percents.
"""

from __future__ import annotations

from typing import Final

import torch

FLOOR: Final = 1e-3


def peak_of(value: torch.Tensor) -> float:
    if not value.numel():
        return 0.0
    low, high = torch.aminmax(_double(value))
    return max(-float(low), float(high))


def _double(value: torch.Tensor) -> torch.Tensor:
    """In double precision; of complex numbers both parts count."""
    value = value.detach()
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


def error(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """max|found - wanted| over max(max|wanted|, floor); infinite where shapes or NaNs differ."""
    if tuple(found.shape) != tuple(wanted.shape) or found.is_complex() != wanted.is_complex():
        return float("inf")
    if not wanted.numel():
        return 0.0
    a, b = _double(found), _double(wanted)
    highest, peak = float((a - b).abs_().max()), peak_of(b)
    if highest < float("inf") and peak < float("inf"):
        return highest / max(peak, floor, 1e-300)
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    if difference.isnan().any():
        return float("inf")
    return float(difference.max()) / max(peak_of(torch.nan_to_num(b, posinf=0.0, neginf=0.0)), floor, 1e-300)
