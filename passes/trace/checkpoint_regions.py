"""Tags of graph nodes for activation checkpoints: the user's region of each, and whether its policy saves the value for backward.

    x = checkpoint(layer, x, context_fn=partial(create_selective_checkpoint_contexts, [aten.mm.default]))

        mm = aten.mm(x, t)       region model.layers.3, saved
        gelu = aten.gelu(mm)     region model.layers.3

Dynamo turns each region into a call of a body. `inline_checkpoints` tags the nodes of the body, by keys of `meta` that tracing keeps for
the operators; then the region's policy is called for each operator, in order, as torch calls it in forward. Of nested regions the
outermost counts: everything in it is recomputed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from os.path import commonprefix
from typing import Final

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from meshc.errors import CaptureError
from meshc.frontend.sources import module_calls, source_of
from meshc.ir import KEY, is_getitem, op_name, records, set_record

CHECKPOINT: Final = torch.ops.higher_order.tag_activation_checkpoint
REGION: Final = "ac_graph_id"
POLICY: Final = "recompute"
"""Keys of `meta` that torch's own regions use; tracing passes their values on."""

aten = torch.ops.aten
STANDS_FOR: Final = {
    "meshc.attention": (
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_cudnn_attention.default,
    ),
    "meshc.dropout": (aten.native_dropout.default,),
}  # fmt: skip
"""meshc's own operators -> torch's operators, for which policies are written."""

SAVES: Final = (
    CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD,
)  # fmt: skip
"""A value that a policy would offload is saved on the device: the plan alone decides what is offloaded."""


def tag_region(body: GraphModule, call: Node, names: Counter[str]) -> None:
    """Tags the nodes of a body whose call is to be replaced: with the call's region if it is in one, otherwise with a new one."""
    if REGION in call.meta:
        region, policy = call.meta[REGION], call.meta[POLICY]
    else:
        inside = [module_calls(node) for node in body.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        module = ".".join(commonprefix([calls[-1][1].split(".") for calls in inside if calls and calls[-1][1]])) or "model"
        names[module] += 1
        region = module if names[module] == 1 else f"{module}#{names[module]}"
        contexts = body.meta.get("_checkpoint_context_fn")
        policy = None if contexts is None else getattr(contexts()[0], "policy_fn", None)  # None: it saves no value
    for node in body.graph.nodes:
        node.meta[REGION], node.meta[POLICY] = region, policy


def mark_regions(graph: Graph) -> None:
    """Records on forward operators their region and whether its policy saves them. Raises CaptureError."""
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
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
    context = SelectiveCheckpointContext(is_recompute=False, op_output=node.meta.get("val"))
    try:
        answers = [policy(context, target, *args, **kwargs) for target in STANDS_FOR.get(op_name(node), (node.target,))]
    except Exception as error:
        raise CaptureError(
            f"the policy of a checkpointed region raised {type(error).__name__}: {error}\n  in your model: {source_of(node)}"
        ) from error
    return any(answer is True or answer in SAVES for answer in answers)
