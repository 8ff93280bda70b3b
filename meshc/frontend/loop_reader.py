"""Loops over experts found in a forward's syntax tree: a description of each loop, and the forward with one call in place of the loop.

    for e in range(len(self.experts)):                        for e in hit:                    # of (mask.sum((-1, -2)) > 0).nonzero()
        token, slot = torch.where(choice == e)                    slot, token = torch.where(mask[e])         # mask: one_hot, permuted
        out[token] += weights[token, slot, None] * self.experts[e](x[token])      out.index_add_(0, token, ...)

      is      out = out + sum over the slots of a token: its weight there times the output of the expert that it has chosen there

An expert may be written out in the loop, by rows of stacked parameters: its statements are its forward.

    rows = x[token]                                            made 0 = F.linear(rows, self.gate_up_proj of one expert)
    gate, up = F.linear(rows, self.gate_up_proj[e]).chunk(2)   made 1 = made 0 .chunk(2)  ..

An expert may also be given all tokens, where gates or masks make the output zero for tokens that have not chosen it:

    for i, expert in enumerate(self.experts):      out = out + gates[..., i : i + 1] * expert(x)
                                                   out = out + torch.where((choice == i).any(-1, keepdim=True), expert(x), 0) * ..

The loop's body runs once, on symbols (`loop_terms.py`): no module or function of the user's is called, and each operation must have a
meaning there. Then the loop is replaced by one call, and everything else of the function stays the user's. A loop with any other
operation is left as it is, for torch to trace or to refuse with its line.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import copy
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.frontend.expert_placement import CALL, stacked_parameters
from meshc.frontend.expert_tape import ROW_INPUT, Call, Name, evaluate
from meshc.frontend.loop_terms import PLAIN, SELF, NotUnderstood, Symbol, Term, Terms, count_numbered

ITEMS: Final = "_meshc_items"
ONCE: Final = "_meshc_once"
"""Functions that a statement calls while it runs on symbols."""


@dataclass(frozen=True)
class Inline:
    """weights  names of the module's stacked parameters [experts, .., ..] that the loop's expert reads
    steps    of the expert, (name of a value, call); made: the name of its output
    """

    weights: tuple[str, ...]
    steps: tuple[tuple[str, Call], ...]
    made: Name


@dataclass(frozen=True)
class Loop:
    """container  the container of its experts, as a value of the forward
    key        prefix of the experts' names in the container; None: they are numbered
    by         the layout of the weights: "choice": [tokens, choices]; "token": [tokens] or [tokens, 1], which have one choice; "expert":
               [tokens, experts]; None: 1
    values     all rows, choices, weights, as values of the forward; None: there are none
    one_hot    choices are one-hot rows, or rows of zeros
    skips      an expert that is not chosen is not called, so that torch gives it no gradient at all
    once       where a token has chosen an expert more than once, only the last such choice counts
    single     each token has one choice: choices have the shape of the tokens
    blank      the sum is uninitialised before the loop, and each token is written in it
    of_all     experts are given all tokens, and no statement branches: torch traces the loop as it is
    line       of the loop
    forward    the module's function, with a call in the place of the loop
    inline     the expert that the loop itself writes out; None: experts are modules
    """

    container: Any
    key: str | None
    by: str | None
    values: tuple[Any, ...]
    one_hot: bool
    skips: bool
    once: bool
    single: bool
    blank: bool
    of_all: bool
    line: int
    forward: FunctionType
    inline: Inline | None

    def count(self, module: nn.Module) -> int:
        """The number of experts."""
        return len(self.experts(module)) if self.inline is None else module.get_parameter(self.inline.weights[0]).shape[0]

    def experts(self, module: Any) -> list[nn.Module]:
        """The experts, if they are modules."""
        held = evaluate(self.container, {"self": module}.__getitem__)
        return [*held] if self.key is None else [held[f"{self.key}{number}"] for number in range(count_numbered(held, self.key))]


class OneExpert(nn.Module):
    """The expert that a loop writes out, as a module: stacked weights are one expert's, without values."""

    def __init__(self, module: nn.Module, inline: Inline) -> None:
        super().__init__()
        self.__dict__.update(_module=module, _inline=inline)
        for name in inline.weights:
            whole = module.get_parameter(name)
            one = torch.empty(whole.shape[1:], dtype=whole.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(one, whole.requires_grad))

    def forward(self, rows: Tensor) -> Tensor:
        inline: Inline = self.__dict__["_inline"]
        values = {
            "self": self.__dict__["_module"],
            ROW_INPUT.name: rows,
            **{f"self.{name}": getattr(self, name) for name in inline.weights},
        }
        for name, call in inline.steps:
            values[name] = evaluate(call, values.__getitem__)
        made: Tensor = evaluate(inline.made, values.__getitem__)
        return made


