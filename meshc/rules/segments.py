"""Sharding rules of segmented operators: embedding bags, segment reductions, grouped matrix products, searchsorted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.ops import grouped_mm as _grouped_operators  # noqa: F401 - registers them
from meshc.ops import routed_mm as _routed_operators  # noqa: F401 - registers them
from meshc.rules.contraction import WEIGHT, product_flops
from meshc.rules.index import rows_bound
from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import EITHER, Operator, declarations
from meshc.rules.preconditions import Operands, Precondition, adds_up, ascending, holds, like, operand, same_dtype, size, within
from meshc.rules.rule import Local, Rule, by_text, dtype_of, einsum, letters_of, result_shapes, shape_of

aten = torch.ops.aten
meshc = torch.ops.meshc


def _embedding_bag(node: Node, tensors: list[Node]) -> Rule | None:
    """(weight [v, d], rows, offsets, weights of rows) -> bags [b, d], bag of each row, bag sizes, rows of the maxima."""
    if len(shape_of(tensors[1])) != 1:
        return None
    operands = ["v! d", "r!", "o!", *["r!"] * (len(tensors) - 3)]
    made = result_shapes(node)
    maxima = "y! d" if len(made[3]) == 2 else "y!"
    results = ["b! d", "x!" if made[1] != shape_of(tensors[1]) else "r!", "z!", maxima]
    return einsum(f"{', '.join(operands)} -> {' | '.join(results)}", node, tensors, lower=_lower_embedding_bag)


def _lower_embedding_bag(local: Local) -> list[Node]:
    """Except for mode `max`, the rows of the maxima differ from kernel to kernel, and nothing reads them. A kernel may leave out the bag
    of each row, which backward then recomputes."""
    made = local.call(*local.operands)
    found = [local.item(made, index) for index in range(4)]
    if list(local.out_shape(1)) == [0] != list(local.shape(found[1])):
        found[1] = local.emit(aten.slice.Tensor, found[1], 0, 0, 0)
    shape = list(local.out_shape(3))
    if list(local.shape(found[3])) != shape:
        found[3] = found[2]
    return found


def _embedding_bag_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad of the bags, rows, offsets, bag of each row, bag sizes, rows of the maxima, ...) -> grad of the weight."""
    lead = ["b! d", "r!", "o!", "x!", "z!"] if node.target is aten._embedding_bag_backward.default else ["b! d", "r!", "x!", "z!"]
    maxima = tensors[len(lead)]
    operands = [*lead, "y! d" if len(shape_of(maxima)) == 2 else "y!", *["w!"] * (len(tensors) - len(lead) - 1)]
    return einsum(f"{', '.join(operands)} -> v! d", node, tensors, clean=(len(lead),))


def _segment_reduce(node: Node, tensors: list[Node]) -> Rule | None:
    """(data, lengths or offsets) -> a row for each segment; dims after the segmented dim may be split."""
    axis = named_arguments(node)["axis"]
    data, lengths = tensors[0], tensors[-1]
    rank = len(shape_of(data))
    if axis % rank != len(shape_of(lengths)) - 1 or len(tensors) != 2:
        return None
    letters = letters_of(data, "a")
    # segments of different rows have different lengths, so padding would be no segment
    before, after = " ".join(f"{letter}!" for letter in letters[: axis % rank]), " ".join(letters[axis % rank + 1 :])
    return einsum(f"{before} r! {after}, {before} l! -> {before} s! {after}", node, tensors)


def _segment_reduce_backward(node: Node, tensors: list[Node]) -> Rule | None:
    grad, _, data, *rest = tensors
    if named_arguments(node)["axis"] % len(shape_of(data)) != 0 or len(rest) != 1:
        return None
    after = " ".join(letters_of(data, "a")[1:])
    return einsum(f"s! {after}, s! {after}, r! {after}, l! -> r! {after}", node, tensors)


def _grouped_mm(node: Node, tensors: list[Node]) -> Rule | None:
    """Runs of rows, each multiplied by its own matrix; `offs` are the ends of runs. With both operands in runs, a matrix for each run."""
    a, b = (len(shape_of(tensor)) for tensor in tensors[:2])
    if len(tensors) != 2 + ((a, b) != (3, 3)):
        return None
    text = {(2, 3): "r! k, g! k n, g! -> r! n +k", (3, 2): "g! m k, k c!, g! -> m c! +k", (2, 2): "m r!, r! n, g! -> g! m n"}
    return einsum(text.get((a, b), "g m k, g k n -> g m n +k"), node, tensors, lower=_lower_grouped_mm)


def _lower_grouped_mm(local: Local) -> Node:
    """The kernels require row strides that are multiples of 16 bytes: other tiles of k and n are padded with zeros."""
    a, b, *ends = local.operands
    if not any(local.axes(letter) for letter in "kn"):
        return local.call(a, b, *ends)
    unit = 16 // local.dtype(a).itemsize
    inner, columns = (-local.local_size(letter) % unit if letter in local.letters() else 0 for letter in "kn")
    a = _pad_zeros(local, a, [0, inner])
    b = _pad_zeros(local, b, [0, columns, 0, inner])
    made = local.call(a, b, *ends)
    return local.emit(aten.slice.Tensor, made, -1, 0, local.out_shape(0)[-1]) if columns else made


def _pad_zeros(local: Local, x: Node, amounts: list[int]) -> Node:
    return local.emit(aten.constant_pad_nd.default, x, amounts, 0.0) if any(amounts) else x


def _searchsorted(node: Node, tensors: list[Node]) -> Rule | None:
    """searchsorted(sorted rows, values): values may be split, the rows are whole."""
    rows, values = (shape_of(tensor) for tensor in tensors[:2])
    if len(tensors) != 2 or dtype_of(node) not in (torch.int64, torch.int32):
        return None
    if len(rows) == 1:
        return einsum("s!, ... -> ...", node, tensors)
    return einsum("... s!, ... v -> ... v", node, tensors) if len(values) == len(rows) else None


