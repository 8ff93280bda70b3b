"""Shardings of operands and results from the axes of an operator's tokens, and maps through layout operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshc.ir.sharding import Part, Sharding
from meshc.passes.phases.factors import Instance, Token


def sharding_by_tokens(whole: Sharding, dims: tuple[tuple[Token, ...], ...], chosen: Mapping[Token, tuple[str, ...]]) -> Sharding:
    """The sharding of an operand or result whose dims have the tokens `dims`."""
    rows = tuple(
        tuple(
            part if part.axes == (axes := chosen.get(token, ())) else Part(part.factor, part.size, axes)
            for part, token in zip(parts, tokens, strict=True)
        )
        for parts, tokens in zip(whole.dims, dims, strict=True)
    )
    return Sharding(rows)


def axes_by_token(sharding: Sharding, dims: tuple[tuple[Token, ...], ...]) -> dict[Token, tuple[str, ...]]:
    """The axes of each token of an operand or result whose dims have the tokens `dims`."""
    rows = zip(sharding.dims, dims, strict=True)
    return {token: part.axes for parts, tokens in rows for part, token in zip(parts, tokens, strict=True)}


def forward_map(instance: Instance, index: int, source: Sharding, whole: Sharding) -> Sharding:
    """The sharding of a layout operator's result, for an operand sharded as `source`. A split of a dim that must be whole is lost."""
    axes = {}
    for token, split in axes_by_token(source, instance.operands[0]).items():
        if token not in instance.whole:
            axes[token] = axes[instance.tied.get(token, token)] = split
    return replace(sharding_by_tokens(whole, instance.results[index], axes), partial=() if instance.rule.settles else source.partial)


def backward_map(instance: Instance, index: int, want: Sharding, whole: Sharding) -> tuple[Sharding, bool]:
    """The sharding that the operand needs for result `index` to be sharded as `want`, and whether the operator can give all of `want`."""
    axes = {}
    complete = not (instance.rule.settles and want.partial)
    for token, split in axes_by_token(want, instance.results[index]).items():
        if token in instance.whole:
            complete = complete and not split
        else:
            axes[token] = axes[instance.tied.get(token, token)] = split
    return replace(sharding_by_tokens(whole, instance.operands[0], axes), partial=want.partial), complete
