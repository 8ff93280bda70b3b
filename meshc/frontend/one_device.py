"""One-device function of a model with expert capacity: the reference that programs are compared with."""

from __future__ import annotations

from torch import nn

from meshc.frontend.expert_capacity import Capacity, rows_of
from meshc.frontend.grouped_calls import grouped_calls
from meshc.frontend.libraries.stock_experts import unsorted_experts
from meshc.frontend.listed_experts import formed_experts, listed_experts
from meshc.ir.functions import Function


def one_device(function: Function, capacity: Capacity | None) -> Function:
    """The model's function on one device with this capacity, called as function(module, *args, **kwargs)."""
    if capacity is None:
        return function

    def call_with_capacity(module: nn.Module, *args: object, **kwargs: object) -> object:
        formed = formed_experts(module, lambda path: 1, capacity=capacity, batch=rows_of((args, kwargs)), behind=True)
        with unsorted_experts(), grouped_calls(), listed_experts(module), formed:
            return function(module, *args, **kwargs)

    return call_with_capacity
