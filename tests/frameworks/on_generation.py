"""A stock model's own generate, compiled. Rows of docs/ecosystem.md by checks of `tests/processes`, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from tests.frameworks.rows import Rows, refuses
from tests.processes import generation, heard
from tests.processes.session import run_checks

ROWS = Rows("generation")

for _what, _check in (
    ("model.generate and program.generate, most likely tokens and drawn ones", generation.short),
    ("prompts of any length and number, padded or not, buffers that double", generation.greedy),
    ("beams, with draws too", generation.sampled),
    ("beams that reorder rows, tokens that are looked up and taken back, prompts in parts", generation.beams_and_chunks),
    ("sliding windows, StaticCache", generation.windows_and_static),
    ("states of recurrent layers: Mamba, hybrids with attention", generation.states),
    ("a cache over several calls", generation.turns),
    ("crop, reorder_cache, selection of rows; a cache that a plain model has filled", generation.rows),
    ("a copy of a cache", generation.copies),
    ("decoders with encoders (T5, BART)", generation.encoders),
    ("speech to text (Whisper, Speech2Text)", heard.heard),
    ("pictures to text (VisionEncoderDecoderModel)", heard.seen),
    ("prompts with images (Llava, Gemma 3)", heard.read_beside_images),
    ("classes that generate by a model inside them (Blip-2, of OPT and of T5)", heard.told_by_a_model_inside),
    ("hidden states, attentions, logits beside tokens", generation.looked_at),
    ("transformers.pipeline", generation.pipelines),
):
    ROWS.row(_what)(_check)

ROWS.row("caches that are offloaded, calls with labels or gradients", refused="says which, and what to call")(generation.refusals)
ROWS.row("calls by hand without positions, of models that make them of a length (OPT)", refused="pass position_ids")(generation.lengths)


def flexible() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**generation.SIZES, attn_implementation="flex_attention"))


@ROWS.row("flex_attention with a cache", refused='load the model with attn_implementation="sdpa"')
def flex(mesh: Any) -> None:
    torch.manual_seed(0)
    model = flexible().eval().requires_grad_(False)
    meshc.compile(model, mesh)
    refuses(meshc.InputError, 'attn_implementation="sdpa"', lambda: model.generate(generation.prompts(), max_new_tokens=2))  # type: ignore[operator]


@ROWS.row("ranks that draw differently", refused="torch.manual_seed(n) on every rank")
def seeds(mesh: Any) -> None:
    generation.seeds(mesh)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
