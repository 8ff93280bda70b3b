"""Ground truth of placements on one axis, and which of them DTensor's rules know: torch's own enumeration, asked operator by operator.

`torch.distributed.tensor._ops.strategy_validation` cuts an operator's operands by every combination of placements, runs the operator on
each rank's piece, and compares what comes of it with the whole result. What is true so is *valid*.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._ops.strategy_validation as truth
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from meshc.testing.brute_force import Sample

Combination = tuple[tuple[str, ...], tuple[str, ...]]
"""Placements of the operands and of the results: R, S(dim), P(reduction)."""
MOST_COMBINATIONS = 1500


@dataclass(frozen=True)
class Operator:
    """One call of an ATen operator, and how many ranks the axis has."""

    sample: Sample
    ranks: int
    result: Any


def start() -> None:
    """A process group that sends nothing, which DTensor's rules want to exist."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=30, store=FakeStore())


def operators(entry: Any, most: int) -> Iterator[Operator]:
    """The ATen calls that an entry's first `most` samples with a dim to split come to, by name if it is one of several."""
    found = 0
    try:
        samples = iter(entry.sample_inputs("cpu", torch.float32))
    except Exception:
        return
    for sample in itertools.islice(samples, 12):
        capture = truth.get_aten_op_for_sample(entry.op, sample, entry.name)
        op = capture.best_match
        if op is None or op._schema.is_mutable or any(argument.is_out for argument in op._schema.arguments):
            continue
        call = Sample(op, tuple(capture.best_match_args or ()), dict(capture.best_match_kwargs or {}))
        tensors = [tensor for _, tensor in truth.extract_tensors_from_args(call.args, dict(call.kwargs))]
        result = truth._check_ground_truth(capture.best_match_result)
        if not tensors or result is None or any(0 in tensor.shape for tensor in tensors):
            continue
        ranks = max((2, 3, 5), key=lambda count: sum(size % count == 0 for tensor in tensors for size in tensor.shape))
        if all(size % ranks for tensor in tensors for size in tensor.shape) or _count(tensors, result) > MOST_COMBINATIONS:
            continue
        yield Operator(call, ranks, result)
        found += 1
        if found == most:
            return


def _count(tensors: list[Tensor], result: Any) -> int:
    first = result[0] if isinstance(result, list) else result
    count = len(truth.get_1d_output_placements_for_tensor(first))
    for tensor in tensors:
        count *= len(truth.get_1d_input_placements_for_tensor(tensor, include_partial=True))
    return count


def compare(operator: Operator) -> tuple[set[Combination], set[Combination]]:
    """(valid combinations, those of them that DTensor's rules know)."""
    sample = operator.sample
    args, kwargs = sample.args, dict(sample.kwargs)
    tensors = truth.extract_tensors_from_args(args, kwargs)
    results = operator.result if isinstance(operator.result, list) else [operator.result]
    inputs, outputs = tuple(tuple(t.shape) for _, t in tensors), tuple(tuple(t.shape) for t in results)
    known = truth._query_dtensor_rules(sample.op, tensors, args, kwargs, inputs, outputs, operator.ranks, False)
    mitigations = truth._prepare_aten_mitigations(sample.op, args, kwargs)
    options = [truth.get_1d_input_placements_for_tensor(tensor, include_partial=True) for _, tensor in tensors]
    valid: set[Combination] = set()
    with LocalTensorMode(frozenset(range(operator.ranks))):
        mesh = init_device_mesh("cpu", (operator.ranks,))
        for given in itertools.product(*options):
            if truth.is_fully_replicated(given):
                continue
            shapes = _local_shapes(operator, tensors, given, mesh)
            for made in truth.get_1d_output_placements_for_tensor(results[0]):
                if shapes != [_piece(shape, made, operator.ranks) for shape in outputs]:
                    continue  # not valid; the enumeration would find out by putting the pieces together
                found = (made,) * len(results)
                key = normalised(given, found, inputs, outputs)
                if all(place == "R" for place in key[0]) or key in valid:
                    continue
                if truth._validate_aten_with_mitigations(
                    sample.op, args, kwargs, given, found, operator.result, operator.ranks, mesh, mitigations
                ):
                    valid.add(key)
    return valid, valid & known


def _local_shapes(operator: Operator, tensors: Any, given: tuple[Placement, ...], mesh: Any) -> list[tuple[int, ...]] | None:
    """Shapes of what a rank's operator gives; None if it refuses its pieces, or if these are not equally large."""
    for (_, tensor), place in zip(tensors, given, strict=True):
        if isinstance(place, Shard) and tensor.size(place.dim) % operator.ranks:
            return None
    pieces = [piece._local_tensors[0] for piece in truth._shard_tensors(tensors, given, operator.ranks, mesh)]
    rest = iter(pieces)
    args, kwargs = pytree.tree_map(
        lambda item: next(rest) if isinstance(item, Tensor) else item, (operator.sample.args, dict(operator.sample.kwargs))
    )
    try:
        made = operator.sample.op(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    return [tuple(item.shape) for item in (made if isinstance(made, list | tuple) else [made])]


def _piece(shape: tuple[int, ...], place: Placement, ranks: int) -> tuple[int, ...]:
    return tuple(size // ranks if isinstance(place, Shard) and place.dim == dim else size for dim, size in enumerate(shape))


def normalised(
    given: tuple[Placement, ...], made: tuple[Placement, ...], inputs: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...]
) -> Combination:
    """Placements as text, a split of a dim of size 1 as R."""
    key: Combination = truth.normalize_combo_key((tuple(map(str, given)), tuple(map(str, made))), inputs, outputs)
    return key
