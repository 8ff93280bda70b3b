"""Calls of meshc's own operators with operands that do not fit together, fake ones and then real ones: run as a program, one line a call,
`KIND: NAME: what it raised`.

A kernel that walked one operand by the sizes of another would end this process: operands lie before pages that nobody may touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshc.ops.implementations import register_operators
from tests.attack.pages import Fenced

ops = torch.ops.meshc
register_operators()
MANY = 1 << 14
SEED = torch.tensor([5, 3])
NUMBER = torch.tensor(0.1, dtype=torch.float64)
ADAM = (*[NUMBER] * 5, True, False)
SGD = (*[NUMBER] * 4, True, False)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def ints(*shape: int, value: int = 0) -> Tensor:
    return torch.full(shape, value)


def heads(*shape: int) -> Tensor:
    return x(*shape, 16)


def calls() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    yield "mask is shorter", ops.dropout_backward, (x(MANY), x(8, dtype=torch.bool), 0.5)
    yield "mask is float", ops.dropout_backward, (x(MANY), x(MANY), 0.5)
    yield "mask is wider", ops.dropout_backward, (x(4, 1), x(4, 4, dtype=torch.bool), 0.5)
    yield "seed is empty", ops.uniform, (ints(0), 0, [8], [8], [0], torch.float32)
    yield "seed is float", ops.normal, (x(2), 0, [8], [8], [0], torch.float64)
    yield "seed is int32", ops.keep_mask, (SEED.int(), 0, 0.5, [8], [8], [0])
    yield "x is shorter than its tile", ops.dropout, (x(8), SEED, 0, 0.5, [MANY], [MANY], [0])
    yield "no seed for dropout", ops.dropout, (x(8), ints(1), 0, 0.5, [8], [8], [0])
    yield "negative tile", ops.uniform, (SEED, 0, [-8], [-8], [0], torch.float32)
    yield "tile of other rank", ops.uniform, (SEED, 0, [8, 8], [8], [0], torch.float32)
    yield "factors of fewer steps", ops.recurrence, (x(8, 3), x(8, 4), None, 1)
    yield "another dtype", ops.recurrence, (x(8, 4), x(8, 4, dtype=torch.float64), None, 1)
    yield "no such dim", ops.recurrence_end, (x(8, 4), x(8, 4), 2, False)
    yield "a state of several steps", ops.recurrence, (x(8, 4), x(8, 4), x(8, 4), 1)
    yield "gradients of fewer steps", ops.recurrence_backward, (x(8, 3), x(8, 4), x(8, 4), None, None, 1)
    yield "a gradient from beyond of other rows", ops.recurrence_backward, (x(8, 4), x(8, 4), x(8, 4), None, x(7, 1), 1)
    yield "a scan along no dim", ops.cumsum_back, (x(8, 3), 2)
    yield "a scan of integers", ops.logcumsumexp_back, (ints(8), 0)
    yield "delta: keys of fewer steps", ops.delta_rule, (x(8, 4), x(7, 4), x(8, 3), x(8, 4), x(8), None)
    yield "delta: a decay for each key", ops.delta_rule, (x(8, 4), x(8, 4), x(8, 3), x(8, 4), x(8, 4), None)
    yield "delta: a state of other values", ops.delta_rule, (x(8, 4), x(8, 4), x(8, 3), x(8, 4), x(8), x(4, 4))
    yield "delta: fewer gradients", ops.delta_rule_backward, (x(8, 2), x(8, 4), x(8, 4), x(8, 3), x(8, 4), x(8), None, None)
    yield "delta: half precision", ops.delta_rule_end, tuple(one.half() for one in (x(8, 4), x(8, 3), x(8, 4), x(8)))
    yield "delta: gradients of fewer steps", ops.delta_rule_ends, (x(7, 3), x(8, 4), x(8, 4), x(8, 3), x(8, 4), x(8))
    yield "delta: products of other keys", ops.delta_rule_join, (x(2, 4, 4), x(2, 3, 3), None, 1, False)
    gates, weight, states = x(8, 4, 12), x(12, 3), x(2, 4, 3)
    turn = (1, 2, 1, 2)
    yield "rnn: no such kind", ops.rnn, ("cell", gates, weight, None, None, False)
    yield "rnn: gates of another layer", ops.rnn, ("gru", gates, weight, None, None, False)
    yield "rnn: a state of fewer rows", ops.rnn, ("lstm", gates, weight, None, x(2, 3, 3), False)
    yield "rnn: another dtype", ops.rnn, ("lstm", gates, weight.double(), None, None, False)
    yield "rnn: kept of fewer steps", ops.rnn_backward, ("lstm", x(8, 4, 3), None, x(7, 4, 18), weight, False)
    yield "rnn: more steps than positions", ops.rnn_turn, ("lstm", gates, weight, None, states, None, False, 9, *turn)
    yield "rnn: parts that do not divide rows", ops.rnn_turn, ("lstm", gates, weight, None, states, None, False, 8, 0, 3, 1, 2)
    yield "rnn: no such turn", ops.rnn_turn, ("lstm", gates, weight, None, states, None, False, 8, 3, 2, 1, 2)
    yield "rnn: handed on of all rows", ops.rnn_turn, ("lstm", gates, weight, None, states, x(1, 2, 4, 3), False, 8, *turn)
    yield "rnn: handed back of all rows", ops.rnn_turn_backward, (
        "lstm", x(8, 4, 3), states, x(1, 2, 4, 3), x(8, 4, 18), weight, False, 8, *turn,
    )  # fmt: skip
    yield "turns: of two sizes", ops.in_turn, ([x(4, 2), x(4, 3)], 0, 0, 2, False)
    yield "turns: fewer than ranks", ops.in_turn, ([x(4, 2)], 0, 0, 2, False)
    yield "recurrence: parts of the steps", ops.recurrence_turn, (x(8, 4), x(8, 4), None, 1, 1, *turn)
    yield "recurrence: handed on of all rows", ops.recurrence_turn, (x(8, 4), x(8, 4), x(1, 8, 1), 1, 0, *turn)
    yield "recurrence: the last h of fewer rows", ops.recurrence_backward_turn, (*[x(8, 4)] * 3, x(7, 1), None, 1, 0, *turn)
    delta = (x(8, 5, 4), x(8, 5, 3), x(8, 5, 4), x(8, 5))
    yield "delta: parts of the steps", ops.delta_rule_turn, (x(8, 5, 4), *delta, None, None, 1, *turn)
    yield "delta: handed on of all rows", ops.delta_rule_state_turn, (*delta, None, x(1, 8, 4, 3), 0, *turn)
    yield "delta: begins with other keys", ops.delta_rule_backward_turn, (
        x(8, 5, 3), x(8, 5, 4), *delta, x(8, 3, 3), None, None, 0, *turn,
    )  # fmt: skip
    yield "slots in two dims", ops.experts_by_slot, (ints(4, 1),)
    yield "an order of fewer experts", ops.in_order, (x(4, 3), ints(4), ints(3))
    yield "fewer labels", ops.take, (x(8, 4), ints(2), -100)
    yield "labels are int32", ops.take, (x(8, 4), ints(8).int(), -100)
    yield "more labels", ops.take_backward, (x(8), ints(9), -100, 4)
    yield "negative columns", ops.take_backward, (x(8), ints(8), -100, -4)
    frames, said = x(6, 3, 5), (ints(3, value=6), ints(3, value=2))
    yield "targets of fewer rows", ops.ctc_loss, (frames, ints(2, 4), *said, 0, False)
    yield "a blank that is no class", ops.ctc_loss, (frames, ints(3, 4), *said, 5, False)
    yield "lengths are int32", ops.ctc_loss, (frames, ints(3, 4), said[0].int(), said[1], 0, False)
    yield "gradients of fewer rows", ops.ctc_loss_backward, (x(2), frames, ints(3, 4), *said, 0, False)
    yield "fewer factors", ops.upsample, (x(2, 3, 4, 4), [2])
    yield "a factor of zero", ops.upsample, (x(2, 3, 4), [0])
    yield "a factor that does not divide", ops.upsample_backward, (x(2, 3, 5), [2])
    yield "a negative factor", ops.upsample_backward, (x(2, 3, 4), [-2])
    yield "rows of other width", ops.grouped_mm, (x(8, 4), x(2, 5, 3), ints(2))
    yield "more ends than matrices", ops.grouped_mm, (x(8, 4), x(2, 4, 3), ints(3))
    yield "ends are float", ops.grouped_mm, (x(8, 4), x(2, 4, 3), x(2))
    yield "right has fewer rows", ops.grouped_outer, (x(8, 4), x(2, 4), ints(2, value=8))
    yield "fewer choices", ops.routed_mm, (x(8, 4), x(2, 4, 4), ints(2))
    yield "choices in two dims", ops.routed_mm, (x(8, 4), x(2, 4, 4), ints(8, 1))
    yield "negative count", ops.routed_outer, (x(8, 4), x(8, 4), ints(8), -1)
    yield "right has more rows", ops.routed_outer, (x(8, 4), x(9, 4), ints(8), 2)
    yield "choices are float", ops.group_choices, (x(8, 2), 2, 2, 2, 0)
    yield "slots are int32", ops.choices_to_slots, (ints(8, 2), ints(4).int())
    yield "numbers of fewer rows", ops.choices_to_places, (ints(8, 2), ints(2, 1), ints(4), 2)
    yield "copies are int32", ops.choices_to_places, (ints(8, 2), ints(2, 1).int(), ints(8), 2)
    yield "copies in one dim", ops.copies_of, (x(8, 4), ints(2))
    yield "gradients of other copies", ops.added_copies, (x(2, 2, 4), ints(2, 1), 8)
    yield "groups of fewer slots", ops.by_group, (x(8, 4), 2, 3)
    yield "rows of fewer groups", ops.in_line, (x(2, 4, 3), 9)
    yield "groups of nothing", ops.group_choices, (ints(8, 2), 2, 0, 2, 0)
    yield "more than are chosen", ops.group_choices, (ints(8, 2), 2, 2, 3, 0)
    yield "choices of fewer rows", ops.to_groups, (x(8, 4), ints(2, 4, 2))
    yield "rows of other choices", ops.from_groups, (x(2, 8, 2, 4), ints(2, 8, 1))
    yield "rows of other groups", ops.in_slots, (x(2, 8, 4), ints(1, 8, 2))
    yield "slots of other rows", ops.over_slots, (x(2, 8, 2, 4), ints(2, 4, 2))
    yield "choices in two dims of three", ops.bounded_choices, (ints(8, 2), 2, 2, 2, 0, 2, "")
    yield "negative places", ops.bounded_choices, (ints(2, 8, 2), 2, 2, -2, 0, 2, "")
    yield "choices of no experts", ops.counts_of_rows, (ints(2, 8, 2), 0)
    yield "counts of fewer rows", ops.first_choices, (ints(4, 8, 2), ints(2, 4), 2, False, "")
    yield "counts are float", ops.first_choices, (ints(2, 8, 2), x(2, 4), 2, False, "")
    yield "a capacity of nothing", ops.first_choices, (ints(2, 8, 2), ints(2, 4), 0, False, "")
    yield "weights of fewer choices", ops.heaviest_choices, (ints(2, 8, 2), x(2, 8, 1), 4, 2, False, "")
    yield "places of fewer rows", ops.to_places, (x(4, 8, 4), ints(2, 2, 8), 2)
    yield "places of other groups", ops.in_places, (x(3, 4, 8, 4), ints(2, 4, 8), 2)
    yield "rows of other places", ops.from_places, (x(2, 4, 8, 4), ints(2, 4, 7), 8, 2)
    yield "places of no choices", ops.over_places, (x(2, 4, 8, 4), ints(2, 4, 8), 8, 0)
    yield "slots are shorter", ops.weights_of_groups, (x(8, 2), ints(2, 8, 2), ints(2, 4, 2))
    yield "no slots", ops.weights_to_tokens, (x(2, 8, 2), ints(2, 8, 2), ints(2, 8, 2), 0)
    yield "rows of groups of other width", ops.group_mm, (x(2, 8, 4), x(4, 5, 3), ints(2, 8), 2, 0.5)
    yield "choices of one group", ops.group_mm, (x(2, 8, 4), x(4, 4, 3), ints(1, 8), 2, 0.5)
    yield "rows of one group", ops.group_outer, (x(2, 8, 4), x(1, 8, 4), ints(2, 8), 2, 4, 0.5)
    yield "a negative count of matrices", ops.group_outer, (x(2, 8, 4), x(2, 8, 4), ints(2, 8), 2, -1, 0.5)
    yield "choices of several groups", ops.used_rows, (ints(2, 8, 2), 4)
    yield "choices of no experts at all", ops.used_rows, (ints(1, 8, 2), 0)
    yield "places are int32", ops.rows_of_tokens, (x(8, 4), ints(1, 6).int(), 2)
    yield "places of no choices of a token", ops.rows_of_tokens, (x(8, 4), ints(1, 6), 0)
    yield "places of several groups", ops.rows_of_places, (x(1, 8, 4), ints(2, 6))
    yield "used rows of other width", ops.used_mm, (x(1, 8, 4), x(2, 5, 3), ints(2), 0.5)
    yield "ends of fewer experts", ops.used_mm, (x(1, 8, 4), x(2, 4, 3), ints(1), 0.5)
    yield "right has fewer used rows", ops.used_outer, (x(1, 8, 4), x(1, 2, 4), ints(2), 0.5)
    yield "rows of fewer places", ops.tokens_of_rows, (x(1, 8, 4), ints(1, 6), 8, 2)
    yield "rows of negative places", ops.tokens_of_rows, (x(1, 8, 4), ints(1, 8), -8, 2)
    yield "rows of more places", ops.places_of_rows, (x(1, 8, 4), ints(1, 9), 16)
    yield "a slice beyond its dim", ops.rows_spread, (x(1, 8, 4), 2, 6, 3, 1)
    yield "a slice of the rows", ops.rows_spread, (x(1, 8, 4), 1, 16, 0, 1)
    yield "keys of one head", ops.attention, (heads(4, 8, 128), heads(1, 1, 128), heads(1, 1, 128), None, False, 1.0)
    yield "fewer values", ops.attention, (heads(2, 2, 128), heads(2, 2, 128), heads(2, 2, 1), None, False, 1.0)
    yield "fewer values in a window", ops.attention, (heads(2, 2, 128), heads(2, 2, 128), heads(2, 2, 1), None, True, 1.0, 4)
    yield "bias is shorter", ops.attention, (heads(2, 2, 128), heads(2, 2, 128), heads(2, 2, 128), x(1, 1, 1, 2), False, 1.0)
    yield "keys are bfloat16", ops.attention, (heads(2, 2, 8), heads(2, 2, 8).bfloat16(), heads(2, 2, 8), None, False, 1.0)
    whole = heads(2, 2, 128)
    yield "one sum", ops.attention_backward, (whole, whole, whole, whole, None, whole, x(1, 1, 1), False, 1.0)
    yield "out is shorter", ops.attention_backward, (whole, whole, whole, whole, None, heads(2, 2, 1), x(2, 2, 128), False, 1.0)
    yield "gradient is shorter", ops.attention_backward, (heads(2, 2, 1), whole, whole, whole, None, whole, x(2, 2, 128), False, 1.0)
    block = 0, 0, 0, 0, 128
    yield "block: keys of one head", ops.attention, (heads(4, 8, 128), heads(1, 1, 128), heads(1, 1, 128), None, False, 1.0, *block)
    yield "block: fewer values", ops.attention, (whole, whole, heads(2, 2, 1), None, True, 1.0, *block)
    yield "block: bias is shorter", ops.attention, (whole, whole, whole, x(1, 1, 1, 2), False, 1.0, *block)
    yield "block: one sum", ops.attention_backward, (whole, whole, whole, whole, None, whole, x(1, 1, 1), False, 1.0, *block)
    yield "block: out is shorter", ops.attention_backward, (
        whole, whole, whole, whole, None, heads(2, 2, 1), x(2, 2, 128), False, 1.0, *block,
    )  # fmt: skip
    drawn = (SEED, 0, 0.5, [2, 2, 128, 128], [2, 2, 128, 128], [0, 0, 0, 0])
    here, short = (False, 1.0, 0, 0, 0, 0, None), (SEED, 0, 0.5, [2, 2, 128, 8], [2, 2, 128, 8], [0, 0, 0, 0])
    yield "dropout: keys of one head", ops.attention, (whole, heads(1, 1, 128), heads(1, 1, 128), None, *here, *drawn)
    yield "dropout: bias is shorter", ops.attention, (whole, whole, whole, x(1, 1, 1, 2), *here, *drawn)
    yield "dropout: draws of fewer keys", ops.attention, (whole, whole, whole, None, *here, *short)
    yield "dropout: draws without a seed", ops.attention, (whole, whole, whole, None, *here, None, *drawn[1:])
    yield "dropout: a seed without draws", ops.attention, (whole, whole, whole, None, *here, SEED)
    yield "dropout: one sum", ops.attention_backward, (whole, whole, whole, whole, None, whole, x(1, 1, 1), *here, *drawn)
    yield "dropout: draws of fewer keys backward", ops.attention_bias_backward, (
        whole, whole, whole, whole, x(1, 1, 1, 128), whole, x(2, 2, 128), *here, *short
    )  # fmt: skip
    yield "zigzag: keys of one head", ops.attention_zigzag, (heads(4, 8, 128), heads(1, 1, 128), heads(1, 1, 128), 1.0, 0, 0, 2, 256)
    yield "zigzag: fewer keys", ops.attention_zigzag, (whole, heads(2, 2, 1), heads(2, 2, 1), 1.0, 0, 0, 2, 256)
    yield "zigzag: one sum", ops.attention_zigzag_backward, (whole, whole, whole, whole, whole, x(1, 1, 1), 1.0, 0, 0, 2, 256)
    yield "zigzag: fewer keys backward", ops.attention_zigzag_backward, (
        whole, whole, heads(2, 2, 1), heads(2, 2, 1), whole, x(2, 2, 128), 1.0, 0, 0, 2, 256,
    )  # fmt: skip
    yield "join: no parts", ops.attention_join, (x(0, 2, 2, 8, 5),)
    yield "join: parts are bfloat16", ops.attention_join, (x(2, 2, 2, 8, 5).bfloat16(),)
    yield "merge: fewer sums", ops.attention_merge, (whole, x(2, 2, 1), whole, x(2, 2, 128))
    yield "merge: a part is shorter", ops.attention_merge, (whole, x(2, 2, 128), heads(2, 2, 1), x(2, 2, 128))
    yield "merge: sums are bfloat16", ops.attention_merge, (whole, x(2, 2, 128).bfloat16(), whole, x(2, 2, 128).bfloat16())
    yield "adam: moments are shorter", ops.adam, (x(MANY), x(MANY), x(4), x(4), x(), *ADAM)
    yield "adam: gradient is shorter", ops.adam, (x(MANY), x(4), x(MANY), x(MANY), x(), *ADAM)
    yield "adam: no count", ops.adam, (x(MANY), x(MANY), x(MANY), x(MANY), x(0), *ADAM)
    short = [x(4)], [x(4)], [x(4)], [x(2)], [x()]
    yield "adam_many_: one moment is shorter", ops.adam_many_, (*short, *ADAM)
    yield "adam_many_: fewer moments", ops.adam_many_, ([x(4)] * 2, [x(4)] * 2, [x(4)], [x(4)] * 2, [x()] * 2, *ADAM)
    yield "adam_amsgrad: maximum is shorter", ops.adam_amsgrad, (x(MANY), x(MANY), x(MANY), x(MANY), x(4), x(), *ADAM)
    yield "sgd: buffer is shorter", ops.sgd, (x(MANY), x(MANY), x(4), x(), *SGD)
    yield "sgd_many_: buffer is shorter", ops.sgd_many_, ([x(MANY)], [x(MANY)], [x(4)], [x()], *SGD)
    yield "sgd: no flag", ops.sgd, (x(MANY), x(MANY), x(MANY), x(0), *SGD)
    yield "sgd_plain: gradient is shorter", ops.sgd_plain, (x(MANY), x(4), NUMBER, NUMBER, False)
    half = x(8).bfloat16()
    for kind in ("round_state", "round_state_"):
        call = getattr(ops, kind)
        yield f"{kind}: value is shorter", call, (half, x(4), SEED, "w", [8], [8], [0])
        yield f"{kind}: tile is longer", call, (half, x(8), SEED, "w", [MANY], [MANY], [0])
        yield f"{kind}: state is float32", call, (x(8), x(8), SEED, "w", [8], [8], [0])
        yield f"{kind}: seed is short", call, (half, x(8), ints(1), "w", [8], [8], [0])
    codes, tile = x(2, 300, dtype=torch.uint8), ([2, 300], [2, 300], [0, 0])
    for kind in ("encode_state", "encode_state_"):
        call = getattr(ops, kind)
        yield f"{kind}: value is shorter", call, (codes, x(2, 30), x(2, 2), SEED, "w", True, *tile, 1)
        yield f"{kind}: fewer scales", call, (codes, x(2, 300), x(2, 1), SEED, "w", True, *tile, 1)
        yield f"{kind}: tile is longer", call, (codes, x(2, 300), x(2, 2), SEED, "w", True, [2, MANY], [2, MANY], [0, 0], 1)
        yield f"{kind}: codes are float", call, (x(2, 300), x(2, 300), x(2, 2), SEED, "w", True, *tile, 1)
        yield f"{kind}: seed is short", call, (codes, x(2, 300), x(2, 2), ints(1), "w", True, *tile, 1)
    yield "decode_state: fewer scales", ops.decode_state, (codes, x(2, 1), True, torch.float32, *tile, 1)
    yield "decode_state: no last dim", ops.decode_state, (codes, x(2, 2), True, torch.float32, *tile, 0)
    yield "block_scale: integers", ops.block_scale, (ints(2, 300), *tile, 1)
    yield "block_scale: tile is longer", ops.block_scale, (x(2, 300), [2, MANY], [2, MANY], [0, 0], 1)
    yield "round_param_: value is longer", ops.round_param_, (half, x(MANY))
    yield "update_if_: value is longer", ops.update_if_, (x(8), x(MANY), torch.tensor(True))
    yield "update_if_: several truths", ops.update_if_, (x(8), x(8), torch.ones(8, dtype=torch.bool))
    yield "join_master_: parameter is shorter", ops.join_master_, (x(MANY), half)


def main(fake: bool) -> None:
    fenced = Fenced()

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(item) for item in value]
        return fenced.tensor(value) if isinstance(value, Tensor) else value

    for name, call, args in calls():
        print("fake" if fake else "real", name, sep=": ", end=": ", flush=True)
        try:
            if fake:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    call(*args)
            else:
                call(*map(placed, args))
            print("nothing", flush=True)
        except (ValueError, RuntimeError, TypeError) as error:
            print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main(fake=True)
    main(fake=False)
