"""What the Python of the pages takes for granted, so that all of it runs: data over pages; `pages.py` runs it.

A page that sets up all that it uses needs nothing here but its place in SCENES. Another takes a model, a mesh or a loader for granted, as
its reader has one: what stands before its blocks is such a model, the smallest that shows what the page says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LLAMA: Final = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import meshc

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4))
step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()))
ids = torch.randint(64, (8, 40))
inputs = {"input_ids": ids, "labels": ids}
"""

GROUP: Final = """
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
"""

TWO_AXES: Final = """
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
"""

MIXTRAL: Final = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import meshc

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
torch.manual_seed(0)
config = MixtralConfig(vocab_size=65, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                       num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
step = meshc.TrainStep(model := MixtralForCausalLM(config), optimizer=torch.optim.AdamW(model.parameters()))
ids = torch.randint(65, (4, 12))
inputs = {"input_ids": ids, "labels": ids}
batches = [inputs] * 100
"""

LOOP: Final = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshc

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 8), torch.randint(4, (24,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
"""

BY_DDP: Final = """
by_ddp = DistributedDataParallel(build())
optimizer = torch.optim.AdamW(by_ddp.parameters(), lr=1e-2)
for x, y in loader:
    F.cross_entropy(by_ddp(x), y).backward()
    torch.nn.utils.clip_grad_norm_(by_ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    torch.testing.assert_close(dict(found), dict(by_ddp.module.state_dict()))
"""

STATISTICS: Final = """
from collections.abc import Sequence
from math import inf

import torch
from torch.fx import Node

from meshc.rules import elementwise, every_family
from meshc.rules import statistics
from meshc.rules.operator import Operator
from meshc.rules.reduction import reduce
from meshc.rules.rule import Local, Rule
from meshc.rules.statistics import _mask_padding
from meshc.testing.brute_force import prove
from tests.rules.samples import SAMPLES

aten = torch.ops.aten

def splits(rule):
    "By the page's three samples; what is wrong raises."
    for family in every_family():
        family.OPERATORS.pop(aten.logsumexp.default, None)
    elementwise.OPERATORS[aten.logsumexp.default] = Operator(rule)
    return [prove(call) for call in SAMPLES[aten.logsumexp.default][:3]]
"""

STEP: Final = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshc

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=torch.nn.functional.mse_loss)
args, kwargs = (torch.randn(8, 8),), {"target": torch.randn(8, 4)}
"""


KL: Final = """
from torch.nn.functional import mse_loss as mse

optimizer, x, y = torch.optim.AdamW(model.parameters()), torch.randn(8, 8), torch.randn(8, 4)

def kl(out):
    return out.square().mean()
"""

LOADER: Final = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data, epochs = TensorDataset(torch.randn(64, 8), torch.randn(64, 4)), 2
"""


@dataclass(frozen=True)
class Scene:
    """Blocks of a page, by their numbers from 0, that run one after the other in one module, on so many ranks.

    before     what the page takes for granted
    after      what is asked of that which they leave
    often      runs by `make test` too
    """

    page: str
    blocks: tuple[int, ...]
    ranks: int = 1
    before: str = ""
    after: str = ""
    often: bool = False

    @property
    def name(self) -> str:
        return f"{self.page.removeprefix('../').removesuffix('.md')}-{'-'.join(map(str, self.blocks))}"


