"""Trees that torch's own functions do not know: inside, outside, and by which names their parts go."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache

from meshc.frontend.call_keys import describe_inputs
from meshc.frontend.flex_on_cpu import masks_as_inputs
from meshc.frontend.libraries.stock_models import learn_caches
from meshc.ir import trees


def test_inputs_are_named_by_what_their_class_calls_its_parts() -> None:
    masks_as_inputs()
    learn_caches()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert describe_inputs((), {"mask": mask}).startswith("mask.kv_num_blocks int32 [1, 1, 1], mask.kv_indices int32")
    assert describe_inputs((), {"past": cache}).count("past") == 2 == len(trees.leaves(cache))
    assert torch.utils._pytree.tree_leaves(cache) == [cache]
