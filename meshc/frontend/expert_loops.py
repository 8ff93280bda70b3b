"""Recognition of the loop over experts in a module's forward: over modules that it calls, or over rows of stacked weights."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from types import CodeType, FunctionType

from torch import nn

from meshc.frontend.inline_experts import InlineReader, stacked_parameters
from meshc.frontend.loop_reader import CALL, Loop, LoopReader, compile_body


def loop_of(module: nn.Module) -> Loop | None:
    """The loop over experts in a module's forward; None if there is no such loop, or one that is not understood."""
    function = type(module).forward
    if not isinstance(function, FunctionType) or "forward" in module.__dict__ and CALL not in module.__dict__:
        return None
    held = [module, *module.children()]
    lists = any(isinstance(each, nn.ModuleList | nn.ModuleDict) and len(each) > 1 for each in held)
    weights = stacked_parameters(module)
    tree = _tree(function) if lists or weights else None
    if tree is None:
        return None
    found = LoopReader(module, function, tree).loop() if lists else None
    return InlineReader(module, function, tree).loop() if found is None and weights else found


@cache
def _tree(function: FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a plain function, without decorators and free variables, at its lines in its file; None for any other."""
    if function.__code__.co_freevars:
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        found = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        return None
    if any(isinstance(each, ast.Attribute) and each.attr.startswith("__") and not each.attr.endswith("__") for each in ast.walk(found)):
        return None  # private names, which Python mangles by class
    ast.increment_lineno(found, first - 1)
    if not any(isinstance(each, ast.For) for each in found.body):
        return None
    same = _code_key(compile_body(found, found.body, function)) == _code_key(function.__code__)
    return found if same else None  # else the file has changed since the import


def _code_key(code: CodeType) -> object:
    return code.co_names, code.co_varnames, [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
