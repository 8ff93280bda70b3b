"""Patterns: few, true of all that they match."""

from __future__ import annotations

from fnmatch import fnmatchcase

from meshc.passes.planner.cover_patterns import cover_patterns

LAYERS = 3
PARTS = (
    "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
    "post_attention_layernorm",
)  # fmt: skip
NAMES = ["embed.weight", *(f"layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in PARTS), "norm.weight", "head.weight"]


def named(*parts: str, layers: tuple[int, ...] = tuple(range(LAYERS))) -> list[str]:
    return [name for name in NAMES for part in parts for layer in layers if name == f"layers.{layer}.{part}.weight"]


def few(needed: list[str], right: list[str] | None = None) -> list[str]:
    """The patterns; they match what they have to, and nothing wrong."""
    found = cover_patterns(needed, right or [], NAMES)
    matched = {name for name in NAMES if any(fnmatchcase(name, one) for one in found)}
    assert set(needed) <= matched <= {*needed, *(right or [])}
    return found


def test_what_differs_in_a_letter_or_a_word_is_one_pattern() -> None:
    assert few(named("attn.q_proj", "attn.k_proj", "attn.v_proj")) == ["layers.*.attn.[kqv]_proj.weight"]
    assert few(named("mlp.gate_proj", "mlp.up_proj"), named("mlp.down_proj")) == ["layers.*.mlp.*_proj.weight"]
    assert few(named("mlp.gate_proj", "mlp.up_proj")) == ["layers.*.mlp.gate_proj.weight", "layers.*.mlp.up_proj.weight"]
    assert few(named("input_layernorm", "post_attention_layernorm")) == ["layers.*.*_layernorm.weight"]


def test_a_pattern_matches_no_more_than_it_has_to() -> None:
    assert few(["head.weight"], NAMES) == ["head.weight"]
    assert few(named("mlp.up_proj"), NAMES) == ["layers.*.mlp.up_proj.weight"]
    assert few(named("attn.q_proj", "attn.k_proj"), named("attn.v_proj", "attn.o_proj")) == ["layers.*.attn.[kq]_proj.weight"]
    assert len(few(NAMES)) == 1


def test_layers_that_do_otherwise_are_told_one_by_one() -> None:
    assert few(named("mlp.up_proj", layers=(0,))) == ["layers.0.mlp.up_proj.weight"]
    assert few(named("mlp.up_proj", layers=(0, 2))) == ["layers.0.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"]
    assert few(named("attn.q_proj", "attn.k_proj", layers=(1,))) == ["layers.1.attn.[kq]_proj.weight"]
