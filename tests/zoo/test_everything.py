"""What transformers lists, shrunk: by which rules, what comes of one, and the table."""

from __future__ import annotations

import pytest
from transformers import BailingHybridConfig, LlamaConfig, Mamba2Config, MinistralConfig, Qwen3NextConfig, SwinConfig

from tests.broad import broad
from tests.zoo import trying
from tests.zoo.everything import section, trial
from tests.zoo.listed import TASKS, case, listed
from tests.zoo.shrinking import WAYS, Way, shrunk
from tests.zoo.trying import NotBuilt, Trial, in_a_child, table, tried

ENTRIES = {one.key: one for one in listed()}


def test_all_that_is_listed_has_a_row_of_its_own() -> None:
    assert len(ENTRIES) == len(listed()) > 300
    assert {one.task for one in ENTRIES.values()} == set(TASKS)


def test_numbers_are_known_by_their_names() -> None:
    config = shrunk(LlamaConfig(), WAYS[0])
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.vocab_size) == (32, 2, 4, 65)
    assert config.num_key_value_heads == config.num_attention_heads  # as many in its own configuration too
    assert config.rms_norm_eps == LlamaConfig().rms_norm_eps


def test_as_many_layers_stay_as_have_all_kinds() -> None:
    config = shrunk(Qwen3NextConfig(), WAYS[0])
    assert set(config.layer_types) == set(Qwen3NextConfig().layer_types) and len(config.layer_types) == config.num_hidden_layers == 4


def test_kinds_of_layers_are_those_of_every_list() -> None:
    """Of one list the second kind begins at the third layer, of the other at the sixth."""
    config = shrunk(BailingHybridConfig(), WAYS[0])
    assert set(config.layer_types) == {"linear_attention", "full_attention"} and config.num_hidden_layers == 6
    assert shrunk(BailingHybridConfig(), Way(WAYS[0].change, times=0)).num_hidden_layers == 2


def test_products_that_are_equal_stay_so() -> None:
    config = shrunk(Mamba2Config(), WAYS[0])
    assert config.num_heads * config.head_dim == config.expand * config.hidden_size == 64


def test_numbers_that_are_left_open_are_filled_in_by_name() -> None:
    way = next(way for way in WAYS if way.change("head_dim", None))
    assert MinistralConfig().head_dim is None and shrunk(MinistralConfig(), way).head_dim == 8
    assert way.change("sliding_window", None) is None and way.change("classifier_dropout", None) is None


def test_a_model_without_a_loss_is_given_one() -> None:
    found = case(ENTRIES["image pp_lcnet"])
    assert found.loss is not None and "labels" not in found.kwargs


def test_where_names_do_not_do_numbers_are_divided() -> None:
    """Levels of 3 and 6 heads want widths that these divide, as 32 is not."""
    config = shrunk(SwinConfig(), WAYS[1])
    assert config.embed_dim == SwinConfig().embed_dim // 16 and list(config.num_heads) == list(SwinConfig().num_heads[:2])
    assert case(ENTRIES["image swin"]).model.config.embed_dim == config.embed_dim


def test_what_is_not_built_says_why() -> None:
    with pytest.raises(NotBuilt, match="rope_theta"):
        case(ENTRIES["causal dbrx"])
    assert tried(trial(ENTRIES["causal dbrx"]))["outcome"] == "not built"


def test_a_model_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(one: Trial) -> None:
        while True:
            pass

    monkeypatch.setattr(trying, "SECONDS", 0.25)
    monkeypatch.setattr(trying, "tried", endless)
    assert in_a_child(trial(ENTRIES["causal llama"]))["outcome"] == "too slow"


@pytest.mark.parametrize(
    "key",
    [
        broad("causal xglm"), broad("seq2seq t5gemma2"), broad("image levit"), broad("masked funnel"), broad("causal git"),
        broad("seq2seq longt5"),
    ],
)  # fmt: skip
def test_a_type_equals_one_device(key: str) -> None:
    assert tried(trial(ENTRIES[key])) | {"seconds": 0} == {"outcome": "equal", "why": "", "seconds": 0}


@pytest.mark.parametrize("key, line", [broad("causal jetmoe", "modeling_jetmoe.py:"), broad("seq2seq m2m_100", "modeling_m2m_100.py:")])
def test_a_type_that_is_refused_names_its_line(key: str, line: str) -> None:
    row = tried(trial(ENTRIES[key]))
    assert row["outcome"] == "refused" and line in row["why"] and "what to do:" in row["why"]


def test_the_table_counts_and_names_what_is_not_equal() -> None:
    one, other = ENTRIES["causal llama"], ENTRIES["image vit"]
    rows = {
        one.key: {"outcome": "equal", "why": "", "seconds": 1.0},
        other.key: {"outcome": "refused", "why": "at vit.py:7 a line | what to do: that", "seconds": 1.0},
    }
    told = table(rows, section())
    assert f"2 of {len(ENTRIES)} were tried. Of 1 refusals 1 name a line and say what to do." in told
    assert "| equal | 1 | 0 | 0 | 0 | 1 |" in told and "| refused | 0 | 0 | 0 | 1 | 1 |" in told
    assert "Refused:\n\n- image vit: at vit.py:7 a line / what to do: that\n" in told
