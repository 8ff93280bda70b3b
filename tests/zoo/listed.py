"""All model types that transformers lists for four tasks, each shrunk from its own configuration as far as it builds and runs.

What is taken is the first way to shrink it (`shrinking.py`) and to call it (`INPUTS`) in which the model is built, is small enough, and
gives a finite loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from tests.models import Case
from tests.zoo.families import BATCH, SEQ, VOCAB, causal, masked
from tests.zoo.shrinking import WAYS, shrunk
from tests.zoo.trying import NotBuilt

Inputs = Callable[[Any, nn.Module], dict[str, Tensor]]

TASKS: Final = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}  # fmt: skip

MOST: Final = 20_000_000
"""Parameters of a model that is small enough."""


@dataclass(frozen=True)
class Listed:
    """A model type of a task. `key`: of its row."""

    task: str
    type: str
    model: str

    @property
    def key(self) -> str:
        return f"{self.task} {self.type}"


def listed() -> list[Listed]:
    """In the order of the tasks and of their lists."""
    found = []
    for task, mapping in TASKS.items():
        for name, models in getattr(modeling_auto, mapping).items():
            found.append(Listed(task, name, models if isinstance(models, str) else models[0]))
    return found


def case(one: Listed) -> Case:
    """The model with the inputs of a training step. Raises NotBuilt with what the first way of shrinking it came to."""
    why: list[str] = []
    make = configuration(one)
    if make is None:
        raise NotBuilt("it has no configuration of its own")
    for inputs, way in product(INPUTS[one.task], WAYS):
        try:
            return case_of(one, shrunk(make(), way), inputs)
        except Exception as error:  # noqa: BLE001 - of whatever kind: the next way may do
            why.append(f"{type(error).__name__}: {error}")
    raise NotBuilt(why[0])


def configuration(one: Listed) -> type[PretrainedConfig] | None:
    own = getattr(getattr(transformers, one.model), "config_class", None)
    name = configuration_auto.CONFIG_MAPPING_NAMES.get(one.type)
    return own or (getattr(transformers, name) if name else None)


def case_of(one: Listed, config: PretrainedConfig, inputs: Inputs) -> Case:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = getattr(transformers, one.model)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in make(config).parameters())
        if count > MOST:
            raise ValueError(f"it has {count:,} parameters")
        model = make(config).float().train()
        found = Case(one.key, model, inputs(config, model))
        output = model(**found.kwargs)
        if getattr(output, "loss", None) is None:
            found = Case(one.key, model, {name: value for name, value in found.kwargs.items() if name != "labels"}, _squares)
        loss = found.loss_of(output)
    if not torch.isfinite(loss):
        raise ValueError(f"its loss is {loss.item()}")
    return found


def _squares(output: Any) -> Tensor:
    """A loss for a model that has none: the mean of the squares of what it gives first."""
    return next(value for value in output.values() if isinstance(value, Tensor)).pow(2).mean()


def _spoken(config: Any, model: nn.Module) -> dict[str, Tensor]:
    """Of what is read, or heard: tokens, a spectrogram, or a wave; with tokens that are said."""
    if not getattr(config, "is_encoder_decoder", False):
        return causal(config)
    labels = torch.randint(3, VOCAB, (BATCH, SEQ))
    name = model.main_input_name
    if name == "input_features":
        mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
        whisper = hasattr(config, "max_source_positions") and not hasattr(config, "input_feat_per_channel")
        shape = (BATCH, mels, 2 * config.max_source_positions) if whisper else (BATCH, 40, mels)
        return {name: torch.randn(shape), "labels": labels}
    if name in ("input_values", "inputs"):
        return {name: torch.randn(BATCH, 2000), "labels": labels}
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "labels": labels}


def _pictured(config: Any, model: nn.Module) -> dict[str, Tensor]:
    own = next((part for part in (config, getattr(config, "vision_config", None)) if getattr(part, "image_size", None)), config)
    size = getattr(own, "image_size", 64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    pixels = torch.randn(BATCH, getattr(own, "num_channels", 3), height, width)
    return {model.main_input_name: pixels, "labels": torch.randint(config.num_labels, (BATCH,))}


def _as_long_as_positions(make: Callable[..., dict[str, Tensor]]) -> Inputs:
    """For models that take nothing shorter."""
    return lambda config, model: make(config, config.max_position_embeddings)


def _codes(config: Any, model: nn.Module) -> dict[str, Tensor]:
    """Tokens of several codebooks, which stand in rows below each other."""
    ids = torch.randint(3, VOCAB, (BATCH, SEQ, config.num_codebooks))
    return {"input_ids": ids.transpose(1, 2).reshape(-1, SEQ), "labels": ids}


def _read_beside_pictures(config: Any, model: nn.Module) -> dict[str, Tensor]:
    pixels = torch.randn(BATCH, 3, config.vision_config.image_size, config.vision_config.image_size)
    return {**causal(config), "pixel_values": pixels}


def _pictures_of_tokens(config: Any, model: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "labels": torch.randint(config.num_labels, (BATCH,))}


def _patches(config: Any, model: nn.Module) -> dict[str, Tensor]:
    """Pictures of different shapes, each as its four patches."""
    own = config.vision_config
    shapes = torch.tensor([[2, 2], [1, 4], [4, 1], [2, 2]])
    return {
        "pixel_values": torch.randn(BATCH, 4, own.num_channels * own.patch_size**2), "pixel_attention_mask": torch.ones(BATCH, 4).long(),
        "spatial_shapes": shapes, "labels": torch.randint(config.num_labels, (BATCH,)),
    }  # fmt: skip


INPUTS: Final[dict[str, tuple[Inputs, ...]]] = {
    "causal": (lambda config, model: causal(config), _as_long_as_positions(causal), _codes, _read_beside_pictures),
    "masked": (lambda config, model: masked(config), _as_long_as_positions(masked)),
    "seq2seq": (_spoken,),
    "image": (_pictured, _pictures_of_tokens, _patches),
}
"""By task the ways to call a model, in the order in which they are tried."""
