"""`TrainStep`, and the function traced for it: the model's output, its loss, and the loss function's metrics.

program(x, y)      x goes to model.forward; y, which forward has no parameter for, to loss(output, target)
loss, metrics      a loss function may return both: `program.metrics` then has the metrics beside loss, grad_norm and lr
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.errors import InputError, PlanError
from meshc.frontend import admission, clipping, loss_scaling
from meshc.frontend.clipping import Clip
from meshc.ir.functions import Function
from meshc.optimizer import find_optimizers
from meshc.optimizer.optimizer_set import Optimizers

ROUTED: Final = "routed:"
DROPPED: Final = "dropped:"
"""Prefixes of a layer's path in the names of a step's metrics of experts."""
BATCH_MIX: Final = ("refuse", "mean_of_parts")
RESERVED: Final = ("loss", "grad_norm", "lr", loss_scaling.SCALE, loss_scaling.SKIPPED)
"""Names that `program.metrics` has for every step."""
LOSS: Final = "loss"
METRICS: Final = "metrics"
"""Keys of a step function's result with metrics; without, it returns the loss alone."""


class TrainStep:
    """A training step as a value: forward, loss, backward, clipping, accumulation over microbatches, update.

    Called like the model; its scalar output, or `output.loss`, is the loss. With `loss`, what `model.forward` takes goes to the model, by
    position and by name, and the rest to `loss(output, ...)`: further positional arguments in order, others by name. Of a forward that
    takes any name (`**kwargs`) the model gets those that the loss has no parameter for. A loss function may return `(loss, metrics)`, or
    a dict with "loss": tensors that are detached and come to `program.metrics` by name.

    optimizer       a torch.optim optimizer, several in a list, or a wrapper whose `step` calls theirs
    clip_grad_norm  the largest global norm of all gradients; a dict from patterns of parameters' names to norms clips each group by its
                    own ({"embed.*": 0.1, "layers.*": 1.0})
    clip_grad_value the largest magnitude of an element of a gradient: `sign(g) * min(|g|, t)`. By value comes first, then by norm, so that
                    both bounds hold, and `metrics["grad_norm"]` is what `clip_grad_norm_` returns behind `clip_grad_value_`
    microbatches    how many parts the batch is worked through in, one after the other; the result is the whole batch's
    batch_mix       "refuse": an operator that mixes the whole batch (batch norm) is refused with several microbatches.
                    "mean_of_parts": loss and gradients are the mean of what each microbatch, a range of the batch's rows, gives
                    alone; running statistics are updated by each in turn. The batch must divide by their number
    scaler          a torch.amp.GradScaler, for autocast to float16: the loss is multiplied by its scale, gradients are divided by it
                    behind their hooks and ahead of clipping; where one of them is not finite, on any rank, parameters and optimizer stay
                    as they are, and the scale falls. Its settings mean what they mean in torch, and a call updates it
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | Sequence[object] | Any,
        loss: Function | None = None,
        clip_grad_norm: Clip = None,
        microbatches: int | None = None,
        batch_mix: str = "refuse",
        clip_grad_value: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if batch_mix not in BATCH_MIX:
            raise PlanError(f"batch_mix={batch_mix!r} is not known: use one of {', '.join(map(repr, BATCH_MIX))}")
        if microbatches is not None and microbatches < 1:
            raise PlanError(f"microbatches={microbatches}: a step has at least one")
        self.model = model
        self.optimizer = list(optimizer) if isinstance(optimizer, list | tuple) else optimizer
        self.loss = loss
        self.clip_grad_norm = clip_grad_norm
        self.clip_grad_value = clip_grad_value
        self.microbatches = microbatches
        self.batch_mix = batch_mix
        self.scaler = scaler
        self._found: tuple[tuple[int, ...], Optimizers] | None = None
        admission.refuse_kind(self)
        clipping.check(clip_grad_norm, (name for name, _ in model.named_parameters()))
        clipping.check_value(clip_grad_value, model.named_parameters())
        loss_scaling.check(scaler, model.named_parameters())
        self.optimizers  # noqa: B018  refuses what is no optimizer, at the user's line

    @property
    def scaling(self) -> torch.amp.GradScaler | None:
        """The scaler, if it is enabled."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    @property
    def optimizers(self) -> Optimizers:
        """The optimizers that step. Searched again when a wrapper has got other ones."""
        ones = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        there = tuple(id(one) for given in ones if hasattr(given, "__dict__") for one in find_optimizers.inner_optimizers(given).values())
        if self._found is None or self._found[0] != there:
            names = {id(p): name for name, p in self.model.named_parameters()}

            def name_of(parameter: Tensor) -> str:
                return names.get(id(parameter), f"a parameter of shape {list(parameter.shape)}, which is not the model's")

            self._found = there, find_optimizers.find_optimizers(self.optimizer, name_of)
        return self._found[1]


