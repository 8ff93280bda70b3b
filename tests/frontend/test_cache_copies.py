"""Copies of caches: as transformers builds them, of the tensors given, and of no cache that holds what is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from transformers import DynamicCache, EncoderDecoderCache

from meshc.frontend.cache_copies import CacheCopies
from meshc.frontend.libraries import stock_models
from meshc.ir import trees
from tests.meaning.checks import one_rank

LAYERS = 3


@pytest.fixture(autouse=True)
def caches_are_trees() -> None:
    stock_models.learn_caches()


def cache_of(make: Any = DynamicCache) -> Any:
    cache = make()
    for layer in range(LAYERS):
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), layer)
    return cache


def tensors(mesh: Any, length: int = 3, count: int = 2 * LAYERS) -> list[Tensor]:
    return [DTensor.from_local(torch.randn(1, 2, length, 4), mesh, [Replicate()]) for _ in range(count)]


def built_of(copies: CacheCopies, leaves: list[Tensor]) -> Any:
    built = copies.build(leaves)
    found, spec = trees.flatten(built)
    assert spec == copies.spec and all(a is b for a, b in zip(found, leaves, strict=True))
    return built


def test_a_copy_is_what_transformers_builds() -> None:
    copies = CacheCopies(trees.structure(cache_of()))
    with one_rank() as mesh:
        own, second, *rest = [built_of(copies, tensors(mesh)) for _ in range(5)]
        assert copies._text is not None
        for cache in (second, *rest):
            assert type(cache) is DynamicCache and cache.layers is not own.layers and cache.layers[0] is not own.layers[0]
            assert vars(cache).keys() == vars(own).keys() and vars(cache.layers[1]).keys() == vars(own.layers[1]).keys()
            for layer, theirs in zip(cache.layers, own.layers, strict=True):
                assert {name: value for name, value in vars(layer).items() if not isinstance(value, Tensor)} == {
                    name: value for name, value in vars(theirs).items() if not isinstance(value, Tensor)
                }
        rest[0].layers.pop()
        rest[0].layers[0].keys = None
        assert [len(cache.layers) for cache in (own, second, *rest)] == [LAYERS, LAYERS, LAYERS - 1, LAYERS, LAYERS]
        assert all(isinstance(cache.layers[0].keys, DTensor) for cache in (own, second, *rest[1:]))


def test_other_lengths_are_built_anew() -> None:
    copies = CacheCopies(trees.structure(cache_of()))
    with one_rank() as mesh:
        for length in (3, 3, 3, 5, 5, 5, 4):
            assert built_of(copies, tensors(mesh, length)).get_seq_length() == length


def test_two_caches_in_one() -> None:
    whole = EncoderDecoderCache(cache_of(), cache_of())
    copies = CacheCopies(trees.structure(whole))
    with one_rank() as mesh:
        for _ in range(3):
            built = built_of(copies, tensors(mesh, count=4 * LAYERS))
        assert copies._text is not None and built.self_attention_cache is not built.cross_attention_cache


class Counted(DynamicCache):  # type: ignore[misc]
    """A cache of the user's own."""


def test_of_one_tensor_in_two_places_nothing_is_taken_for_granted() -> None:
    """Later calls may have two."""
    copies = CacheCopies(trees.structure(cache_of()))
    with one_rank() as mesh:
        for _ in range(3):
            built_of(copies, tensors(mesh, count=1) * (2 * LAYERS))
        apart = tensors(mesh)
        assert built_of(copies, apart).layers[0].device == apart[0].device


def test_what_is_not_the_librarys_is_built_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trees._learned, Counted, trees._learned[DynamicCache])  # so that it is forgotten behind the test
    flatten, unflatten, *_ = trees.functions_of(DynamicCache)
    trees.learn(Counted, lambda cache: flatten(cache), lambda leaves, context: _counted(unflatten(leaves, context)))
    copies = CacheCopies(trees.structure(cache_of(Counted)))
    with one_rank() as mesh:
        for _ in range(4):
            assert type(copies.build(tensors(mesh))) is Counted
    assert copies._text is None


def test_plain_tensors_are_copied_by_the_library() -> None:
    """It appends to an empty tensor: what it holds is not what was given."""
    copies = CacheCopies(trees.structure(cache_of()))
    for _ in range(4):
        leaves = [torch.randn(1, 2, 3, 4) for _ in range(2 * LAYERS)]
        found = trees.leaves(copies.build(leaves))
        assert copies._text is None and all(torch.equal(a, b) for a, b in zip(found, leaves, strict=True))  # type: ignore[arg-type]


def _counted(cache: Any) -> Any:
    cache.__class__ = Counted
    return cache
