"""A compiled model of transformers under its Trainer. Each function is a row."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, default_collate
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.optimization import Adafactor
from transformers.trainer_pt_utils import LabelSmoother

import meshc
from meshc.frontend.reference_random import ReferenceRandom
from tests.frameworks.rows import Rows, refuses, shared_folder
from tests.frameworks.trainer_heads import every
from tests.processes.session import run_checks

ROWS = Rows("trainer")
SIZES: dict[str, Any] = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
STEPS = 3


def llama(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=dropout)).double()


def texts(rows: int = 12, tokens: int = 6) -> list[dict[str, torch.Tensor]]:
    """Some tokens of each have no label, and not as many of each."""
    ids = torch.randint(3, 32, (rows, tokens), generator=torch.Generator().manual_seed(5))
    labels = torch.where(torch.arange(tokens) < 1 + torch.arange(rows)[:, None] % 3, -100, ids)
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def batches(rows: int) -> list[dict[str, torch.Tensor]]:
    data = texts()
    return [default_collate(data[start : start + rows]) for start in range(0, len(data), rows)]


def arguments(folder: Path, **kwargs: Any) -> TrainingArguments:
    given: dict[str, Any] = dict(
        per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=STEPS, learning_rate=0.1, optim="sgd", use_cpu=True,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **kwargs})


def trained(twin: nn.Module, steps: int = STEPS, optimizer: torch.optim.Optimizer | None = None) -> None:
    """As the Trainer does on one device, by batches of four."""
    optimizer = optimizer or torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in batches(4)[:steps]:
        twin(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def compiled(mesh: Any, inputs: str, rows: int) -> tuple[Any, Any]:
    model = llama()
    twin = copy.deepcopy(model)
    meshc.compile(model, mesh, kwargs=batches(rows)[0], inputs=inputs)
    return model, twin


@contextmanager
def one_compilation() -> Iterator[None]:
    """Rank 0's program is that of all ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*compiles this program for itself")
        yield


@ROWS.row('train, evaluate, predict, with inputs="local"', mesh="dp=2")
def dealt_out(mesh: Any) -> None:
    """Each rank has its own rows, as the Trainer deals them out, with different numbers of labels."""
    given = arguments(shared_folder())  # from here on Accelerate knows which rank this is, and no forward asks
    with one_compilation():
        model, twin = compiled(mesh, "local", 2)
        trainer = Trainer(model=model, args=given, train_dataset=texts(), eval_dataset=texts(4))
        trainer.train()
    trained(twin)
    _close(model, twin)
    assert {"loss", "grad_norm"} <= {name for row in trainer.state.log_history for name in row} or trainer.state.global_step == STEPS
    with torch.no_grad():
        twin.eval()
        wanted = twin(**batches(4)[0])
        assert abs(trainer.evaluate()["eval_loss"] - wanted.loss.item()) < 1e-5
        found = trainer.predict(texts(4)).predictions
        torch.testing.assert_close(torch.as_tensor(found), wanted.logits, rtol=1e-6, atol=1e-6)


@ROWS.row('train with optim="adafactor" and split parameters, with inputs="local"', mesh="dp_shard=2")
def by_adafactor(mesh: Any) -> None:
    """Whose own code cannot take them."""
    model, twin = compiled(mesh, "local", 2)
    Trainer(model=model, args=arguments(shared_folder(), optim="adafactor"), train_dataset=texts()).train()
    trained(twin, optimizer=Adafactor(twin.parameters(), lr=0.1, scale_parameter=False, relative_step=False))
    _close(model, twin)


