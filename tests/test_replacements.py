"""The canary of the registry: each target of another library is there in the form that the table says, and is itself again afterwards."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

import meshc
from meshc import private, replacements
from meshc.errors import CompileError
from meshc.replacements import REPLACEMENTS, check_form, owner_of, replace_for_good, replace_in, replace_targets
from tests import replacements_page

ROOT = Path(meshc.__file__).parent.parent
EXAMPLES = {
    "own_masks": "transformers.models.longt5.modeling_longt5:is_torchdynamo_compiling",
    "selective_scan": "transformers.models.mamba.modeling_mamba:mamba_selective_scan",
    "short_convolution": "transformers.models.mamba.modeling_mamba:causal_conv1d_fn",
    "delta_rule": "transformers.models.qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule",
    "decaying_average": "transformers.models.rwkv.modeling_rwkv:rwkv_linear_attention",
    "rope": "transformers.models.llama.modeling_llama:LlamaRotaryEmbedding.forward",
    "optimizer_math": "torch.optim.lr_scheduler:math",
}
"""One target of each that has many owners."""
WRITTEN = {"accelerate_mark": "accelerate.accelerator", "dealing_mesh": "accelerate.data_loader"}
"""Attributes that objects may lack, and the module whose text reads them."""


def found(name: str) -> tuple[Any, str]:
    entry = REPLACEMENTS[name]
    if name in EXAMPLES:
        assert fnmatchcase(EXAMPLES[name], entry.target.removesuffix("[]"))
        entry = replace(entry, target=EXAMPLES[name])
    importlib.import_module(entry.split()[0])
    owner = owner_of(entry)
    assert owner is not None, "this release has nothing to replace"
    return owner, entry.split()[2]


@pytest.mark.parametrize("name", [name for name in REPLACEMENTS if name not in WRITTEN])
def test_a_target_is_there_is_replaced_within_and_is_itself_afterwards(name: str) -> None:
    owner, attribute = found(name)
    entry, own = REPLACEMENTS[name], getattr(owner, attribute)
    check_form(entry, own)
    before, entries, inside = vars(owner).get(attribute), dict(own) if entry.is_table else {}, object()
    value = {"planted": inside} if entry.is_table else inside
    for fault in (None, KeyError("planted")):
        try:
            with replace_in(name, [(owner, attribute, value)]):
                assert (own["planted"] if entry.is_table else inspect.getattr_static(owner, attribute)) is inside
                if fault is not None:
                    raise fault
        except KeyError as error:
            assert error is fault
        assert vars(owner).get(attribute) is before and getattr(owner, attribute) == own
        assert (dict(own) if entry.is_table else {}) == entries


@pytest.mark.parametrize("name", WRITTEN)
def test_what_an_object_may_lack_is_read_by_its_library(name: str) -> None:
    assert REPLACEMENTS[name].form == ""
    assert REPLACEMENTS[name].split()[2] in inspect.getsource(importlib.import_module(WRITTEN[name]))


def test_contexts_nest_and_entries_of_a_table_are_restored() -> None:
    from torch.distributions.kl import _KL_MEMOIZE

    with replace_targets(known_elements=7, divergences={("a", "b"): 1}):
        with replace_targets(known_elements=9, divergences={("a", "b"): 2, ("a", "c"): 3}):
            assert private.resolve_name("torch._subclasses.fake_tensor:CONSTANT_NUMEL_LIMIT") == 9 and _KL_MEMOIZE[("a", "b")] == 2  # type: ignore[index]
        assert private.resolve_name("torch._subclasses.fake_tensor:CONSTANT_NUMEL_LIMIT") == 7
        assert _KL_MEMOIZE[("a", "b")] == 1 and ("a", "c") not in _KL_MEMOIZE  # type: ignore[index, comparison-overlap]
    assert private.resolve_name("torch._subclasses.fake_tensor:CONSTANT_NUMEL_LIMIT") == 1
    assert ("a", "b") not in _KL_MEMOIZE  # type: ignore[comparison-overlap]


def test_a_method_that_is_looked_up_in_a_table_is_replaced_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Dynamo's variables have it from torch 2.14 on."""

    class Method:
        def __init__(self, handler: object) -> None:
            self.handler = handler

    from torch._dynamo.variables.tensor import TensorVariable

    own, other = Method(TensorVariable.method_requires_grad_), Method(None)
    table = {"requires_grad_": own, "other": other}
    monkeypatch.setattr(TensorVariable, "tp_methods", table, raising=False)
    with replace_targets(leaf_mark=lambda self, tx, requires_grad=True: self):
        assert table["requires_grad_"].handler is vars(TensorVariable)["method_requires_grad_"] is not own.handler
        assert table["other"] is other
    assert table["requires_grad_"] is own


