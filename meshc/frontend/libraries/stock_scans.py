"""Recurrences of stock `transformers` models as scans and padded convolutions, so that a program does not grow with the sequence.

    model:   for each position: state = a state + b, product with C        convolve with padding on both sides, cut to the sequence
    traced:  one recurrence, one product of all positions                  convolve with a kernel whose later half is zero

Models with a selective scan have a function of one name for it, in a module each, and so have those with a gated delta rule, or a short
causal convolution; RWKV has one for its average. While a model is traced, the functions here replace them, if both give equal results on a
sample call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from meshc.lazy_module import LazyModule
from meshc.private import no_dispatch
from meshc.replacements import replace_in

if TYPE_CHECKING:
    from meshc.ops import delta_rule, recurrence
else:
    delta_rule, recurrence = LazyModule("meshc.ops.delta_rule"), LazyModule("meshc.ops.recurrence")

Function = Callable[..., Any]


@contextmanager
def traced_scans() -> Iterator[None]:
    """A context in which stock models call these functions; it does nothing without such models."""
    models = [loaded for name, loaded in [*sys.modules.items()] if name.startswith("transformers.models.") and ".modeling_" in name]
    with ExitStack() as stack:
        for name, (ours, call, target) in STANDING.items():
            found = [(loaded, vars(loaded).get(name)) for loaded in models]
            rows = [(loaded, name, ours) for loaded, own in found if callable(own) and own is not ours and _same(own, ours, call)]
            stack.enter_context(replace_in(target, rows))
        yield


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """(x and dt [batch, channels, t], A [channels, n], B and C [batch, n, t]) -> [batch, channels, t], and with `return_last_state` the
    last state.

    Casts are those of the model: the state has the promoted dtype of its factors, its product with C the dtype of x. (Gu, Dao: Mamba,
    arXiv:2312.00752.)
    """
    dtype = hidden_states.dtype
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = functional.softplus(dt) if delta_softplus else dt
    B, C = B.transpose(1, 2), C.transpose(1, 2)
    a = torch.exp(A[None, :, None, :] * dt[..., None])
    b = dt[..., None] * B[:, None].float() * hidden_states[..., None].float()
    state = torch.promote_types(torch.promote_types(a.dtype, b.dtype), dtype)
    states = recurrence.recurrence(a.to(state), b.to(state), None, 2)
    made = torch.matmul(states.to(dtype).transpose(1, 2), C.unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    made = made if D is None else made + hidden_states * D[None, :, None]
    made = made if z is None else made * functional.silu(z)
    return (made, states[:, :, -1]) if return_last_state else made


def short_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: object
) -> Tensor:
    """(x [batch, channels, t], weight [channels, taps]) -> [batch, channels, t]: a position reads itself and those before it."""
    from transformers.activations import ACT2FN

    before = weight.shape[-1] - 1
    taps = functional.pad(weight, (0, before)).unsqueeze(1)
    out = functional.conv1d(hidden_states.to(weight.dtype), taps, bias, padding=before, groups=hidden_states.shape[1])
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """(query, key [batch, t, key heads, keys], value [batch, t, heads, values], g, beta [batch, t, heads]) -> like value, and with
    `output_final_state` the last state [batch, heads, keys, values]. All in float32, as in the model. (arXiv:2412.06464.)
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(groups, dim=2) if groups != 1 else x for x in (query, key))
    query, key, value, beta, g = (x.transpose(1, 2).to(torch.float32) for x in (query, key, value, beta, g))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    query, beta = query * query.shape[-1] ** -0.5, beta.unsqueeze(-1)
    before = None if initial_state is None else initial_state.to(torch.float32)
    made, last = delta_rule.delta_rule(query, key, value * beta, key * beta, g, before)
    return made.transpose(1, 2).to(dtype), last if output_final_state else None


def decaying_average(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Any]:
    """(decay and first [channels], key and value [batch, t, channels]) -> [batch, t, channels], and the last state: RWKV's attention.

    Each position takes the average of the values before it, by weights exp(key) that decay, and of its own by exp(first + key). Sums are
    kept as multiples of exp(peak), where peak is the largest exponent so far. The average does not depend on peak, so peak has no gradient;
    a state does depend on it. (Peng et al.: RWKV, arXiv:2305.13048.)
    """
    keys, values, decay = key.float(), value.float(), -torch.exp(time_decay)
    numerator, denominator, highest = (None, None, None) if state is None else state
    exponents, fall = (keys, decay) if return_state or state is not None else (keys.detach(), decay.detach())
    since = torch.arange(key.shape[1], dtype=torch.float32, device=key.device)[:, None] * fall
    peak = (exponents - since).cummax(1)[0] + since
    if highest is not None:
        peak = torch.maximum(peak, highest[:, None] + since + fall)
    peak_before = _before(peak, highest, -1e38)
    kept, new = torch.exp(peak_before + decay - peak), torch.exp(keys - peak)
    sums = [_decaying(kept, terms, first) for terms, first in ((new * values, numerator), (new, denominator))]
    above, below = (_before(made, first) for made, first in zip(sums, (numerator, denominator), strict=True))
    top = torch.maximum(peak_before, keys + time_first).detach()
    old, own = torch.exp(peak_before - top), torch.exp(keys + time_first - top)
    made = ((old * above + own * values) / (old * below + own)).to(key.dtype)
    return made, [x[:, -1] for x in (*sums, peak)] if return_state or state is not None else None


