"""Reference for random numbers: an unmodified model, run eagerly, with random calls answered by meshc's draws.

    with ReferenceRandom(seed, step) as reference:
        loss = model(x)
        loss.backward()         # inside, if the model uses torch.utils.checkpoint
    reference.calls             # how many random calls the model made

The k-th random call (k = 0, 1, ... in order of execution) gets the draws of call k at the shape of its tensor, which is what a compiled
program draws for it on any mesh. A random operator that meshc does not define raises, rather than drawing from torch's generator.

Meanwhile the seed of torch's CPU generator is the number of the next call. A checkpointed region restores the generator's state when it
runs again in backward, and so finds the numbers, and with them the draws, of its first run.

A single microbatch draws its rows of the whole batch's draws, whose shapes come from a run of the whole batch:

    with ReferenceRandom(seed, step) as whole, torch.no_grad():
        model(x)
    with ReferenceRandom(seed, step, Microbatch(whole.drawn, count=4, index=1)):
        model(x[2:4])                           # x has 8 rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshc.errors import MeshcError
from meshc.ir.functions import Target
from meshc.ir.schemas import arguments_by_name
from meshc.ops import distributions, random
from meshc.private import OpOverload, TorchDispatchMode
from meshc.program.microbatch_split import offsets

aten = torch.ops.aten
Tile = tuple[Sequence[int], Sequence[int], Sequence[int]]


Named: TypeAlias = dict[str, Any]
"""The arguments of one call by name, each of the type that the operator's schema says."""


@dataclass(frozen=True)
class Microbatch:
    """The tile of the whole batch's draws that answers a model's calls: the index-th of `count`; `drawn` lists the whole batch's draws."""

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

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        state = self._outside.pop()
        if state is not None:
            torch.set_rng_state(state)

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Named | None = None) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        named = arguments_by_name(func, args, kwargs)
        if _is_idle(func, named):
            return func(*args, **kwargs)
        answer = ANSWERS.get(func.overloadpacket)
        if answer is None and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # under inference_mode composite operators are dispatched undecomposed
                return func.decompose(*args, **kwargs)
        if answer is None:
            raise undefined_error(func, named)
        if torch._C._current_graph_task_id() != -1 and torch.default_generator.initial_seed() >= self.calls:
            raise MeshcError(
                f"{func} draws random numbers anew during backward, where calls have no number.\n"
                "  why: a checkpointed region runs forward again without the state that the generator had\n"
                "  what to do: checkpoint(..., preserve_rng_state=True), or switch checkpointing off in the reference"
            )
        return self.answer_call(answer, func, args, kwargs)

    def answer_call(self, answer: Answer, func: OpOverload, args: Sequence[object], kwargs: Named) -> object:
        """The answer to a random call; a recording overrides it."""
        named = arguments_by_name(func, args, kwargs)
        if "out" not in named:
            return answer(self, func, named)
        written = named.pop("out")
        made = dict.fromkeys(("layout", "device", "pin_memory", "memory_format")) | {"dtype": written.dtype} | named
        return written.copy_(answer(self, func, made))

    def next(self, func: OpOverload, shape: Sequence[int], device: torch.device | None) -> tuple[Tensor, int, Tile]:
        """(seed_step, call, tile) of the next random call, which draws `shape`."""
        call = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(call + 1)
        shape = tuple(shape)
        if call == self.calls:  # not one that a checkpointed region repeats
            self.drawn.append((str(func), shape))
        number, tile = self.tile_of_call(call, shape)
        return random.seed_step(self.seed, self.step, device or "cpu"), number, tile

    def tile_of_call(self, call: int, shape: tuple[int, ...]) -> tuple[int, Tile]:
        """The number under which a call draws, and its tile of the draws."""
        return call, self.microbatch.tile(call, shape) if self.microbatch is not None else (shape, shape, [0] * len(shape))

    def draws(self, func: OpOverload, shape: Sequence[int], device: torch.device | None) -> distributions.Draws:
        """The next random call, for a distribution."""
        return distributions.Draws(*self.next(func, shape, device))


def _is_idle(func: OpOverload, named: Named) -> bool:
    """Whether a call draws nothing: dropout that is off or has a fixed result (p = 0 or 1, no elements), or attention without dropout."""
    if func.overloadpacket is aten.dropout and (named["p"] in (0.0, 1.0) or named["input"].numel() == 0):
        return True
    return named.get("train", None) is False or named.get("training", None) is False or named.get("dropout_p", None) == 0.0


def undefined_error(func: OpOverload, named: Named) -> MeshcError:
    advice = "draw outside the model and pass the result in"
    if "dropout_p" in named:
        advice = "run the reference under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), whose dropout is a call of its own"
    return MeshcError(f"{func} draws random numbers in a way that meshc does not define.\n  what to do: {advice}")


def _fill(mode: ReferenceRandom, func: OpOverload, out: Tensor, values: Callable[..., Tensor], *numbers: object) -> Tensor:
    """`out` overwritten by a distribution's draws at its shape."""
    return out.copy_(values(mode.draws(func, out.shape, out.device), *numbers, out.dtype))


def _bernoulli(mode: ReferenceRandom, func: OpOverload, out: Tensor, probability: Tensor | float) -> Tensor:
    seed_step, call, tile = mode.next(func, out.shape, out.device)
    if isinstance(probability, Tensor):
        return out.copy_(random.bernoulli(seed_step, call, probability.expand(out.shape), tile))
    return out.copy_(torch.ops.meshc.keep_mask(seed_step, call, 1.0 - probability, *tile))


