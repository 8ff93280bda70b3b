"""Gradient-clipping options, by value and by one norm or norms by patterns of names: checks, groups of parameters, clipping on one device.

    clip_grad_norm=1.0                                       torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_norm={"embed.*": 0.1, "layers.*": 1.0}         each group by its own norm; a parameter without a pattern is not clipped
    clip_grad_value=0.5                                      torch.nn.utils.clip_grad_value_(model.parameters(), 0.5), ahead of any norm
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn

from meshc.errors import PlanError, join_names

Clip: TypeAlias = float | Mapping[str, float] | None


def check(clip: Clip, names: Iterable[str]) -> None:
    """Raises PlanError for a limit that is no norm, a pattern that names no parameter, and a parameter that two patterns name."""
    limits = clip.values() if isinstance(clip, Mapping) else [] if clip is None else [clip]
    wrong = [limit for limit in limits if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0]
    if wrong:
        raise PlanError(f"clip_grad_norm={clip!r}: the largest norm of all gradients, or a dict from patterns of names to norms")
    if not isinstance(clip, Mapping):
        return
    names = list(names)
    groups = [[name for name in names if fnmatchcase(name, pattern)] for pattern in clip]
    idle = [repr(pattern) for pattern, group in zip(clip, groups, strict=True) if not group]
    if idle:
        raise PlanError(f"clip_grad_norm: {', '.join(idle)} names no parameter; the model has {join_names(names, 4)}")
    twice = [name for name in names if sum(name in group for group in groups) > 1]
    if twice:
        raise PlanError(f"clip_grad_norm: {join_names(twice, 4)}: two patterns name it, and a gradient is clipped once")


def check_value(limit: float | None, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raises PlanError for a limit that is no positive number, and for complex parameters, whose gradients have no order."""
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise PlanError(f"clip_grad_value={limit!r}: the largest magnitude of an element of a gradient, a number above 0")
    complex_ones = [name for name, parameter in parameters if parameter.is_complex()]
    if complex_ones:
        raise PlanError(
            f"clip_grad_value: {join_names(complex_ones, 4)}: a complex gradient is not cut by value\n"
            "  what to do: clip_grad_norm=, which is defined for complex gradients"
        )


def groups_of(clip: Clip, names: Iterable[str]) -> list[tuple[float, list[str]]]:
    """(largest norm, names of its parameters) of each group that has any."""
    patterns = clip if isinstance(clip, Mapping) else {} if clip is None else {"*": clip}
    names = list(names)
    found = [(limit, [name for name in names if fnmatchcase(name, pattern)]) for pattern, limit in patterns.items()]
    return [(limit, group) for limit, group in found if group]


def clip_(module: nn.Module, clip: Clip, value: float | None = None) -> Tensor | None:
    """Clip gradients on one device, first by value and then by norm. Returns the norm of all gradients between the two; None if no norm is
    clipped."""
    parameters = dict(module.named_parameters())
    if value is not None:
        torch.nn.utils.clip_grad_value_(parameters.values(), value)
    if not isinstance(clip, Mapping):
        return None if clip is None else torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
    for limit, names in groups_of(clip, parameters):
        torch.nn.utils.clip_grad_norm_([parameters[name] for name in names], limit)
    return norm
