"""torch's autocast policy as data: which ATen operators of a region take which dtype, for each device.

The lists hold what torch registers for its `AutocastCPU` and `AutocastCUDA` dispatch keys (aten/src/ATen/autocast_mode.cpp and .h), in any
of the supported releases. A dispatch key tells which operators it holds, not with which policy: of the lists, only the operators that
this release's key holds count. `tests/frontend/test_autocast_policy.py` is the canary: it compares the lists with the dispatcher, and each
policy with what torch's own kernel does to fake tensors of the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True)
class Region:
    """The autocast state of a call. `cache`: casts of leaves are shared."""

    device: str
    dtype: torch.dtype
    enabled: bool = True
    cache: bool = True


class Policy(Enum):
    """The dtype to which an operator's floating-point arguments are cast; float64 is never cast."""

    LOWER = "the region's dtype"
    FLOAT32 = "float32"
    FLOAT32_RESULT = "float32, unless the call names a dtype"
    WIDEST = "float32 if one argument is float32, else the region's dtype"
    CUDNN = "float16, by the rule of _cudnn_rnn, which only CUDA builds have"
    REFUSED = "torch refuses the call"


_CPU = {
    Policy.LOWER: """
        _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d conv1d.padding conv2d
        conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input linalg_vecdot
        linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention""",
    Policy.FLOAT32: """
        _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d binary_cross_entropy
        binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss
        ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn
        fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf
        grid_sampler grid_sampler_2d grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_matrix_sqrth linalg_qr linalg_solve linalg_svd
        linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss
        multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr
        ormqr pinverse poisson_nll_loss polar prod prod.dim_Dimname prod.dim_int qr quantile quantile.scalar reflection_pad1d
        reflection_pad2d replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center svd
        trace triangular_solve triplet_margin_loss view_as_complex""",
    Policy.WIDEST: "cat index_copy index_copy.dimname stack",
}

_CUDA = {
    Policy.LOWER: """
        _convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm
        addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
        convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul
        mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention""",
    Policy.FLOAT32: """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist erfinv exp expm1
        frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_sqrth log log10 log1p log2
        logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d
        nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm
        rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d""",
    Policy.FLOAT32_RESULT: """
        cumprod cumprod.dimname cumsum cumsum.dimname linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm
        log_softmax.Dimname log_softmax.int norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim prod prod.dim_Dimname prod.dim_int
        softmax.Dimname softmax.int sum sum.dim_DimnameList sum.dim_IntList""",
    Policy.WIDEST: "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
    Policy.CUDNN: "gru.data gru.input lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_tanh.data rnn_tanh.input",
    Policy.REFUSED: "binary_cross_entropy",
}

DISPATCH_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def _of_this_release(device: str, lists: Mapping[Policy, str]) -> dict[str, Policy]:
    held = set(torch._C._dispatch_get_registrations_for_dispatch_key(DISPATCH_KEYS[device]))
    named = {f"aten::{name}": policy for policy, names in lists.items() for name in names.split()}
    return {name: policy for name, policy in named.items() if name in held or policy is Policy.CUDNN}


POLICIES: dict[str, dict[str, Policy]] = {device: _of_this_release(device, lists) for device, lists in (("cpu", _CPU), ("cuda", _CUDA))}
"""Device type -> operator with overload (`aten::softmax.int`) -> policy."""

INSIDE: dict[str, dict[str, Policy]] = {
    "cpu": {"aten::_trilinear": Policy.LOWER, "aten::linalg_pinv.atol_rtol_tensor": Policy.LOWER},
    "cuda": {
        "aten::ldexp.Tensor": Policy.FLOAT32,
        "aten::linalg_pinv.atol_rtol_tensor": Policy.LOWER,
        "aten::mvlgamma": Policy.FLOAT32_RESULT,
    },
}
"""Operators off the lists whose kernels call operators on them: torch casts there, below autograd, where a graph has no place for it."""

DTYPES = {"cpu": (torch.bfloat16, torch.float16), "cuda": None}
"""The dtypes for which torch enables a region; with any other it warns and leaves autocast off. None: all."""


def eligible(dtype: torch.dtype) -> bool:
    """Whether autocast casts operands of this dtype at all."""
    return dtype.is_floating_point and dtype != torch.float64


def operand_dtype(policy: Policy, region: Region, dtypes: Sequence[torch.dtype], names_dtype: bool) -> torch.dtype | None:
    """The dtype to which the eligible operands of one call are cast; None: not cast. Raises ValueError where torch refuses the call.

    `dtypes` are the operands' dtypes; `names_dtype`: the call has a dtype argument.
    """
    if policy is Policy.LOWER:
        return region.dtype
    if policy is Policy.FLOAT32:
        return torch.float32
    if policy is Policy.FLOAT32_RESULT:  # torch adds dtype=float32, which reads the one operand as float32
        return None if names_dtype else torch.float32
    if policy is Policy.CUDNN:
        if region.dtype != torch.float16:
            raise ValueError(f"cuDNN runs recurrent layers in float16 in a region of {region.dtype}")
        return torch.float16
    if policy is Policy.REFUSED:
        raise ValueError(f"torch refuses it under autocast({region.device!r}), because float16 overflows in it")
    other = [dtype for dtype in dtypes if dtype not in (torch.float32, region.dtype)]
    if other:
        raise ValueError(f"torch refuses to mix {other[0]} with {region.dtype} under autocast({region.device!r})")
    return torch.float32 if torch.float32 in dtypes else region.dtype


def inner_region(
    around: Sequence[Region], mesh_device: str | None, device: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None
) -> Region:
    """The state in `torch.autocast(device, dtype, enabled, cache)` within the regions `around`, outermost first.

    "cpu" stands for the mesh's device, or for that of the region around, because capture's fake tensors are CPU tensors.
    Raises ValueError for a device without lists.
    """
    if device == "cpu":
        device = mesh_device or (around[-1].device if around else device)
    if dtype is None:
        same = [region.dtype for region in around if region.device == device]
        dtype = same[-1] if same else torch.get_autocast_dtype(device)
    if cache is None:
        cache = around[-1].cache if around else torch.is_autocast_cache_enabled()
    if enabled and device not in POLICIES:
        raise ValueError(f"meshc has torch's lists for {' and '.join(POLICIES)}, not for {device}")
    allowed = DTYPES.get(device)
    return Region(device, dtype, enabled and (allowed is None or dtype in allowed), cache)
