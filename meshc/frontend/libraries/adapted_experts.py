"""Tracing of peft adapters on bare parameters, such as stacked expert weights (LoraConfig(target_parameters=[...])): deltas are added.

    peft:       registers a parametrization of the parameter, calls the module, and removes the parametrization: in every call
    traced:     calls the module with  parameter + sum of the active adapters' deltas  in the parameter's place

A wrapper wraps one parameter; wrappers of several parameters of one module are nested. While a model is traced, the outermost wrapper
computes all adapted parameters and calls the module inside. Without peft nothing happens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Final

from torch import Tensor, nn
from torch.func import functional_call

from meshc.errors import CaptureError
from meshc.replacements import replace_in

LAYER: Final = "peft.tuners.lora.layer"


@contextmanager
def adapted_experts(model: nn.Module) -> Iterator[None]:
    """A context in which wrapped parameters are adapted as values. Raises CaptureError where adapters are merged or disabled."""
    loaded = sys.modules.get(LAYER)
    kind = getattr(loaded, "ParamWrapper", None)
    wrappers = {} if kind is None else {path: each for path, each in model.named_modules() if isinstance(each, kind)}
    inner = {id(each.base_layer) for each in wrappers.values()}
    rows: list[tuple[nn.Module, str, object]] = []
    for path, each in wrappers.items():
        if id(each) in inner or "forward" in each.__dict__:
            continue
        chain = _chain(each, kind)
        if any(one.merged or one.disable_adapters for one in chain):
            raise CaptureError(
                f"{path}: adapters of its parameters are merged or switched off, which peft does by writing into them\n"
                "  what to do: model.unload() where they are not wanted, model.merge_and_unload() where they are, before meshc.compile"
            )
        rows.append((each, "forward", MethodType(_forward_of(chain), each)))
    with replace_in("adapted_parameters", rows):
        yield


def _chain(wrapper: Any, kind: Any) -> list[Any]:
    found = [wrapper]
    while isinstance(found[-1].base_layer, kind):
        found.append(found[-1].base_layer)
    return found


def _forward_of(chain: list[Any]) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        base = self.get_base_layer()
        adapted: dict[str, Tensor] = {}
        for one in chain:
            weight = getattr(base, one.parameter_name)
            for name in one.active_adapters:
                if name in one.lora_A:
                    weight = weight + one.get_delta_weight(name)
            adapted[one.parameter_name] = weight
        return functional_call(base, adapted, (x, *args), kwargs)

    return forward
