"""docs/words.md is alive: its files are there and use their words, each word stands once, and words that are out grow fewer."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections import Counter
from collections.abc import Iterator

from tests import words_left
from tests.words_left import ROOT, trees

ROWS = words_left.rows()


def test_every_word_stands_once_with_its_meaning_and_its_file() -> None:
    assert len(ROWS) > 40 and all(len(row) == 4 and row[1] for row in ROWS)
    assert [word for word, count in Counter(row[0] for row in ROWS).items() if count > 1] == []


def test_its_file_is_there_and_uses_the_word() -> None:
    missing = []
    for word, _, where, _ in ROWS:
        path = ROOT / where.strip("`")
        last = word.partition(" (")[0].split()[-1]
        if not path.exists() or last[:5].lower() not in path.read_text().lower():
            missing.append(f"{word}: {where}")
    assert missing == []


PARTICIPLES = {
    "Prefetched", "Program.asked", "Program.compiled", "Program.guarded", "Program.lowered", "Program.traced", "RebalanceReport.moved",
    "_given", "_searchsorted", "_unsupported",
}  # fmt: skip
"""Names that are a bare participle: public ones, decorators, and operators of torch."""
IRREGULAR = set(
    "told made said put held kept found given left sent written taken drawn known seen meant built begun shown lost chosen asked laid lent "
    "met brought caught done got hidden lain led paid spent stuck torn worn bound grown".split()
)
ALIKE = {("meshc/api", "meshc/commands"), ("meshc/commands", "meshc/plan"), ("meshc/ops", "meshc/rules"), ("meshc", "meshc/plan")}
"""Folders whose files may have one name: a command and what it runs, an operator and its rule, a public module and what it shows."""


def is_participle(name: str) -> bool:
    """A single word that says what was done to something, but not to what."""
    word = name.strip("_").lower()
    single = "_" not in word and not re.search("[a-z][A-Z]", name)
    return single and (
        word in IRREGULAR or (word.endswith("ed") and len(word) > 4 and word not in ("embed", "exceed", "proceed", "shared", "speed"))
    )


def qualified(node: ast.AST, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted names of the definitions within a node."""
    for child in ast.iter_child_nodes(node):
        defines = isinstance(child, ast.ClassDef | ast.FunctionDef)
        inner = (*path, child.name) if isinstance(child, ast.ClassDef | ast.FunctionDef) else path
        if defines:
            yield ".".join(inner)
        yield from qualified(child, inner)


def test_a_name_is_a_noun_or_a_verb_with_its_object() -> None:
    found = {name for _, tree in trees() for name in qualified(tree) if is_participle(name.rpartition(".")[2])}
    assert found == PARTICIPLES
    assert [name for name in ("made", "_told", "Kept", "Expected", "read_plan", "seed", "Shared") if is_participle(name)] == [
        "made", "_told", "Kept", "Expected",
    ]  # fmt: skip


def test_a_name_is_that_of_one_thing() -> None:
    """`TrainStep` is one, and announces its rank where users construct it."""
    classes = Counter(node.name.strip("_") for _, tree in trees() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == ["TrainStep"]
    folders: dict[str, list[str]] = {}
    for path, _ in trees():
        if path.name != "__init__.py":
            folders.setdefault(path.stem, []).append(str(path.parent.relative_to(ROOT)))
    assert {stem: several for stem, several in folders.items() if len(several) > 1 and tuple(sorted(several)) not in ALIKE} == {}


def test_a_first_line_is_a_noun_phrase() -> None:
    begins = re.compile(r"(What|Which|Where|How|Who|Whose|Whether|Of|They|When|Why|That)\b")
    assert [path for path, tree in trees() if begins.match(ast.get_docstring(tree) or "That")] == []


def test_what_a_docstring_raises_and_the_files_that_it_names_are_there() -> None:
    classes = {name.rpartition(".")[2] for _, tree in trees() for name in qualified(tree)} | set(vars(builtins))
    files = {path.name for folder in ("meshc", "passes", "runtime", "tests") for path in (ROOT / folder).rglob("*.py")} | {"NN_pass.py"}
    missing = []
    for path, tree in trees():
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        named = [("raises", each) for text in texts for each in re.findall(r"\b[Rr]aises? ([A-Z]\w+)", text)]
        named += [("file", each) for text in texts for each in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text)]
        missing += [(path.name, kind, each) for kind, each in named if each not in (classes if kind == "raises" else files)]
    assert missing == []


def test_words_that_are_out_grow_fewer() -> None:
    """A word that is new in a file fails; so does a list that says more than there is, which `python -m tests.words_left` writes anew."""
    assert {"homes", "pending", "lies"} <= words_left.words_out()
    assert words_left.left() == json.loads(words_left.LIST.read_text())


def test_each_place_of_a_word_counts() -> None:
    file = ROOT / "meshc" / "ir" / "pending_homes.py"
    source = '"""What lies there.\n\nIt lies."""\n\ndef has_pending() -> str:\n    """Lies."""\n    return f"it lies on {1}"\n'
    assert words_left.counts_of(ast.parse(source), file, {"pending", "homes", "lies"}) == {"pending": 2, "homes": 1, "lies": 3}


def test_a_word_is_the_name_of_one_class_at_most() -> None:
    words = {re.sub(r" \(.*", "", row[0]).title().replace(" ", "") for row in ROWS}
    assert {"Program", "Stage", "PipelineStage"} <= words
    found = Counter(name.rpartition(".")[2] for _, tree in trees() for name in qualified(tree))
    assert [word for word in words if found[word] > 1] == []
