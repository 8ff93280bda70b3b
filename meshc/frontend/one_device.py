"""What a model with a capacity for its experts means on one device: what programs are held against."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from meshc.frontend.expert_capacity import Capacity, rows_of
from meshc.frontend.listed_experts import listed_experts
from meshc.frontend.stock_experts import formed_experts, unsorted_experts
from meshc.ir.functions import Function


def one_device(function: Function, capacity: Capacity | None) -> Function:
    """A model's function as it means on one device: called as function(module, *args, **kwargs), with this capacity."""
    if capacity is None:
        return function

    def limited(module: nn.Module, *args: object, **kwargs: object) -> object:
        with ExitStack() as stack:
            stack.enter_context(unsorted_experts())
            stack.enter_context(listed_experts(module))
            stack.enter_context(formed_experts(module, lambda path: 1, capacity=capacity, batch=rows_of((args, kwargs))))
            return function(module, *args, **kwargs)

    return limited
