"""Reference copy of the model and its inputs on one device, for comparisons with a program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from meshc.errors import StateError, join_names
from meshc.frontend.double_copy import wide_dtype, wider
from meshc.frontend.expert_placement import initial_slots, is_slot_table
from meshc.ir import trees

Tree = TypeVar("Tree")


def plain_copy(module: nn.Module, values: Mapping[str, torch.Tensor] | None, double: bool) -> nn.Module:
    """A copy on the CPU, with `values` for its parameters if given (a compiled module holds DTensors). Raises StateError if the module
    cannot be copied, or has no values."""
    memo: dict[int, torch.Tensor] = {}
    empty = [name for name, held in (*module.named_parameters(), *module.named_buffers()) if held.is_meta]
    if empty and values is None:
        raise StateError(
            f"the model was built on `meta`, and these have no values to compare with: {join_names(empty, 6)}\n"
            '  what to do: build it on a device that holds values (model.to_empty(device="cpu"), and first values); a module that only '
            "torch.func.functional_call reads, with values for all of it, is to be none of the model's: self.base = [base]"
        )
    for name, parameter in module.named_parameters():
        full = parameter.detach() if values is None else values[name]
        memo[id(parameter)] = nn.Parameter(full.detach().cpu().clone(), requires_grad=parameter.requires_grad)
    for name, buffer in module.named_buffers():
        full = buffer.detach() if values is None else values.get(name, initial_slots(buffer) if is_slot_table(name) else buffer)
        memo[id(buffer)] = full.detach().cpu().clone()
    for child in module.modules():  # left by earlier calls: the weight of torch.nn.utils.weight_norm, a list that forward fills
        computed = [value for value in trees.leaves(vars(child)) if isinstance(value, torch.Tensor) and not value.is_leaf]
        memo.update({id(value): value.detach().cpu().clone() for value in computed})
    known = dict(memo)
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise StateError(_copy_failure_text(module, known, error)) from error
    for child, original in zip(twin.modules(), module.modules(), strict=True):
        child.training = original.training
    return widen(twin) if double else twin


def _copy_failure_text(module: nn.Module, memo: Mapping[int, torch.Tensor], error: Exception) -> str:
    """Message for a model that cannot be copied; names the attribute at fault, if there is one."""
    what = "the model"
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            try:
                if name not in ("_parameters", "_buffers", "_modules"):
                    copy.deepcopy(value, dict(memo))
            except Exception:  # any class of error: only whether it can be copied matters
                what = f"{path}.{name}".lstrip(".")
    return (
        f"{what} cannot be copied, and verify compares with a copy of the model: {type(error).__name__}: {error}\n"
        "  what to do: keep it out of the model's attributes (name it in forward), or give its class a __deepcopy__"
    )


def widen(module: nn.Module) -> nn.Module:
    """Converts a module to double precision: parameters, buffers, and tensors among other attributes."""
    module._apply(lambda t: t.to(wider(t.dtype)))
    for child in module.modules():
        vars(child).update({name: value.to(wider(value.dtype)) for name, value in vars(child).items() if isinstance(value, torch.Tensor)})
    return module


class ModelSnapshot:
    """A snapshot of a model, restored by `put_back` after calls of it: values of parameters and buffers, and the set of buffers and
    attributes (calls may create a buffer, or replace it by one of the input's size)."""

    def __init__(self, module: nn.Module) -> None:
        self.values = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]
        self.tables = [
            (child, dict(vars(child)), dict(child._buffers), set(child._non_persistent_buffers_set)) for child in module.modules()
        ]

    def put_back(self) -> None:
        for child, attributes, buffers, passing in self.tables:
            vars(child).clear()
            vars(child).update(attributes)
            child._buffers.clear()
            child._buffers.update(buffers)
            child._non_persistent_buffers_set.clear()
            child._non_persistent_buffers_set.update(passing)
        with torch.no_grad():
            for tensor, value in self.values:
                if tensor.shape != value.shape:  # a buffer: a parameter cannot be resized
                    tensor.resize_(value.shape)
                tensor.copy_(value)


def widen_inputs(tree: Tree, double: bool) -> Tree:
    """A copy of inputs, widened if `double`: the reference may change its inputs, and sets gradients on them."""

    def wide(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(wide_dtype(leaf.dtype, double), copy=True).requires_grad_(leaf.requires_grad)

    copied: Tree = trees.map_leaves(wide, tree)
    return copied
