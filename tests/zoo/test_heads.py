"""Stock models with heads for other tasks than those of `make zoo-all`: a training step on simulated ranks beside one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from tests.captured import Captured
from tests.zoo.families import BATCH, SEQ, VOCAB
from tests.zoo.listed import Listed, case_of, configuration
from tests.zoo.run import adamw
from tests.zoo.shrinking import WAYS, shrunk

Inputs = Callable[[Any, Any], dict[str, Tensor]]


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, SEQ))


def pictures(config: Any) -> Tensor:
    return torch.randn(BATCH, 3, config.image_size, config.image_size)


def classes(config: Any, *shape: int) -> Tensor:
    return torch.randint(config.num_labels, (BATCH, *shape))


def said(config: Any, model: Any) -> dict[str, Tensor]:
    labels = torch.randint(1, 12, (BATCH, 4))
    labels[0, 2:] = -100
    return {"input_values": torch.randn(BATCH, 4000), "labels": labels}


def heard_in_frames(config: Any, model: Any) -> dict[str, Tensor]:
    labels = classes(config, int(model._get_feat_extract_output_lengths(4000)))
    return {"input_values": torch.randn(BATCH, 4000), "labels": torch.nn.functional.one_hot(labels, config.num_labels).float()}


def segmented(config: Any, model: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": classes(config, 64, 64)}


def hidden_patches(config: Any, model: Any) -> dict[str, Tensor]:
    patches = (config.image_size // config.patch_size) ** 2
    return {"pixel_values": pictures(config), "bool_masked_pos": torch.rand(BATCH, patches) > 0.5}


TASKS: Final[dict[str, tuple[str, Inputs]]] = {
    "of a sequence": ("SEQUENCE_CLASSIFICATION", lambda config, model: {"input_ids": tokens(), "labels": classes(config)}),
    "of tokens": ("TOKEN_CLASSIFICATION", lambda config, model: {"input_ids": tokens(), "labels": classes(config, SEQ)}),
    "answers": ("QUESTION_ANSWERING", lambda config, model: {
        "input_ids": tokens(), "start_positions": torch.arange(BATCH), "end_positions": torch.arange(BATCH) + 1,
    }),
    "choices": ("MULTIPLE_CHOICE", lambda config, model: {
        "input_ids": tokens().unsqueeze(1).repeat(1, 2, 1), "labels": torch.arange(BATCH) % 2,
    }),
    "segments": ("SEMANTIC_SEGMENTATION", segmented),
    "depths": ("DEPTH_ESTIMATION", lambda config, model: {"pixel_values": torch.randn(BATCH, 3, 64, 64)}),
    "patches": ("MASKED_IMAGE_MODELING", hidden_patches),
    "videos": ("VIDEO_CLASSIFICATION", lambda config, model: {
        "pixel_values": torch.randn(BATCH, config.num_frames, 3, config.image_size, config.image_size), "labels": classes(config),
    }),
    "sounds": ("AUDIO_CLASSIFICATION", lambda config, model: {"input_values": torch.randn(BATCH, 4000), "labels": classes(config)}),
    "frames": ("AUDIO_FRAME_CLASSIFICATION", heard_in_frames),
    "speech": ("CTC", said),
}  # fmt: skip
"""What is classified or foretold: the name of transformers' list, and the inputs of a step."""

TRIED: Final = [
    ("of a sequence", "camembert"), ("of tokens", "qwen2_moe"), ("answers", "squeezebert"), ("choices", "distilbert"),
    ("segments", "segformer"), ("depths", "glpn"), ("patches", "deit"), ("videos", "vivit"), ("sounds", "hubert"),
    ("frames", "wavlm"), ("speech", "wav2vec2"), ("speech", "sew"), ("speech", "data2vec-audio"),
]  # fmt: skip


@pytest.mark.broad
@pytest.mark.parametrize(("task", "kind"), TRIED)
def test_a_step_equals_one_device(task: str, kind: str) -> None:
    name, inputs = TASKS[task]
    one = Listed(task, kind, getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")[kind])
    make = configuration(one)
    assert make is not None
    config = shrunk(make(), WAYS[0])
    for drawn in ("layerdrop", "mask_time_prob", "mask_feature_prob"):  # which a program cannot hold
        if hasattr(config, drawn):
            setattr(config, drawn, 0.0)
    Captured(case_of(one, config, inputs), train=True, double=True).verify_training("dp=2,tp=2", None, adamw)
