"""Chunked form of the gated delta rule: batched matrix products within chunks, one small step between chunks.

Of a chunk that begins with the state S, with c the running sum of g in it and D[i, j] = exp(c[i] - c[j]) for i >= j:

    u[t] = v[t] - exp(g[t]) e[t] S[t-1]      what is written at t, so that S[t] = exp(c[t]) S + sum of D[t, j] k[j] u[j] over j <= t
    (I + A) U = V - exp(c) E S               A = E K^T * D below the diagonal; T is the inverse of I + A
    U = T V - W S                            W = T exp(c) E
    out = exp(c) Q S + P U                   P = Q K^T * D on the diagonal and below
    S' = exp(c[end]) S + K'^T U              K'[j] = exp(c[end] - c[j]) k[j]

Backward is the same from the other end: with G the gradient of S', that of U is dU = P^T grad + K' G, and that of S is
exp(c[end]) G + (exp(c) Q)^T grad - W^T dU. With S and G of each chunk known, all other gradients are matrix products. States are
recomputed in backward: for t positions they would take `keys / 64` times the memory of v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LENGTH = 64
"""Positions per chunk: cost within a chunk is quadratic in them, and the steps between chunks are sequential."""


class Chunks:
    """Keys, values, erase vectors and decays of all chunks: [n, chunks, length, ...], with n the product of all leading dims."""

    def __init__(self, k: Tensor, v: Tensor, e: Tensor, g: Tensor) -> None:
        self.lead, self.size = k.shape[:-2], k.shape[-2]
        self.length = max(1, min(LENGTH, self.size))
        self.k, self.v, self.e = self._split_into_chunks(k), self._split_into_chunks(v), self._split_into_chunks(e)
        self.sum = self._split_into_chunks(g.unsqueeze(-1)).squeeze(-1).cumsum(-1)
        apart = self.sum.unsqueeze(-1) - self.sum.unsqueeze(-2)
        later = torch.ones(self.length, self.length, dtype=torch.bool, device=k.device).triu_(1)
        self.decay = apart.masked_fill_(later, -torch.inf).exp_()  # masked before exp: other entries may overflow
        self.erased = (self.e @ self.k.transpose(-1, -2)).mul_(self.decay).tril_(-1)
        ones = torch.eye(self.length, dtype=k.dtype, device=k.device)
        self.inverse = torch.linalg.solve_triangular(self.erased, ones.expand_as(self.erased), upper=False, unitriangular=True)
        self.since = self.sum.exp().unsqueeze(-1)
        self.left = self.decay[..., -1, :].unsqueeze(-1)
        self.kept = self.since[..., -1:, :]
        self.decayed_e = self.e * self.since
        self.w = self.inverse @ self.decayed_e
        self.late_k = self.k * self.left
        self.written = self.inverse @ self.v

    def _split_into_chunks(self, x: Tensor) -> Tensor:
        """[..., t, width] -> [n, chunks, length, width], padded with zeros behind the last position."""
        beyond = -self.size % self.length if self.size else 1
        x = functional.pad(x, (0, 0, 0, beyond)) if beyond else x
        return x.reshape(self.lead.numel(), -1, self.length, x.shape[-1])

    def _join_chunks(self, x: Tensor) -> Tensor:
        whole = x.reshape(*self.lead, -1, x.shape[-1])
        return whole if whole.shape[-2] == self.size else whole.narrow(-2, 0, self.size).contiguous()

    def _begin(self, state: Tensor | None) -> Tensor:
        shape = (self.k.shape[0], self.k.shape[-1], self.v.shape[-1])
        return self.k.new_zeros(shape) if state is None else state.reshape(shape)

    def _steps(self, state: Tensor, written: Tensor, states: Tensor | None = None) -> Tensor:
        """Forward over the chunks; returns the last state. In place, `written` becomes U, `states` the first state of each chunk."""
        for place in range(self.k.shape[1]):
            if states is not None:
                states[:, place] = state
            u = written[:, place].sub_(self.w[:, place] @ state)
            state = torch.baddbmm(state * self.kept[:, place], self.late_k[:, place].transpose(-1, -2), u)
        return state

    def _steps_back(self, after: Tensor, grad: Tensor, q: Tensor, of_u: Tensor, states: Tensor | None = None) -> Tensor:
        """Backward over the chunks. In place, `of_u`, P^T grad, becomes dU, and `states` the gradient of the state behind each chunk."""
        for place in reversed(range(self.k.shape[1])):
            if states is not None:
                states[:, place] = after
            u = of_u[:, place].add_(self.late_k[:, place] @ after)
            after = torch.baddbmm(after * self.kept[:, place], q[:, place].transpose(-1, -2), grad[:, place])
            after.baddbmm_(self.w[:, place].transpose(-1, -2), u, alpha=-1)
        return after

    def _decayed_scores(self, q: Tensor) -> Tensor:
        return (q @ self.k.transpose(-1, -2)).mul_(self.decay)

    def _states(self) -> Tensor:
        return self.k.new_empty(*self.k.shape[:2], self.k.shape[-1], self.v.shape[-1])

    def _out(self, state: Tensor) -> Tensor:
        return state.reshape(*self.lead, *state.shape[-2:])

    def forward(self, q: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        q, states = self._split_into_chunks(q), self._states()
        last = self._steps(self._begin(before), self.written, states)
        out = (q * self.since) @ states
        return self._join_chunks(out.add_(self._decayed_scores(q) @ self.written)), self._out(last)

    def through(self, before: Tensor | None) -> Tensor:
        """The state behind all chunks."""
        return self._out(self._steps(self._begin(before), self.written))

    def end(self) -> tuple[Tensor, Tensor]:
        """(product, end): all chunks map state S to product S + end. Columns are independent; the product begins as the identity."""
        width = self.k.shape[-1]
        ones = torch.eye(width, dtype=self.k.dtype, device=self.k.device).expand(self.k.shape[0], width, width)
        nothing = self.k.new_zeros(self.k.shape)
        state = self._steps(torch.cat([ones, self._begin(None)], -1), torch.cat([nothing, self.written], -1))
        product, end = state.split([width, self.v.shape[-1]], -1)
        return self._out(product.contiguous()), self._out(end.contiguous())

    def start(self, grad: Tensor, q: Tensor) -> Tensor:
        """Gradient of the state before all chunks, with gradient zero for the state behind them."""
        grad, q = self._split_into_chunks(grad), self._split_into_chunks(q)
        of_u = self._decayed_scores(q).transpose(-1, -2) @ grad
        return self._out(self._steps_back(self._begin(None), grad, q * self.since, of_u))

    def backward(
        self, grad: Tensor, q: Tensor, before: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        grad, q = self._split_into_chunks(grad), self._split_into_chunks(q)
        decayed_q, asked, u = q * self.since, self._decayed_scores(q), self.written
        states, behind = self._states(), self._states()
        self._steps(self._begin(before), u, states)
        of_u = asked.transpose(-1, -2) @ grad
        of_before = self._steps_back(self._begin(after), grad, decayed_q, of_u, behind)
        of_v = self.inverse.transpose(-1, -2) @ of_u
        back = states.transpose(-1, -2)
        of_q, of_e, of_late = grad @ back, (of_v @ back).neg_(), u @ behind.transpose(-1, -2)
        late = (of_late * self.late_k).sum(-1)
        of_sum = (of_q * decayed_q).sum(-1) + (of_e * self.decayed_e).sum(-1) - late
        of_sum[..., -1] += late.sum(-1) + (behind * states).sum((-1, -2)) * self.kept[..., 0, 0]
        of_q.mul_(self.since), of_e.mul_(self.since), of_late.mul_(self.left)
        self._within(grad @ u.transpose(-1, -2), asked, q, of_q, of_late, of_sum)
        self._within((of_v @ u.transpose(-1, -2)).neg_(), self.erased, self.e, of_e, of_late, of_sum)
        of_g = of_sum.flip(-1).cumsum(-1).flip(-1)  # c is a running sum of g
        parts = (of_q, of_late, of_v, of_e, of_g.unsqueeze(-1))
        of_q, of_k, of_v, of_e, of_g = (self._join_chunks(x) for x in parts)
        return of_q, of_k, of_v, of_e, of_g.squeeze(-1), self._out(of_before)

    def _within(self, given: Tensor, made: Tensor, x: Tensor, of_x: Tensor, of_k: Tensor, of_sum: Tensor) -> None:
        """Add the gradients through `made = x K^T * D`, below the diagonal, to `of_x`, `of_k` and `of_sum`."""
        both = given * made
        of_sum.add_(both.sum(-1)).sub_(both.sum(-2))
        given = given.mul_(self.decay)  # which is zero above the diagonal; on it a key's own answer is no part of what it erases
        if x is self.e:
            given.tril_(-1)
        of_x.add_(given @ self.k)
        of_k.add_(given.transpose(-1, -2) @ x)