@ROWS.row('gradient_accumulation_steps, each label counted once, with inputs="local"', mesh="dp=2")
def accumulated(mesh: Any) -> None:
    """Batches of a step have different numbers of labels, of which the mean over all is one device's; the last step has one batch alone."""
    model, twin = compiled(mesh, "local", 2)
    given = dict(gradient_accumulation_steps=2, max_steps=2, max_grad_norm=0.0, logging_steps=1)
    for averaged in (True, False):
        said = arguments(shared_folder(), average_tokens_across_devices=averaged, **given)
        trainer = Trainer(model=model, args=said, train_dataset=texts())
        trainer.train()
        losses, optimizer = [], torch.optim.SGD(twin.parameters(), lr=0.1)
        for rows in (texts()[:8], texts()[8:]):
            losses.append(twin(**default_collate(rows)).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        _close(model, twin)
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        torch.testing.assert_close(logged, [loss.item() for loss in losses], rtol=1e-5, atol=1e-5)
    accumulated_means(mesh)


def accumulated_means(mesh: Any) -> None:
    """A model that takes the count and does not divide by it: the sum of its batches' means, as the Trainer has it on one device."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    kind = dict(problem_type="single_label_classification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(BertConfig(**sizes, **kind)).double()
    twin = copy.deepcopy(model)
    rows = [{"input_ids": row["input_ids"], "labels": torch.tensor(index % 3)} for index, row in enumerate(texts(8))]
    given = arguments(shared_folder(), gradient_accumulation_steps=2, max_steps=1, max_grad_norm=0.0)
    with one_compilation():
        meshc.compile(model, mesh, kwargs=default_collate(rows[:2]), inputs="local")
        Trainer(model=model, args=given, train_dataset=rows).train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for start in (0, 4):
        twin(**default_collate(rows[start : start + 4])).loss.backward()
    optimizer.step()
    _close(model, twin)


@ROWS.row('the loss of each kind of head, by the count of labels or without it; training and evaluation, with inputs="local"', mesh="dp=2")
def heads(mesh: Any) -> None:
    """Two of `trainer_heads.HEADS`, of which a test of its own has all: one that divides by the count, which is not that of its labels, and
    one that does not."""
    every(("GPT2LMHeadModel", "BertForTokenClassification"), mesh)


class Whole(Trainer):
    """The same batch on every rank: its loader does not deal out."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)  # type: ignore[arg-type]


@ROWS.row(
    'train on any mesh, with inputs="global"', line="def get_train_dataloader(self): return DataLoader(...)  # of a subclass, not prepared"
)
def the_same_everywhere(mesh: Any) -> None:
    model, twin = compiled(mesh, "global", 4)
    Whole(model=model, args=arguments(shared_folder()), train_dataset=texts()).train()
    trained(twin)
    _close(model, twin)


@ROWS.row("save_model, and checkpoints", mesh="dp=2")
def saved(mesh: Any) -> None:
    model, twin = compiled(mesh, "local", 2)
    folder = shared_folder()
    trainer = Trainer(model=model, args=arguments(folder, save_strategy="steps", save_steps=2), train_dataset=texts())
    trainer.train()
    trainer.save_model(str(folder / "last"))
    torch.distributed.barrier()
    for name, steps in (("checkpoint-2", 2), ("last", STEPS)):
        wanted = copy.deepcopy(twin)
        trained(wanted, steps)
        _close(LlamaForCausalLM.from_pretrained(folder / name).double(), wanted)


RESUMED: dict[str, Any] = dict(save_strategy="steps", save_steps=2, optim="adamw_torch", learning_rate=0.01, lr_scheduler_type="linear")


def started(mesh: Any, inputs: str, folder: Path, steps: int = STEPS, dropout: float = 0.0, by_callback: bool = False) -> Any:
    """A Trainer of a model that is compiled and was not trained yet, which saves at step 2 what can be gone on from. by_callback: the
    Trainer saves the model alone, and a callback the rest."""
    kind, rows = (Trainer, 2) if inputs == "local" else (Whole, 4)
    model = llama(dropout)
    meshc.compile(model, mesh, kwargs=batches(rows)[0], inputs=inputs)
    given = arguments(folder, **RESUMED, max_steps=steps, save_only_model=by_callback)
    return kind(model=model, args=given, train_dataset=texts(), callbacks=[meshc.trainer_checkpoints()] if by_callback else [])


def goes_on(mesh: Any, inputs: str, dropout: float) -> None:
    """Stopped behind step 2 and started anew: what never stopped has the same parameters, and the same random numbers."""
    folder = shared_folder()
    whole = started(mesh, inputs, folder, dropout=dropout)
    whole.train()
    again = started(mesh, inputs, folder, dropout=dropout)
    torch.random.manual_seed(99)
    with torch.no_grad():
        again.model(**batches(2 if inputs == "local" else 4)[0])  # a draw of its own, which resuming forgets
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert again.state.global_step == STEPS
    theirs = dict(whole.model.named_parameters())
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter.to_local(), theirs[name].to_local()), name
    assert again.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    for one, other in zip(again.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        assert all(torch.equal(*(x.full_tensor() if hasattr(x, "full_tensor") else x for x in (one[key], other[key]))) for key in other)


@ROWS.row('checkpoints to resume from: optimizer, schedule, random numbers, with inputs="local"', mesh="dp=2")
def resumed(mesh: Any) -> None:
    goes_on(mesh, "local", 0.25)


@ROWS.row("the same on any mesh, and by a Trainer of the plain model")
def resumed_elsewhere(mesh: Any) -> None:
    """A checkpoint goes on as the other's, in both directions."""
    goes_on(mesh, "global", 0.0)
    folder, other = shared_folder(), shared_folder()
    saved = started(mesh, "global", folder, by_callback=True)
    saved.train()
    for there, begun in ((other, None), (folder, str(folder / "checkpoint-2"))):
        plain = Whole(model=llama(), args=arguments(there, **RESUMED), train_dataset=texts())
        plain.is_distributed_loading_by_transformers = True  # no DDP: each rank trains all of it
        plain.train(resume_from_checkpoint=begun)
        _close(saved.model, plain.model)
    again = started(mesh, "global", other)
    again.train(resume_from_checkpoint=str(other / "checkpoint-2"))
    _close(again.model, plain.model)


@ROWS.row("resuming from a checkpoint of save_only_model=True", refused="leave it out, or add callbacks=[meshc.trainer_checkpoints()]")
def not_resumed(mesh: Any) -> None:
    model, _ = compiled(mesh, "global", 4)
    folder = shared_folder()
    given = arguments(folder, save_strategy="steps", save_steps=2, save_only_model=True)
    Whole(model=model, args=given, train_dataset=texts()).train()
    torch.distributed.barrier()
    again = started(mesh, "global", folder)
    refuses(meshc.StateError, "no optimizer.pt", lambda: again.train(resume_from_checkpoint=True))
    elsewhere = started(mesh, "global", shared_folder())
    refuses(meshc.StateError, "that begin anew", lambda: elsewhere.train(resume_from_checkpoint=str(folder / "checkpoint-2")))
    plain = Whole(model=llama(), args=arguments(folder), train_dataset=texts(), callbacks=[meshc.trainer_checkpoints()])
    plain.is_distributed_loading_by_transformers = True
    refuses(meshc.StateError, "is not compiled", plain.train)


@ROWS.row('gradient_checkpointing, re-entrant and not, with inputs="local"', mesh="dp=2")
def recomputed(mesh: Any) -> None:
    for reentrant in (True, False):
        model, twin = compiled(mesh, "local", 2)
        given = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        Trainer(model=model, args=arguments(shared_folder(), **given), train_dataset=texts()).train()
        trained(twin)
        _close(model, twin)


@ROWS.row("label_smoothing_factor", line='meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))', mesh="dp=2")
def smoothed(mesh: Any) -> None:
    """The Trainer makes the loss of the logits, of each rank's own rows, of which each has as many labels."""
    data = [{name: value.clamp(min=3) for name, value in row.items()} for row in texts()]
    model, given = llama(), arguments(shared_folder(), label_smoothing_factor=0.1)
    twin = copy.deepcopy(model)
    meshc.compile(model, mesh, kwargs=batches(2)[0], inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))
    Trainer(model=model, args=given, train_dataset=data).train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in (default_collate(data[start : start + 4]) for start in range(0, 12, 4)):
        LabelSmoother(0.1)(twin(**batch), batch["labels"], shift_labels=True).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    _close(model, twin)


