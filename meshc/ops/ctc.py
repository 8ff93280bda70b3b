"""`meshc::ctc_loss`: connectionist temporal classification loss, one value per row; and torch's `ctc_loss` in terms of it.

    ctc_loss(log_probs, targets, frames, lengths, blank, zero_infinity) -> loss
    ctc_loss_backward(grad, log_probs, targets, frames, lengths, blank, zero_infinity) -> the gradient of log_probs

    log_probs  [t, rows, classes]  logarithms of probabilities
    targets    [rows, s]           classes; entries beyond a row's length are not read
    frames     [rows], lengths [rows]   int64: the number of valid positions of t, and of s, in a row
    loss       [rows]              -log of the sum over all alignments; inf where there is none, or 0 with `zero_infinity`

Computed by torch's kernels. Torch's operators with lengths in tensors return results of data-dependent sizes, which no program can hold;
here backward recomputes them. `loss_of_rows` is `torch.nn.functional.ctc_loss` in terms of this operator.

Graves, Fernandez, Gomez, Schmidhuber: Connectionist Temporal Classification (ICML 2006).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshc.errors import InputError
from meshc.ops.definition import misfit, operator, ops

aten = torch.ops.aten


def _fit(
    operator: str, log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, grad: Tensor | None = None
) -> None:
    given = {"log_probs": log_probs, "targets": targets, "frames": frames, "lengths": lengths, "grad": grad}
    if log_probs.dim() != 3 or log_probs.dtype not in (torch.float32, torch.float64) or targets.dtype not in (torch.int32, torch.int64):
        raise misfit(operator, "log_probs are [t, rows, classes] in float32 or float64, targets int64 or int32", **given)
    times, rows, classes = log_probs.shape
    if targets.dim() not in (1, 2) or targets.dim() == 2 and targets.shape[0] != rows:
        raise misfit(operator, "each row has targets", **given)
    if any(one.shape != (rows,) or one.dtype != torch.int64 for one in (frames, lengths)):
        raise misfit(operator, "frames and lengths are a number a row, int64", **given)
    if grad is not None and (grad.shape != (rows,) or grad.dtype != log_probs.dtype):
        raise misfit(operator, "grad is a number a row, of the dtype of log_probs", **given)
    if not 0 <= blank < classes:
        raise misfit(operator, f"blank is a class, 0 to {classes - 1}", **given)


@operator(
    "ctc_loss",
    results=lambda log_probs: log_probs.new_empty(log_probs.shape[1:2]),
    fit=_fit,
    gradient=lambda grad, log_probs, targets, frames, lengths, blank, zero_infinity: ops.ctc_loss_backward(
        grad, log_probs, targets, frames, lengths, blank, zero_infinity
    ),
)
def ctc_loss(log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    loss, _ = aten._ctc_loss.default(log_probs, targets, *_numbers("ctc_loss", log_probs, targets, frames, lengths), blank, zero_infinity)
    return torch.where(loss.isinf(), 0, loss) if zero_infinity else loss.clone()


@operator("ctc_loss_backward", results="log_probs", fit=_fit)
def ctc_loss_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    how = _numbers("ctc_loss_backward", log_probs, targets, frames, lengths)
    loss, alpha = aten._ctc_loss.default(log_probs, targets, *how, blank, zero_infinity)
    return aten._ctc_loss_backward.default(grad.contiguous(), log_probs, targets, *how, loss, alpha, blank, zero_infinity).contiguous()


def _numbers(operator: str, log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor) -> tuple[list[int], list[int]]:
    """Frames and target lengths as Python numbers. Raises InputError where torch's kernels would read out of bounds."""
    times, _, classes = log_probs.shape
    if targets.dim() != 2:
        raise misfit(operator, "targets are [rows, s]", targets=targets)
    size = targets.shape[1]
    of_frames, of_targets = frames.tolist(), lengths.tolist()
    read = targets[torch.arange(size, device=targets.device) < lengths[:, None]]
    for what, given, most, advice in (
        ("the frames of a row", of_frames, times, "input_lengths count positions of log_probs, behind what shortens a sequence"),
        ("the targets of a row", of_targets, size, "target_lengths count labels of their row"),
        ("a target", [] if not read.numel() else [int(one) for one in torch.aminmax(read)], classes - 1,
         "labels are classes of the model (vocab_size); leave out by the mask, or by target_lengths, what is none"),
    ):  # fmt: skip
        wrong = next((one for one in given if not 0 <= one <= most), None)
        if wrong is not None:
            raise InputError(f"meshc::{operator}: {what} may be 0 to {most}, and one is {wrong}\n  what to do: {advice}")
    return of_frames, of_targets


def loss_of_rows(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """As `torch.nn.functional.ctc_loss`."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    alone = log_probs.dim() == 2
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    log_probs = log_probs if log_probs.dtype in (torch.float32, torch.float64) else log_probs.float()  # as autocast does
    frames, lengths = (_in_a_tensor(given, log_probs) for given in (input_lengths, target_lengths))
    loss = torch.ops.meshc.ctc_loss(log_probs, targets, frames, lengths, blank, zero_infinity)
    if reduction == "none":
        return loss[0] if alone else loss
    return loss.sum() if reduction == "sum" else (loss / lengths.clamp(min=1)).mean()


def _in_a_tensor(given: Tensor | Sequence[int] | int, beside: Tensor) -> Tensor:
    found = given if isinstance(given, Tensor) else torch.tensor(given)
    return found.to(device=beside.device, dtype=torch.int64).reshape(-1)


def rows_of_list(targets: Tensor, lengths: Tensor) -> Tensor:
    """Padded targets [rows, w] of the concatenated targets [w] of all rows."""
    count = targets.shape[0]
    if not count:
        return targets.new_zeros((lengths.shape[0], 0))
    starts = lengths.cumsum(0) - lengths
    return targets[(starts[:, None] + torch.arange(count, device=targets.device)).clamp(max=count - 1)]


def chosen_in_front(targets: Tensor, chosen: Tensor) -> Tensor:
    """`targets` [rows, s] with the entries where `chosen` is true moved to the front of each row, in their order."""
    order = torch.sort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)[1]
    return targets.gather(-1, order)
