"""docs/ecosystem.md."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from tests.frameworks.libraries import LIBRARIES, UNTRIED

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "ecosystem.md"
PACKAGES: Final = ("torch", "transformers", "accelerate", "trl", "timm", "diffusers", "lightning", "litgpt", "peft", "pillow")

TITLE: Final = """# The ecosystem

What a compiled model does where people pass models: by nothing, by one line, or refused with what to do instead. Each row is a
check on two processes under gloo (`tests/frameworks/`): losses, gradients and parameters equal those of the plain model on one
device, and a refusal is raised on every rank: by meshc with its advice, or by the library itself (DDP, `fully_shard`, the Trainer).

A module that is compiled in module mode stays the live object: it is passed where a module is taken, and its call runs its program
(`docs/decisions/module-calls.md`). What is passed to it is by default the same on every rank
(`inputs="global"`); a library that deals batches out goes with `inputs="local"`.
"""
AFTER: Final = """
## Beside the tables

- **Whole tensors.** `model.load_state_dict` takes whole plain tensors, the same on every rank, and sends nothing. Accelerate's
  `save_state`, the Trainer's `save_model` and transformers' `model.save_pretrained`, which every rank calls and one writes for, get
  whole tensors in each rank's host memory (on `dp` alone, where nothing is split, that one may call `save_state` by itself);
  `program.save_pretrained` needs that on rank 0 alone. `if rank == 0:` around them makes a call that waits for the others, which is said
  after 15 s.
- **Copies.** `copy.deepcopy` of a compiled model has its DTensors and no program. `meshc.compile(copy, ...)` gives it a storage and
  a program of its own, which begin with its values. Where a program's storage is no layout of torch's and a step has run since, the
  copy is refused until `program.sync()`; `update_parameters` cannot look, so beside a `TrainStep` call `program.sync()` first.
- **Averages of weights** (EMA), penalties and masks. An average that is made behind `meshc.compile` lies in parts, like the model; a
  copy of the module that was made before is compiled too, which also lets it be called (timm's `ModelEmaV2`, `ModelEmaV3`:
  `meshc.compile(ema.module, mesh, args=...)`). One that was made of plain tensors before (diffusers' `EMAModel(model.parameters())`,
  `AveragedModel`, Lightning's `StochasticWeightAveraging`) stays plain, and works: each rank keeps it whole, each update gathers the
  model, on every rank, and a warning says so at the first. Plain tensors beside a model's (a mask in `weight.mul_(mask)`, what weights
  were in `((weight - before) ** 2).sum()`) are whole ones, the same on every rank; lists of both (`torch._foreach_lerp_`) go one by
  one. A penalty of parameters is a DTensor: `(loss + penalty.full_tensor()).backward()`, or in the loss of a `TrainStep`; without it a
  `StateError` says that line. Over pipeline stages averages are made behind `meshc.compile`. Write into an average
  (`average.mul_(0.9).add_(parameter, alpha=0.1)`, `lerp_`, `copy_`): `average.data = ...` changes nothing of a DTensor, which torch
  does not say.
- **Accelerate's schedulers.** One that `accelerator.prepare` has made steps once a process at each step. With `inputs="local"` and a part
  for each process that is what Accelerate means; where ranks pass fewer parts (`inputs="global"`: one) the rate falls so many times as
  fast as on one device, and a warning says so at the second step. Numbers of steps that are multiplied by `num_processes` are right as
  they are.
- **The same rows on data ranks.** With `inputs="local"` ranks compare digests of what they pass in training until they have seen parts
  that differ. Where none has rows of its own in two different batches, a warning says so: a loader without a sampler, or Fabric's and
  Lightning's `ModelParallelStrategy`, whose own `tensor_parallel_size` is all ranks of a node.
- **Mixed models.** `implicit_replication()` is torch's: plain tensors beside DTensors count as the same on every rank, which a
  head's parameters are under `inputs="global"`. Without it torch says "got mixed torch.Tensor and DTensor". Under `inputs="local"`
  a plain head has gradients of each rank's own rows (DDP around the head alone is the way; it was not tried).
- **What Python holds.** Between calls, `train()`/`eval()`, `requires_grad`, hooks, a replaced `forward`, settings of torch's own
  layers (`p` of Dropout, `momentum` of BatchNorm) and PEFT's adapters count, and so does what else forward has read of Python
  ([fixed.md](fixed.md)).