def _before(x: Tensor, first: Tensor | None, fill: float = 0.0) -> Tensor:
    """x [batch, t, ...] shifted by one position; `first`, or `fill`, comes first."""
    return functional.pad(x, (0, 0, 1, -1), value=fill) if first is None else torch.cat([first[:, None], x[:, :-1]], 1)


def _decaying(kept: Tensor, terms: Tensor, first: Tensor | None) -> Tensor:
    """A running sum that decays by `kept` at each step; `first` is the sum before."""
    if first is not None:
        terms = terms + functional.pad(kept[:, :1] * first[:, None], (0, 0, 0, terms.shape[1] - 1))
    return recurrence.recurrence(kept, terms, None, 1)


def _sample_values(*shape: int) -> Tensor:
    """Sample values without regularity, independent of a generator's state."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float32, device="cpu") * 1.7 + count).reshape(shape)


def _sample_scan(function: Function) -> list[Tensor]:
    x, dt, b, c = _sample_values(2, 3, 5), _sample_values(2, 3, 5), _sample_values(2, 4, 5), _sample_values(2, 4, 5)
    more = {
        "D": _sample_values(3),
        "z": _sample_values(2, 3, 5),
        "delta_bias": _sample_values(3),
        "delta_softplus": True,
        "return_last_state": True,
    }
    plain = {"use_mambapy": False, "use_associative_scan": False}
    return [*function(x, dt, -_sample_values(3, 4).exp(), b, c, **more, **plain), function(x, dt, _sample_values(3, 4), b, c, **plain)]


def _sample_convolution(function: Function) -> list[Tensor]:
    x, weight = _sample_values(2, 3, 5), _sample_values(3, 4)
    return [function(x, weight, _sample_values(3), activation="silu"), function(x, weight)]


def _sample_delta_rule(function: Function) -> list[Tensor]:
    query, key, value, state = (
        _sample_values(2, 7, 2, 3),
        _sample_values(2, 7, 2, 3) / 2,
        _sample_values(2, 7, 4, 5),
        _sample_values(2, 4, 3, 5),
    )
    g, beta = -_sample_values(2, 7, 4).exp(), _sample_values(2, 7, 4).sigmoid()
    more = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    plain, nothing = function(query, key, value, g, beta)
    return [*function(query, key, value, g=g, beta=beta, chunk_size=4, **more), plain, *(() if nothing is None else (nothing,))]


def _sample_average(function: Function) -> list[Tensor]:
    decay, first, key, value = _sample_values(3), _sample_values(3), _sample_values(2, 5, 3) * 3, _sample_values(2, 5, 3)
    state = _sample_values(2, 3), _sample_values(2, 3).exp(), _sample_values(2, 3)
    plain, nothing = function(decay, first, key, value)
    (made, last), (more, later) = function(decay, first, key, value, return_state=True), function(decay, first, key, value, state)
    return [plain, made, *last, more, *later, *(() if nothing is None else (nothing,))]


STANDING: dict[str, tuple[Function, Callable[[Function], list[Tensor]], str]] = {
    "mamba_selective_scan": (selective_scan, _sample_scan, "selective_scan"),
    "causal_conv1d_fn": (short_convolution, _sample_convolution, "short_convolution"),
    "torch_chunk_gated_delta_rule": (gated_delta_rule, _sample_delta_rule, "delta_rule"),
    "rwkv_linear_attention": (decaying_average, _sample_average, "decaying_average"),
}
"""Name in a model's module -> (the function that replaces it, a sample call of either, its name among the replacements)."""
_found: WeakKeyDictionary[Function, bool] = WeakKeyDictionary()


def _same(theirs: Function, ours: Function, call: Callable[[Function], list[Tensor]]) -> bool:
    """Whether a sample call of both gives equal results, whatever context the caller is in; a function that does not accept the call is
    another one."""
    if theirs not in _found:
        try:
            with no_dispatch(), torch.no_grad(), torch.autocast("cpu", enabled=False):
                pairs = list(zip(call(theirs), call(ours), strict=True))
                _found[theirs] = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) and a.dtype == b.dtype for a, b in pairs)
        except Exception:  # whatever a function of that name says to arguments that it does not take
            _found[theirs] = False
    return _found[theirs]
