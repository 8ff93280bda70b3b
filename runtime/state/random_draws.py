"""Random draws into DTensors on a CPU mesh, with the numbers that one device would draw.

    nn.init.normal_(model.head.weight)       a DTensor: in torch each rank draws into its own part
    ranks that are seeded alike              rows 0-2 and rows 3-5 would be the same numbers
    ranks that are not                       replicas would differ

On accelerators torch itself offsets a rank's draws by its part of the whole tensor; for CPU meshes it has a hook for that (`_rng_tracker`),
which is unset. Here each rank draws the whole tensor from its own generator, as one device would, and keeps its part; nothing is sent.
Replicas are set to the draw of the first of them before a program runs (`even_out`). If one rank has drawn and another has not, they would
wait for each other: so a draw is noted first (`changes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshc.ir import layouts, trees
from meshc.private import OpOverload, TorchDispatchMode, dtensor_random
from meshc.replacements import replace_for_good
from meshc.runtime.comm import collectives
from meshc.runtime.comm.transfers import Transfers
from meshc.runtime.state.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OF_VALUES: Final = (torch.ops.aten.bernoulli.default, torch.ops.aten.native_dropout.default)
"""Draws that read the values of their operand; other draws read its shape only."""


class DrawTracker:
    """The object that torch calls, by these names, for a context around each random operator of a DTensor."""

    distribute_region_enabled: Final = True

    def __init__(self) -> None:
        self.homes: dict[DeviceMesh, Transfers] = {}
        self.written: set[int] = set()
        """Addresses of memory drawn into since the last `even_out`."""

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        home = self.homes.get(spec.mesh)
        if home is None or any(type(placement) not in (Shard, Replicate) for placement in spec.placements):
            yield
            return
        with _WholeDraw(self, spec, home, generator):
            yield


_DRAWS: Final = DrawTracker()


def follow(home: Transfers) -> None:
    """Makes draws into DTensors on this mesh equal to those of one device. With an accelerator torch has its own way."""
    mesh = home.mesh.device_mesh
    if mesh is None:
        return
    _DRAWS.homes.pop(mesh, None)  # an equal one, of a world that has ended
    _DRAWS.homes[mesh] = home
    if home.device.type == "cpu" and not torch.accelerator.is_available() and dtensor_random._rng_tracker is None:
        replace_for_good("random_tracker", _DRAWS)


def home_of(mesh: DeviceMesh) -> Transfers | None:
    """The transfers of a compiled model on this mesh; None if there is none."""
    return _DRAWS.homes.get(mesh)


def note_drawn(value: DTensor) -> None:
    """Notes that every rank has drawn this tensor whole, and kept its part."""
    _DRAWS.written.add(value._local_tensor.data_ptr())


def has_draws() -> bool:
    """Whether there are draws that `even_out` has not broadcast."""
    return bool(_DRAWS.written)


def even_out(stored: Iterable[StoredTensor]) -> None:
    """Broadcasts draws from the first of the replicas to the others. All ranks call this, and have drawn into the same tensors."""
    if not _DRAWS.written:
        return
    for held in stored:
        if held.local.data_ptr() in _DRAWS.written and held.local.numel():
            group = held.home.over(replicated_axes(held))
            if group is not None:
                collectives.broadcast(held.local, group, 0).wait()
    _DRAWS.written.clear()


def replicated_axes(held: StoredTensor) -> tuple[str, ...]:
    """The axes along which the stored tensor is replicated."""
    axes = zip(held.home.mesh.axes, held.placements, strict=True) if held.placements else ()
    return tuple(axis.name for axis, placement in axes if axis.size > 1 and isinstance(placement, Replicate))


class _WholeDraw(TorchDispatchMode):
    """Dispatch mode that draws the whole tensor instead of a part, and returns this rank's part."""

    def __init__(self, draws: DrawTracker, spec: Any, home: Transfers, generator: torch.Generator | None) -> None:
        super().__init__()
        self.draws, self.spec, self.generator = draws, spec, generator
        self.ranges = layouts.chunk_ranges(spec.shape, spec.placements, home.mesh, home.coordinates)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        part = args[0] if args else None
        if type(part) is not Tensor or tuple(part.shape) != tuple(length for _, length in self.ranges):
            return func(*args, **kwargs)
        whole = torch.empty_strided(self.spec.shape, self.spec.stride, dtype=part.dtype, device=part.device)
        if func in _OF_VALUES:
            whole.zero_()
            self._part(whole).copy_(part)
        with _use_generator(self.generator):
            result = func(whole, *args[1:], **kwargs)
        if result is whole:
            self.draws.written.add(part.data_ptr())
            return part.copy_(self._part(whole))
        return trees.map_leaves(lambda one: self._part(one).clone() if isinstance(one, Tensor) else one, result)

    def _part(self, whole: Tensor) -> Tensor:
        for dim, (start, length) in enumerate(self.ranges):
            whole = whole.narrow(dim, start, length)
        return whole


@contextmanager
def _use_generator(generator: torch.Generator | None) -> Iterator[None]:
    """A context in which torch draws from `generator`, or from the default one if None."""
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        yield
        generator.set_state(torch.get_rng_state())