@dataclass(frozen=True)
class TracedFunction:
    """A function to trace, called as function(module, **kwargs). `signature` names its inputs."""

    module: nn.Module
    function: Function
    signature: Function

    @cached_property
    def parameters(self) -> list[inspect.Parameter] | None:
        """The signature's parameters, read once; None where Python has no signature."""
        return _parameters(self.signature)


def traced_step(step: TrainStep) -> TracedFunction:
    """The function whose output is the loss, or {"loss": loss, "metrics": {name: tensor}}."""
    if step.loss is None:
        return TracedFunction(step.model, lambda module, *args, **kwargs: loss_of(module(*args, **kwargs)), step.model.forward)
    loss = step.loss
    signature = StepSignature(step.model.forward, loss)
    positional, star, takes = signature.positional, signature.star, signature.takes

    def function(module: nn.Module, *args: object, **kwargs: object) -> object:
        mine = {key: value for key, value in kwargs.items() if not takes(key)}
        places = len(args) if star else len([name for name in positional if name not in kwargs])
        output = module(*args[:places], **{key: value for key, value in kwargs.items() if takes(key)})
        return loss_and_metrics(loss(output, *args[places:], **mine))

    function.refused = signature.shared  # type: ignore[attr-defined]
    return TracedFunction(step.model, function, signature)


def loss_of(output: object) -> Tensor:
    """The loss in a model's output: a scalar, or `output.loss`."""
    if isinstance(output, Tensor):
        if output.numel() != 1:
            raise InputError(f"a TrainStep without `loss` needs a scalar output, the model returned shape {list(output.shape)}")
        return output.reshape(())
    loss = output.get(LOSS) if isinstance(output, Mapping) else getattr(output, LOSS, None)
    if loss is None:
        todo = _number_in(output) or "pass labels, or give TrainStep(..., loss=function)"
        raise InputError(f"the model's output, a {type(output).__name__}, has no loss; what to do: {todo}")
    return loss.reshape(())


# Results of loss functions.


def loss_and_metrics(result: object) -> object:
    """A loss function's result in the form that a step's function returns."""
    if isinstance(result, Tensor):
        return _scalar(result)
    if isinstance(result, Mapping) and isinstance(result.get(LOSS), Tensor):
        metrics: Mapping[object, object] = {key: value for key, value in result.items() if key != LOSS}
        loss = result[LOSS]
    elif isinstance(result, list | tuple) and result and isinstance(result[0], Tensor):
        loss, *rest = result
        if loss.numel() != 1 and (todo := _number_in(result)):
            raise InputError(f"the loss function returned a tuple that begins with shape {list(loss.shape)}; what to do: {todo}")
        metrics = rest[0] if len(rest) == 1 and isinstance(rest[0], Mapping) else {str(i): value for i, value in enumerate(rest, 1)}
    else:
        raise InputError(f'the loss function returned a {type(result).__name__}: return the loss, (loss, metrics), or a dict with "loss"')
    found: dict[str, Tensor] = {}
    _collect(metrics, "", found)
    return {LOSS: _scalar(loss), METRICS: found} if found else _scalar(loss)


def split_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics by name) of a step function's result."""
    return (result, {}) if isinstance(result, Tensor) else (result[LOSS], result[METRICS])