- **The Trainer's counts.** The Trainer passes how many labels it counts in all batches that make a step, on all ranks
  (`num_items_in_batch`), and multiplies the loss by the number of processes, as DDP wants it. Some models divide by that count, others
  take a mean; some labels that a causal model shifts away are counted (of GPT-2, not of Llama: it goes by the class's name). A compiled
  model, whose loss is of all ranks' rows already, gets the count of the whole batch when the Trainer's own `compute_loss` calls it, and
  gives back the loss divided by what the Trainer multiplies it with: training and evaluation are those of one device for every head that
  has a loss of its own (`tests/frameworks/trainer_heads.py`: 34, with the count and without). DDP is that where a model divides by the
  count; of one that takes a mean and any arguments (T5, BERT's heads) its Trainer has the loss times the number of ranks. The count is an
  input, so that the Trainer's first call compiles; `num_items_in_batch=torch.tensor(1.0)` among the example inputs saves the program
  without it. A `compute_loss` of yours that passes `num_items_in_batch` on gets what the model means by it.
- **The Trainer's loss outside the model** (`label_smoothing_factor`, `compute_loss_func`) is of each rank's own rows: compile with
  `options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))`, which is what the Trainer means. Without it backward is refused.
- **The Trainer's collator.** One that pads each rank's rows to the longest of them gives ranks sequences of other lengths, which is refused
  with both: `padding="max_length"`, or `pad_to_multiple_of` a length that all parts reach. Each length is a program.
- **The Trainer's last batch.** Where rows do not divide, Accelerate gives some rows twice, to make parts equal, as it does under DDP:
  the step's mean counts them twice, and `eval_loss` of such a last batch is the mean of what ranks were given. Metrics of `compute_metrics`
  and `predict` count each row once. `dataloader_drop_last=True`, or a number of rows that divides, is exact.
- **The Trainer's checkpoints** hold the optimizer, the schedule and random numbers, where the model is compiled when the Trainer is made,
  and go on under any mesh, of a plain model too, and where a plain model's were begun ([other-libraries](decisions/other-libraries.md)).
  With `save_only_model=True` and `callbacks=[meshc.trainer_checkpoints()]` the rest is written behind the model, and behind the
  removal of old ones.
- **Ranks that share a part** (`tp` beside `dp`, `inputs="local"`). Accelerate, and so the Trainer, deals out the same rows to them, and
  `gather_for_metrics` counts each part once, where the data axes are the mesh's first (`("dp", "tp")`). On other meshes its loader deals
  out to each process, which is refused: give it `num_processes=mesh["dp"].size(), process_index=mesh.get_local_rank("dp")`. With
  `inputs="global"` every rank gets the same batch, by a loader of its own.
- **TRL's trainers** compute losses outside the model, of each rank's own rows: `local_loss="mean"`. All they need in a script is

  ```diff
   model = AutoModelForCausalLM.from_pretrained(name)
  +mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
  +ids = torch.ones(per_device_batch, length, dtype=torch.long)
  +meshc.compile(model, mesh, kwargs={"input_ids": ids}, inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))
  -args = SFTConfig(output_dir, ...)
  +args = SFTConfig(output_dir, pad_to_multiple_of=length, ...)
   trainer = SFTTrainer(model=model, args=args, train_dataset=rows)
   trainer.train()
  ```

  and likewise with `DPOTrainer`, `RewardTrainer` (with `attention_mask` among the example inputs) and `GRPOTrainer`; a `ref_model` stays
  as it is. Losses are those of the script under DDP (SFT, DPO, rewards on `dp=2,tp=2` by four ranks: 3.781888, 3.789412, 3.782500;
  0.693147, 0.693950, 0.693951; 0.698224, 0.693401, 0.704053 in both). `pad_to_multiple_of` is for parts of other lengths, which are
  refused; each length is a program. `GRPOTrainer` gives each rank a seed of its own, and a rank draws for its own prompts
  (`docs/generation.md`). LoRA comes before `meshc.compile`. (Re-entrant
  `gradient_checkpointing` under DDP wants `ddp_find_unused_parameters=False`, as DDP says.)
- **The Trainer's generation.** With `predict_with_generate=True` prompts of all ranks are brought together and generated with
  `inputs="global"` (`docs/generation.md`); ranks' last batches may differ in rows, but each has one at least.
- **Modules of a model.** `model.model(ids)`, `model.lm_head(h)`, an encoder or an embedding that somebody calls by itself is a program of
  its own over the same parameters (`docs/decisions/module-calls.md`). A parameter that is used without its
  module, `F.linear(h, model.lm_head.weight)`, is a DTensor: `model.lm_head.weight.full_tensor()`.
- **Lightning.** Its own sampler shuffles training rows as it deals them out; `use_distributed_sampler=False` leaves a loader as it is. A
  distributed checkpoint is a folder, which `load_from_checkpoint` does not take: `ModelParallelStrategy(save_distributed_checkpoint=False)`
  writes one file. Its `StochasticWeightAveraging` callback copies the module before it is compiled, so its average is whole on each rank;
  `torch.optim.swa_utils` averages a compiled model in parts. `precision="bf16-true"` after compiling is refused. (By hand, on two gloo
  ranks: bf16-mixed; Fabric under torchrun, and with processes of its own.)
- **Notebooks** show the head of the report for a program (`docs/report.md`); `repr(program)` is a line, `repr(model)` is torch's.
"""


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The page for what was found, by library and check."""
    lines = [TITLE, f"Written by `make ecosystem` (`python -m tests.frameworks`), with {_versions()}."]
    for key, library in LIBRARIES.items():
        lines += ["", f"## {library.title}", "", "| what | outcome | the line, or what to do |", "|---|---|---|"]
        lines += [_line(row, rows.get(f"{key}.{row.name}")) for row in import_rows(key)]
    return "\n".join([*lines, AFTER, "## Untested", "", *(f"- {text}" for text in UNTRIED)]) + "\n"


def import_rows(library: str) -> Any:
    try:
        return import_module(LIBRARIES[library].module).ROWS
    except ModuleNotFoundError:
        return ()


def _line(row: Any, found: Mapping[str, Any] | None) -> str:
    advice = f"`{row.line}`" if row.line else row.refused
    outcome = "untested" if found is None else row.outcome if found["ok"] else f"WRONG: {found['said']}"
    return f"| {row.what} | {outcome} | {advice} |".replace("  |", " |")


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