def test_what_a_user_has_put_there_has_any_form() -> None:
    from torch.nn.modules import transformer

    def of_a_user(*_: object) -> bool:
        return True

    with replace_in("causal_hint", [(transformer, "_detect_is_causal_mask", of_a_user)]):
        with replace_targets(causal_hint=of_a_user):
            assert vars(transformer)["_detect_is_causal_mask"] is of_a_user
    assert vars(transformer)["_detect_is_causal_mask"].__module__ == transformer.__name__


def test_for_good_stays_in_one_object_alone() -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    replace_for_good("accelerate_mark", True, one)
    assert getattr(one, "_is_accelerate_prepared", False) and not hasattr(other, "_is_accelerate_prepared")


PLANTED = {
    "lstm_layer": ("torch._decomp.decompositions:one_layer_gone", "has none: .*no attribute 'one_layer_gone'"),
    "jit_isinstance": ("torch.jit_gone:isinstance", "has none: No module named 'torch.jit_gone'"),
    "known_elements": ("torch._subclasses.fake_tensor:FakeTensorMode", r"is to be int, and is of the class type"),
    "causal_hint": ("torch.nn.modules.transformer:_get_clones", r"is to be \(mask, is_causal, size\), and is function\(module, N\)"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_target_that_is_gone_or_has_another_form_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, said = PLANTED[name]
    monkeypatch.setattr(replacements, "REPLACEMENTS", {**REPLACEMENTS, name: replace(REPLACEMENTS[name], target=target)})
    with pytest.raises(private.UnsupportedTorch, match=rf"(?s)torch 2\.\S+: .*meshc replaces.*{said}.*install a release .*2\.11 to 2\.14"):
        with replace_targets(synced_batch_norm=torch.nn.BatchNorm1d.forward, **{name: None}):
            pass
    assert torch.nn.SyncBatchNorm.forward is not torch.nn.BatchNorm1d.forward, "what was replaced before it"


def test_a_compilation_says_which_target_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(REPLACEMENTS["causal_hint"], target="torch.nn.modules.transformer:_detect_gone")
    monkeypatch.setattr(replacements, "REPLACEMENTS", {**REPLACEMENTS, "causal_hint": gone})
    with pytest.raises(CompileError, match=r"torch.nn.modules.transformer._detect_gone, which meshc replaces"):
        meshc.compile(torch.nn.Linear(4, 4).requires_grad_(False), meshc.Mesh("tp=2"), args=(torch.randn(2, 4),))


def test_every_entry_is_replaced_somewhere_and_nothing_else_is() -> None:
    used = {name for names in replacements_page.by_file().values() for name in names}
    assert used == set(REPLACEMENTS)


ADDED = {
    "meshc/ir/trees.py: _of_torch.SUPPORTED_NODES", "meshc/ir/trees.py: _of_fx.SUPPORTED_NODES",  # classes that torch has no tree for
    "meshc/commands/target.py: sys.modules",  # the user's own script
    "runtime/failure/failed_rank.py: sys.excepthook",  # Python's place for it
}  # fmt: skip
"""What is put into a library's tables, or into a place that it has for it, in nobody's place."""


def test_nothing_is_replaced_beside_the_registry() -> None:
    paths = [path for folder in ("meshc", "passes", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {f"{path.relative_to(ROOT)}: {name}" for path in paths if path.name != "replacements.py" for name in put_into(path.read_text())}
    assert {one for one in found if not one.startswith(("meshc/passes/", "meshc/runtime/"))} == ADDED


def put_into(text: str) -> Iterator[str]:
    """What of other libraries a text assigns to, by an attribute, an entry or `setattr`; and any use of `mock`."""
    nodes = [*ast.walk(ast.parse(text))]
    own = ("meshc.private", "torch", "transformers", "peft", "accelerate")
    foreign = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            foreign |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and (not (node.module or "").startswith("meshc") or node.module in own):
            foreign |= {one.asname or one.name for one in node.names}
            yield from (one.name for one in node.names if one.name == "mock")
    foreign -= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        targets: list[ast.expr] = list(node.targets) if isinstance(node, ast.Assign | ast.Delete) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "?")]
        targets = [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]
        for one in targets:
            if isinstance(one, ast.Attribute | ast.Subscript):
                name = ast.unparse(one.value if isinstance(one, ast.Subscript) else one)
                if name.partition(".")[0].partition("(")[0] in foreign and not isinstance(node, ast.Delete):
                    yield name


def test_a_planted_replacement_is_found() -> None:
    text = "from unittest import mock\nimport torch\nfrom meshc.private import dynamo\nfrom torch import nn\nown = {}\nown['a'] = 1\n"
    text += "dynamo.reset = None\nsetattr(nn.Linear, 'forward', None)\ntorch.ops.table['x'], b = 1, 2\n"
    assert sorted(put_into(text)) == ["dynamo.reset", "mock", "nn.Linear.?", "torch.ops.table"]


def test_the_page_has_the_table() -> None:
    assert replacements_page.PAGE.read_text() == replacements_page.page(), "make reference"