@ROWS.row("load_best_model_at_end", mesh="dp=2")
def the_best(mesh: Any) -> None:
    """By the loss of an evaluation after each step, of steps that are too long."""
    model, twin = compiled(mesh, "local", 2)
    how = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=1, load_best_model_at_end=True)
    given = arguments(shared_folder(), **how, metric_for_best_model="eval_loss", learning_rate=0.5)
    trainer = Trainer(model=model, args=given, train_dataset=texts(), eval_dataset=texts(4))
    trainer.train()
    found = []
    for batch in batches(4):
        trained_on(twin, batch, 0.5)
        with torch.no_grad():
            found.append((twin(**batches(4)[0]).loss.item(), copy.deepcopy(twin.state_dict())))
    told = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    torch.testing.assert_close(told, [loss for loss, _ in found], rtol=1e-5, atol=1e-5)
    twin.load_state_dict(min(found, key=lambda one: one[0])[1])
    _close(model, twin)


def trained_on(twin: nn.Module, batch: Any, rate: float, clip: bool = True) -> None:
    twin.zero_grad()
    twin(**batch).loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.SGD(twin.parameters(), lr=rate).step()


def seq2seq(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "t5":
        sizes = dict(vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, dropout_rate=0.0)
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).double()
    sizes = dict(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0.0)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=32)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None)
    return BartForConditionalGeneration(BartConfig(**sizes, **heads, **tokens)).double()


