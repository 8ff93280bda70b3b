"""Source location of a traced node in the user's model: file, line, and the module calls around it; all graphs of a captured one."""

from __future__ import annotations

import re

from torch import nn
from torch.fx import GraphModule, Node

from meshc.frames import is_users
from meshc.ir import Source


def bodies_of(module: nn.Module) -> list[GraphModule]:
    """A captured graph and the graphs inside it, such as checkpointed regions."""
    return [body for body in module.modules() if isinstance(body, GraphModule)]


def source_of(node: Node) -> Source:
    """The innermost user frame of a node's stack, or one of an installed package, with the node's module path."""
    calls = module_calls(node)
    module = calls[-1][1] if calls else ""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(\S[^\n]*)', trace)
    for file, line, code in reversed(frames):
        if is_users(file):
            return Source(file, int(line), code.strip(), module)
    return Source(module=module)


def module_calls(node: Node) -> list[tuple[str, str]]:
    """The module calls in which a node was traced, outermost first: (id of the call, module path)."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(str(call), _module_path(str(path))) for call, (path, *_) in stack.items()]


def _module_path(path: str) -> str:
    path = re.sub(r"^L\['self'\]\.?(_export_root\.?)?", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return re.sub(r"\._modules\.|\.slice\(.*?\)\.", ".", path).strip(".").removeprefix("module").strip(".")
