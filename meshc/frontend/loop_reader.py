"""Loops over experts found in a forward's syntax tree: a description of each loop, and the forward with one call in place of the loop.

    for e in range(len(self.experts)):                        for e in hit:                    # of (mask.sum((-1, -2)) > 0).nonzero()
        token, slot = torch.where(choice == e)                    slot, token = torch.where(mask[e])         # mask: one_hot, permuted
        out[token] += weights[token, slot, None] * self.experts[e](x[token])      out.index_add_(0, token, ...)

      is      out = out + sum over the slots of a token: its weight there times the output of the expert that it has chosen there

An expert may also be given all tokens, where gates or masks make the output zero for tokens that have not chosen it:

    for i, expert in enumerate(self.experts):      out = out + gates[..., i : i + 1] * expert(x)
                                                   out = out + torch.where((choice == i).any(-1, keepdim=True), expert(x), 0) * ..

Each statement of the loop must be one that this file understands; then the loop is replaced by one call, and everything else of the
function stays the user's. A loop with any other statement is left as it is, for torch to trace or to refuse with its line.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

from torch import nn

from meshc.frontend.loop_terms import NotUnderstood, Term, Terms, count_numbered, is_call, is_zero, names_of, path_of

CALL: Final = "_meshc_experts"
"""The attribute of a module whose call replaces the loop: CALL(x, choice, weights, sum so far), which adds to the sum."""


@dataclass(frozen=True)
class Inline:
    """weights  names of the module's stacked parameters [experts, ..] that the loop's expert reads
    made     the expert's output, as a function of (a module with its weights, rows)
    """

    weights: tuple[str, ...]
    made: FunctionType


@dataclass(frozen=True)
class Loop:
    """container  attributes from the module to the container of its experts
    key        prefix of the experts' names in the container; None: they are numbered
    weights    "choice": [tokens, choices]; "token": [tokens] or [tokens, 1], which have one choice; "expert": [tokens, experts]; None: 1
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

    container: tuple[str, ...]
    key: str | None
    weights: str | None
    one_hot: bool
    skips: bool
    once: bool
    single: bool
    blank: bool
    of_all: bool
    line: int
    forward: FunctionType
    inline: Inline | None = None

    def count(self, module: nn.Module) -> int:
        """The number of experts."""
        return len(self.experts(module)) if self.inline is None else module.get_parameter(self.inline.weights[0]).shape[0]

    def experts(self, module: Any) -> list[nn.Module]:
        """The experts, if they are modules."""
        held: Any = module
        for name in self.container:
            held = getattr(held, name)
        return [*held] if self.key is None else [held[f"{self.key}{number}"] for number in range(count_numbered(held, self.key))]


def compile_body(old: ast.FunctionDef, body: list[ast.stmt], function: FunctionType) -> CodeType:
    """The code of a function with another body, at the function's lines in its file."""
    new = ast.FunctionDef(old.name, old.args, body, [], old.returns, None, lineno=old.lineno, col_offset=old.col_offset)
    new.__dict__.setdefault("type_params", [])
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(ast.Module([new], []), function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    return next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == old.name)