SCENES: Final = (
    Scene("../README.md", (0,), ranks=4),
    Scene("../README.md", (1,), ranks=2, before=LOOP, after="""
found = model.state_dict()
""" + BY_DDP),
    Scene("../README.md", (2,), ranks=4, before=LLAMA + TWO_AXES, after="""
assert 'dp: batch' in str(program.asked.plan) and program(**inputs) > 0
"""),
    Scene("add-a-rule.md", (1, 2, 3, 4), before="""
import torch
import meshc
from tests.rules.own import imported

imported("mylib")
aten = torch.ops.aten
""", after="""
proof = prove_rule("mylib::my_rmsnorm", [(x, weight), (x[0], weight)])
assert "c" in proof.letters, "split_rows finishes what a split row needs"
""", often=True),
    Scene("add-a-rule.md", (6,), before="""
import torch
import meshc
from meshc.testing import prove_rule

@torch.library.custom_op("mylib::project", mutates_args=())
def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()

@project.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
""", after='assert "+k" in prove_rule("mylib::project", [(torch.randn(5, 7), torch.randn(4, 7))]).letters', often=True),
    Scene("add-a-rule.md", (7,), before="""
import torch
from meshc.ir.window import Window
from meshc.rules.convolution import OPERATORS
from meshc.rules.rule import einsum
from meshc.testing.brute_force import Sample, build
from tests.rules.samples import f

convolution = torch.ops.aten.convolution.default
one = build(Sample(convolution, (f(2, 3, 8), f(4, 3, 3), None, [2], [1], [1], False, [0], 1)))
node, tensors, _lower = one.node, [node for node in one.graph.nodes if node.op == "placeholder"], None
""", after="""
assert OPERATORS[convolution].rule(node, tensors).windows == {"y0": ("x0", Window(stride=2, offset=-1, span=3))}, "as the page says"
"""),
    Scene("add-a-rule.md", (8,), before=STATISTICS, after="assert splits(_logsumexp) == [5, 5, 5]"),
    Scene("add-a-rule.md", (10,), before=STATISTICS,
          after="assert splits(statistics._whole_result_rule(_logsumexp)) == [11, 19, 16]"),
    Scene("architecture.md", (0,), after="assert program.plan"),
    Scene("compressed-gradients.md", (0,)),
    Scene("cost-model.md", (0,), before=STEP + """
mesh = meshc.Mesh("dp=2,tp=2")
program = meshc.compile(step, mesh, args=args, kwargs=kwargs)
""", after="assert takes.total > 0 and peak_memory.by_rank(program.compiled)"),
    Scene("fixed.md", (0,), ranks=2, before=STEP + GROUP + KL, after="assert len(program.compilations.kept) == 3"),
    Scene("data.md", (0,), ranks=2, before=STEP + GROUP + LOADER, after="assert loss > 0"),
    Scene("data.md", (1,), ranks=2, before=STEP + GROUP + LOADER, after="assert loss > 0"),
    Scene("data.md", (2,), ranks=2, before="""
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import meshc

class Tags(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 8)

    def forward(self, src):
        return self.lstm(self.embed(src))[0]

tags, loss = Tags(), lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
step = meshc.TrainStep(tags, optimizer=torch.optim.AdamW(tags.parameters()), loss=loss)
""" + GROUP, after="""
assert program(torch.randint(12, (6, 2)), target=torch.randint(8, (6, 2))) > 0
"""),
    Scene("does-not-compile.md", (0,), often=True),
    Scene("dynamic-sizes.md", (0,), ranks=2, before=LLAMA + TWO_AXES),
    Scene("experts.md", (0,)),
    Scene("experts.md", (1,), ranks=2, before=MIXTRAL, after="meshc.compile(step, mesh, kwargs=inputs, options=options)(**inputs)"),
    Scene("experts.md", (2,), ranks=2, before=MIXTRAL),
    Scene("experts.md", (3,), ranks=2, before=MIXTRAL),
    Scene("experts.md", (4,), before="""
import torch
import meshc
from tests.zoo.experts import FAMILIES

case = FAMILIES["deepseek_v3"].case("deepseek_v3")
step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=lambda output: output.loss)
""", after='meshc.compile(step, meshc.Mesh("ep=2"), kwargs=case.call_kwargs, options=options)'),
    Scene("from-ddp.md", (0, 1, 2, 3, 4), ranks=2),
    Scene("from-deepspeed.md", (0,), ranks=2),
    Scene("from-fsdp2.md", (0, 1, 2), ranks=2),
    Scene("from-megatron.md", (0,), ranks=2),
    Scene("fuzzing.md", (0,), after="""
from hypothesis import Phase, find
first = settings(max_examples=1, phases=[Phase.generate])
test_random.hypothesis.inner_test(find(tests.fuzz.cases(most=3), lambda case: True, settings=first))
"""),
    Scene("generation.md", (0,), ranks=2),
    Scene("generation.md", (1,), ranks=2, before=LLAMA + GROUP + """
from transformers import DynamicCache
model.eval().requires_grad_(False)
program, ids, rows = meshc.compile(model, mesh), ids[:2, :11], torch.tensor([1, 0])
""", after="assert cache.get_seq_length() == 13 and cache.layers[0].keys.shape[0] == 4"),
    Scene("long-context.md", (0, 1), before=LLAMA),
    Scene("mixed-precision.md", (0, 1)),
    Scene("precision.md", (0,), often=True),
    Scene("recurrences.md", (0,), before=STEP, after="""
class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 6, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0].square().mean()

step = meshc.TrainStep(reads := Reads(), optimizer=torch.optim.AdamW(reads.parameters()))
program = meshc.compile(step, meshc.Mesh("cp=2"), args=(torch.randn(4, 6, 4),), plan=plan)
assert "all_to_all" in str(program)
"""),
    Scene("losses-differ.md", (0, 1), often=True),
    Scene("memory.md", (0, 1)),
    Scene("pipelines.md", (0,), ranks=4, before=LLAMA + """
dist.init_process_group("gloo")
optimizer = torch.optim.AdamW(model.parameters())
"""),
    Scene("planner.md", (0,)),
    Scene("plans.md", (0,), before=LLAMA + """
mesh = meshc.Mesh("dp=2,tp=2")
meshc.Plan("dp: batch").save("llama.plan")
"""),
    Scene("plans.md", (1, 2), before="import torch\nimport torch.nn.functional as F\nfrom torch import nn\nimport meshc\n"),
    Scene("found-plans.md", (0,), before=STEP + 'mesh = meshc.Mesh("dp=2,tp=2")\n'),
    Scene("randomness.md", (0,), after="assert 0 <= uniform32(0, 0, 0, 4)[0] < 1", often=True),
    Scene("randomness.md", (1,), before="""
from types import SimpleNamespace

import torch

class Drops(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 32)

    def forward(self, x):
        return SimpleNamespace(loss=torch.nn.functional.dropout(self.up(x), 0.5).mean())

model, batch = Drops(), {"x": torch.randn(2, 8)}
""", after="assert [(name, tuple(shape)) for name, shape in reference.drawn] == [('aten.bernoulli_.float', (2, 32))]", often=True),
    Scene("randomness.md", (2,), before="""
import torch
from meshc.reference import ReferenceRandom

class Mean(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5).mean()

model, x = Mean(), torch.randn(8, 8)
""", after="assert [tuple(shape) for _, shape in whole.drawn] == [(8, 8)] and loss.isfinite()", often=True),
    Scene("sparsity.md", (0,)),
    Scene("training.md", (0,), ranks=2),
    Scene("training.md", (1,), after="""
import meshc
student, teacher = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
both = Distilled(student, teacher)
step = meshc.TrainStep(both, optimizer=torch.optim.AdamW(student.parameters()))
assert meshc.verify(meshc.compile(step, meshc.Mesh("dp=2"), args=(torch.randn(4, 4),)), (torch.randn(4, 4),)).ok
generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
both = Gan(generator, critic)
for part, given in ((generator, ()), (critic, (torch.randn(4, 4),))):
    step = meshc.TrainStep(both, optimizer=torch.optim.AdamW(part.parameters()))
    passed = (torch.randn(4, 4), *given)
    assert meshc.verify(meshc.compile(step, meshc.Mesh("dp=2"), args=passed), passed).ok
"""),
    Scene("training.md", (2, 3), after="""
assert len(open("rates.jsonl").readlines()) == 1000
model = torch.nn.Linear(4, 2)
step = meshc.TrainStep(model, optimizer=FusedLion(model.parameters()), loss=torch.nn.functional.mse_loss)
meshc.compile(step, meshc.Mesh("dp=2"), args=(torch.randn(4, 4),), kwargs={"target": torch.randn(4, 2)})
"""),
    Scene("weights.md", (0, 1), ranks=2),
    Scene("which-plan.md", (0,), often=True),
)  # fmt: skip

ELSEWHERE: Final = {
    "add-a-pass.md": (3, "tests/test_docs.py"),
    "add-a-schedule.md": (5, "tests/pipelining/test_page.py"),
}
"""Pages all of whose blocks a test of their subject runs: how many, and which."""

QUOTED: Final = {
    ("add-a-rule.md", 0): "examples/own_operator/mylib.py",
    ("add-a-rule.md", 5): "meshc/rules/contraction.py",
    ("add-a-rule.md", 9): "meshc/rules/statistics.py",
    ("add-a-rule.md", 11): "tests/rules/samples/reduction.py",
    ("add-a-rule.md", 12): "tests/rules/test_rules.py",
    ("add-a-rule.md", 13): "meshc/rules/routed_experts.py",
}
"""Blocks that stand so in a file: page and number, and the file."""