def _lower_bucketize(local: Local) -> Node:
    """bucketize(values, borders): the number of borders below each value, so counts of tiles of the borders add up."""
    values, borders = local.operands
    made = local.call(values, local.neutralise(borders, "s", float("inf"), 1))
    if not local.axes("s"):
        return made
    return local.emit(aten.clamp.default, made, None, local.count("s"))  # a value may be above the padding's borders too


_BAG_FITS = (
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


def _bag_gradient_fits(rows: Callable[[Operands], int], known: bool) -> tuple[Precondition, ...]:
    """`known`: the bag of each index has to be given; else it is found from the offsets where it is not."""

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


_BAG_SIZES_FIT = (
    holds("bag_size has a number for each bag", lambda o: o["mode"] == 0 or o["bag_size"].numel() == o["grad"].shape[0]),
    holds("maximum_indices have the shape of grad", lambda o: o["mode"] != 2 or o["maximum_indices"].shape == o["grad"].shape),
    like("per_sample_weights", "indices"),
    same_dtype("indices", "bag_size"),
    same_dtype("grad", "per_sample_weights"),
    holds("a gradient is dense", lambda o: not o.get("sparse", False)),
)
_OFFSETS_FIT = (
    holds("offsets are a list", lambda o: o["offsets"].dim() == 1 and (o["offsets"].numel() > 0 or o["indices"].numel() == 0)),
    same_dtype("indices", "offsets"),
    ascending("offsets", size("indices", 0)),
    holds("there are no more offsets than bags, and one", lambda o: o["offsets"].numel() <= o["grad"].shape[0] + 1),
)


def _segment_fault(o: Operands) -> str | None:
    axis, data = o["axis"], o["data"]
    cuts = o["lengths"] if o["lengths"] is not None else o["offsets"]
    if not 0 <= axis < data.dim() or cuts is None or cuts.dim() != axis + 1 or cuts.shape[:axis] != data.shape[:axis]:
        return "lengths or offsets have the dims of data before axis, and one more"
    if o["lengths"] is None and cuts.shape[-1] == 0:
        return "offsets begin with 0"
    return None


_SEGMENTS_FIT = (
    _segment_fault,
    adds_up("lengths", lambda o: int(o["data"].shape[o["axis"]])),
    ascending("offsets", lambda o: int(o["data"].shape[o["axis"]]), exactly=True),
)


def _reduced_segment_fault(o: Operands) -> str | None:
    axis, data = o["axis"], o["data"]
    cuts = o["lengths"].shape[-1] if o["lengths"] is not None else o["offsets"].shape[-1] - 1
    wanted = (*data.shape[:axis], cuts, *data.shape[axis + 1 :])
    fits = o["grad"].shape == o["output"].shape == wanted and o["grad"].dtype == o["output"].dtype == data.dtype
    return None if fits else f"grad and output are {list(wanted)}, of the dtype of data"


def _grouped_dim_size(o: Operands) -> int:
    one, two = o["self"], o["mat2"]
    return int(one.shape[0] if (one.dim(), two.dim()) == (2, 3) else two.shape[-1] if one.dim() == 3 else one.shape[-1])


OPERATORS = declarations({
    "_embedding_bag _embedding_bag_forward_only": Operator(_embedding_bag, bounds=rows_bound, preconditions=_BAG_FITS),
    "_embedding_bag_backward": Operator(
        _embedding_bag_backward,
        preconditions=(*_bag_gradient_fits(operand("num_weights"), False), *_BAG_SIZES_FIT, *_OFFSETS_FIT),
    ),
    "_embedding_bag_dense_backward": Operator(
        _embedding_bag_backward, preconditions=(*_bag_gradient_fits(operand("num_weights"), True), *_BAG_SIZES_FIT)
    ),
    "_embedding_bag_per_sample_weights_backward": Operator(
        by_text("b! d, v! d, r!, o!, x! -> r! +d"),
        preconditions=(
            *_bag_gradient_fits(size("weight", 0), False),
            *_OFFSETS_FIT,
            holds("weight has the columns of grad", lambda o: o["weight"].dim() == 2 and o["weight"].shape[1] == o["grad"].shape[1]),
            same_dtype("grad", "weight"),
        ),
    ),
    "segment_reduce": Operator(_segment_reduce, preconditions=_SEGMENTS_FIT),
    "_segment_reduce_backward": Operator(_segment_reduce_backward, preconditions=(*_SEGMENTS_FIT, _reduced_segment_fault)),
    "_grouped_mm": Operator(_grouped_mm, flops=product_flops, preconditions=(ascending("offs", _grouped_dim_size),)),
    "meshc.grouped_mm": Operator(by_text("r! k, g! k n, g! -> r! n +k", roles=WEIGHT), linear=EITHER, flops=product_flops),
    "meshc.grouped_outer": Operator(by_text("r! k, r! n, g! -> g! k n"), linear=EITHER, flops=product_flops),
    "meshc.routed_mm": Operator(by_text("r k, g! k n, r -> r n +k", clean=(2,), roles=WEIGHT), linear=EITHER, flops=product_flops),
    "meshc.routed_outer": Operator(by_text("r k, r n, r -> g! k n +r", clean=(2,)), linear=EITHER, flops=product_flops),
    "searchsorted.Tensor": Operator(_searchsorted),
    "bucketize.Tensor": Operator(
        by_text("..., s -> ... +s", lower=_lower_bucketize, self_masked=True, major={"s"}), monotone=rises_in_first
    ),
})
