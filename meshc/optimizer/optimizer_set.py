"""Set of the optimizers that one training step runs, each with parameters of its own.

Groups are numbered consecutively over all members: of `[muon, adamw]` with a group each, `1.lr` is AdamW's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from meshc.errors import CompileError, lines_of


@dataclass(frozen=True, eq=False)
class Optimizers:
    """
    members   optimizers whose `step` updates parameters
    wrappers  optimizers whose `step` only calls members' steps: kept up to date, never run
    idle      parameters that an optimizer holds and none steps, with the name of the holder
    """

    members: tuple[Optimizer, ...]
    wrappers: tuple[object, ...] = ()
    idle: tuple[tuple[Tensor, str], ...] = ()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for member in self.members for group in member.param_groups]

    def __str__(self) -> str:
        return " and ".join(type(member).__qualname__ for member in self.members)


AnyOptimizer = Optimizer | Optimizers


def parameters_of(optimizers: Iterable[AnyOptimizer]) -> Iterator[Tensor]:
    """The parameters in the groups of these optimizers, in order."""
    return (parameter for one in optimizers for group in one.param_groups for parameter in group["params"])


def members_of(optimizer: AnyOptimizer) -> tuple[Optimizer, ...]:
    return optimizer.members if isinstance(optimizer, Optimizers) else (optimizer,)


def with_wrappers(optimizer: AnyOptimizer) -> list[Optimizer]:
    """The members, and those of the wrappers that are optimizers themselves."""
    wrappers = optimizer.wrappers if isinstance(optimizer, Optimizers) else ()
    return [one for one in (*members_of(optimizer), *wrappers) if isinstance(one, Optimizer)]


def refuse_shared(members: Sequence[Optimizer], name_of: Callable[[Tensor], str]) -> None:
    """Raises CompileError that names every parameter which would be stepped twice: by two optimizers, or at two places of one."""
    held: dict[int, str] = {}
    faults = []
    alike = len({type(member) for member in members}) < len(members)
    for index, member in enumerate(members):
        who = type(member).__qualname__ + (f" (optimizer {index})" if alike else "")
        for position, group in enumerate(member.param_groups):
            where = f"group {position} of {who}"
            for parameter in group["params"]:
                other = held.setdefault(id(parameter), where)
                if other is not where:
                    faults.append(f"{name_of(parameter)} is in {other} and in {where}")
            if len(set(map(id, group["params"]))) < len(group["params"]):
                faults.append(f"{where} lists a parameter twice")
    if faults:
        raise CompileError(
            "a parameter is stepped once in a training step:\n    "
            + lines_of(faults, 8)
            + "\n  what to do: give each parameter to one optimizer, in one group"
        )
