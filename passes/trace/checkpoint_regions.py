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

Policy = Callable[..., Any]


def tag_region(body: GraphModule, call: Node, names: Counter[str]) -> None:
    """Tags the nodes of a body whose call is to be replaced: with the call's region if it is in one, otherwise with a new one."""
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
    """Copies the tags of a body's node to its copy."""
    made.meta[REGION], made.meta[POLICY] = node.meta[REGION], node.meta[POLICY]


def _path(node: Node) -> str:
    calls = module_calls(node)
    return calls[-1][1] if calls else ""


def _common(paths: Iterable[str]) -> str:
    return ".".join(commonprefix([path.split(".") for path in paths]))


def _policy(body: GraphModule) -> Policy | None:
    """The function that decides which values a region saves; None: it saves none."""
    contexts = body.meta.get("_checkpoint_context_fn")
    return None if contexts is None else getattr(contexts()[0], "policy_fn", None)


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