@ROWS.row('group_by_length, compute_metrics, with inputs="local"', mesh="dp=2")
def by_length(mesh: Any) -> None:
    """Rows come in an order of the Trainer's own, which is noted, and each length that they are padded to is a program."""
    model, seen = llama(), []
    twin, data = copy.deepcopy(model), [{name: value[: 2 + at % 5] for name, value in row.items()} for at, row in enumerate(texts())]
    meshc.compile(model, mesh, kwargs=batches(2)[0], inputs="local")

    def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        made = {}
        for name, value in (("input_ids", 0), ("labels", -100)):
            made[name] = torch.stack([nn.functional.pad(row[name], (0, 6 - len(row[name])), value=value) for row in rows])
        seen.append(made)
        return made

    given = arguments(shared_folder(), train_sampling_strategy="group_by_length", remove_unused_columns=False)
    trainer = Trainer(model=model, args=given, train_dataset=data, eval_dataset=data[:4], data_collator=padded, compute_metrics=right)
    trainer.train()
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, seen[:STEPS])
    for parts in zip(*told, strict=True):
        trained_on(twin, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, 0.1)
    _close(model, twin)
    twin.eval()
    whole = padded(data[:4])
    assert trainer.evaluate()["eval_right"] == int((twin(**whole).logits.argmax(-1) == whole["labels"]).sum())


def right(found: Any) -> dict[str, int]:
    return {"right": int((found.predictions.argmax(-1) == found.label_ids).sum())}


@ROWS.row('neftune_noise_alpha, with inputs="local"', mesh="dp=2")
def noise(mesh: Any) -> None:
    """A hook on the embedding that is there while the Trainer trains; its draws are numbered as any."""
    model, whole = llama(), batches(4)[0]
    twin = copy.deepcopy(model).train()
    meshc.compile(model, mesh, kwargs=batches(2)[0], inputs="local", options=meshc.Options(seed=3))
    given = arguments(shared_folder(), neftune_noise_alpha=5.0, max_steps=1, max_grad_norm=0.0)
    Trainer(model=model, args=given, train_dataset=texts()).train()
    plain = copy.deepcopy(twin)
    embedding = twin.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    with ReferenceRandom(3):
        trained_on(twin, whole, 0.1, clip=False)
    _close(model, twin)
    trained_on(plain, whole, 0.1, clip=False)
    assert (twin.lm_head.weight - plain.lm_head.weight).abs().max() > 1e-3, "there was noise"


