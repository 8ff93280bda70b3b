"""The Trainer of transformers over every kind of head that has a loss of its own: a compiled model beside the plain one on one device, and
beside DDP; with the count of labels that the Trainer passes on, and without it; in training and in evaluation.

The four rows of a batch have different numbers of labels, and each of two ranks has two of them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments

import meshc
from tests.frameworks.rows import shared_folder
from tests.processes.session import run_checks
from tests.zoo.shrinking import WAYS, shrunk

ROWS, TOKENS, WORDS = 4, 10, 65
RATE: Final = 0.1
CLOSE: Final = 2e-6
"""Relative to the larger of both, or to 1: most losses of transformers are float32."""

Inputs = Callable[[Any], dict[str, Any]]


def ids(config: Any) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, TOKENS))


def some(labels: Tensor) -> Tensor:
    """Of the first row only the last half has labels, of the third all but one."""
    labels = labels.clone()
    labels[0, : labels.shape[1] // 2] = labels[2, -1:] = -100
    return labels


def classes(config: Any, *shape: int) -> Tensor:
    return torch.randint(config.num_labels, (ROWS, *shape))


def words(config: Any) -> dict[str, Tensor]:
    found = ids(config)
    return {"input_ids": found, "labels": some(found)}


def of_tokens(config: Any) -> dict[str, Tensor]:
    return {"input_ids": ids(config), "labels": some(classes(config, TOKENS))}


def of_texts(config: Any) -> dict[str, Tensor]:
    return {"input_ids": ids(config), "labels": classes(config)}


def several(config: Any) -> dict[str, Tensor]:
    config.problem_type = "multi_label_classification"
    return {"input_ids": ids(config), "labels": classes(config, config.num_labels).clamp(max=1).double()}


def numbers(config: Any) -> dict[str, Tensor]:
    config.num_labels = 1
    return {"input_ids": ids(config), "labels": torch.randn(ROWS, dtype=torch.float64)}


def answers(config: Any) -> dict[str, Tensor]:
    """The first one's lies beyond the text, and is left out."""
    return {"input_ids": ids(config), "start_positions": torch.tensor([TOKENS, 1, 2, 3]), "end_positions": torch.tensor([TOKENS, 2, 4, 6])}


def choices(config: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (ROWS, 2, TOKENS)), "labels": torch.arange(ROWS) % 2}


def pretrained(config: Any) -> dict[str, Tensor]:
    return {**words(config), "next_sentence_label": torch.arange(ROWS) % 2}


def replaced(config: Any) -> dict[str, Tensor]:
    return {"input_ids": ids(config), "labels": torch.randint(2, (ROWS, TOKENS))}


def two_heads(config: Any) -> dict[str, Tensor]:
    found = torch.randint(3, WORDS, (ROWS, 2, TOKENS))
    return {"input_ids": found, "labels": found, "mc_labels": torch.arange(ROWS) % 2, "mc_token_ids": torch.full((ROWS, 2), TOKENS - 1)}


def pixels(config: Any, size: int | None = None) -> Tensor:
    return torch.randn(ROWS, 3, *(2 * [size or config.image_size]), dtype=torch.float64)


