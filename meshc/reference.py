"""The reference for random numbers: an unmodified model, run eagerly, whose random calls are answered with meshc's draws.

    with ReferenceRandom(seed, step) as reference:
        loss = model(x)
        loss.backward()         # inside, if the model uses torch.utils.checkpoint
    reference.calls             # how many random calls the model made

The k-th random call (k = 0, 1, ... in order of execution) gets the draws of call k at the shape of its tensor, which is what a compiled
program draws for it on any mesh. What meshc has no definition for raises, rather than drawing from torch's generator.

Meanwhile the seed of torch's CPU generator is the number of the next call. A checkpointed region restores the generator's state when it
runs again in backward, and so finds the numbers, and with them the draws, of its first run.

A microbatch on its own draws its rows of what the whole batch draws, whose shapes a run of the whole batch tells:

    with ReferenceRandom(seed, step) as whole, torch.no_grad():
        model(x)
    with ReferenceRandom(seed, step, Microbatch(whole.drawn, count=4, index=1)):
        model(x[2:4])                           # x has 8 rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshc.errors import MeshcError
from meshc.ops import random
from meshc.parts import offsets

aten = torch.ops.aten
Tile = tuple[Sequence[int], Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Microbatch:
    """Which tile of the whole batch's draws a model is to be answered with: the index-th of `count`, where `drawn` is the whole's."""

    drawn: Sequence[tuple[str, tuple[int, ...]]]
    count: int
    index: int

    def tile(self, call: int, shape: Sequence[int]) -> Tile:
        """(global shape, local shape, offsets) of a call that draws `shape`. Raises MeshcError if the whole batch has no such draw."""
        whole = self.drawn[call][1] if call < len(self.drawn) else ()
        starts = offsets(whole, tuple(shape), self.count, self.index)
        if starts is None:
            raise MeshcError(f"random call {call} draws {list(shape)} for a microbatch, and {list(whole)} for the whole batch")
        return whole, tuple(shape), starts


class ReferenceRandom(TorchDispatchMode):
    """Answers random ATen calls with meshc's draws for (seed, step); one object is one step, and goes on counting if entered again.

    `calls` is the number of the next call; `drawn` lists what was drawn so far, as (operator, shape), to compare with a capture.
    Raises MeshcError for random operators without a definition, for fused attention with dropout (enter
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` on CUDA), and for new draws made during backward (a checkpointed region that does not
    restore the generator's state).
    """

    def __init__(self, seed: int, step: int = 0, microbatch: Microbatch | None = None) -> None:
        super().__init__()
        self.seed, self.step, self.microbatch = seed, step, microbatch
        self.drawn: list[tuple[str, tuple[int, ...]]] = []
        self._outside: list[Tensor | None] = []

    @property
    def calls(self) -> int:
        return len(self.drawn)

    def __enter__(self) -> ReferenceRandom:
        inside = bool(self._outside)
        self._outside.append(None if inside else torch.get_rng_state())
        if not inside:
            torch.default_generator.manual_seed(self.calls)
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        state = self._outside.pop()
        if state is not None:
            torch.set_rng_state(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        named = _named(func, args, kwargs)
        if _is_idle(func, named):
            return func(*args, **kwargs)
        answer = None if "out" in named else ANSWERS.get(func.overloadpacket)
        if answer is None and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # under inference_mode composites arrive whole
                return func.decompose(*args, **kwargs)
        if answer is None:
            raise _undefined(func, named)
        if torch._C._current_graph_task_id() != -1 and torch.default_generator.initial_seed() >= self.calls:
            raise MeshcError(
                f"{func} draws random numbers anew during backward, where calls have no number.\n"
                "  why: a checkpointed region runs forward again without the state that the generator had\n"
                "  what to do: checkpoint(..., preserve_rng_state=True), or switch checkpointing off in the reference"
            )
        return answer(self, func, named)

    def next(self, func: Any, shape: Sequence[int], device: torch.device | None) -> tuple[Tensor, int, Tile]:
        """(seed_step, call, tile) of the next random call, which draws `shape`."""
        call = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(call + 1)
        shape = tuple(shape)
        if call == self.calls:  # not one that a checkpointed region repeats
            self.drawn.append((str(func), shape))
        tile = self.microbatch.tile(call, shape) if self.microbatch is not None else (shape, shape, [0] * len(shape))
        return random.seed_step(self.seed, self.step, device or "cpu"), call, tile


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name; the dispatcher leaves out those that equal their default."""
    named = {argument.name: argument.default_value for argument in func._schema.arguments if argument.has_default_value()}
    named.update(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    return named | kwargs


def _is_idle(func: Any, named: dict[str, Any]) -> bool:
    """Dropout that is switched off or settled (p = 0 or 1, nothing to drop), or attention without any."""
    if func.overloadpacket is aten.dropout and (named["p"] in (0.0, 1.0) or named["input"].numel() == 0):
        return True
    return named.get("train", None) is False or named.get("training", None) is False or named.get("dropout_p", None) == 0.0


def _undefined(func: Any, named: dict[str, Any]) -> MeshcError:
    advice = "draw outside the model and pass the result in"
    if "dropout_p" in named:
        advice = "run the reference under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), whose dropout is a call of its own"
    return MeshcError(f"{func} draws random numbers in a way that meshc does not define.\n  what to do: {advice}")


def _uniform(mode: ReferenceRandom, func: Any, out: Tensor, low: float, high: float) -> Tensor:
    seed_step, call, tile = mode.next(func, out.shape, out.device)
    values = torch.ops.meshc.uniform(seed_step, call, *tile, out.dtype)
    return out.copy_(values if (low, high) == (0.0, 1.0) else values * (high - low) + low)


def _normal(mode: ReferenceRandom, func: Any, out: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    seed_step, call, tile = mode.next(func, out.shape, out.device)
    values = torch.ops.meshc.normal(seed_step, call, *tile, out.dtype)
    standard = not isinstance(mean, Tensor) and not isinstance(std, Tensor) and (mean, std) == (0.0, 1.0)
    return out.copy_(values if standard else values * std + mean)


def _bernoulli(mode: ReferenceRandom, func: Any, out: Tensor, probability: Tensor | float) -> Tensor:
    seed_step, call, tile = mode.next(func, out.shape, out.device)
    if isinstance(probability, Tensor):
        return out.copy_(random.bernoulli(seed_step, call, probability.expand(out.shape), tile))
    return out.copy_(torch.ops.meshc.keep_mask(seed_step, call, 1.0 - probability, *tile))


def _new(named: dict[str, Any]) -> Tensor:
    """The empty tensor that a factory call asks for, `x_like` or by size."""
    options = {key: named[key] for key in ("dtype", "layout", "device", "pin_memory")}
    if "size" in named:
        return torch.empty(named["size"], **{key: value for key, value in options.items() if value is not None})
    return aten.empty_like(named["self"], **options, memory_format=named.get("memory_format"))


def _answer_normal(mode: ReferenceRandom, func: Any, named: dict[str, Any]) -> Tensor:
    mean, std = named["mean"], named["std"]
    if "size" in named:
        return _normal(mode, func, _new(named), mean, std)
    like = torch.broadcast_tensors(*(value for value in (mean, std) if isinstance(value, Tensor)))[0]
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return _normal(mode, func, out, mean, std)


def _answer_native_dropout(mode: ReferenceRandom, func: Any, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = named["input"]
    seed_step, call, tile = mode.next(func, x.shape, x.device)
    return torch.ops.meshc.dropout(x, seed_step, call, named["p"], *tile)


ANSWERS: dict[Any, Callable[[ReferenceRandom, Any, dict[str, Any]], Any]] = {
    aten.native_dropout: _answer_native_dropout,
    aten.dropout: lambda mode, func, named: _answer_native_dropout(mode, func, named)[0],
    aten.bernoulli: lambda mode, func, named: _bernoulli(mode, func, torch.empty_like(named["self"]), named.get("p", named["self"])),
    aten.bernoulli_: lambda mode, func, named: _bernoulli(mode, func, named["self"], named["p"]),
    aten.rand: lambda mode, func, named: _uniform(mode, func, _new(named), 0.0, 1.0),
    aten.rand_like: lambda mode, func, named: _uniform(mode, func, _new(named), 0.0, 1.0),
    aten.randn: lambda mode, func, named: _normal(mode, func, _new(named), 0.0, 1.0),
    aten.randn_like: lambda mode, func, named: _normal(mode, func, _new(named), 0.0, 1.0),
    aten.uniform: lambda mode, func, named: _uniform(mode, func, torch.empty_like(named["self"]), named["from"], named["to"]),
    aten.uniform_: lambda mode, func, named: _uniform(mode, func, named["self"], named["from"], named["to"]),
    aten.normal: _answer_normal,
    aten.normal_: lambda mode, func, named: _normal(mode, func, named["self"], named["mean"], named["std"]),
}
"""ATen operator -> its answer, from the mode, the overload and all arguments by name."""
