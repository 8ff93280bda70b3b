"""Structures of outputs as JSON: they come back as they were, or are said to be no data."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from meshc.frontend import output_tree_data
from meshc.frontend.libraries import stock_models
from meshc.frontend.output_tree import OutputTree
from meshc.ir import trees
from tests.cache_name import CACHE

Pair = namedtuple("Pair", "first second")


def stock_output() -> CausalLMOutputWithPast:
    stock_models.learn_caches()
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    return CausalLMOutputWithPast(loss=torch.ones(()), **{CACHE: cache})


@pytest.mark.parametrize(
    "output",
    [
        5, {"a": [1, None], 3: (2, ())}, OrderedDict(x=1), defaultdict(list, {"k": [1]}), Pair(1, [2]),
        torch.return_types.max((1, 2)), stock_output(),
    ],
    ids=lambda output: type(output).__name__,
)  # fmt: skip
def test_what_is_data_comes_back_as_it_was(output: Any) -> None:
    tree = OutputTree(trees.structure(output), {0: None, 1: torch.float32, 2: "text", 3: torch.Size([2, 3])})
    assert output_tree_data.tree_from_json(json.loads(json.dumps(output_tree_data.tree_to_json(tree)))) == tree


def test_an_output_around_its_cache() -> None:
    cached, tree = stock_output(), OutputTree(trees.structure(stock_output()))
    whole = tree.build(trees.leaves(cached))
    around = tree.build_around("the cache", [torch.zeros(())])
    assert list(around) == list(whole) and type(around) is type(whole)
    assert around[CACHE] == "the cache" and around.loss == 0
    nested = OutputTree(trees.structure({"of": [cached[CACHE], 1], "rest": 2, "plain": 3}), {4: "kept"})
    assert nested.build_around(None, [10, 20]) == {"of": [None, 10], "rest": 20, "plain": "kept"}


def test_what_is_no_data_is_said() -> None:
    local = namedtuple("local", "first")
    with pytest.raises(output_tree_data.NotPlainData, match="which is no plain value"):
        output_tree_data.tree_to_json(OutputTree(trees.structure(local(1))))
    with pytest.raises(output_tree_data.NotPlainData, match="holds a builtins.object, which is no plain value"):
        output_tree_data.tree_to_json(OutputTree(trees.structure([1]), {0: object()}))
    told = output_tree_data.tree_to_json(OutputTree(trees.structure([1])))
    told["spec"][0] = "elsewhere.Output"
    with pytest.raises(output_tree_data.NotPlainData, match="elsewhere.Output, of which the output is made, is no tree on this rank"):
        output_tree_data.tree_from_json(told)
