"""Stock models of many layers: compiled in part and whole they are one program, line by line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch

import meshc
from meshc.errors import CompileError
from tests.passes.depth.texts import text_of
from tests.zoo.stock import STOCK

FAMILIES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "llama": ({"num_hidden_layers": 6}, {"num_hidden_layers": 9}),
    "gpt2": ({"n_layer": 6}, {"n_layer": 9}),
    "gemma2": ({"num_hidden_layers": 10}, {"num_hidden_layers": 13}),
    "gemma3": ({"num_hidden_layers": 20}, {"num_hidden_layers": 27}),
    "gpt_oss": ({"num_hidden_layers": 10}, {"num_hidden_layers": 12}),
    "deepseek_v3": ({"num_hidden_layers": 8, "first_k_dense_replace": 2}, {"num_hidden_layers": 10, "first_k_dense_replace": 3}),
    "qwen3_moe": ({"num_hidden_layers": 10, "decoder_sparse_step": 2}, {"num_hidden_layers": 12, "decoder_sparse_step": 2}),
    "t5": ({"num_layers": 6}, {"num_layers": 8}),
    "whisper": ({"encoder_layers": 6, "decoder_layers": 6}, {"encoder_layers": 5, "decoder_layers": 8}),
    "vit": ({"num_hidden_layers": 6}, {"num_hidden_layers": 9}),
    "swin": ({"depths": [2, 10], "drop_path_rate": 0.0}, {"depths": [2, 12], "drop_path_rate": 0.0}),
    "mamba": ({"num_hidden_layers": 6}, {"num_hidden_layers": 8}),
    "bert": ({"num_hidden_layers": 6}, {"num_hidden_layers": 9}),
}
"""Sizes of two depths each."""
WHOLE: Final[dict[str, dict[str, Any]]] = {
    "resnet_stock": {"depths": [2, 6]},
    "swin": {"depths": [2, 12]},
}
"""Layers that are not equal: strides and widths; a rate of dropped paths that grows with the layers."""


def compiled(name: str, sizes: dict[str, Any], depth: str, mesh: str, train: bool, **step: Any) -> meshc.Program:
    stock = STOCK[name]
    case = replace(stock, sizes={**stock.sizes, **sizes}).case(name)
    options = meshc.Options(debugging=meshc.Debugging(depth=depth))
    if not train:
        kwargs = {key: value for key, value in case.kwargs.items() if key != "labels" or name in ("t5", "whisper")}
        with torch.no_grad():
            return meshc.compile(case.model.eval(), meshc.Mesh(mesh), kwargs=kwargs, options=options)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    return meshc.compile(meshc.TrainStep(case.model, optimizer=optimizer, **step), meshc.Mesh(mesh), kwargs=case.kwargs, options=options)


def compare(name: str, sizes: dict[str, Any], mesh: str = "dp=2,tp=2", train: bool = True, **step: Any) -> bool:
    """Whether layers were left out; the texts are equal."""
    whole, part = (compiled(name, sizes, depth, mesh, train, **step) for depth in ("whole", "auto"))
    assert text_of(part.compiled) == text_of(whole.compiled)
    infos = [{**program.compiled.info, "work": _added(program.compiled.info["work"])} for program in (part, whole)]
    assert infos[0] == infos[1]
    return part.lowered.depth is not None


def _added(work: Any) -> dict[Any, float]:
    """By operator, phase and what axes do: of a list within a list a row may name one layer for all that it stands for."""
    found: dict[Any, float] = {}
    for _, operator, phase, flops, axes in work:
        key = (operator, phase, tuple(axes.items()))
        found[key] = found.get(key, 0.0) + flops
    return found


@pytest.mark.broad
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_depths(name: str, number: int, train: bool) -> None:
    assert compare(name, FAMILIES[name][number], train=train)


@pytest.mark.broad
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("mesh", "step"),
    [
        ("dp_shard=2,tp=2", {"clip_grad_norm": 1.0}),
        ("dp=2,tp=2", {"clip_grad_norm": 1.0, "microbatches": 2}),
        ("pp=2,dp=2", {"clip_grad_norm": 1.0, "microbatches": 2}),
        ("pp=2,tp=2", {}),
    ],
)
def test_pipelines_microbatches_and_clipping(name: str, mesh: str, step: dict[str, Any]) -> None:
    assert compare(name, FAMILIES[name][0], mesh, **step)


CLIPPED: Final = {"clip_grad_norm": 1.0, "microbatches": 2}


@pytest.mark.broad
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,dp=2"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("llama", "gpt2")])
def test_microbatches_and_clipping_with_and_without_a_pipeline(name: str, mesh: str) -> None:
    assert compare(name, FAMILIES[name][0], mesh, **CLIPPED)


@pytest.mark.broad
@pytest.mark.parametrize("name", FAMILIES)
def test_inference_over_a_pipeline(name: str) -> None:
    assert compare(name, FAMILIES[name][0], "pp=2,tp=2", train=False)


@pytest.mark.broad
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,dp=2"])
def test_what_cannot_be_cut_is_refused_alike(mesh: str) -> None:
    """ResNet's norms mix the batch."""
    said: list[str] = []
    for depth in ("whole", "auto"):
        with pytest.raises(CompileError, match="normalization mixes the whole batch, so the batch cannot be cut") as raised:
            compiled("resnet_stock", WHOLE["resnet_stock"], depth, mesh, train=True, **CLIPPED)
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.broad
@pytest.mark.parametrize("name", WHOLE)
def test_others_are_captured_whole(name: str) -> None:
    assert not compare(name, WHOLE[name])