def _new(named: Named) -> Tensor:
    """The empty tensor of a factory call, `x_like` or by size."""
    options = {key: named[key] for key in ("dtype", "layout", "device", "pin_memory")}
    if "size" in named:
        return torch.empty(named["size"], **{key: value for key, value in options.items() if value is not None})
    return aten.empty_like(named["self"], **options, memory_format=named.get("memory_format"))


Answer: TypeAlias = Callable[[ReferenceRandom, OpOverload, Named], object]


def _standard(values: Callable[..., Tensor]) -> Answer:
    return lambda mode, func, named: _fill(mode, func, _new(named), values, 0.0, 1.0)


def _answer_normal(mode: ReferenceRandom, func: OpOverload, named: Named) -> Tensor:
    mean, std = named["mean"], named["std"]
    if "size" in named:
        return _fill(mode, func, _new(named), distributions.normal, mean, std)
    like = torch.broadcast_tensors(*(value for value in (mean, std) if isinstance(value, Tensor)))[0]
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return _fill(mode, func, out, distributions.normal, mean, std)


def _answer_integers(mode: ReferenceRandom, func: OpOverload, named: Named) -> Tensor:
    out = _new({**named, "dtype": _counting(named)} if "size" in named else named)
    return _fill(mode, func, out, distributions.integers, named.get("low", 0), named["high"])


def _counting(named: Named) -> torch.dtype:
    """The dtype of the call; a schema's default is an int and means int64."""
    return named["dtype"] if isinstance(named["dtype"], torch.dtype) else torch.int64


def _answer_random(mode: ReferenceRandom, func: OpOverload, named: Named) -> Tensor:
    if "to" not in named or named["to"] is None:
        raise undefined_error(func, named)
    return _fill(mode, func, named["self"], distributions.integers, named.get("from", 0), named["to"])


def _answer_permutation(mode: ReferenceRandom, func: OpOverload, named: Named) -> Tensor:
    return distributions.permutation(mode.draws(func, (named["n"],), named["device"]), _counting(named))


def _answer_multinomial(mode: ReferenceRandom, func: OpOverload, named: Named) -> Tensor:
    weights, samples, replacement = named["self"], named["num_samples"], named["replacement"]
    shape = distributions.multinomial_shape(list(weights.shape), samples, replacement)
    return distributions.multinomial(mode.draws(func, shape, weights.device), weights, samples, replacement)


def _answer_rrelu(mode: ReferenceRandom, func: OpOverload, named: Named) -> Tensor:
    """`noise` receives the slopes, which backward multiplies with."""
    x = named["self"]
    slopes = distributions.rrelu_slopes(mode.draws(func, x.shape, x.device), x, named["lower"], named["upper"])
    if "noise" in named:
        named["noise"].copy_(slopes)
    out = x * slopes
    return x.copy_(out) if func.overloadpacket in (aten.rrelu_, aten.rrelu_with_noise_) else out


def _answer_native_dropout(mode: ReferenceRandom, func: OpOverload, named: Named) -> tuple[Tensor, Tensor]:
    x = named["input"]
    seed_step, call, tile = mode.next(func, x.shape, x.device)
    return torch.ops.meshc.dropout(x, seed_step, call, named["p"], *tile)


def _answer_bernoulli(mode: ReferenceRandom, func: OpOverload, named: Named) -> Tensor:
    return _bernoulli(mode, func, torch.empty_like(named["self"]), named["p"] if "p" in named else named["self"])


ANSWERS: dict[Target, Answer] = {
    aten.native_dropout: _answer_native_dropout,
    aten.dropout: lambda mode, func, named: _answer_native_dropout(mode, func, named)[0],
    aten.bernoulli: _answer_bernoulli,
    aten.bernoulli_: lambda mode, func, named: _bernoulli(mode, func, named["self"], named["p"]),
    **dict.fromkeys((aten.rand, aten.rand_like), _standard(distributions.uniform)),
    **dict.fromkeys((aten.randn, aten.randn_like), _standard(distributions.normal)),
    **dict.fromkeys((aten.randint, aten.randint_like), _answer_integers),
    **dict.fromkeys((aten.rrelu, aten.rrelu_, aten.rrelu_with_noise, aten.rrelu_with_noise_), _answer_rrelu),
    aten.random_: _answer_random,
    aten.randperm: _answer_permutation,
    aten.multinomial: _answer_multinomial,
    aten.normal: _answer_normal,
}
"""ATen operator -> its answer, from the mode, the overload and all arguments by name."""

FILLING: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "uniform": (distributions.uniform, ("from", "to")),
    "normal": (distributions.normal, ("mean", "std")),
    "exponential": (distributions.exponential, ("lambd",)),
    "log_normal": (distributions.log_normal, ("mean", "std")),
    "cauchy": (distributions.cauchy, ("median", "sigma")),
    "geometric": (distributions.geometric, ("p",)),
}
"""Operators that overwrite a tensor with a distribution (or, without the underscore, an empty one like it): their numbers, in order."""


def _filling(values: Callable[..., Tensor], names: tuple[str, ...], fresh: bool) -> Answer:
    def answer(mode: ReferenceRandom, func: OpOverload, named: Named) -> Tensor:
        out = torch.empty_like(named["self"]) if fresh else named["self"]
        return _fill(mode, func, out, values, *(named[name] for name in names))

    return answer


for _name, (_values, _names) in FILLING.items():
    ANSWERS[getattr(aten, f"{_name}_")] = _filling(_values, _names, fresh=False)
    if _name != "normal":
        ANSWERS[getattr(aten, _name)] = _filling(_values, _names, fresh=True)
ANSWERS[aten.normal_functional] = _filling(*FILLING["normal"], fresh=True)  # normal_ after functionalization
