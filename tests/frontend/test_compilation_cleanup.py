"""What stays behind when a program that was compiled is gone: nothing that grows with the number of compilations."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref

import pytest
import torch

from meshc.frontend.compilation_cleanup import clean_up_compilation
from tests.broad import broad

CHILD = '''
import gc, json, sys
from collections import Counter
import torch, torch.nn.functional as F
from torch import nn
from torch.fx.graph_module import _loader
import meshc

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))

def module():
    meshc.compile(Model(), meshc.Mesh("dp=2,tp=2"), args=(torch.randn(4, 8),))

def step():
    model = Model()
    what = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    meshc.compile(what, meshc.Mesh("dp=2,tp=2"), args=(torch.randn(4, 8),), kwargs={"target": torch.randn(4, 8)})

def refused():
    class Counts(Model):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    try:
        meshc.compile(Counts(), meshc.Mesh("dp=2"), args=(torch.randn(4, 8),))
    except meshc.MeshcError:
        return
    raise AssertionError("this cannot be compiled")

def objects():
    gc.collect()
    return Counter(map(str, map(type, gc.get_objects())))

def grown(compile):
    """More objects after every compilation, of each kind; what one of them leaves once and for all does not count."""
    compile(), compile()
    seen = [objects()]
    for _ in range(3):
        compile()
        seen.append(objects())
    more = [after - before for before, after in zip(seen, seen[1:])]
    return {name: min(one[name] for one in more) for name in more[0] if all(one[name] for one in more)}

print(json.dumps({form: grown(globals()[form]) for form in sys.argv[1:]} | {"sources": len(_loader.eval_cache)}))
'''


@pytest.mark.parametrize("forms", [("step",), broad(("refused", "module"))], ids=" ".join)
def test_nothing_of_a_compilation_stays_behind(forms: tuple[str, ...]) -> None:
    """It was about 800 objects and 0.5 MB each: the graph, fake tensors, guards, stacks."""
    done = subprocess.run([sys.executable, "-c", CHILD, *forms], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("sources") == 0 and found.keys() == {*forms}
    for form, counts in found.items():
        assert sum(counts.values()) < 25, (form, counts)
        assert not [name for name in counts if any(word in name for word in ("fx.", "FakeTensor", "Guard", "finalize"))], (form, counts)


def test_the_guards_of_the_users_own_compilations_stay() -> None:
    with clean_up_compilation():
        before = set(weakref.finalize._registry)  # type: ignore[attr-defined]
        compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="eager")
        compiled(torch.ones(3))
        made = set(weakref.finalize._registry) - before  # type: ignore[attr-defined]
        guards = {one for one in made if "CheckFunctionManager" in str(one.peek())}
        assert guards
    assert guards <= set(weakref.finalize._registry)  # type: ignore[attr-defined]