def compile_body(old: ast.FunctionDef, body: list[ast.stmt], function: FunctionType) -> CodeType:
    """The code of a function with another body, at the function's lines in its file."""
    new = ast.FunctionDef(old.name, old.args, body, [], old.returns, None, lineno=old.lineno, col_offset=old.col_offset)
    new.__dict__.setdefault("type_params", [])
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(ast.Module([new], []), function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    return next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == old.name)


class LoopReader(Terms):
    """Reads one function. values: what each of its names is, in front of the statement that is read; outside: likewise the file's names."""

    def __init__(self, module: nn.Module, function: FunctionType, tree: ast.FunctionDef, case: str = "full") -> None:
        super().__init__(module, stacked_parameters(module), case)
        self.function, self.tree = function, tree
        own = function.__code__.co_varnames
        self.values: dict[str, Any] = {name: self.outer(name) for name in own}
        self.values["self"] = Symbol(self, Term("free", SELF, leaves=frozenset(["self"]), held=module))
        file = {name: function.__globals__[name] for name in names_of(tree) - {*own} if name in function.__globals__}
        self.outside = {name: self.constant(value, value) for name, value in file.items()}
        self.outside["__builtins__"] = {
            "range": range,
            "str": format,
            "int": int,
            "len": self.length,
            "enumerate": self.enumerate_experts,
            "__import__": __import__,
            ITEMS: self.items,
            ONCE: self.targets,
        }

    def loop(self) -> Loop | None:
        for place in [place for place, each in enumerate(self.tree.body) if isinstance(each, ast.For)]:
            try:
                return self.read_loop(place)
            except Exception:  # of the user's own code too, which is not made for symbols
                continue
        return None

    def run_until(self, place: int, case: str) -> tuple[LoopReader, dict[str, Any]]:
        """A reader that has run the loop, with what names were in front of it."""
        reader = LoopReader(self.module, self.function, self.tree, case)
        for statement in self.tree.body[:place]:
            reader.before(statement)
        before, values, loop = dict(reader.values), dict(reader.values), self.tree.body[place]
        for name in stored_names(loop):  # what an iteration leaves to the next is none of its values, but for the sum
            if not isinstance(x := before[name], Symbol) or x._term.kind != "zeros":
                del values[name]
        reader.inside = True
        reader.values = reader.run(loop, values)
        return reader, before

    def read_loop(self, place: int) -> Loop:
        found = self.tree.body[place]
        assert isinstance(found, ast.For)
        read, before = self.run_until(place, "full")
        if any(self.run_until(place, case)[0].added is not None for case in read.asked):
            raise NotUnderstood
        return read.describe_loop(place, found, before)

    def describe_loop(self, place: int, found: ast.For, before: dict[str, Any]) -> Loop:
        if self.added is None:
            raise NotUnderstood
        into, value = self.added
        if "all" in value.more and "masked" not in value.more:
            self.choice = None  # all experts are added, whatever is chosen
        elif self.choice is None:
            raise NotUnderstood
        name, last = into.value.name, self.values[into.value.name]._term
        x, weights = (*value.of, None)[:2]
        read = [each for each in (x, self.choice, weights) if each is not None]
        leaves = {leaf for each in read for leaf in each.leaves if leaf.partition(".")[0] != "self"}
        if last is not into and last.of[:1] != (into,) or name in leaves or "blank" in into.more and not self.written:
            raise NotUnderstood
        others = [*self.tree.body[:place], *self.tree.body[place + 1 :]]
        behind = {name for statement in self.tree.body[place + 1 :] for name in names_of(statement)}
        if behind & (stored_names(found) - {name}) or any(self.reads_experts(each) for each in others):
            raise NotUnderstood
        kinds = {each: before[each]._term.kind for each in names_of(found) if isinstance(before.get(each), Symbol)}
        hits = {each for each, kind in kinds.items() if kind in ("hits", "counts")}
        kept = [self.without_hits(each, hits, behind) for each in self.tree.body[:place]]
        body = [*(each for each in kept if each is not None), _call_statement(found, sorted(leaves), name), *self.tree.body[place + 1 :]]
        code = compile_body(self.tree, body, self.function)
        forward = FunctionType(code, self.function.__globals__, self.function.__name__, self.function.__defaults__)
        forward.__kwdefaults__ = self.function.__kwdefaults__
        skips = "empty" in self.asked or "hits" in kinds.values()
        by = None if weights is None else str(value.more[0])
        values = tuple(None if each is None else each.value for each in (x, self.choice, weights))
        container = None if self.container is None else self.container.value
        flags = (self.one_hot, skips, self.once, self.single, "blank" in into.more, "all" in value.more and not skips)
        return Loop(container, self.key, by, values, *flags, found.lineno, forward, self.inline(value))

    def inline(self, value: Term) -> Inline | None:
        """The expert of `value` that the loop itself writes out; None: the expert is a module. Raises NotUnderstood."""
        inside = None if self.container is not None else Inline(tuple(self.weights), tuple(self.steps), value.value)
        counts = {self.stacked[name] for name in self.weights}
        if self.container is not None:
            counts = {count_numbered(self.container.held, self.key)}
        known = {each for each in (self.expected, self.past) if each is not None}
        if len(counts) != 1 or not known <= counts or inside is None and self.steps:
            raise NotUnderstood
        return inside

    def reads_experts(self, statement: ast.stmt) -> bool:
        """Whether a statement outside of the loop reads the experts, other than their number."""
        container = SELF if self.container is None else self.container.value
        calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "len"]
        counted = {id(argument) for each in calls for argument in each.args}
        read: list[ast.expr] = [each for each in ast.walk(statement) if isinstance(each, ast.Attribute)]
        if container == SELF:
            read = [each.value for each in ast.walk(statement) if isinstance(each, ast.Subscript)]
        return any(id(each) not in counted and _value_of(each) == container for each in read)

    def without_hits(self, statement: ast.stmt, hits: set[str], behind: set[str]) -> ast.stmt | None:
        """A statement without the computation of chosen experts' numbers, or their counts, which only the loop reads."""
        if isinstance(statement, ast.With) and hits:
            inner = [kept for each in statement.body if (kept := self.without_hits(each, hits, behind)) is not None]
            made = ast.With(statement.items, inner or [ast.copy_location(ast.Pass(), statement)])
            return ast.copy_location(made, statement)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and getattr(statement.targets[0], "id", "") in hits:
            return None
        if hits & (names_of(statement) | behind):
            raise NotUnderstood
        return statement

    # What runs.

    def outer(self, name: str, *more: object) -> Symbol:
        """A value from outside of the loop, by its name."""
        return Symbol(self, Term("free", Name(name), more=more, leaves=frozenset([name])))

    def run(self, statement: ast.stmt, values: dict[str, Any]) -> dict[str, Any]:
        """What names are behind a statement, which runs on symbols."""
        found = dict(values)
        exec(_compile_for_symbols(statement, self.function.__code__.co_filename), self.outside, found)
        return found

    def before(self, statement: ast.stmt) -> None:
        """Tracks the names that a statement in front of the loop assigns."""
        if isinstance(statement, ast.With):
            for each in statement.body:
                self.before(each)
            return
        if isinstance(statement, ast.Import | ast.ImportFrom) and ast.unparse(statement).split()[1].startswith("torch"):
            self.values |= {name: self.constant(x, x) for name, x in self.run(statement, {}).items()}
            return
        made: dict[str, Any] = {}
        if isinstance(statement, ast.Assign):
            with contextlib.suppress(Exception):  # as in `loop`
                made = self.run(statement, self.values)
        changed = _changed_names(statement)
        for name in {*changed, *(name for name, x in self.values.items() if isinstance(x, Symbol) and x._term.leaves & changed)}:
            self.values[name] = self.outer(name)
        for name in stored_names(statement) & {*made}:
            term = self.operand(made[name])
            if isinstance(term, PLAIN):
                self.values[name] = term
            elif isinstance(term, Term) and term.kind == "zeros":
                self.values[name] = Symbol(self, replace(term, value=Name(name), leaves=frozenset([name])))
            elif isinstance(term, Term) and term.kind == "free":
                self.values[name] = self.outer(name, *({"topk", "distinct"} & {*term.more}))
            elif isinstance(term, Term) and not term.leaves & changed:
                self.values[name] = made[name]

    def targets(self, over: Any) -> list[Any]:
        """What the loop's targets are, in the one run of its body."""
        index = Symbol(self, Term("index"))
        if isinstance(over, range) and over.start == 0 and over.step == 1:
            self.expected = over.stop
            return [index]
        term = over._term
        if term.kind not in ("listed", "hits"):
            raise NotUnderstood
        return [(index, Symbol(self, self.holds(term.of[0], None))) if term.kind == "listed" else index]

    def enumerate_experts(self, x: Symbol) -> Symbol:
        """`enumerate`"""
        return Symbol(self, Term("listed", of=(x._term,)))


