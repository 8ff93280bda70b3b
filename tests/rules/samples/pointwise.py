"""What torch itself tags as pointwise, and a call of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshc.testing.brute_force import Sample
from tests.rules.samples.calls import b, begin, i, positive

aten = torch.ops.aten


def pointwise_operators() -> list[Any]:
    """Every ATen operator that torch tags as pointwise and that writes into nothing: the rules take torch's word for these."""
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            writes = op._schema.is_mutable or any(argument.is_out for argument in op._schema.arguments)
            if torch.Tag.pointwise in op.tags and not writes:
                found.append(op)
    return found


def pointwise_sample(op: Any) -> Sample | None:
    """A call with tensors that broadcast, of the first kind that the operator takes; None if it takes none of them."""
    begin(str(op))
    for kind in (positive, lambda *shape: i(4, *shape) + 1, b):
        shapes = iter(((5, 4), (4,), (5, 1)))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in op._schema.arguments:
            type_ = str(argument.type)
            if argument.kwarg_only and not argument.has_default_value():
                kwargs[argument.name] = "floor" if argument.name == "rounding_mode" else 1
            elif type_ in ("Tensor", "Optional[Tensor]"):
                args.append(kind(*next(shapes)))
            elif argument.name in ("min", "max"):
                args.append(1 if argument.name == "min" else 2)
            elif not argument.has_default_value():
                args.append({"number": 2, "int": 2, "float": 0.5}[type_])
            elif not argument.kwarg_only:
                break
        try:
            made = op(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        if all(isinstance(item, Tensor) for item in (made if isinstance(made, tuple) else (made,))):
            return Sample(op, tuple(args), kwargs)
    return None
