"""torch's table of operators with sample inputs: the only file that imports its private test modules."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils import _pytree as pytree

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128, torch.bfloat16)
"""The first that the operator takes on a CPU."""


@dataclass(frozen=True)
class Call:
    """One call of an entry: `function` takes `tensors`, in place of those among the arguments, and gives a list of tensors."""

    function: Callable[..., list[Tensor]]
    tensors: tuple[Tensor, ...]
    differentiable: bool


def entries() -> dict[str, Any]:
    """The table by name, variants apart."""
    return {entry.formatted_name: entry for entry in op_db}


def dtype_of(entry: Any) -> torch.dtype | None:
    return next((dtype for dtype in DTYPES if dtype in entry.supported_dtypes("cpu")), None)


def calls(entry: Any, count: int, seed: int = 0) -> Iterator[Call]:
    """The first `count` sample calls of an entry. Raises what torch's own sample functions raise."""
    dtype = dtype_of(entry)
    if dtype is None:
        raise NotImplementedError("it has no kernel for a CPU")
    number = zlib.crc32(entry.formatted_name.encode()) + seed
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)
    gradient = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
    with _untracked():
        samples = itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=gradient), count)
    while True:
        with _untracked():
            sample = next(samples, None)
        if sample is None:
            return
        yield _call(entry.op, sample, gradient)


@contextmanager
def _untracked() -> Iterator[None]:
    """torch looks through the whole stack, with each file's lines, for a test of its own to tell of each sample. There is none."""
    with mock.patch.object(common_utils, "extract_test_fn", _none), mock.patch.object(core, "extract_test_fn", _none):
        yield


def _none() -> None:
    pass


def _call(operator: Callable[..., Any], sample: Any, gradient: bool) -> Call:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> list[Tensor]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            # an operator may write into its argument, which a program's inputs are not for
            given[place] = tensor.view_as(tensor) if tensor.requires_grad else tensor.clone()
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        made = [leaf for leaf in pytree.tree_leaves(operator(first, *args, **kwargs)) if isinstance(leaf, Tensor)]
        return [tensor.clone() for tensor in made]

    return Call(function, tuple(leaves[place] for place in places), gradient)
