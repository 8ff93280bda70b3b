"""Experts written out inside a loop over rows of stacked parameters, extracted as a function of one expert's rows.

    for e in hit:                                              def made(self, rows):      # self: with the weights of one expert
        slot, token = torch.where(mask[e])                         gate, up = F.linear(rows, self.gate_up_proj).chunk(2, dim=-1)
        rows = x[token]                                            h = F.silu(gate) * up
        gate, up = F.linear(rows, self.gate_up_proj[e]).chunk(2, dim=-1)
        h = F.silu(gate) * up                                      return F.linear(h, self.down_proj)
        made = F.linear(h, self.down_proj[e])
        out.index_add_(0, token, made * weights[token, slot, None])

An expression is the expert's if it reads its rows, rows of stacked parameters, other attributes of the module and global names of the
file, and nothing else.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshc.frontend.loop_reader import Inline, LoopReader
from meshc.frontend.loop_terms import NotUnderstood, Term, numbers_of, path_of

ROWS: Final = "_meshc_rows"
"""The function's parameter of rows."""
LINEAR: Final = "_meshc_linear"
"""The function's name of `F.linear`."""
CLOSED: Final = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
"""Expressions that bind names, or have effects beside their value."""


def stacked_parameters(module: nn.Module) -> dict[str, int]:
    """Number of experts by name, of the module's own parameters that may be experts' matrices [experts, .., ..]."""
    return {name: each.shape[0] for name, each in module._parameters.items() if each is not None and each.dim() == 3 and each.shape[0] > 1}


class OneExpert(nn.Module):
    """The `self` of the extracted function: stacked weights are one expert's, without values; other attributes are the module's."""

    def __init__(self, module: nn.Module, inline: Inline) -> None:
        super().__init__()
        self.__dict__.update(_module=module, _made=inline.made)
        for name in inline.weights:
            whole = module.get_parameter(name)
            one = torch.empty(whole.shape[1:], dtype=whole.dtype, device="meta")
            self._parameters[name] = nn.Parameter(one, whole.requires_grad)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__["_parameters"].get(name)
        return getattr(self.__dict__["_module"], name) if own is None else own

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.__dict__["_made"](self, rows)
        return made


