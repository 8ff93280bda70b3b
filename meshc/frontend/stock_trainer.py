"""What a compiled model of `transformers` tells its `Trainer`: that it owns its placement and its gradients, as models do that were split
at load time. Then the Trainer neither wraps it in DDP nor moves it, and saves it with all ranks at once.

    inputs="local"    each rank passes its own rows, which is how Trainer's data loader deals them out. The loss is the mean over all ranks'
                      rows already, so that the Trainer is not to divide it by counts of its own (`accepts_loss_kwargs`)
    inputs="global"   every rank passes the same rows; the Trainer's counts are right, and its loader must not deal out (docs/ecosystem.md)

Releases without the mark refuse a model of DTensors themselves.
"""

from __future__ import annotations

from typing import Final

from torch import nn

MARK: Final = "_is_distributed_loading_by_transformers"
COUNTS: Final = "accepts_loss_kwargs"


def tell_trainer(model: nn.Module, inputs: str) -> None:
    """Of a model without modules of transformers nothing changes."""
    for module in model.modules():
        if hasattr(type(module), MARK):
            setattr(module, MARK, True)
            if inputs == "local":
                setattr(module, COUNTS, False)


def is_told(model: nn.Module) -> bool:
    return any(vars(module).get(MARK, False) for module in model.modules())
