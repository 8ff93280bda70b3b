"""Models that torchao converts to 8-bit training, each recipe, real products and emulated ones: split, proved, equal to one device, and
equal in what they round to a plan's precision lines. Skipped where torchao is not installed (`make test-frameworks` installs it).
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from meshc.cost.divided_work import SPLIT, work_rows
from meshc.ir.formats import FORMATS
from meshc.private import TorchDispatchMode
from meshc.runtime.simulator.reference_formats import FewBits

pytestmark = pytest.mark.frameworks
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MESHES = ("dp=2", "tp=2", "dp_shard=2")
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)


def convert(model: nn.Module, recipe: str, emulate: bool) -> Any:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed: it is of the extra `frameworks`")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return float8.convert_to_float8_training(model, config=config)


def llama(recipe: str, emulate: bool, width: int = 64) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return convert(LlamaForCausalLM(config), recipe, emulate)


def compiled(recipe: str, emulate: bool, mesh: str, width: int = 64) -> meshc.Program:
    model, ids = llama(recipe, emulate, width), torch.arange(128).reshape(8, 16) % 96
    return meshc.compile(model, meshc.Mesh(mesh), kwargs={"input_ids": ids, "labels": ids})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "real"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_converted_llama_is_split_and_equal(recipe: str, emulate: bool, mesh: str) -> None:
    """Its products are all split. Where none is rounded to bfloat16 before ranks add, results are those of one device to float32."""
    program = compiled(recipe, emulate, mesh)
    assert not [note for note in program.compiled.notes if "runs whole" in note or "cannot be saved" in note]
    rows = work_rows(program.compiled)
    axis = mesh.partition("=")[0]
    assert rows and all(row.by_axis[axis] == SPLIT for row in rows), [row for row in rows if row.by_axis[axis] != SPLIT]
    said = program.summary()
    assert "products in few bits" in said and ("float32, once decoded" in said) == emulate
    report = meshc.verify(program)
    assert report.ok and report.worst < (1e-4 if emulate or recipe == "tensorwise" else 0.15), report


def test_wider_rows_are_equal_too_and_float64_says_why_it_is_not_asked() -> None:
    report = meshc.verify(compiled("tensorwise", True, "dp=2,tp=2", width=128), dtype=torch.float64)
    assert report.ok and "the model rounds to 8 bits itself, by scales that are float32 in any case" in report.single


class _Rounded(TorchDispatchMode):
    """Keeps the 8-bit operands of products, and of what decodes them for one, by their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[bytes]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(type(one) not in (Tensor, nn.Parameter) for one in args if isinstance(one, Tensor)):
            return NotImplemented  # a converted model's own tensors are taken apart first
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype in EIGHT and args[0].dtype not in EIGHT:
            values = made.flatten(2).flatten(0, 1) if made.dim() == 4 else made  # rows and columns in blocks
            values = values.t() if values.shape[0] > values.shape[1] else values
            self.found.add(values.contiguous().view(torch.uint8).numpy().tobytes())
        return made


def _layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=False))


def _results(model: nn.Module, *modes: Any) -> tuple[list[Tensor], set[bytes]]:
    """Output and gradients for seeded operands, and the 8-bit values on the way."""
    draw = torch.Generator().manual_seed(1)
    x, rounded = torch.randn(32, 64, generator=draw).requires_grad_(), _Rounded()
    with ExitStack() as stack:
        for mode in (rounded, *modes):
            stack.enter_context(mode)
        out = model(x)
        out.backward(torch.randn(out.shape, generator=draw))
    return [out.detach(), *(leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None)], rounded.found


@pytest.mark.parametrize("line, recipe, values", [("float8 tensor", "tensorwise", 3), ("float8 row", "rowwise", 5)])
def test_a_precision_line_rounds_what_torchao_rounds(line: str, recipe: str, values: int) -> None:
    """Bit for bit: of a tensor each operand once, of rows and columns twice, but for the weight, all of whose scales are one power of two.
    Results are equal but for roundings of float32. A mesh has what one device has under the line."""
    theirs, rounded = _results(convert(_layer(), recipe, True))
    model = _layer()
    own, same = _results(model, FewBits(model, {"0.weight": (FORMATS[line],)}))
    assert rounded == same and len(same) == values
    assert len(own) == len(theirs) == 3
    for mine, wanted in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    program = meshc.compile(_layer(), meshc.Mesh("dp=2,tp=2"), args=(torch.randn(32, 64),), plan=f"precision 0: {line}")
    assert meshc.verify(program).worst < 1e-12