@cache
def _compile_for_symbols(statement: ast.stmt, file: str) -> CodeType:
    code = ast.fix_missing_locations(_Rewriter().visit(copy.deepcopy(statement)))
    return compile(ast.Module([code], []), file, "exec", dont_inherit=True)


class _Rewriter(ast.NodeTransformer):
    """A statement as it runs on symbols: a loop once, values that are assigned by a call, and an error in the place of a statement of the
    loop whose effects symbols do not see."""

    inside = False

    def visit(self, node: ast.AST) -> Any:
        return ast.Raise(None, None) if self.inside and isinstance(node, ast.stmt) and not _is_seen(node) else super().visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.inside = True
        return self.generic_visit(
            ast.For(node.target, _call_of(ONCE, node.iter), node.body, [ast.Raise(None, None)] if node.orelse else [])
        )

    def visit_With(self, node: ast.With) -> Any:
        return [self.visit(each) for each in node.body]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        count = len(target.elts) if isinstance(target, ast.Tuple) else 0
        return self.generic_visit(ast.Assign(node.targets, _call_of(ITEMS, node.value, ast.Constant(count))))


def _is_seen(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With):
        return names_of(statement.items[0].context_expr) == {"torch"}
    if isinstance(statement, ast.Expr):
        called = getattr(statement.value, "func", None)
        return isinstance(statement.value, ast.Constant) or getattr(called, "attr", "") == "index_add_"
    single = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    return single or isinstance(statement, ast.AugAssign | ast.If | ast.Continue)


