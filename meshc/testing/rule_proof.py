"""Public `meshc.testing.prove_rule`: tests an operator's sharding rule on sample calls.

    meshc.testing.prove_rule("mylib::my_rmsnorm", [(torch.randn(5, 7), torch.randn(7))])

Every letter that the rule allows to be split is split, alone on two and on three ranks and in pairs on six, with NaN in the padding; the
ranks run one after another in this process, and together they must give what the operator gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshc.errors import CompileError, VerifyError
from meshc.ir.functions import Target
from meshc.ops.registered import overload_of
from meshc.testing.brute_force import Sample, build, prove


@dataclass(frozen=True)
class Proof:
    """What came of it.

    splits   ways to split that were run and gave what the operator gives
    letters  that were split, `+` before those that leave a sum; `*0`, `*1`, ... are the dims that `...` stands for
    """

    op: str
    samples: int
    splits: int
    letters: tuple[str, ...]

    def __str__(self) -> str:
        what = f"split were {', '.join(self.letters)}" if self.letters else "the rule lets nothing be split"
        return f"{self.op}: {self.splits} ways to split {self.samples} sample{'s' * (self.samples > 1)} are equal; {what}"


def prove_rule(op: Target, samples: Iterable[Sequence[Any]]) -> Proof:
    """Raises VerifyError at the first split of a sample that changes what the operator gives.

    op       as `meshc.register_rule` takes it; operators of torch, and those that its tag calls pointwise, may be tried too
    samples  a tuple of arguments for each call; a dict at its end are arguments by name. Small sizes will do; sizes such as 5 and 7, which
             neither 2 nor 3 divides, try padding too, and a dim of size 1 tries nothing
    """
    known = overload_of(op)
    name = str(known).removesuffix(".default")
    calls = [_sample(known, given) for given in samples]
    if not calls:
        raise CompileError(f"prove_rule({name}): there are no samples\n  what to do: give the arguments of a call or more, [(x, weight)]")
    splits = 0
    letters: dict[str, None] = {}
    for number, call in enumerate(calls):
        one = build(call)
        if not one.instance.known:
            raise CompileError(f'{name} has no rule\n  what to do: meshc.register_rule("{known._schema.name}", ...)')
        summed = {token for sums in one.instance.sums for token in sums}
        letters.update(dict.fromkeys(f"{'+' * (token in summed)}{token[0]}" for token in one.tokens()))
        try:
            splits += prove(call)
        except AssertionError as error:
            raise VerifyError(
                f"the rule of {name} is wrong, sample {number}: {error}\n"
                "  what to do: say that the letter is whole (c!), or summed over (+c); if splitting it takes communication, give a lower"
            ) from error
    return Proof(name, len(calls), splits, tuple(letters))


def _sample(op: torch._ops.OpOverload, given: Sequence[Any]) -> Sample:
    if isinstance(given, torch.Tensor | str) or not isinstance(given, Sequence):
        raise CompileError(f"prove_rule: a sample is a tuple of arguments, (x, weight), not {type(given).__name__}")
    *args, last = [*given, None] if not given or not isinstance(given[-1], Mapping) else given
    return Sample(op, tuple(_plain(arg) for arg in args), {key: _plain(value) for key, value in (last or {}).items()})


def _plain(value: Any) -> Any:
    """An argument that nobody asks gradients of."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