class InlineReader(LoopReader):
    """weights     names of stacked parameters that the loop's expert has read
    statements  of the expert's function so far
    source      the expression of all rows
    """

    def __init__(self, module: nn.Module, function: FunctionType, tree: ast.FunctionDef) -> None:
        super().__init__(module, function, tree)
        self.stacked = stacked_parameters(module)
        self.weights: dict[str, None] = {}
        self.statements: list[ast.stmt] = []
        self.source: ast.expr | None = None
        self.container = ()

    def inline(self, value: Term) -> Inline:
        counts = {self.stacked[name] for name in self.weights}
        if value.code is None or len(counts) != 1 or self.expected not in (None, *counts) or self.past not in (None, *counts):
            raise NotUnderstood
        first, *_ = self.tree.args.args
        arguments = ast.arguments([], [ast.arg("self"), ast.arg(ROWS)], None, [], [], None, [])
        made = ast.FunctionDef("expert", arguments, [*self.statements, ast.Return(value.code)], [], None, None)
        made.__dict__.setdefault("type_params", [])
        ast.fix_missing_locations(ast.copy_location(made, first))
        whole = compile(ast.Module([made], []), self.function.__code__.co_filename, "exec", dont_inherit=True)
        code = next(each for each in whole.co_consts if isinstance(each, CodeType))
        return Inline(tuple(self.weights), FunctionType(code, {**self.function.__globals__, LINEAR: F.linear}, "expert"))

    # Expressions, and their form in the function.

    def term(self, x: ast.expr) -> Term:
        if not isinstance(x, ast.Name):
            rows, seen = self.source, dict(self.weights)
            try:
                code = self.code(x)
            except NotUnderstood:
                self.source, self.weights = rows, seen
            else:
                if self.is_matrix(x):
                    return Term("matrix", code=code)
                if self.source is not None and self.of_rows(code) and not (isinstance(code, ast.Name) and code.id == ROWS):
                    return Term("made", (self.source,), code=code)
        return super().term(x)

    def times(self, left: Term, right: Term) -> Term | None:
        found = super().times(left, right)
        code = next((each.code for each in (right, left) if each.kind == "made"), None)
        return found if found is None else replace(found, code=code)

    def of_rows(self, code: ast.expr) -> bool:
        """Whether the expression reads rows, or values computed from rows."""
        made = {ROWS, *(name for name, known in self.known.items() if known.kind == "made")}
        return any(isinstance(each, ast.Name) and each.id in made for each in ast.walk(code))

    def is_matrix(self, x: ast.expr) -> bool:
        """Whether the expression is `self.W[e]`."""
        if not isinstance(x, ast.Subscript) or self.known.get(getattr(x.slice, "id", ""), Term("")).kind != "index":
            return False
        path = path_of(x.value)
        return path is not None and len(path) == 1 and path[0] in self.stacked

    def code(self, x: ast.expr) -> ast.expr:
        """An expression of the loop's expert, in its form in the function. Raises NotUnderstood where it reads anything else."""
        if isinstance(x, ast.Name):
            return self.name(x)
        if isinstance(x, CLOSED):
            raise NotUnderstood
        if self.is_matrix(x):
            assert isinstance(x, ast.Subscript) and isinstance(x.value, ast.Attribute)
            self.weights[x.value.attr] = None
            return copy.deepcopy(x.value)
        if isinstance(x, ast.Subscript) and (rows := self.rows(x)) is not None:
            return rows
        if isinstance(x, ast.Attribute):
            path = path_of(x)
            if path is not None and (not path or path[0] in self.stacked):
                raise NotUnderstood  # weights of all experts
            return copy.deepcopy(x) if path is not None else ast.Attribute(self.code(x.value), x.attr, ast.Load())
        turned = _transpose_operand(x.right) if isinstance(x, ast.BinOp) and isinstance(x.op, ast.MatMult) else None
        if turned is not None and self.is_matrix(turned):
            assert isinstance(x, ast.BinOp)
            return ast.Call(ast.Name(LINEAR, ast.Load()), [self.code(x.left), self.code(turned)], [])
        return self.whole(x)

    def whole(self, x: Any) -> Any:
        """A node with each of its expressions in its form in the function."""
        fields: dict[str, Any] = {}
        for name, value in ast.iter_fields(x):
            if isinstance(value, ast.expr):
                fields[name] = self.code(value)
            elif isinstance(value, ast.keyword | ast.slice):
                fields[name] = self.whole(value)
            elif isinstance(value, list):
                fields[name] = [self.code(v) if isinstance(v, ast.expr) else self.whole(v) if isinstance(v, ast.AST) else v for v in value]
            else:
                fields[name] = value
        return type(x)(**fields)

    def name(self, x: ast.Name) -> ast.expr:
        known = self.known.get(x.id)
        if known is not None and known.kind == "rows":
            return self.own_rows(known)
        if known is not None and known.kind in ("made", "matrix") and known.code is not None:
            return copy.deepcopy(known.code)
        if known is not None or x.id in self.within or x.id in self.function.__code__.co_varnames:
            raise NotUnderstood
        return x

    def rows(self, x: ast.Subscript) -> ast.expr | None:
        """The rows that `x[token]` is in the function; None for another expression."""
        try:
            term = super().term(x)
        except NotUnderstood:
            return None
        return self.own_rows(term) if term.kind == "rows" else None

    def own_rows(self, term: Term) -> ast.expr:
        (of,) = term.of
        if self.source is not None and ast.dump(self.source) != ast.dump(of):
            raise NotUnderstood
        self.source = of
        return ast.Name(ROWS, ast.Load())

    # Statements.

    def statement(self, statement: ast.stmt) -> None:
        changed = isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name) and self.kind(statement.target) == "made"
        if not changed or self.added is not None:
            return super().statement(statement)
        assert isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name)
        name = statement.target.id
        try:
            self.statements.append(ast.AugAssign(ast.Name(name, ast.Store()), statement.op, self.code(statement.value)))
        except NotUnderstood:
            term = self.term(ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value))
            if term.kind != "weighed":
                raise
            self.known = {other: known for other, known in self.known.items() if known.kind != "made"}  # other names of the weighted value
            self.known[name] = term

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        term = self.term(value)
        if term.kind != "made" or term.code is None:
            return super().assign(target, value)
        names: Sequence[ast.expr] = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(each, ast.Name) for each in names):
            raise NotUnderstood
        self.statements.append(ast.Assign([copy.deepcopy(target)], term.code))
        self.known |= {each.id: replace(term, code=ast.Name(each.id, ast.Load())) for each in names if isinstance(each, ast.Name)}


def _transpose_operand(x: ast.expr) -> ast.expr | None:
    """The `w` of `w.T`, `w.t()` and `w.transpose(0, 1)`; None for another expression."""
    if isinstance(x, ast.Attribute):
        return x.value if x.attr in ("T", "mT") else None
    if not isinstance(x, ast.Call) or not isinstance(x.func, ast.Attribute) or x.keywords:
        return None
    dims = sorted(numbers_of(x.args))
    turns = x.func.attr == "t" and not x.args or x.func.attr == "transpose" and len(x.args) == 2 and dims in ([0, 1], [-2, -1])
    return x.func.value if turns else None