def images(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": pixels(config, getattr(config, "image_size", 32)), "labels": classes(config)}


def hidden_patches(config: Any) -> dict[str, Tensor]:
    patches = (config.image_size // config.patch_size) ** 2
    return {"pixel_values": pixels(config), "bool_masked_pos": torch.arange(ROWS * patches).reshape(ROWS, -1) % 3 == 0}


def segments(config: Any) -> dict[str, Tensor]:
    labels = classes(config, 64, 64)
    labels[0, :40] = 255
    return {"pixel_values": pixels(config, 64), "labels": labels}


def videos(config: Any) -> dict[str, Tensor]:
    shape = (ROWS, config.num_frames, 3, config.image_size, config.image_size)
    return {"pixel_values": torch.randn(shape, dtype=torch.float64), "labels": classes(config)}


def sounds(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(ROWS, 2000, dtype=torch.float64), "labels": classes(config)}


def speech(config: Any) -> dict[str, Tensor]:
    labels = torch.randint(1, 12, (ROWS, 4))
    labels[0, 2:] = labels[2, 3:] = -100
    return {"input_values": torch.randn(ROWS, 4000, dtype=torch.float64), "labels": labels}


def spectrograms(config: Any) -> dict[str, Tensor]:
    frames = torch.randn(ROWS, config.num_mel_bins, 2 * config.max_source_positions, dtype=torch.float64)
    return {"input_features": frames, "labels": some(ids(config))}


def captions(config: Any) -> dict[str, Any]:
    found = ids(config)
    found[:, -1] = config.text_config.eos_token_id
    return {"input_ids": found, "pixel_values": pixels(config.vision_config), "return_loss": True}


def series(config: Any) -> dict[str, Tensor]:
    past, future = torch.randn(ROWS, config.context_length, 1), torch.randn(ROWS, config.prediction_length, 1)
    return {"past_values": past.double(), "future_values": future.double()}


@dataclass(frozen=True)
class Head:
    """
    inputs     a batch
    by_count   whether the model divides by the count of labels that it is passed, so that DDP gives what one device gives. Of one that
               takes a count and does not look at it, DDP gives twice as much, on two ranks
    """

    inputs: Inputs
    by_count: bool = True


def means(inputs: Inputs) -> Head:
    return Head(inputs, by_count=False)


HEADS: Final[dict[str, Head]] = {
    "LlamaForCausalLM": Head(words), "GPT2LMHeadModel": Head(words), "BertLMHeadModel": Head(words), "BartForCausalLM": means(words),
    "MixtralForCausalLM": Head(words), "MambaForCausalLM": Head(words), "GPT2DoubleHeadsModel": means(two_heads),
    "T5ForConditionalGeneration": means(words), "BartForConditionalGeneration": means(words),
    "WhisperForConditionalGeneration": means(spectrograms), "BertForMaskedLM": means(words), "ModernBertForMaskedLM": Head(words),
    "BertForPreTraining": means(pretrained), "ElectraForPreTraining": means(replaced), "BertForTokenClassification": means(of_tokens),
    "LlamaForTokenClassification": means(of_tokens), "BertForSequenceClassification": means(of_texts),
    "BertForSequenceClassification, several labels": means(several), "BertForSequenceClassification, a number": means(numbers),
    "LlamaForSequenceClassification": means(of_texts), "ModernBertForSequenceClassification": means(of_texts),
    "BertForQuestionAnswering": means(answers), "LlamaForQuestionAnswering": means(answers), "BertForMultipleChoice": means(choices),
    "BertForNextSentencePrediction": means(of_texts), "ViTForImageClassification": Head(images),
    "ConvNextForImageClassification": means(images), "DeiTForMaskedImageModeling": means(hidden_patches),
    "SegformerForSemanticSegmentation": means(segments), "VivitForVideoClassification": Head(videos),
    "Wav2Vec2ForSequenceClassification": means(sounds), "Wav2Vec2ForCTC": means(speech), "CLIPModel": means(captions),
    "PatchTSTForPrediction": means(series),
}  # fmt: skip


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A small model without dropout, in float64, and a batch of it."""
    torch.manual_seed(1)
    kind = getattr(transformers, name.partition(",")[0])
    config = shrunk(kind.config_class(), WAYS[0])
    for part in (config, *(value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig))):
        for key, value in vars(part).items():
            if "drop" in key and isinstance(value, float) or key in ("mask_time_prob", "mask_feature_prob"):
                setattr(part, key, 0.0)
    batch = HEADS[name].inputs(config)
    model = kind(config).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # of what the configuration does not say
            module.p = 0.0
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others' kernels take no float64
    return model, batch


# ------------------------------------------------------------------------------------------------------------------- three Trainers


@dataclass(frozen=True)
class Found:
    """The loss of an evaluation (None of a model that gives none without labels), that of a step, the parameters behind it, and whether the
    Trainer has passed a count."""

    evaluated: float | None
    trained: float
    parameters: dict[str, Tensor]
    counted: bool


@contextmanager
def one_device() -> Iterator[None]:
    """Inside, Accelerate and the Trainer know of this process alone."""
    with patch.dict(os.environ):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def found(model: Any, batch: dict[str, Any], counted: bool, rows: int, folder: Path) -> Found:
    """An evaluation and a step by the Trainer, of which each process has so many rows."""
    whole = {name: value for name, value in batch.items() if not isinstance(value, Tensor)}
    data = [{name: value[row] for name, value in batch.items() if name not in whole} for row in range(ROWS)]
    wanted = ("labels", "_labels", "start_positions", "end_positions", "future_values", "return_loss", "next_sentence_label")
    given: dict[str, Any] = dict(
        per_device_train_batch_size=rows, per_device_eval_batch_size=rows, max_steps=1, optim="sgd", learning_rate=RATE,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        train_sampling_strategy="sequential", ddp_find_unused_parameters=True, remove_unused_columns=False,
        label_names=[name for name in batch if name.endswith(wanted)],
    )  # fmt: skip

    def trainer(model: Any) -> Trainer:
        said = TrainingArguments(str(folder), **given)
        made = Trainer(model, said, data_collator=lambda some: {**default_collate(some), **whole}, train_dataset=data, eval_dataset=data)  # type: ignore[arg-type]
        made.model_accepts_loss_kwargs = made.model_accepts_loss_kwargs and counted
        return made

    plain = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    evaluated = trainer(copy.deepcopy(model) if plain else model).evaluate().get("eval_loss")  # behind which no Trainer puts DDP around it
    training = trainer(model)
    training.train()
    (loss,) = [row["loss"] for row in training.state.log_history if "loss" in row]
    parameters = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    return Found(evaluated, loss, parameters, training.model_accepts_loss_kwargs and "labels" in batch)


def _whole(parameter: Any) -> Tensor:
    found: Tensor = (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
    return found


def ranks_means(model: Any, batch: dict[str, Any]) -> float:
    """The mean of the means of each rank's rows, which is what DDP means."""
    halves = [{name: value.chunk(2)[half] if isinstance(value, Tensor) else value for name, value in batch.items()} for half in (0, 1)]
    with torch.no_grad():
        return sum(model(**half)["loss"].item() for half in halves) / 2


def differences(name: str, mesh: Any, counted: bool) -> list[str]:
    """In what the compiled model's Trainer differs from that of one device, and DDP's from what is known of it."""
    model, batch = build(name)
    start, ddp_model, folder = copy.deepcopy(model), copy.deepcopy(model), shared_folder()
    with one_device():
        wanted = found(copy.deepcopy(model), batch, counted, ROWS, folder)
    ddp = found(ddp_model, batch, counted, ROWS // 2, folder)
    meshc.compile(model, mesh, kwargs={key: v[: ROWS // 2] if isinstance(v, Tensor) else v for key, v in batch.items()}, inputs="local")
    mine = found(model, batch, counted, ROWS // 2, folder)
    told = [
        f"{what} {_number(one)} for {_number(other)}"
        for what, one, other in (("evaluated", mine.evaluated, wanted.evaluated), ("trained", mine.trained, wanted.trained))
        if not _close(one, other)
    ]
    told += [f"{key} behind the step" for key, value in mine.parameters.items() if not _near(value, wanted.parameters[key])]
    if not any((value - before).abs().max() > 1e-4 for value, before in zip(wanted.parameters.values(), start.parameters(), strict=True)):
        told.append("the step changes nothing")
    if mine.counted and HEADS[name].by_count:
        told += [f"DDP's {key} behind the step" for key, value in ddp.parameters.items() if not _near(value, wanted.parameters[key])]
        expected = wanted.trained
    else:
        expected = ranks_means(start.train(), batch) * (2 if mine.counted else 1)
    return told if _close(ddp.trained, expected) else [*told, f"DDP's trained {ddp.trained} for {expected}"]


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.7f}"


def _close(one: float | None, other: float | None) -> bool:
    return one is other is None or (one is not None and other is not None and abs(one - other) <= CLOSE * max(1.0, abs(other)))


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= CLOSE * max(1.0, other.abs().max().item()))


def every(names: tuple[str, ...], mesh: Any) -> None:
    """Raises AssertionError with all that differs of these heads."""
    wrong = {}
    for name in names:
        for counted in (True, False):
            if told := differences(name, mesh, counted):
                wrong[name, counted] = told
    assert not wrong, wrong


def run(mesh: str, *names: str) -> None:
    transformers.logging.set_verbosity_error()
    run_checks([_check(name) for name in names], mesh, names)


def _check(name: str) -> Callable[[Any], None]:
    def check(mesh: Any) -> None:
        every((name,), mesh)

    check.__name__ = name
    return check