def _call_of(name: str, *given: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*given], [])


def _call_statement(found: ast.For, read: list[str], into: str) -> ast.stmt:
    """The call in the place of a loop, all at the line of the loop."""
    values = ", ".join(f"{name!r}: {name}" for name in read)
    (made,) = ast.parse(f"self.{CALL}({{{values}}}, {into})").body
    for each in ast.walk(made):
        if isinstance(each, ast.expr | ast.stmt):
            ast.copy_location(each, found)
            each.end_lineno, each.end_col_offset = each.lineno, found.col_offset + 1
    return made


def names_of(x: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(x) if isinstance(each, ast.Name)}


def stored_names(x: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(x) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}


def _value_of(x: ast.expr) -> Any:
    """The value of `self.a.b`; None for another expression."""
    if isinstance(x, ast.Attribute):
        return None if (inner := _value_of(x.value)) is None else Call(getattr, (inner, x.attr))
    return SELF if isinstance(x, ast.Name) and x.id == "self" else None


def _changed_names(statement: ast.stmt) -> set[str]:
    """Names that a statement assigns, or whose values it changes."""
    found = stored_names(statement)
    for each in ast.walk(statement):
        if (
            isinstance(each, ast.Subscript)
            and not isinstance(each.ctx, ast.Load)
            or isinstance(each, ast.Attribute)
            and each.attr.endswith("_")
            and not each.attr.startswith("_")
        ):
            found |= names_of(each.value) - {"self", "torch"}
    return found
