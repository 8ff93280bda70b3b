"""Initial weights of a compiled model by the user's function: recorded without memory, then computed by each rank for its own tiles.

    fn(model)  recorded on every rank, on tensors without memory ──> compared between ranks ──> tiles computed, a tensor at a time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch.distributed as dist
from torch import Tensor, nn

from meshc.errors import StateError, join_names
from meshc.files.tensor_file import TensorReader
from meshc.frontend.recorded_init import Recording
from meshc.frontend.recorded_values import RecordedValue
from meshc.ops.random import FIRST_VALUES
from meshc.runtime.agreement.compare import first_other
from meshc.runtime.failure.failed_rank import single_thread_context
from meshc.runtime.saved.weight_loading import reset_copied_state, write_tensor
from meshc.runtime.state.store import Store
from meshc.runtime.state.stored_tensor import StoredTensor

_ADVICE: Final = (
    "  what to do: program.init_weights(fn) with a function that writes those too; or load them (program.load_state_dict, "
    "meshc.load_pretrained)"
)


def init_weights(store: Store, fn: Callable[[nn.Module], object]) -> None:
    """`Program.init_weights` of a store. All ranks call it."""
    with single_thread_context("init_weights"):
        store.adopt_changes()
        held_ones = [held for held in store.held.values() if not held.of]
        unfilled = set(store.unfilled_names)

        def current_value(at: int) -> Tensor | None:
            return None if held_ones[at].name in unfilled else held_ones[at].whole().to("cpu", copy=True)

        recording = Recording(store.seed, FIRST_VALUES, current_value)
        error, values = _record_init(store, held_ones, recording, fn)
        _agree(store, error, recording.digest([value for value in values if value is not None]) if error is None else "")
        left = [held.name for held, value in zip(held_ones, values, strict=True) if value is None and held.name in unfilled]
        if left:
            raise StateError(f"init_weights left without values: {join_names(left, 6)}\n{_ADVICE}")
        changed = [(held, value) for held, value in zip(held_ones, values, strict=True) if value is not None]
        for held, value in changed:
            recording.evaluation.request(value)  # a collective: all ranks take part, whichever of them need the value
            write_tensor(store, held, _ComputedValue(recording, value), held.name)
            recording.evaluation.forget()
        reset_copied_state(store, {held.key for held, _ in changed})
        store.sync()


class _ComputedValue(TensorReader):
    """A recorded value with the interface of a file: slices are computed on request."""

    def __init__(self, recording: Recording, value: RecordedValue) -> None:
        super().__init__()
        self._recording, self._value = recording, value

    def shape(self, name: str) -> tuple[int, ...]:
        return self._value.shape

    def slice(self, name: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        return self._recording.compute_box(self._value, tuple(ranges))


def _record_init(
    store: Store, held_ones: Sequence[StoredTensor], recording: Recording, fn: Callable[[nn.Module], object]
) -> tuple[str | None, list[RecordedValue | None]]:
    """(error text or None, recorded value of each tensor; None where `fn` left it unchanged)."""
    try:
        store.filling = True
        for at, held in enumerate(held_ones):
            is_parameter = isinstance(held.live, nn.Parameter)
            plain: Tensor = recording.tensor(at, held.shape, held.dtype)
            plain = nn.Parameter(plain, requires_grad=held.live.requires_grad) if is_parameter else plain
            for members, name in held.places:
                members[name] = plain
        with recording:
            fn(store.model)
        return None, [_final_value(held, recording) for held in held_ones]
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}", [None] * len(held_ones)
    finally:
        store.filling = False
        for held in held_ones:
            for members, name in held.places:
                members[name] = held.live


def _final_value(held: StoredTensor, recording: Recording) -> RecordedValue | None:
    members, name = held.places[0]
    found = members[name]
    if tuple(found.shape) != held.shape:
        raise StateError(f"{held.name} was of shape {list(held.shape)} and is now of {list(found.shape)}")
    return None if recording.is_untouched(found) else recording.value(found)


def _agree(store: Store, error: str | None, digest: str) -> None:
    """Raises StateError, on all ranks, if the function failed on one, or did not do the same everywhere."""
    group = store.transfers.groups.world
    mine = (error, digest)
    said: list[tuple[str | None, str]] = [mine]
    if group is not None:
        said = [mine] * dist.get_world_size(group)
        dist.all_gather_object(said, mine, group=group)
    for rank, (failure, _) in enumerate(said):
        if failure is not None:
            raise StateError(f"init_weights: the function failed on rank {rank}\n  why: {failure}")
    other = first_other([told for _, told in said])
    if other is not None:
        raise StateError(
            f"init_weights: the function did something else on rank {other} than on rank 0\n"
            "  why: every rank runs it, and computes its own part of what it writes; numpy's and Python's own random numbers differ "
            "between ranks, torch's are numbered and do not\n"
            "  what to do: draw with torch; or seed the others alike on every rank"
        )