@ROWS.row('Seq2SeqTrainer with predict_with_generate (T5, BART), with inputs="local"', mesh="dp=2")
def generating(mesh: Any) -> None:
    """Ranks have prompts of other lengths, of which one is a batch of its own at the end."""
    for kind in ("t5", "bart"):
        model, rows = seq2seq(kind), [{**row, "labels": row["input_ids"]} for row in texts(4)]
        model.generation_config.suppress_tokens = [0, 1, 2]  # what ends a text, or fills it up
        twin = copy.deepcopy(model)
        meshc.compile(model, mesh, kwargs=default_collate(rows[:2]), inputs="local")
        given: dict[str, Any] = dict(predict_with_generate=True, generation_max_length=7, max_steps=1, learning_rate=0.1, optim="sgd")
        quiet: dict[str, Any] = dict(use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", per_device_train_batch_size=2)
        said = Seq2SeqTrainingArguments(str(shared_folder()), **given, **quiet, per_device_eval_batch_size=1, max_grad_norm=0.0)
        trainer = Seq2SeqTrainer(model=model, args=said, train_dataset=rows, eval_dataset=rows, compute_metrics=tokens_of)
        trainer.train()
        found = trainer.evaluate()
        trained_on(twin, default_collate(rows), 0.1, clip=False)
        _close(model, twin)
        twin.eval()
        wanted = torch.cat([twin.generate(row["input_ids"][None], max_length=7) for row in rows])
        assert found["eval_sum"] == int(wanted.sum()) > 0, (kind, found, wanted)
        trained_on(twin.train(), default_collate(rows), 0.1, clip=False)
        trainer.train()
        _close(model, twin)


def tokens_of(found: Any) -> dict[str, int]:
    return {"sum": int(found.predictions.clip(0).sum())}


@ROWS.row("the model's generate, of each rank's own prompts, with inputs='local'", mesh="dp=2")
def generating_parts(mesh: Any) -> None:
    """Prompts of other lengths, with draws of one seed; a rank has more of them than the other."""
    model, rank = llama().eval().requires_grad_(False), torch.distributed.get_rank()
    twin = copy.deepcopy(model)
    program = meshc.compile(model, mesh, inputs="local")
    ids = torch.arange(3, 18).reshape(3, 5)
    mine, mask = ((ids[:1], None), (ids[1:, :3], torch.tensor([[1, 1, 1], [0, 1, 1]])))[rank]
    for call in (model.generate, program.generate):
        found = call(mine, attention_mask=mask if mask is not None else torch.ones_like(mine), max_new_tokens=3, do_sample=False)
        wanted = twin.generate(mine, attention_mask=mask, max_new_tokens=3, do_sample=False)
        assert torch.equal(found[:, : wanted.shape[1]], wanted), (found, wanted)
    refuses(meshc.InputError, "tokens alone", lambda: model.generate(mine, max_new_tokens=3, return_dict_in_generate=True))
    model(input_ids=ids[:2])  # its calls are of parts still


@ROWS.row('train, evaluate, predict, where ranks share a part of the batch, with inputs="local"', mesh="dp=1,tp=2")
def shared_parts(mesh: Any) -> None:
    model, twin = compiled(mesh, "local", 4)
    given = arguments(shared_folder(), per_device_train_batch_size=4, per_device_eval_batch_size=3)
    trainer = Trainer(model=model, args=given, train_dataset=texts(), eval_dataset=texts(4))
    trainer.train()
    trained(twin)
    _close(model, twin)
    with torch.no_grad():
        wanted = twin.eval()(**batches(4)[0]).logits
    torch.testing.assert_close(torch.as_tensor(trainer.predict(texts(4)).predictions), wanted, rtol=1e-6, atol=1e-6)


@ROWS.row('ranks that are dealt other rows, with inputs="global"', refused='compile with inputs="local", or do not deal out')
def dealt_out_unasked(mesh: Any) -> None:
    model, _ = compiled(mesh, "global", 2)
    refuses(meshc.InputError, 'inputs="local"', Trainer(model=model, args=arguments(shared_folder()), train_dataset=texts()).train)


def _close(model: nn.Module, twin: nn.Module) -> None:
    """The model's loss is float32 in any case."""
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        whole: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[operator]
        torch.testing.assert_close(whole.detach(), theirs[name].detach(), rtol=1e-5, atol=1e-6)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
