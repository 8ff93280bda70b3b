"""Masks of weights in a model on one device, as the sparse lines of a plan say, found by the memory that products read.

Knows nothing of graphs: of each element of a parameter's memory, and of that of its copies in other dtypes, it knows which entry of the
parameter it is. The first product of forward that reads a weight says along which of its entries is summed, and so what is in a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshc.optimizer.spec import MASK, MASK_STEPS
from meshc.plan.precision_lines import SparseLine
from meshc.runtime.state.stored_tensor import memory_of


@dataclass
class _ParameterMemory:
    """Entry of the parameter at each place of a memory."""

    name: str
    entry: Tensor

    def entries_of(self, view: Tensor) -> Tensor:
        return self.entry.as_strided(view.shape, view.stride(), view.storage_offset())


class ReferenceMasks:
    """`lines`: by the name of a parameter of `module`, its sparse line. `steps`: how many have ended; `left`: masks behind the last."""

    def __init__(self, module: nn.Module, lines: Mapping[str, SparseLine]) -> None:
        found = dict(module.named_parameters(remove_duplicate=False))
        self.lines, self.parameters = dict(lines), {name: found[name] for name in lines}
        self.steps, self.left = 0, dict[str, Tensor]()
        self.kept: dict[str, Tensor] = {}
        """By parameter that a product has read, whether products read each of its entries."""
        self._known: dict[int, _ParameterMemory] = {}
        self._held: list[Tensor] = []

    def begin(self) -> None:
        """Forgets what runs before have found."""
        self.kept.clear()
        self._held.clear()
        self._known = {}
        for name, parameter in self.parameters.items():
            entry = torch.full((parameter.untyped_storage().nbytes() // parameter.itemsize,), -1)
            entry.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset()).copy_(
                torch.arange(parameter.numel()).view(parameter.shape)
            )
            self._known[memory_of(parameter)] = _ParameterMemory(name, entry)

    def forget_steps(self) -> None:
        self.steps = 0
        self.left.clear()

    def end_step(self) -> None:
        self.steps += 1
        self.left.update(self.kept)

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The masks and numbers of steps among these names of state."""
        masks = {f"{name}/{MASK}": mask.view(self.parameters[name].shape) for name, mask in self.left.items()}
        known = masks | {f"{name}/{MASK_STEPS}": torch.tensor([self.steps]) for name in self.lines}
        return {name: known[name] for name in names if name in known}

    def follow(self, x: Tensor, copy: Tensor) -> None:
        """Notes that a tensor is a copy of another."""
        known = self._known.get(memory_of(x))
        if known is not None and memory_of(copy) not in self._known:
            entry = torch.full((copy.untyped_storage().nbytes() // copy.itemsize,), -1)
            entry.as_strided(copy.shape, copy.stride(), copy.storage_offset()).copy_(known.entries_of(x))
            self._known[memory_of(copy)] = _ParameterMemory(known.name, entry)
            self._held.append(copy)

    def mask_factor(self, factor: Tensor, summed: int, backward: bool) -> Tensor:
        """What a product reads of a factor, whose dim `summed` it sums over: all of it, unless it is a weight under a line."""
        known = self._known.get(memory_of(factor))
        if known is None:
            return factor
        entries, kept = known.entries_of(factor), self.kept.get(known.name)
        if not backward or kept is None:
            kept = self._decide(known.name, entries.movedim(summed, -1))
        return torch.where(kept[entries], factor, 0.0)

    def _decide(self, name: str, entries: Tensor) -> Tensor:
        """Which entries of a parameter are kept, given those of a factor [.., k]: the groups of one product are those of all others."""
        line, parameter = self.lines[name], self.parameters[name].detach()
        apart = int(entries.flatten()[1] - entries.flatten()[0])
        runs = torch.arange(parameter.numel()).view(-1, line.m, apart).transpose(1, 2).reshape(-1, line.m)
        groups = entries.reshape(-1, line.m)
        assert torch.isin(groups[:, 0], runs[:, 0]).all() and (groups == groups[:, :1] + apart * torch.arange(line.m)).all()
        due = not line.every or (self.steps % line.every == 0 and (line.until is None or self.steps <= line.until))
        if not due and name in self.left:
            self.kept[name] = self.left[name]
            return self.kept[name]
        order = parameter.reshape(-1)[runs].abs().argsort(dim=1, descending=True, stable=True)
        self.kept[name] = torch.zeros(parameter.numel(), dtype=torch.bool)
        self.kept[name][runs] = torch.zeros(runs.shape, dtype=torch.bool).scatter(1, order[:, : line.n], True)
        return self.kept[name]

    def refine_gradients(self) -> None:
        """Adds to each gradient the decay of the entries that are not read; under `fixed` these have none."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and name in self.kept:
                line, kept = self.lines[name], self.kept[name].view(parameter.shape)
                left = torch.where(kept, 0.0, parameter.detach())
                parameter.grad = torch.where(kept, parameter.grad, 0.0) if line.fixed else parameter.grad + line.decay * left

    def fix_weights(self) -> None:
        """Sets what no product of the last forward has read to zero, in weights that an update has written under `fixed`."""
        for name, parameter in self.parameters.items():
            if self.lines[name].fixed and parameter.grad is not None and name in self.kept:
                with torch.no_grad():
                    parameter.masked_fill_(~self.kept[name].view(parameter.shape), 0.0)
