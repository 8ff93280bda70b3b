"""Checkpointed regions of the user's model: which nodes are in one, and what of it is saved for backward.

    x = checkpoint(layer, x, context_fn=partial(create_selective_checkpoint_contexts, [aten.mm.default]))

        mm = aten.mm(x, t)       region model.layers.3, saved
        gelu = aten.gelu(mm)     region model.layers.3

Dynamo makes a call of a body of each. `inline_checkpoints` tags the nodes of the body, by names of meta that tracing carries on to the
operators; once these are there the region's policy is asked of each, in their order, as torch asks it in forward. Of regions within
regions the outermost counts: all in it is recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from os.path import commonprefix
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from meshc.errors import CaptureError
from meshc.frontend.sources import module_calls, source_of
from meshc.ir import KEY, is_getitem, op_name, records, set_record

REGION: Final = "ac_graph_id"
POLICY: Final = "recompute"
"""Names of meta that torch's own regions use; tracing hands on what stands there."""

aten = torch.ops.aten
STANDS_FOR: Final = {
    "meshc.attention": (
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_cudnn_attention.default,
    ),
    "meshc.explicit_attention": (
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_cudnn_attention.default,
    ),
    "meshc.dropout": (aten.native_dropout.default,),
}  # fmt: skip
"""Operators of meshc's own that torch has no policy for: what it runs there."""

SAVES: Final = (
    CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD,
)  # fmt: skip
"""What a policy would have on the host is kept where it is: lines of a plan say what lies there."""

Policy = Callable[..., Any]


def tag_region(body: GraphModule, call: Node, names: Counter[str]) -> None:
    """Of a body whose call is to be replaced: its nodes are of one region, that of the call if it is in one."""
    if REGION in call.meta:
        region, policy = call.meta[REGION], call.meta[POLICY]
    else:
        inside = [_path(node) for node in body.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        module = _common([path for path in inside if path]) or "model"
        names[module] += 1
        region = module if names[module] == 1 else f"{module}#{names[module]}"
        policy = _policy(body)
    for node in body.graph.nodes:
        node.meta[REGION], node.meta[POLICY] = region, policy


def carry_region(node: Node, made: Node) -> None:
    """To the copy of a body's node."""
    made.meta[REGION], made.meta[POLICY] = node.meta[REGION], node.meta[POLICY]


def _path(node: Node) -> str:
    calls = module_calls(node)
    return calls[-1][1] if calls else ""


def _common(paths: Iterable[str]) -> str:
    return ".".join(commonprefix([path.split(".") for path in paths]))


def _policy(body: GraphModule) -> Policy | None:
    """What says which values a region saves; None: none."""
    contexts = body.meta.get("_checkpoint_context_fn")
    return None if contexts is None else getattr(contexts()[0], "policy_fn", None)


def mark_regions(graph: Graph) -> None:
    """Says of forward's operators which region they are in, and whether its policy saves them. Raises CaptureError."""
    for node in graph.nodes:
        region = node.meta.get(REGION)
        if node.op != "call_function" or not isinstance(region, str) or records(node)[0].phase != "forward":
            continue
        saved = records(node.args[0])[0].source.saved if is_getitem(node) else _saves(node)
        found = tuple(replace(one, source=replace(one.source, region=region, saved=saved)) for one in records(node))
        set_record(node, found if isinstance(node.meta[KEY], tuple) else found[0])


def _saves(node: Node) -> bool:
    policy = node.meta.get(POLICY)
    if not callable(policy) or isinstance(policy, CheckpointPolicy):
        return False
    args: Any = map_arg(node.args, lambda one: one.meta.get("val"))
    kwargs: Any = map_arg(node.kwargs, lambda one: one.meta.get("val"))
    context = SelectiveCheckpointContext(is_recompute=False, op_output=node.meta.get("val"))
    try:
        answers = [policy(context, target, *args, **kwargs) for target in STANDS_FOR.get(op_name(node), (node.target,))]
    except Exception as error:
        raise CaptureError(
            f"the policy of a checkpointed region raised {type(error).__name__}: {error}\n  in your model: {source_of(node)}"
        ) from error
    return any(answer is True or answer in SAVES for answer in answers)