def _scalar(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise InputError(f"the loss function returned a loss of shape {list(loss.shape)}; it must be one number: reduce it, loss.mean()")
    return loss.reshape(())


def _number_in(output: object) -> str:
    """Advice where exactly one entry of a model's output is a number, as in (logits, loss); "" otherwise."""
    entries = output.items() if isinstance(output, Mapping) else enumerate(output) if isinstance(output, list | tuple) else ()
    found = [key for key, value in entries if isinstance(value, Tensor) and value.numel() == 1]
    if len(found) != 1:
        return ""
    return f"TrainStep(..., loss=lambda out: out[{found[0]!r}]), which is its one number"


def _collect(value: object, path: str, found: dict[str, Tensor]) -> None:
    """Tensors and numbers by their path: {"top": {"1": t}} is `top.1`."""
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _collect(item, f"{path}.{key}" if path else str(key), found)
    elif value is not None:
        if path in RESERVED:
            raise InputError(f"the loss function returns a metric {path!r}, which program.metrics has of every step: give it another name")
        if not isinstance(value, Tensor | bool | int | float):
            raise InputError(f"the metric {path!r} is a {type(value).__name__}: metrics are tensors and numbers")
        found[path] = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)  # may be the loss itself


# Arguments of a call.


class StepSignature:
    """The signature of `program(...)`: `forward`'s parameters, then those of the loss beyond its first, the model's output.

    forward     names of forward's parameters
    positional  those of them that may be given by position
    star        forward takes any number of positional arguments, so none are left for the loss
    any_name    forward takes arguments of any name: those that the loss has no name for, unless the loss takes any name too
    shared      names that both take
    """

    def __init__(self, forward: Function, loss: Function) -> None:
        mine, theirs = _parameters(forward) or [], (_parameters(loss) or [])[1:]
        self.forward = tuple(p.name for p in mine)
        self.positional = tuple(p.name for p in mine if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        self.star = any(p.kind is p.VAR_POSITIONAL for p in mine)
        plain = [p for p in mine if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        loss_open = any(p.kind is p.VAR_KEYWORD for p in theirs)
        self.any_name = any(p.kind is p.VAR_KEYWORD for p in mine) and (not loss_open or not plain)
        self.shared = sorted({*self.forward} & {p.name for p in theirs} - {"args", "kwargs"})
        self.loss_name = getattr(loss, "__qualname__", type(loss).__qualname__)
        self.theirs = [p for p in theirs if p.name not in self.forward]
        places = [p for p in mine if p.name in self.positional or p.kind is p.VAR_POSITIONAL]
        named = [p for p in mine if p not in places]
        behind = [] if self.star else [p for p in self.theirs if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
        self.__signature__ = inspect.Signature([*places, *behind, *named], __validate_parameters__=False)

    def takes(self, name: str) -> bool:
        """Whether an argument of this name goes to the model."""
        return name in self.forward or self.any_name and all(p.name != name for p in self.theirs)

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Never called: the object only has a signature."""
        raise TypeError("a signature is not called")

    def check(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raises InputError if the loss lacks an argument that it needs, or is given one that it does not know; `args` have no names."""
        places = len(args) if self.star else len([name for name in self.positional if name not in kwargs])
        surplus = len(args[places:])
        known = {p.name for p in self.theirs}
        open_ended = not self.theirs or any(p.kind is p.VAR_KEYWORD for p in self.theirs)
        strangers = [name for name in kwargs if not self.takes(name) and name not in known]
        if strangers and self.theirs and not open_ended:
            raise InputError(
                f"{', '.join(strangers)}: neither model.forward({', '.join(self.forward)}) nor the loss {self.loss_name}(output, "
                f"{', '.join(p.name for p in self.theirs)}) takes this"
            )
        filled = [p.name for p in self.theirs if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:surplus]
        needed = [p.name for p in self.theirs if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        missing = [name for name in needed if name not in kwargs and name not in filled]
        if not missing:
            return
        first = self.positional[0] if self.positional else "inputs"
        why = f"  why: model.forward takes {', '.join(self.forward)}, and what it takes goes to the model first"
        raise InputError(
            f"the loss {self.loss_name} was not given {', '.join(missing)}\n{why}\n"
            f"  what to do: give it by name, program({first}, {', '.join(f'{name}=...' for name in missing)})"
        )


def _parameters(function: Function) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters.values())
    except (TypeError, ValueError):
        return None
