"""Calls of operators that no sample of torch's makes: bags and sequences whose kernels trust what they are told, and meshc's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshc.ops.implementations import register_operators
from tests.attack.corpus import Call

aten, ops = torch.ops.aten, torch.ops.meshc
register_operators()
NUMBER = torch.tensor(0.1, dtype=torch.float64)


def _of(target: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(target.default if hasattr(target, "default") else target, args, kwargs)


def _x(*shape: int) -> Tensor:
    return torch.randn(shape)


def written() -> Iterator[Call]:
    yield from _bags()
    yield from _sequences()
    yield from _windows()
    yield from _own()
    yield from _scaled()


def _bags() -> Iterator[Call]:
    weight, indices, offsets = _x(10, 4), torch.tensor([1, 3, 9, 0, 2]), torch.tensor([0, 2])
    for mode in (0, 1, 2):
        for scale in (False, True):
            if scale and mode == 2:
                continue
            weights = _x(5) if mode == 0 else None
            bag = aten._embedding_bag_forward_only(weight, indices, offsets, scale, mode, False, weights)
            yield _of(aten._embedding_bag_forward_only, weight, indices, offsets, scale, mode, False, weights)
            which = torch.tensor([0, 0, 1, 1, 1])
            sizes, most = torch.tensor([2, 3]), bag[3] if mode == 2 else torch.zeros(2, dtype=torch.int64)
            yield _of(aten._embedding_bag_dense_backward, _x(2, 4), indices, which, sizes, most, 10, scale, mode, weights)
    yield _of(aten.embedding_dense_backward, _x(2, 3, 4), torch.randint(0, 10, (2, 3)), 10, -1, True)


def _sequences() -> Iterator[Call]:
    chances, targets = torch.log_softmax(_x(6, 3, 5), -1), torch.tensor([[1, 2, 3], [1, 1, 2], [4, 3, 2]])
    for labels in (targets, targets[:, :2].reshape(-1)):
        lengths = [6, 5, 4], [3, 2, 1] if labels.dim() == 2 else [2, 2, 2]
        tensors = tuple(map(torch.tensor, lengths))
        for overload, given in ((aten._ctc_loss.default, lengths), (aten._ctc_loss.Tensor, tensors)):
            loss, alpha = overload(chances, labels, *given)
            yield _of(overload, chances, labels, *given)
            backward = aten._ctc_loss_backward.default if overload is aten._ctc_loss.default else aten._ctc_loss_backward.Tensor
            yield _of(backward, _x(3), chances, labels, *given, loss, alpha, 0)
    lengths_as_tensors = torch.tensor([6, 5, 4]), torch.tensor([3, 2, 1])
    yield _of(ops.ctc_loss, chances, targets, *lengths_as_tensors, 0, True)
    yield _of(ops.ctc_loss_backward, _x(3), chances, targets, *lengths_as_tensors, 0, True)
    rows, matrices = _x(8, 16).bfloat16(), _x(2, 16, 8).bfloat16()
    yield _of(aten._grouped_mm, rows, matrices, torch.tensor([3, 8], dtype=torch.int32))


def _windows() -> Iterator[Call]:
    for space in (2, 3):
        x = _x(2, 3, *[6] * space)
        for kind in ("reflection", "replication"):
            forward, backward = (getattr(aten, f"{kind}_pad{space}d{end}") for end in ("", "_backward"))
            yield _of(forward, x, [1, 2] * space)
            yield _of(backward, torch.ones_like(forward(x, [1, 2] * space)), x, [1, 2] * space)
        yield _of(getattr(aten, f"upsample_nearest{space}d"), x, [12] * space)
        yield _of(getattr(aten, f"upsample_nearest{space}d_backward"), _x(2, 3, *[12] * space), [12] * space, list(x.shape))
    for smoothed in (aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa):
        yield _of(smoothed, _x(2, 3, 4, 6), [6, 9], False, 1.5, 1.5)
    yield _of(aten._upsample_bilinear2d_aa_backward, _x(2, 3, 6, 9), [6, 9], [2, 3, 4, 6], False, 1.5, 1.5)
    yield _of(aten.native_layer_norm_backward, _x(4, 6), _x(4, 6), [6], _x(4, 1), _x(4, 1), _x(6), _x(6), [True, True, True])
    yield _of(aten.lcm, torch.tensor([4, 6]), torch.tensor([6, 9]))
    numbers = torch.tensor([4, -6])
    for op in (aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor):
        yield _of(op, numbers, torch.tensor([-1, 3]))
    yield _of(aten.div.Tensor_mode, numbers, torch.tensor([-1, 3]), rounding_mode="floor")
    yield _of(aten.div.Tensor_mode, numbers, torch.tensor([-1, 3]), rounding_mode="trunc")
    for op in (aten.remainder.Scalar, aten.fmod.Scalar, aten.floor_divide.Scalar):
        yield _of(op, numbers, -1)


def _delta_rule() -> Iterator[Call]:
    keys, values, decays, state = _x(2, 5, 3), _x(2, 5, 4), -_x(2, 5).abs(), _x(2, 3, 4)
    yield _of(ops.delta_rule, keys, keys, values, keys, decays, state)
    yield _of(ops.delta_rule_backward, values, keys, keys, values, keys, decays, None, state)
    yield _of(ops.delta_rule_end, keys, values, keys, decays)
    yield _of(ops.delta_rule_ends, values, keys, keys, values, keys, decays)
    yield _of(ops.delta_rule_join, _x(3, 2, 3, 3), _x(3, 2, 3, 4), state, 1, True)


def _turns() -> Iterator[Call]:
    keys, values, decays, state = _x(2, 4, 5, 3), _x(2, 4, 5, 4), -_x(2, 4, 5).abs(), _x(2, 4, 3, 4)
    handed, turn = _x(1, 2, 2, 3, 4), (1, 1, 2, 1, 2)
    yield _of(ops.delta_rule_turn, keys, keys, values, keys, decays, state, handed, *turn)
    yield _of(ops.delta_rule_state_turn, keys, values, keys, decays, None, handed, *turn)
    yield _of(ops.delta_rule_backward_turn, values, keys, keys, values, keys, decays, state, state, handed, *turn)
    x = _x(4, 6)
    yield _of(ops.recurrence_turn, x, x, _x(1, 2, 1), 1, 0, 1, 2, 1, 2)
    yield _of(ops.recurrence_backward_turn, x, x, x, _x(4, 1), _x(1, 2, 1), 1, 0, 1, 2, 0, 2)
    gates, weight, grad, kept, states = _x(5, 4, 12), _x(12, 3), _x(5, 4, 3), _x(5, 4, 18), _x(2, 4, 3)
    yield _of(ops.rnn, "lstm", gates, weight, _x(12), states, True)
    yield _of(ops.rnn_backward, "lstm", grad, states, kept, weight, True)
    yield _of(ops.rnn_turn, "lstm", gates, weight, None, states, _x(1, 2, 2, 3), False, 4, 1, 2, 1, 2)
    yield _of(ops.rnn_turn_backward, "lstm", grad, states, _x(1, 2, 2, 3), kept, weight, False, 4, 1, 2, 1, 2)
    yield _of(ops.in_turn, [x, x, x], 0, 1, 2, False)


def _own() -> Iterator[Call]:
    seed, x = torch.tensor([5, 3]), _x(4, 6)
    tile: tuple[Any, ...] = ([4, 6], [4, 6], [0, 0])
    for op in (ops.uniform, ops.normal):
        yield _of(op, seed, 1, *tile, torch.float32)
    yield _of(ops.keep_mask, seed, 1, 0.5, *tile)
    yield _of(ops.dropout, x, seed, 1, 0.5, *tile)
    yield _of(ops.dropout_backward, x, x > 0, 0.5)
    index = torch.tensor([0, 5, -100, 2])
    yield _of(ops.take, x, index, -100)
    yield _of(ops.take_backward, _x(4), index, -100, 6)
    yield _of(ops.recurrence, x, x, _x(4, 1), 1)
    yield _of(ops.recurrence_end, x, x, 0, True)
    yield _of(ops.recurrence_backward, x, x, x, _x(4, 1), _x(4, 1), 1)
    yield _of(ops.cumsum_back, x, 1)
    yield _of(ops.logcumsumexp_back, x, 0)
    yield from _delta_rule()
    yield from _turns()
    image = _x(2, 3, 4, 4)
    yield _of(ops.upsample, image, [2, 2])
    yield _of(ops.upsample_backward, image, [2, 2])
    yield _of(ops.square_sum, x)
    yield _of(ops.sum_of_parts, x)
    ends, choice = torch.tensor([1, 4]), torch.tensor([0, 1, 1, 0])
    yield _of(ops.grouped_mm, x, _x(2, 6, 3), ends)
    yield _of(ops.grouped_outer, x, _x(4, 3), ends)
    yield _of(ops.routed_mm, x, _x(2, 6, 3), choice)
    yield _of(ops.routed_outer, x, _x(4, 3), choice, 2)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]])
    own, slot = ops.group_choices(chosen, 2, 2, 2, 0)
    yield _of(ops.choices_to_slots, chosen, torch.tensor([2, 0, 1]))
    yield _of(ops.experts_by_slot, torch.tensor([2, 0, 1]))
    copies = torch.tensor([[2], [0]])
    yield _of(ops.choices_to_places, chosen, copies, torch.arange(4), 2)
    yield _of(ops.copies_of, _x(3, 4), copies)
    yield _of(ops.added_copies, _x(2, 1, 4), copies, 3)
    yield _of(ops.by_group, _x(3, 4), 2, 2)
    yield _of(ops.in_line, _x(2, 2, 4), 3)
    yield _of(ops.in_order, _x(3, 4), torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0]))
    yield _of(ops.group_choices, chosen, 2, 2, 2, 0)
    yield _of(ops.to_groups, x, own)
    yield _of(ops.from_groups, _x(2, 4, 2, 6), own)
    yield _of(ops.in_slots, _x(2, 4, 6), own)
    yield _of(ops.over_slots, _x(2, 4, 2, 6), own)
    place = ops.bounded_choices(chosen.view(2, 2, 2), 2, 2, 3, 0, 2, "")[1]
    yield _of(ops.bounded_choices, chosen.view(2, 2, 2), 2, 2, 3, 0, 2, "")
    yield _of(ops.counts_of_rows, chosen.view(2, 2, 2), 3)
    yield _of(ops.first_choices, chosen.view(2, 2, 2), torch.zeros(2, 3, dtype=torch.int64), 1, False, "")
    yield _of(ops.heaviest_choices, chosen.view(2, 2, 2), _x(2, 2, 2), 3, 1, False, "")
    yield _of(ops.to_places, _x(2, 2, 6), place, 2)
    yield _of(ops.in_places, _x(2, 2, 2, 6), place, 2)
    yield _of(ops.from_places, _x(2, 2, 3, 6), place, 2, 2)
    yield _of(ops.over_places, _x(2, 2, 3, 6), place, 2, 2)
    yield _of(ops.weights_of_groups, _x(4, 2), own, slot)
    yield _of(ops.weights_to_tokens, _x(2, 4, 2), own, slot, 2)
    yield _of(ops.group_mm, _x(2, 8, 6), _x(3, 6, 5), own.flatten(1), 2, 0.5)
    yield _of(ops.group_outer, _x(2, 8, 6), _x(2, 8, 5), own.flatten(1), 2, 3, 0.5)
    used, ends = ops.used_rows(torch.zeros(1, 4, 2, dtype=torch.int64), 2)
    rows = ops.rows_of_tokens(x, used, 2)
    yield _of(ops.used_rows, torch.zeros(1, 4, 2, dtype=torch.int64), 2)
    yield _of(ops.rows_of_tokens, x, used, 2)
    yield _of(ops.rows_of_places, rows, used)
    yield _of(ops.used_mm, rows, _x(2, 6, 5), ends, 0.5)
    yield _of(ops.used_outer, rows, rows, ends, 0.5)
    yield _of(ops.tokens_of_rows, rows, used, 4, 2)
    yield _of(ops.places_of_rows, rows, used, 8)
    yield _of(ops.rows_spread, rows, 2, 14, 1, 2)
    q, bias = _x(1, 2, 5, 8), _x(1, 1, 5, 5)
    for how in ((None, False, 0.3), (bias, False, 0.3), (None, True, 0.3), (None, True, 0.3, 2, 1, 1)):
        out, lse = ops.attention(q, q, q, *how)
        yield _of(ops.attention, q, q, q, *how)
        yield _of(ops.attention_backward, q, q, q, q, how[0], out, lse, *how[1:])
        numbers = (*how[3:5], 0, 0)[:2] + (5, 3, 4)
        yield _of(ops.attention, q, q, q, *how[:3], *numbers)
        yield _of(ops.attention_backward, q, q, q, q, how[0], out, lse, *how[1:3], *numbers)
        yield _of(ops.attention_merge, out, lse, out, lse)
    out, lse = ops.attention(q, q, q, None, True, 0.3)
    yield _of(ops.attention_zigzag, q, q, q, 0.3, 1, 0, 2, 9)
    yield _of(ops.attention_zigzag_backward, q, q, q, q, out, lse, 0.3, 1, 0, 2, 9)
    moments, count = (x, _x(4, 6), _x(4, 6), _x(4, 6).abs()), torch.ones(())
    adam, sgd = (*[NUMBER] * 5, True, False), (*[NUMBER] * 4, True, False)
    yield _of(ops.adam, *moments, count, *adam)
    yield _of(ops.adam_amsgrad, *moments, _x(4, 6).abs(), count, *adam)
    yield _of(ops.adam_many_, *([one.clone()] * 2 for one in (*moments, count)), *adam)
    yield _of(ops.adam_amsgrad_many_, *([one.clone()] for one in (*moments, moments[3], count)), *adam)
    yield _of(ops.sgd, *moments[:3], torch.zeros(()), *sgd)
    yield _of(ops.sgd_many_, *([one.clone()] for one in (*moments[:3], torch.zeros(()))), *sgd)
    yield _of(ops.sgd_plain, x, x, NUMBER, NUMBER, False)
    yield _of(ops.sgd_plain_many_, [x.clone()], [x], NUMBER, NUMBER, False)


def _scaled() -> Iterator[Call]:
    """Products of scaled 8-bit values: one scale each, one for each row, one for blocks of 128; of groups in runs, and of groups."""
    eight = torch.float8_e4m3fn
    a, b = _x(16, 256).to(eight), _x(128, 256).to(eight).t()
    one, rows, columns, blocks = torch.tensor(0.5), _x(16, 1).abs(), _x(1, 128).abs(), (_x(16, 2).abs(), _x(2, 1).abs())
    for scales in ((one, one), (rows, columns)):
        yield _of(aten._scaled_mm, a, b, *scales, _x(128), None, torch.float32, False)
        recipe = [scales[0].dim() // 2]
        yield _of(aten._scaled_mm_v2, a, b, [scales[0]], recipe, [], [scales[1]], recipe, [], None, torch.float32)
        yield _of(ops.decoded_mm, a, b, *scales, _x(128), None, torch.bfloat16, False)
    yield _of(ops.decoded_mm, a, b, *blocks, None, one, eight, True)
    ends, groups = torch.tensor([3, 8, 16], dtype=torch.int32), _x(3, 128, 256).to(eight).transpose(1, 2)
    yield _of(ops.decoded_grouped_mm, a, groups, rows.reshape(16), _x(3, 128).abs(), ends, torch.bfloat16, False)
    yield _of(ops.decoded_grouped_mm, _x(3, 8, 256).to(eight), b[:, :16], _x(3, 8).abs(), rows.reshape(16), ends, torch.bfloat16, False)
    yield _of(ops.decoded_grouped_mm, a.t()[:, :16].t(), a.t()[:, :16], _x(48).abs(), _x(48).abs(), ends * 16, torch.bfloat16, False)
    yield _of(ops.decoded_grouped_mm, _x(3, 8, 256).to(eight), groups, _x(3, 8).abs(), _x(3, 128).abs(), None, torch.bfloat16, False)
