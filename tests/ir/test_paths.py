"""Names of a call's inputs and outputs, read off the structure of what goes in and comes out."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import meshc
from meshc.ir import trees
from meshc.ir.paths import input_names, spec_paths
from tests.cache_name import CACHE
from tests.models import llama

Pair = namedtuple("Pair", ["mean", "spread"])


@dataclass
class Halves:
    left: Any
    right: Any


pytree.register_dataclass(Halves)

T = torch.zeros(1)
TREES = [
    (T, ["output"]),
    ((T, [T, T]), ["0", "1.0", "1.1"]),
    ({"logits": T, "hidden": {"states": (T, T)}}, ["logits", "hidden.states.0", "hidden.states.1"]),
    ({5: T, 7: T}, ["5", "7"]),
    (OrderedDict(b=T, a=T), ["b", "a"]),
    (defaultdict(list, {"x": T}), ["x"]),
    (Pair(T, [T]), ["mean", "spread.0"]),
    (Halves((T,), T), ["left.0", "right"]),
]


@pytest.mark.parametrize(("tree", "paths"), TREES, ids=lambda value: ",".join(value) if isinstance(value, list) else "")
def test_a_leaf_is_named_by_its_path(tree: Any, paths: list[str]) -> None:
    assert spec_paths(pytree.tree_structure(tree)) == paths


def test_positional_inputs_take_the_names_of_parameters() -> None:
    def forward(x: Any, *rest: Any, **more: Any) -> None: ...

    assert input_names(forward, (Pair(T, T), T), {"mask": T, "extra": [T]}) == ["x.mean", "x.spread", "arg1", "mask", "extra.0"]


def test_a_cache_is_named_by_layer_then_key_and_value() -> None:
    case = llama(layers=2)
    ids = case.kwargs["input_ids"]
    with torch.no_grad():
        model = case.model.eval()
        program = meshc.compile(model, meshc.Mesh("tp=2"), kwargs={"input_ids": ids})
        cache = model(input_ids=ids)[CACHE]
    outputs = [port.name for port in program.compiled.outputs if port.kind == "output"]
    layers = [f"{CACHE}.{layer}.{part}" for part in (0, 1) for layer in range(2)]
    assert outputs == ["logits", *layers]
    tree = program.lowered.placed.traced.model.output_tree
    assert tree is not None and tree.caches() == layers

    spec = trees.structure({CACHE: cache})
    assert input_names(nn.Module.forward, (), {CACHE: cache}) == spec_paths(spec) == layers
    tensors = dict(zip(layers, trees.leaves(cache), strict=True))
    for index, layer in enumerate(cache.layers):
        assert tensors[f"{CACHE}.{index}.0"] is layer.keys and tensors[f"{CACHE}.{index}.1"] is layer.values
