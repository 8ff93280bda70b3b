"""Table of operators whose kernels trust their operands, with the preconditions of each (by the functions of `preconditions.py`).

Found by calling every operator that a program may name with operands of every kind between pages that cannot be read (`tests/attack`). An
operator that is not here looks at shapes and values itself, or walks its operands by their own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import floor, isfinite, prod
from typing import Final

import torch
from torch import Tensor

from meshc.check.preconditions import (
    Operands,
    Rule,
    adds_up,
    ascending,
    divides,
    elements,
    gives,
    holds,
    leading,
    like,
    operand,
    same_dtype,
    size,
    within,
)  # fmt: skip
from meshc.private import OpOverload

aten = torch.ops.aten

_POOLED = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
_AVERAGED = ("self", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def _adaptive(space: int) -> tuple[Rule, ...]:
    cells = holds("both have a channel and a cell", lambda o: all((*o["grad_output"].shape[-space - 1 :], *o["self"].shape[-space - 1 :])))
    return leading("grad_output", "self", space), same_dtype("grad_output", "self"), cells


def _index_gradient_rules(space: int) -> tuple[Rule, ...]:
    """Gradients that go where indices into the space of `self` say."""
    chosen = like("indices", "grad_output"), within("indices", 0, elements("self", space))
    return *_adaptive(space), *chosen, holds("indices are int64", lambda o: o["indices"].dtype == torch.int64)


def _fractional(space: int) -> tuple[Rule, ...]:
    samples = holds("random_samples are a number a dim of each channel", lambda o: o["random_samples"].shape[-1] == space)
    shape = holds(
        "random_samples are [batch, channels, dims of space]",
        lambda o: o["random_samples"].shape[:2] == (o["self"].shape[0] if o["self"].dim() == space + 2 else 1, o["self"].shape[-space - 1]),
    )
    return samples, shape, same_dtype("self", "random_samples"), _fractions("random_samples")


def _fractions(name: str) -> Rule:
    def rule(o: Operands) -> str | None:
        given = o[name]
        fits = given.is_meta or bool(((given >= 0) & (given <= 1)).all())
        return None if fits else f"{name} holds what does not lie from 0 to 1"

    return rule


_BAG = (
    holds(
        "a weight is a matrix, indices and offsets are lists",
        lambda o: (o["weight"].dim(), o["indices"].dim(), o["offsets"].dim()) == (2, 1, 1),
    ),
    holds(
        "there is a bag for the indices", lambda o: o["offsets"].numel() > 0 or o["indices"].numel() == 0 and not o["include_last_offset"]
    ),
    same_dtype("indices", "offsets"),
    same_dtype("weight", "per_sample_weights"),
    like("per_sample_weights", "indices"),
    within("indices", 0, size("weight", 0)),
    ascending("offsets", size("indices", 0)),
    holds("the mode is 0, 1 or 2", lambda o: 0 <= o["mode"] <= 2),
    holds("padding_idx is a row or -1", lambda o: -1 <= o["padding_idx"] < o["weight"].shape[0]),
    holds("the first offset is 0", lambda o: o["offsets"].is_meta or o["offsets"].numel() == 0 or int(o["offsets"][0]) == 0),
)


def _bag_gradient(rows: Callable[[Operands], int], known: bool) -> tuple[Rule, ...]:
    """`known`: which bag each index lies in has to be given; else it is found from the offsets where it is not."""

    def in_bags(o: Operands) -> bool:
        count, indices = o["offset2bag"].numel(), o["indices"].numel()
        return count == indices or not known and count == 0

    return (
        holds("grad is a matrix, indices are a list", lambda o: (o["grad"].dim(), o["indices"].dim()) == (2, 1)),
        holds("offset2bag is a number for each index", in_bags),
        same_dtype("indices", "offset2bag"),
        within("indices", 0, rows),
        within("offset2bag", 0, size("grad", 0)),
        holds("the mode is 0, 1 or 2", lambda o: 0 <= o["mode"] <= 2),
        holds("padding_idx is a row or -1", lambda o: -1 <= o["padding_idx"] < rows(o)),
    )


_BAG_SIZES = (
    holds("bag_size has a number for each bag", lambda o: o["mode"] == 0 or o["bag_size"].numel() == o["grad"].shape[0]),
    holds("maximum_indices have the shape of grad", lambda o: o["mode"] != 2 or o["maximum_indices"].shape == o["grad"].shape),
    like("per_sample_weights", "indices"),
    same_dtype("indices", "bag_size"),
    same_dtype("grad", "per_sample_weights"),
    holds("a gradient is dense", lambda o: not o.get("sparse", False)),
)
_OFFSETS = (
    holds("offsets are a list", lambda o: o["offsets"].dim() == 1 and (o["offsets"].numel() > 0 or o["indices"].numel() == 0)),
    same_dtype("indices", "offsets"),
    ascending("offsets", size("indices", 0)),
    holds("there are no more offsets than bags, and one", lambda o: o["offsets"].numel() <= o["grad"].shape[0] + 1),
)


def _lengths(o: Operands, name: str) -> Tensor:
    given = o[name]
    return given.reshape(-1) if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64)


def _ctc_lengths(o: Operands) -> str | None:
    times, batch, _ = o["log_probs"].shape
    inputs, targets = _lengths(o, "input_lengths"), _lengths(o, "target_lengths")
    if inputs.numel() != batch or targets.numel() != batch:
        return f"there is a length of an input and of a target for each of {batch}"
    if inputs.is_meta or targets.is_meta or not batch:
        return None
    if int(inputs.min()) < 0 or int(inputs.max()) > times:
        return f"input_lengths are 0 to {times}"
    room = o["targets"].numel() if o["targets"].dim() == 1 else o["targets"].shape[1]
    most = int(targets.max()) if o["targets"].dim() == 2 else int(targets.clamp(min=0, max=room).sum())
    if int(targets.min()) < 0 or int(targets.max()) > room or most > room:
        return f"target_lengths fit {room} targets"
    return None


_CTC = (
    holds(
        "log_probs are [time, batch, classes], targets a list or a row each",
        lambda o: o["log_probs"].dim() == 3 and o["targets"].dim() in (1, 2),
    ),
    holds(
        "a row of targets stands for each of the batch",
        lambda o: o["targets"].dim() == 1 or o["targets"].shape[0] == o["log_probs"].shape[1],
    ),
    holds("targets are int64 or int32", lambda o: o["targets"].dtype in (torch.int64, torch.int32)),
    _ctc_lengths,
    holds("blank is a class", lambda o: 0 <= o["blank"] < o["log_probs"].shape[2]),
    within("targets", 0, size("log_probs", 2)),
)


def _alpha(o: Operands) -> str | None:
    times, batch, _ = o["log_probs"].shape
    targets, alpha = _lengths(o, "target_lengths"), o["log_alpha"]
    states = 1 if targets.is_meta or not targets.numel() else 2 * int(targets.max()) + 1
    fits = alpha.dim() == 3 and alpha.shape[:2] == (batch, times) and alpha.shape[2] >= states
    fits = fits and o["grad"].numel() == batch and o["neg_log_likelihood"].numel() == batch
    fits = fits and len({o[name].dtype for name in ("grad", "neg_log_likelihood", "log_alpha", "log_probs")}) == 1
    return None if fits else f"log_alpha is [{batch}, {times}, {states} or more], grad and neg_log_likelihood [{batch}], of one dtype"


def _segments(o: Operands) -> str | None:
    axis, data = o["axis"], o["data"]
    cuts = o["lengths"] if o["lengths"] is not None else o["offsets"]
    if not 0 <= axis < data.dim() or cuts is None or cuts.dim() != axis + 1 or cuts.shape[:axis] != data.shape[:axis]:
        return "lengths or offsets have the dims of data before axis, and one more"
    if o["lengths"] is None and cuts.shape[-1] == 0:
        return "offsets begin with 0"
    return None


_SEGMENTS = (
    _segments,
    adds_up("lengths", lambda o: int(o["data"].shape[o["axis"]])),
    ascending("offsets", lambda o: int(o["data"].shape[o["axis"]]), exactly=True),
)


def _reduced_segments(o: Operands) -> str | None:
    axis, data = o["axis"], o["data"]
    cuts = o["lengths"].shape[-1] if o["lengths"] is not None else o["offsets"].shape[-1] - 1
    wanted = (*data.shape[:axis], cuts, *data.shape[axis + 1 :])
    fits = o["grad"].shape == o["output"].shape == wanted and o["grad"].dtype == o["output"].dtype == data.dtype
    return None if fits else f"grad and output are {list(wanted)}, of the dtype of data"


def _ldl_pivots(o: Operands) -> str | None:
    """Blocks of two rows are marked by two equal negative numbers, and LAPACK takes the word of the first for the second."""
    given = o["pivots"]
    if given.shape != o["LD"].shape[:-1]:
        return "there is a pivot for each row"
    count = given.shape[-1]
    for row in [] if given.is_meta else given.reshape(-1, count).tolist() if count else []:
        at = 0
        while at < count:
            paired = row[at] < 0
            if not 1 <= abs(row[at]) <= count or paired and (at + 1 == count or row[at + 1] >= 0 or -row[at + 1] > count):
                return f"pivots hold {row[at]}, which is no row from 1 to {count}, or half a block"
            at += 2 if paired else 1
    return None


def _grouped_dim_size(o: Operands) -> int:
    one, two = o["self"], o["mat2"]
    return int(one.shape[0] if (one.dim(), two.dim()) == (2, 3) else two.shape[-1] if one.dim() == 3 else one.shape[-1])


def _layer_norm(o: Operands) -> bool:
    inner = list(o["normalized_shape"])
    outer = prod(o["input"].shape[: o["input"].dim() - len(inner)])
    fits = list(o["input"].shape[o["input"].dim() - len(inner) :]) == inner and o["mean"].numel() == o["rstd"].numel() == outer
    return fits and all(o[name] is None or list(o[name].shape) == inner for name in ("weight", "bias"))


def _classes(o: Operands) -> int:
    return int(o["self"].shape[-1]) if o["self"].dim() else 1


def _pairs(o: Operands) -> bool:
    rows = o["self"].shape[0]
    return rows > 0 and o["self"].dim() == 2 and o["grad"].shape == o["pdist"].shape == (rows * (rows - 1) // 2,)


_COUNTED = holds("the dims are others each, counted from 0", lambda o: len({*o["dim"]} & {*range(o["self"].dim())}) == len(o["dim"]))


def _half(o: Operands) -> bool:
    return bool(o["self"].shape[o["dim"][-1]] == o["last_dim_size"] // 2 + 1)


_PADS = {
    getattr(aten, f"{kind}_pad{space}d_backward").default: (
        gives(getattr(aten, f"{kind}_pad{space}d").default, "grad_output", "self", "padding"),
        same_dtype("grad_output", "self"),
    )
    for kind in ("reflection", "replication")
    for space in (1, 2, 3)
}
_DIVISIONS = {
    op: (divides("self", "other"),)
    for op in (
        aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default, aten.floor_divide.Scalar, aten.fmod.Scalar, aten.fmod.Tensor,
        aten.remainder.Scalar, aten.remainder.Scalar_Tensor, aten.remainder.Tensor,
    )
}  # fmt: skip


MOST_DEGREE: Final = 1 << 12
"""Of a polynomial, each of whose elements takes a step a degree; of what is a sum of so many terms an element."""


def _terms(o: Operands) -> str | None:
    return None if o["p"] <= MOST_DEGREE else f"p is at most {MOST_DEGREE}"


def _degree(o: Operands) -> str | None:
    given = o["n"]
    if isinstance(given, Tensor):
        too_high = not given.is_meta and bool((given > MOST_DEGREE).any())
    else:
        too_high = not given <= MOST_DEGREE
    return f"n is a degree of at most {MOST_DEGREE}" if too_high else None


_POLYNOMIALS = {
    getattr(getattr(aten, f"special_{kind}"), overload): (_degree,)
    for kind in (
        *(f"{shifted}chebyshev_polynomial_{letter}" for shifted in ("", "shifted_") for letter in "tuvw"),
        "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
    )
    for overload in ("default", "n_scalar", "x_scalar")
}  # fmt: skip


def _no_least(o: Operands) -> str | None:
    for name in ("self", "other"):
        given = o[name]
        if not given.is_meta and given.numel() and bool((given == torch.iinfo(given.dtype).min).any()):
            return f"{name} holds {torch.iinfo(given.dtype).min}, whose negative is no {given.dtype}"
    return None


def _scale_fault(o: Operands) -> str | None:
    """Kernels that smooth look for the pixels of an output at its index over the scale, wherever that is."""
    before = o["input_size"] if "input_size" in o else o["self"].shape
    for dim, name in ((-2, "scales_h"), (-1, "scales_w")):
        scale, made = o[name], o["output_size"][dim]
        if scale is not None and (not isfinite(scale) or floor(before[dim] * scale) != made):
            return f"{name} {scale} does not make {made} of {before[dim]}"
    return None


_SMOOTHED: Final = {
    getattr(aten, f"_upsample_{way}2d_aa{direction}").default: (_scale_fault,)
    for way in ("bilinear", "bicubic")
    for direction in ("", "_backward")
}


FARTHEST: Final = 1e9
"""Of a place in an image, whose sides are at 1 and -1: kernels make an index of it, and one of NaN or infinity is anywhere."""


def _grid_fault(o: Operands) -> str | None:
    grid = o["grid"]
    near = grid.is_meta or bool((grid.abs() <= FARTHEST).all())
    return None if near else f"grid holds what is no place: all lie within {FARTHEST:.0e} of the middle"


NEGATED: Final = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
}  # fmt: skip
"""What `neg` has a kernel for. A negated view calls it where somebody reads, by then without a line to name."""


TRUSTING: Final[Mapping[OpOverload, tuple[Rule, ...]]] = {
    aten._adaptive_avg_pool2d_backward.default: _adaptive(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive(3),
    aten.adaptive_max_pool2d_backward.default: _index_gradient_rules(2),
    aten.adaptive_max_pool3d_backward.default: _index_gradient_rules(3),
    aten.max_pool2d_with_indices_backward.default: (
        *_index_gradient_rules(2),
        gives(aten.max_pool2d_with_indices.default, "grad_output", *_POOLED),
    ),
    aten.max_pool3d_with_indices_backward.default: (
        *_index_gradient_rules(3),
        gives(aten.max_pool3d_with_indices.default, "grad_output", *_POOLED),
    ),
    aten.fractional_max_pool2d.default: _fractional(2),
    aten.fractional_max_pool3d.default: _fractional(3),
    aten.fractional_max_pool2d_backward.default: _index_gradient_rules(2),
    aten.max_unpool2d.default: (like("indices", "self"),),
    aten.max_unpool3d.default: (like("indices", "self"),),
    aten.avg_pool2d_backward.default: (gives(aten.avg_pool2d.default, "grad_output", *_AVERAGED), same_dtype("grad_output", "self")),
    aten.avg_pool3d_backward.default: (gives(aten.avg_pool3d.default, "grad_output", *_AVERAGED), same_dtype("grad_output", "self")),
    **_PADS,
    **_SMOOTHED,
    aten.mvlgamma.default: (_terms,),
    aten._neg_view.default: (holds("self is of a dtype that has negatives", lambda o: o["self"].dtype in NEGATED),),
    **{
        getattr(aten, f"grid_sampler_{space}d_backward").default: (
            gives(
                getattr(aten, f"grid_sampler_{space}d").default,
                "grad_output",
                "input",
                "grid",
                "interpolation_mode",
                "padding_mode",
                "align_corners",
            ),
            same_dtype("grad_output", "input", "grid"),
            _grid_fault,
        )
        for space in (2, 3)
    },
    aten._embedding_bag.default: _BAG,
    aten._embedding_bag_forward_only.default: _BAG,
    aten._embedding_bag_backward.default: (*_bag_gradient(operand("num_weights"), False), *_BAG_SIZES, *_OFFSETS),
    aten._embedding_bag_dense_backward.default: (*_bag_gradient(operand("num_weights"), True), *_BAG_SIZES),
    aten._embedding_bag_per_sample_weights_backward.default: (
        *_bag_gradient(size("weight", 0), False),
        *_OFFSETS,
        holds("weight has the columns of grad", lambda o: o["weight"].dim() == 2 and o["weight"].shape[1] == o["grad"].shape[1]),
        same_dtype("grad", "weight"),
    ),
    aten.embedding_dense_backward.default: (
        holds("grad_output has the shape of indices and one dim more", lambda o: o["grad_output"].shape[:-1] == o["indices"].shape),
        lambda o: within("indices", 0, operand("num_weights"))(o) if o["scale_grad_by_freq"] else None,
    ),
    aten._cdist_backward.default: (
        like("cdist", "grad"),
        same_dtype("grad", "x1", "x2", "cdist"),
        holds(
            "cdist is what x1 and x2 make",
            lambda o: o["cdist"].shape == aten._cdist_forward(o["x1"].to("meta"), o["x2"].to("meta"), o["p"], None).shape,
        ),
    ),
    aten._pdist_backward.default: (
        holds("grad and pdist have a number for each pair of rows", _pairs),
        same_dtype("grad", "self", "pdist"),
    ),
    aten._ctc_loss.default: _CTC,
    aten._ctc_loss.Tensor: _CTC,
    aten._ctc_loss_backward.default: (*_CTC, _alpha),
    aten._ctc_loss_backward.Tensor: (*_CTC, _alpha),
    aten.segment_reduce.default: _SEGMENTS,
    aten._segment_reduce_backward.default: (*_SEGMENTS, _reduced_segments),
    aten._grouped_mm.default: (ascending("offs", _grouped_dim_size),),
    aten.lu_unpack.default: (
        holds(
            "there is a pivot for each row or column",
            lambda o: o["LU_pivots"].shape == (*o["LU_data"].shape[:-2], min(o["LU_data"].shape[-2:])),
        ),
        within("LU_pivots", 1, lambda o: int(o["LU_data"].shape[-2]) + 1),
    ),
    aten.linalg_lu_solve.default: (
        holds("there is a pivot for each row", lambda o: o["pivots"].shape == o["LU"].shape[:-1]),
        within("pivots", 1, lambda o: int(o["LU"].shape[-1]) + 1),
    ),
    aten.linalg_ldl_solve.default: (_ldl_pivots,),
    aten.native_layer_norm_backward.default: (
        like("grad_out", "input"),
        holds("mean and rstd are a number for each row, weight and bias have the normalized shape", _layer_norm),
        same_dtype("grad_out", "input"),
        same_dtype("mean", "rstd"),
    ),
    aten.multilabel_margin_loss_backward.default: (
        within("target", -1, _classes),
        like("target", "self"),
        like("is_target", "self"),
        same_dtype("self", "is_target"),
    ),
    aten._softmax_backward_data.default: (
        like("output", "grad_output"),
        holds("input_dtype is that of grad_output", lambda o: o["input_dtype"] == o["grad_output"].dtype),
    ),
    aten._log_softmax_backward_data.default: (
        like("output", "grad_output"),
        holds("input_dtype is that of grad_output", lambda o: o["input_dtype"] == o["grad_output"].dtype),
    ),
    aten._fft_c2r.default: (_COUNTED, holds("the last of the dims is half of last_dim_size, and one", _half)),
    aten._fft_r2c.default: (_COUNTED,),
    aten._fft_c2c.default: (_COUNTED,),
    **_POLYNOMIALS,
    aten.lcm.default: (_no_least,),
    aten.gcd.default: (_no_least,),
    **_DIVISIONS,
}
"""Operator -> what must hold of its operands, asked in this order."""


def fault(target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """What is wrong with the operands of a call, meta tensors or real ones, in words."""
    rules = TRUSTING.get(target)
    if rules is None:
        return None
    operands = _operands_by_name(target, args, kwargs)
    try:
        return next((words for rule in rules if (words := rule(operands)) is not None), None)
    except (IndexError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"they are not of the kind that it takes: {error}"


def _operands_by_name(target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Operands:
    given = target._schema.arguments
    found = {argument.name: argument.default_value for argument in given}
    return found | dict(zip((argument.name for argument in given), args, strict=False)) | dict(kwargs)
