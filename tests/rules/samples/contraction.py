"""Matrix products."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, sample

aten = torch.ops.aten
begin(__name__)

sample(aten.mm.default, f(5, 4), f(4, 7))
sample(aten.mm.default, f(6, 10), f(10, 3), refine={0: (2, 3, 5, 2)})
sample(aten.mm.default, f(5, 1), f(1, 7))
sample(aten.bmm.default, f(3, 4, 5), f(3, 5, 2))
sample(aten.bmm.default, f(1, 4, 5), f(1, 5, 2))
sample(aten.mv.default, f(5, 7), f(7))
sample(aten.dot.default, f(7), f(7))
sample(aten.addmm.default, f(7), f(5, 4), f(4, 7))
sample(aten.addmm.default, f(5, 7), f(5, 4), f(4, 7), beta=2.0, alpha=3.0)
sample(aten.addmm.default, f(()), f(5, 4), f(4, 7), beta=0.2)
sample(aten.addmm.default, f(1), f(5, 4), f(4, 7))
sample(aten.addmm.default, f(1, 7), f(5, 4), f(4, 7))
sample(aten.addmm.default, f(()), f(5, 4), f(4, 7))
sample(aten.baddbmm.default, f(3, 5, 2), f(3, 5, 4), f(3, 4, 2), beta=0.5)
sample(aten.baddbmm.default, f(3, 1, 2), f(3, 5, 4), f(3, 4, 2))
sample(aten.baddbmm.default, f(5, 2), f(3, 5, 4), f(3, 4, 2))
for _bias in (f(5, 2), f(2), f(())):
    sample(aten.addbmm.default, _bias, f(3, 5, 4), f(3, 4, 2), beta=0.5)
sample(aten.vdot.default, torch.complex(f(7), f(7)), torch.complex(f(7), f(7)))
for _p in (1.0, 2.0, 3.0):
    _near, _far = f(2, 5, 4), f(2, 7, 4)
    _apart = aten._cdist_forward(_near, _far, _p, 2)
    sample(aten._cdist_forward.default, _near, _far, _p, 2)
    sample(aten._cdist_backward.default, f(2, 5, 7), _near, _far, _p, _apart)
sample(aten._euclidean_dist.default, f(2, 5, 4), f(2, 7, 4))
sample(aten.addmv.default, f(5), f(5, 4), f(4), beta=0.5)
sample(aten.addmv.default, f(()), f(5, 4), f(4))
sample(aten.addr.default, f(5, 4), f(5), f(4), alpha=0.5)
sample(aten.addr.default, f(4), f(5), f(4), beta=0.3)
sample(aten.addr.default, f(5, 1), f(5), f(4))
sample(aten.addmm.default, f(5, 7), f(5, 4), f(4, 7), beta=-0.5)
sample(aten._trilinear.default, f(7, 3), f(4, 3, 5), f(7, 5), [1, 3], [0], [1, 2], [2, 3])
sample(aten._trilinear.default, f(7, 4), f(4, 3, 5), f(7, 5), [2, 3], [0], [1, 2], [1, 3])