class LoopReader(Terms):
    """Reads one function. skips, once, single: as in `Loop`; added: (name of the sum, term added to it); written: values are assigned, not
    added; past: a number that is no expert's, which the loop skips; distinct: names of choices in which no token has an expert twice."""

    def __init__(self, module: nn.Module, function: FunctionType, tree: ast.FunctionDef) -> None:
        super().__init__(module)
        self.function, self.tree = function, tree
        outside = {name: function.__globals__.get(name) for name in names_of(tree) - {*function.__code__.co_varnames}}
        self.numbers = {name: value for name, value in outside.items() if isinstance(value, int)}
        self.skips = self.once = self.single = self.written = False
        self.added: tuple[str, Term] | None = None
        self.past: object = None
        self.distinct: set[str] = set()

    def loop(self) -> Loop | None:
        places = [place for place, each in enumerate(self.tree.body) if isinstance(each, ast.For)]
        for place in places:
            reader = type(self)(self.module, self.function, self.tree)
            try:
                return reader.read_loop(place)
            except NotUnderstood:
                continue
        return None

    def read_loop(self, place: int) -> Loop:
        for statement in self.tree.body[:place]:
            self.before(statement)
        found = self.tree.body[place]
        assert isinstance(found, ast.For)
        self.within = {each.id for each in ast.walk(found) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        self.header(found)
        self.body(found.body)
        if self.added is None or self.container is None:
            raise NotUnderstood
        into, value = self.added
        if "all" in value.more and "masked" not in value.more:
            self.choice = ast.Constant(None)  # all experts are added, whatever is chosen
        if self.choice is None:
            raise NotUnderstood
        start = self.known.get(into, Term("free"))
        if start.kind != "zeros" or value.kind not in ("made", "weighed") or "blank" in start.more and not self.written:
            raise NotUnderstood
        others = [*self.tree.body[:place], *self.tree.body[place + 1 :]]
        behind = {name for statement in self.tree.body[place + 1 :] for name in names_of(statement)}
        if behind & (self.within - {into}) or any(self.calls_experts(each) for each in others):
            raise NotUnderstood
        x, *weights = value.of
        call = self.call(found, into, x, weights[0] if weights else ast.Constant(None))
        hits = {name for name in names_of(found) if self.known.get(name, Term("")).kind in ("hits", "counts")}
        before = [self.without_hits(each, hits, behind) for each in self.tree.body[:place]]
        body = [*(each for each in before if each is not None), call, *self.tree.body[place + 1 :]]
        of = value.more[0] if weights and value.more else None  # the layout of weights, as in `Loop.weights`
        assert of is None or isinstance(of, str)
        of_all = "all" in value.more and not self.skips
        flags = (self.one_hot, self.skips, self.once, self.single, "blank" in start.more, of_all)
        return Loop(self.container, self.key, of, *flags, found.lineno, self.compile_function(body), self.inline(value))

    def inline(self, value: Term) -> Inline | None:
        """The part of `value`'s expert that the loop itself writes out; None: the expert is a module. Raises NotUnderstood."""
        held: Any = self.module
        for name in self.container or ():
            held = getattr(held, name)
        if self.past not in (None, len(held) if self.key is None else count_numbered(held, self.key)):
            raise NotUnderstood
        return None

    def calls_experts(self, statement: ast.stmt) -> bool:
        """Whether a statement outside of the loop reads the experts, other than their number."""
        counted = {id(each.args[0]) for each in ast.walk(statement) if is_call(each, "len") and each.args}
        read: list[ast.expr] = [each for each in ast.walk(statement) if isinstance(each, ast.Attribute)]
        if self.container == ():
            read = [each.value for each in ast.walk(statement) if isinstance(each, ast.Subscript)]
        return any(id(each) not in counted for each in read if path_of(each) == self.container)

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

    def call(self, found: ast.For, into: str, *given: ast.expr) -> ast.stmt:
        x, weights = given
        assert self.choice is not None
        called = ast.Attribute(ast.Name("self", ast.Load()), CALL, ast.Load())
        whole = ast.Call(called, [x, self.choice, weights, ast.Name(into, ast.Load())], [])
        made = ast.copy_location(ast.Expr(whole), found)
        for each in ast.walk(made):  # all at the line of the loop
            if isinstance(each, ast.expr | ast.stmt):
                ast.copy_location(each, found)
                each.end_lineno, each.end_col_offset = each.lineno, found.col_offset + 1
        return made

    def compile_function(self, body: list[ast.stmt]) -> FunctionType:
        inner = compile_body(self.tree, body, self.function)
        made = FunctionType(inner, self.function.__globals__, self.function.__name__, self.function.__defaults__)
        made.__kwdefaults__ = self.function.__kwdefaults__
        return made

    # Statements.

    def before(self, statement: ast.stmt) -> None:
        """Tracks the names that a statement in front of the loop assigns."""
        if isinstance(statement, ast.With):
            for each in statement.body:
                self.before(each)
            return
        stored = _changed_names(statement)
        self.distinct -= stored
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple) and len(statement.targets[0].elts) == 2:
            chosen = statement.targets[0].elts[1]
            if isinstance(chosen, ast.Name) and isinstance(statement.value, ast.Call) and _is_topk(statement.value):
                self.distinct.add(chosen.id)
        term = Term("free")
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
        if plain:
            assert isinstance(statement, ast.Assign)
            try:
                term = self.term(statement.value)
            except NotUnderstood:
                term = Term("free")
            if term.kind == "free" and isinstance(number := self.own_number(statement.value), int):
                term = Term("number", more=(number,))
        stale = [name for name, of in self.known.items() if name in stored or any(names_of(each) & stored for each in of.of)]
        self.known = {name: known for name, known in self.known.items() if name not in stale}
        if plain and term.kind != "free" and not any(names_of(each) & stored for each in term.of):
            self.known[next(iter(stored))] = term

    def header(self, found: ast.For) -> None:
        target, over = found.target, found.iter
        if found.orelse:
            raise NotUnderstood
        if isinstance(target, ast.Name) and isinstance(over, ast.Name) and self.known.get(over.id, Term("")).kind == "hits":
            self.skips = True
            self.known[target.id] = Term("index")
        elif isinstance(target, ast.Name) and is_call(over, "range") and 0 < len(over.args) < 3:
            if len(over.args) == 2 and self.own_value(over.args[0]) != 0:
                raise NotUnderstood
            self.expected = self.own_value(over.args[-1])
            self.known[target.id] = Term("index")
        elif isinstance(target, ast.Tuple) and is_call(over, "enumerate") and len(over.args) == 1 and len(target.elts) == 2:
            number, expert = target.elts
            if not isinstance(number, ast.Name) or not isinstance(expert, ast.Name):
                raise NotUnderstood
            self.holds(path_of(over.args[0]), None)
            self.known |= {number.id: Term("index"), expert.id: Term("expert")}
        else:
            raise NotUnderstood

    def body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, statement: ast.stmt) -> None:
        if self.added is not None:
            raise NotUnderstood  # a statement after the sum
        if isinstance(statement, ast.With) and names_of(statement.items[0].context_expr) == {"torch"}:
            self.body(statement.body)
        elif isinstance(statement, ast.If):
            self.condition(statement)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add) and isinstance(statement.target, ast.Subscript):
            self.adds(statement.target.value, statement.target.slice, self.term(statement.value), indexed=True)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add) and isinstance(statement.target, ast.Name):
            self.adds_all(statement.target.id, statement.value)
        elif isinstance(statement, ast.Assign) and (added := _added_to_itself(statement)) is not None:
            self.adds_all(*added)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self.index_add(statement.value)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Subscript):
            self.single = self.written = True  # with several choices, the last expert's value would remain
            self.adds(statement.targets[0].value, statement.targets[0].slice, self.term(statement.value), indexed=True)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self.assign(statement.targets[0], statement.value)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            raise NotUnderstood

    def adds_all(self, into: str, added: ast.expr) -> None:
        """The statement `out = out + value` for all tokens."""
        value = self.term(added)
        if value.kind not in ("made", "weighed") or "all" not in value.more or any(into in names_of(each) for each in value.of):
            raise NotUnderstood
        self.once = "masked" in value.more and "choice" not in value.more and not self.is_distinct()
        self.added = into, value

    def is_distinct(self) -> bool:
        """Whether the statements in front of the loop show that no token chooses an expert twice."""
        return isinstance(self.choice, ast.Name) and self.choice.id in self.distinct

    def index_add(self, call: ast.Call) -> None:
        """`out.index_add_(0, token, value)`"""
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "index_add_" or call.keywords or len(call.args) != 3:
            raise NotUnderstood
        if not isinstance(call.args[0], ast.Constant) or call.args[0].value != 0:
            raise NotUnderstood
        self.adds(call.func.value, call.args[1], self.term(call.args[2]), indexed=False)

    def adds(self, into: ast.expr, places: ast.expr, value: Term, indexed: bool) -> None:
        own = isinstance(into, ast.Name) and not any(into.id in names_of(each) for each in value.of)
        if not own or "all" in value.more or not self.tokens(places):
            raise NotUnderstood
        assert isinstance(into, ast.Name)
        self.added = into.id, value
        terms = [self.term(each) for each in (places.elts if isinstance(places, ast.Tuple) else [places])]
        kinds = {each.kind for each in terms}
        self.single = self.single or "mask" in kinds or any("single" in each.more for each in terms)
        tokens = "any" in kinds or any("tokens" in each.more for each in terms)
        slots = any(term.kind == "slot" for term in self.known.values())
        self.once = (tokens or "expert" in value.more or indexed and slots) and not self.is_distinct()

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        term = self.term(value)
        if isinstance(target, ast.Name):
            self.known[target.id] = term
            return
        if not isinstance(target, ast.Tuple) or term.kind != "found" or not all(isinstance(each, ast.Name) for each in target.elts):
            raise NotUnderstood
        names = [each.id for each in target.elts if isinstance(each, ast.Name)]
        if "turned" in term.more:
            if len(names) != 2:
                raise NotUnderstood
            kinds = ["slot", "token"]
        else:
            kinds = ["token"] * max(len(names) - 1, 1) + ["slot"] * (len(names) > 1)
        more = ("tokens",) * ("tokens" in term.more)
        self.known |= {name: Term(kind, more=more) for name, kind in zip(names, kinds, strict=True)}

    def condition(self, statement: ast.If) -> None:
        """A branch on whether an expert is chosen at all, or on the module's own attributes."""
        asked = self.tests_for_none(statement.test)
        if asked is not None and not statement.orelse:
            self.skips = True
            if asked and len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue):
                return
            if not asked:
                self.body(statement.body)
                return
        if asked is None and (past := self.is_past(statement)) is not None:
            self.past = past
            return
        if asked is None:
            self.body(statement.body if self.own_value(statement.test) else statement.orelse)
            return
        raise NotUnderstood

    def is_past(self, statement: ast.If) -> object:
        """The number in `if e == self.num_experts: continue`; None for another statement."""
        test, passed = statement.test, len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue) and not statement.orelse
        if not passed or not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.GtE):
            return None
        return self.own_number(test.comparators[0]) if self.kind(test.left) == "index" else None

    def tests_for_none(self, test: ast.expr) -> bool | None:
        """True if the test is that no token has chosen the expert; False if it is that one has; None for another test."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.tests_for_none(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "any" and not test.args:
            return False if self.kind(test.func.value) in ("mask", "any") else None
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and is_zero(test.comparators[0]):
            counted = self.is_token_count(test.left)
            return None if not counted else {ast.Eq: True, ast.Gt: False, ast.NotEq: False}.get(type(test.ops[0]))
        return False if self.is_token_count(test) else None

    def is_token_count(self, x: ast.expr) -> bool:
        """Whether `x` is the number of tokens: token.numel(), token.shape[0], len(token), mask.sum(), counts[i]."""
        if isinstance(x, ast.Subscript) and self.kind(x.value) == "counts" and self.kind(x.slice) == "index":
            self.use_choice(self.term(x.value).of[0])
            return True
        if isinstance(x, ast.Subscript) and isinstance(x.value, ast.Attribute) and x.value.attr == "shape" and is_zero(x.slice):
            return self.kind(x.value.value) == "token"
        if is_call(x, "len") and len(x.args) == 1:
            return self.kind(x.args[0]) == "token"
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute):
            name, kind = x.func.attr, self.kind(x.func.value)
            return (name in ("numel", "size") and kind == "token") or (name == "sum" and kind in ("mask", "any"))
        return False


def _added_to_itself(statement: ast.Assign) -> tuple[str, ast.expr] | None:
    """(name, value) of `out = out + value`; None for another statement."""
    (target, *more), value = statement.targets, statement.value
    if more or not isinstance(target, ast.Name) or not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    sides = [value.left, value.right]
    own = [isinstance(each, ast.Name) and each.id == target.id for each in sides]
    return (target.id, sides[own.index(False)]) if own.count(True) == 1 else None


def _changed_names(statement: ast.stmt) -> set[str]:
    """Names that a statement assigns, or whose values it changes."""
    found = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    for each in ast.walk(statement):
        inside: ast.expr | None = None
        if isinstance(each, ast.Subscript) and not isinstance(each.ctx, ast.Load):
            inside = each.value
        elif isinstance(each, ast.Attribute) and each.attr.endswith("_") and not each.attr.startswith("_"):
            inside = each.value
        found |= names_of(inside) - {"self", "torch"} if inside is not None else set()
    return found


def _is_topk(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "topk"
