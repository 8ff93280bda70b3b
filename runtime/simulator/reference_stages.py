"""Mode in which a model on one device rounds what crosses the boundaries of pipeline stages, as compress lines of a plan say.

Knows nothing of graphs: a stage begins when the first of its modules is called, and each call of a torch function says what is read and
what is made in which stage. Behind a boundary whatever is read that was made before it is read rounded, and its gradient is rounded by
itself on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshc.errors import VerifyError
from meshc.ir import trees
from meshc.ir.formats import COMPRESSED
from meshc.ir.functions import Keywords
from meshc.ops import compress as _compress  # noqa: F401 - registers its operators


@dataclass
class _MadeValue:
    """Of a value: the stage that made it, and whether it depends on parameters, and on other tensors."""

    value: Tensor
    stage: int
    learned: bool
    given: bool


class _Rounding(torch.autograd.Function):
    """A value, and on the way back its gradient, rounded in blocks of a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, element: str) -> Tensor:
        ctx.element = element
        return _round(x, element)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _round(grad, ctx.element), None


def _round(x: Tensor, element: str) -> Tensor:
    made: Tensor = torch.ops.meshc.between_stages(x.detach(), element, 0)  # inside which modes that widen casts play no part
    return made


class RoundedStages(TorchFunctionMode):
    """splits: modules at which the second and further stages begin; format: a name in COMPRESSED."""

    def __init__(self, module: nn.Module, splits: Sequence[str], format: str) -> None:
        super().__init__()
        self.module, self.splits, self.format = module, splits, format
        self.stage = 0
        self.made: dict[int, _MadeValue] = {}
        self.sent: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context for one call of the module, and its backward."""
        self.stage, handles = 0, []
        self.made.clear()
        self.sent.clear()
        for number, split in enumerate(self.splits, 1):
            for path, each in self.module.named_modules(remove_duplicate=False):
                if path and (path == split or fnmatchcase(path, split)):
                    handles.append(each.register_forward_pre_hook(lambda *_, number=number: self._enter(number), prepend=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, number: int) -> None:
        self.stage = max(self.stage, number)

    def __torch_function__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Keywords | None = None) -> object:
        kwargs = dict(kwargs or {})
        if torch._C._current_graph_task_id() != -1:
            if torch.is_grad_enabled():
                raise VerifyError("forward runs again in backward, where what crosses stages is not known on one device")
            return func(*args, **kwargs)
        read = [self._record_of(one) for one in trees.leaves((args, kwargs)) if isinstance(one, Tensor)]
        args, kwargs = trees.map_leaves(self._read_value, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        learned, given = any(one.learned for one in read), any(one.given for one in read) or not read
        for one in trees.leaves(result):
            if isinstance(one, Tensor) and not isinstance(one, nn.Parameter):
                self.made[id(one)] = _MadeValue(one, self.stage, learned, given)
        return result

    def _record_of(self, value: Tensor) -> _MadeValue:
        found = self.made.get(id(value))
        if found is None:
            found = _MadeValue(value, self.stage, isinstance(value, nn.Parameter), not isinstance(value, nn.Parameter))
        return found

    def _read_value(self, value: Any) -> Any:
        """What a call of this stage reads in the place of a value."""
        known = self.made.get(id(value)) if isinstance(value, Tensor) else None
        if known is None or known.stage == self.stage or not (known.learned and known.given):
            return value
        if not value.is_floating_point() or value.dim() < 2:
            return value
        key = id(value), self.stage
        if key not in self.sent:
            with torch._C.DisableTorchFunction():
                self.sent[key] = _Rounding.apply(value, COMPRESSED[self.format])
        return self.sent[key]
