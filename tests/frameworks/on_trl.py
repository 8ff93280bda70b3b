"""Compiled models under the trainers of TRL: losses and parameters are those of the same trainer under DDP. Each function is a row."""

from __future__ import annotations

import copy
import functools
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import meshc
from tests.frameworks.on_trainer import SIZES
from tests.frameworks.rows import Rows, shared_folder
from tests.processes.session import run_checks

ROWS = Rows("trl")
WORDS = [f"w{number}" for number in range(28)]
LOCAL = 'meshc.compile(model, mesh, kwargs=..., inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))'


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )  # fmt: skip


def texts(rows: int = 12, **named: int) -> Any:
    """Rows of words, by name, as many in each as that name has said, and up to two more."""
    disable_progress_bars()
    drawn = torch.Generator().manual_seed(1)

    def sentence(words: int) -> str:
        return " ".join(WORDS[int(at)] for at in torch.randint(0, len(WORDS), (words,), generator=drawn))

    return Dataset.from_list([{name: f"{sentence(words + row % 3)} " for name, words in named.items()} for row in range(rows)])


def llama(kind: Any = LlamaForCausalLM, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    return kind(LlamaConfig(**SIZES, **kwargs))


def arguments(kind: Any, rows: int, **kwargs: Any) -> Any:
    """As few as make two steps that compare: rows is how many each rank passes."""
    given: dict[str, Any] = dict(
        per_device_train_batch_size=rows, max_steps=2, learning_rate=0.1, optim="sgd", use_cpu=True, lr_scheduler_type="constant",
        report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    return kind(str(shared_folder()), **{**given, **kwargs})


def compiled(model: Any, mesh: Any, **more: int) -> None:
    """From the line of this page: the example needs no more than rows."""
    ids = torch.ones(4, 9, dtype=torch.long)
    kwargs = {"input_ids": ids, **{name: torch.full_like(ids, value) for name, value in more.items()}}
    meshc.compile(model, mesh, kwargs=kwargs, inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))


def same_training(make: Any, model: Any, mesh: Any, rows: int, **more: int) -> None:
    """`make(model, rows a rank)` is a trainer. First by DDP, of a copy; `rows` are all ranks'."""
    twin = copy.deepcopy(model)
    plain = make(twin, rows // 2)
    plain.train()
    compiled(model, mesh, **more)
    mine = make(model, rows // mesh["dp"].size())
    mine.train()
    found, wanted = ([row["loss"] for row in one.state.log_history if "loss" in row] for one in (mine, plain))
    assert len(found) == 2
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        whole: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(whole.detach(), theirs[name].detach(), rtol=1e-4, atol=1e-6)


def tuner(model: Any, rows: int, **how: Any) -> Any:
    given = arguments(SFTConfig, rows, max_length=16, pad_to_multiple_of=16, **how)
    return SFTTrainer(model=model, args=given, train_dataset=texts(text=5), processing_class=tokenizer())


def preferring(model: Any, rows: int) -> Any:
    given = arguments(DPOConfig, rows, max_length=16, pad_to_multiple_of=16)
    data = texts(prompt=2, chosen=3, rejected=4)
    return DPOTrainer(model=model, ref_model=llama(), args=given, train_dataset=data, processing_class=tokenizer())


def rewarding(model: Any, rows: int) -> Any:
    given = arguments(RewardConfig, rows, max_length=16, pad_to_multiple_of=16)
    return RewardTrainer(model=model, args=given, train_dataset=texts(chosen=3, rejected=4), processing_class=tokenizer())


def reward(completions: list[str], **more: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def drawing(model: Any, rows: int) -> Any:
    given = arguments(GRPOConfig, rows, num_generations=2, max_completion_length=5, pad_to_multiple_of=8)
    return GRPOTrainer(model=model, args=given, reward_funcs=reward, train_dataset=texts(prompt=3), processing_class=tokenizer())


@ROWS.row('SFTTrainer, with inputs="local"', line=LOCAL, mesh="dp=2")
def tuned(mesh: Any) -> None:
    same_training(tuner, llama(), mesh, 4)


@ROWS.row("SFTTrainer on other meshes", line=LOCAL, mesh="dp=1,tp=2")
def tuned_split(mesh: Any) -> None:
    same_training(tuner, llama(), mesh, 4)


@ROWS.row('SFTTrainer of LoRA with gradient checkpointing, re-entrant and not, with inputs="local"', line=LOCAL, mesh="dp=2")
def tuned_adapters(mesh: Any) -> None:
    """Behind frozen layers the embedding's result is said to want a gradient."""
    for reentrant in (True, False):
        model = llama()
        model.enable_input_require_grads()
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        how: dict[str, Any] = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        how |= dict(ddp_find_unused_parameters=False)  # without it DDP refuses what is re-entrant
        same_training(functools.partial(tuner, **how), adapted, mesh, 4)


@ROWS.row('DPOTrainer, with inputs="local"', line=LOCAL, mesh="dp=2")
def preferred(mesh: Any) -> None:
    same_training(preferring, llama(), mesh, 4)


@ROWS.row("DPOTrainer on other meshes", line=LOCAL, mesh="dp=1,tp=2")
def preferred_split(mesh: Any) -> None:
    same_training(preferring, llama(), mesh, 4)


@ROWS.row('RewardTrainer, with inputs="local"', line=LOCAL, mesh="dp=2")
def rewarded(mesh: Any) -> None:
    same_training(rewarding, llama(LlamaForSequenceClassification, num_labels=1), mesh, 4, attention_mask=1)


@ROWS.row("RewardTrainer on other meshes", line=LOCAL, mesh="dp=1,tp=2")
def rewarded_split(mesh: Any) -> None:
    same_training(rewarding, llama(LlamaForSequenceClassification, num_labels=1), mesh, 4, attention_mask=1)


@ROWS.row('GRPOTrainer: each rank draws for its own prompts, with inputs="local"', line=LOCAL, mesh="dp=2")
def drawn(mesh: Any) -> None:
    same_training(drawing, llama(), mesh, 8)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
