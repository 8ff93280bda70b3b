"""Reading and writing by an index."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import b, begin, f, i, sample

aten = torch.ops.aten
ours = torch.ops.meshc
begin(__name__)

sample(aten.embedding.default, f(7, 4), i(7, 3, 5))
sample(aten.embedding.default, f(7, 4), i(7, 3, 5), 2)
sample(aten.embedding.default, f(10, 4), i(10, 5), refine={0: (5, 2, 4)})
sample(aten.embedding_dense_backward.default, f(3, 5, 4), i(7, 3, 5), 7, -1, False)
sample(aten.embedding_dense_backward.default, f(9, 4), i(3, 9), 3, 1, False)
sample(ours.take.default, f(3, 5, 7), i(7, 3, 5), -100)
sample(ours.take.default, f(5, 7), torch.tensor([0, 6, -100, 3, 2]), -100)
sample(ours.take.default, f(5, 6), i(6, 5), 2, refine={0: (5, 3, 2)})
sample(ours.take_backward.default, f(3, 5), i(7, 3, 5), -100, 7)
sample(ours.take_backward.default, f(5), torch.tensor([0, 6, -100, 3, 2]), -100, 7)
sample(ours.take_backward.default, f(5), i(6, 5), 2, 6, refine={~0: (5, 3, 2)})
sample(ours.one_hot.default, i(7, 3, 5), 7)
sample(ours.one_hot.default, i(6, 5), 6, refine={~0: (5, 3, 2)})

sample(aten.gather.default, f(3, 5, 7), -1, i(7, 3, 5, 4))
sample(aten.gather.default, f(5, 7), 0, i(5, 2, 3))
sample(aten.gather.default, f(5, 6), 1, i(6, 5, 1), refine={0: (5, 3, 2)})
sample(aten.gather.default, b(5, 7), 1, i(7, 5, 3))
sample(aten.scatter.src, f(5, 7), 1, i(7, 5, 3).sort(1)[0] * 0 + torch.tensor([4, 0, 6]), f(5, 3))
sample(aten.scatter.src, f(5, 7), 0, torch.tensor([[2, 1, 0]]), f(1, 3))
sample(aten.scatter.value, f(5, 7), -1, i(7, 5, 3), 2.0)
sample(aten.scatter_add.default, f(5, 7), 1, i(7, 5, 3), f(5, 3))
sample(aten.index_select.default, f(5, 7, 3), 1, i(7, 4))
sample(aten.index_select.default, f(6, 4), 0, i(6, 5), refine={0: (3, 2, 4)})
sample(aten.index_select.default, b(5, 7), -1, i(7, 4))
sample(aten.scatter_add.default, f(6, 7), 0, i(6, 3, 7), f(5, 7), refine={0: (3, 2, 7)})
sample(aten.scatter.reduce, f(5, 7), 1, i(7, 5, 3), f(5, 3), reduce="multiply")
sample(aten.scatter.value_reduce, f(5, 7), 1, i(7, 5, 3), 2.0, reduce="add")
for _how in ("sum", "prod", "mean", "amax", "amin"):
    sample(aten.scatter_reduce.two, f(5, 7), 1, i(7, 5, 3), f(5, 3), _how)
    sample(aten.scatter_reduce.two, f(5, 7), 0, i(5, 3, 4), f(4, 6), _how, include_self=False)
sample(aten.index_add.default, f(5, 7), 1, i(7, 3), f(5, 3))
sample(aten.index_add.default, f(5, 7), 0, i(5, 6), f(6, 7), alpha=2)
sample(aten.index_copy.default, f(5, 7), 1, torch.tensor([6, 0, 3]), f(5, 3))
sample(aten.index_fill.int_Scalar, f(5, 7), 1, i(7, 3), 2.0)
sample(aten.index_fill.int_Tensor, f(5, 7), 0, torch.tensor([-1, 2]), f(()))
for _how in ("prod", "mean", "amax", "amin"):
    sample(aten.index_reduce.default, f(5, 7), 1, i(7, 3), f(5, 3), _how)
sample(aten.select_scatter.default, f(5, 4), f(5), 1, 2)
sample(aten.select_scatter.default, f(5, 1, 4), f(5, 4), 1, 0)
sample(aten.slice_scatter.default, f(5, 7), f(5, 3), 1, 2, 5)
sample(aten.slice_scatter.default, f(5, 7), f(1, 7), 0, 2, 3)
for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
    sample(op, f(5, 7, 3), [None, i(7, 4)])
    sample(op, f(5, 7, 3), [i(5, 4, 2), i(7, 2)])
    sample(op, f(5, 7, 3), [i(5, 4), None, i(3, 4)])
    sample(op, f(5, 7, 3), [None, i(7, 4, 1), i(3, 1, 2)])
for op in (aten.index_put.default, aten._unsafe_index_put.default):
    sample(op, f(5, 7), [torch.tensor([3, 0, 4])], f(3, 7))
    sample(op, f(5, 7), [torch.tensor([3, 0, 4])], f(3, 7), True)
    sample(op, f(5, 7), [None, i(7, 4)], f(5, 4), True)
    sample(op, f(5, 7), [None, i(7, 4)], f(1), True)
    sample(op, f(5, 7, 3), [i(5, 4, 2), i(7, 2)], f(4, 2, 3), True)
sample(aten.index_select.default, f(()), 0, i(1, 1))
sample(aten.gather.default, f(()), 0, i(1, 1).reshape(()))
sample(aten.scatter.src, f(()), 0, i(1, 1).reshape(()), f(()))
sample(aten.index_add.default, f(()), 0, i(1, 1), f(()))
for op in (aten.index_put.default, aten._unsafe_index_put.default):
    sample(op, f(5, 7), [b(5)], f(7))
    sample(op, f(5, 7), [None, b(7)], f(5, 1), True)
    sample(op, f(5, 7, 3), [b(5, 7)], f(()))
    sample(op, f(3, 7, 5), [None, torch.arange(7) % 2 == 0], f(3, 4, 5))
sample(aten.take.default, f(5, 7), i(35, 4, 3))
sample(aten.take.default, f(5, 7), i(35, 4, 3))
