"""What an operator costs: multiply-accumulates of matrix products and convolutions, FLOPs of everything else.

Matrix products and convolutions have exact formulas. The others are estimates by convention: one FLOP for each element
that a pointwise operator writes or a reduction reads, five for each element of a normalization or softmax, the window's
size for each element that a pooling writes. Biases that come with a matrix product count nothing, and neither do
operators on integers, nor those that only move data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Cost = Callable[..., float]  # cost(out, *the operator's arguments)


class OperatorRule(NamedTuple):
    """How an operator counts.

    Attributes:
        kind: `matmul` for what is counted in MACs, `other` for what is counted in FLOPs, `free` for what costs nothing,
            `composite` for what is counted as the operators it consists of, `unknown` for the rest.
        cost: Of one call, as a function of the result and the operator's arguments.
    """

    kind: Literal["matmul", "other", "free", "composite", "unknown"]
    cost: Cost | None = None


def find_rule(operator: Any, custom: Mapping[Any, Callable[..., float]]) -> OperatorRule:
    """Return the rule of an operator.

    Args:
        operator: An `OpOverload` or a higher-order operator.
        custom: Formulas by operator, for those that have none or a wrong one: as for
            `torch.utils.flop_counter.register_flop_formula`, they get the arguments with shapes in place of tensors
            and return FLOPs.
    """
    packet = getattr(operator, "overloadpacket", operator)
    for key in (operator, packet):
        if key in custom:
            return OperatorRule("matmul", _from_shapes(custom[key]))
    if not isinstance(operator, torch._ops.OpOverload):
        return (
            OperatorRule("matmul", _from_registry(flop_registry[packet]))
            if packet in flop_registry
            else OperatorRule("unknown")
        )
    name = operator.name().partition(".")[0]
    if name in _MATMULS:
        return OperatorRule("matmul", _MATMULS[name])
    if packet in flop_registry:
        return OperatorRule("matmul", _from_registry(flop_registry[packet]))
    base = name.removesuffix("_")
    if base in _ESTIMATES:
        return OperatorRule("other", _ESTIMATES[base])
    if operator.is_view or base in _FREE or operator.namespace in ("prim", "c10d", "_c10d_functional"):
        return OperatorRule("free")
    if torch.Tag.pointwise in operator.tags:
        return OperatorRule("other", _elements_written)
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return OperatorRule("composite")
    return OperatorRule("unknown")


def _from_registry(formula: Callable[..., Any]) -> Cost:
    return lambda out, /, *args, **kwargs: formula(*args, **kwargs, out_val=out) / 2


def _from_shapes(formula: Callable[..., float]) -> Cost:
    def cost(out: Any, /, *args: Any, **kwargs: Any) -> float:
        args, kwargs, shape = torch.utils._pytree.tree_map(
            lambda leaf: leaf.shape if isinstance(leaf, Tensor) else leaf, (args, kwargs, out)
        )
        return formula(*args, **kwargs, out_shape=shape) / 2

    return cost


# Matrix products and convolutions, in multiply-accumulates


def _matrix_product(left: Tensor, right: Tensor) -> int:
    elements = left._nnz() if left.layout != torch.strided else left.numel()
    return elements * (right.shape[-1] if right.ndim > 1 else 1)


def _mm(out: Any, /, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _matrix_product(left, right)


def _addmm(out: Any, /, added: Any, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _matrix_product(left, right)


def _linear(out: Any, /, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return x.numel() * weight.shape[0]


def _convolution(
    out: Any,
    /,
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *_: Any,
) -> int:
    return (x if transposed else out).numel() * weight[0].numel()


def _plain_convolution(out: Any, /, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return int(out.numel()) * weight[0].numel()


def _transposed_convolution(out: Any, /, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return x.numel() * weight[0].numel()


def _convolution_backward(out: Any, /, grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    transposed, wanted = rest[4], rest[7]
    return (x if transposed else grad).numel() * weight[0].numel() * (wanted[0] + wanted[1])  # type: ignore[no-any-return]


def _attention(out: Any, /, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    out: Any, /, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:  # the scores again, then the gradients of values, scores, queries and keys
    return query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _rnn_layer(out: Any, /, x: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    return x[..., 0].numel() * (input_weight.numel() + hidden_weight.numel())


def _rnn(out: Any, /, x: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    return x[..., 0].numel() * sum(weight.numel() for weight in weights if weight.ndim == 2)


def _trilinear(
    out: Any, /, first: Tensor, second: Tensor, third: Tensor, expand1: Any, expand2: Any, expand3: Any, *_: Any
) -> int:
    shapes = []
    for tensor, expanded in ((first, expand1), (second, expand2), (third, expand3)):
        sizes = iter(tensor.shape)
        shapes.append([1 if d in expanded else next(sizes) for d in range(tensor.ndim + len(expanded))])
    return math.prod(map(max, *shapes))


def _quantized_linear(out: Any, /, x: Tensor, packed: Any, *_: Any, **__: Any) -> int:
    return x.numel() * int(packed.unpack()[0].shape[0])


def _quantized_convolution(out: Tensor, /, x: Tensor, packed: Any, *_: Any, **__: Any) -> int:
    return out.numel() * int(packed.unpack()[0][0].numel())


def _twice(cost: Callable[..., int]) -> Cost:
    """Cost of a backward pass: the gradients of inputs and of weights, each as much as the forward pass."""
    return lambda out, /, *args, **kwargs: 2 * cost(out, *args, **kwargs)


_MATMULS: dict[str, Cost] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot"), _mm),
    **dict.fromkeys(("aten::_scaled_mm", "aten::_int_mm", "aten::_sparse_mm"), _mm),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv", "aten::_addmm_activation"), _addmm),
    **dict.fromkeys(("aten::addmm_", "aten::baddbmm_", "aten::addbmm_", "aten::addmv_"), _addmm),
    **dict.fromkeys(("aten::mkldnn_linear", "mkldnn::_linear_pointwise", "aten::_weight_int8pack_mm"), _linear),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"), _convolution),
    **dict.fromkeys(
        (
            "aten::_conv_depthwise2d",
            "aten::_slow_conv2d_forward",
            "aten::conv_depthwise3d",
            "aten::cudnn_convolution",
            "aten::cudnn_convolution_add_relu",
            "aten::cudnn_convolution_relu",
            "aten::miopen_convolution",
            "aten::miopen_depthwise_convolution",
            "aten::mkldnn_convolution",
            "aten::slow_conv3d_forward",
            "aten::slow_conv_dilated2d",
            "aten::slow_conv_dilated3d",
            "torchvision::deform_conv2d",
        ),
        _plain_convolution,
    ),
    **dict.fromkeys(
        (
            "aten::cudnn_convolution_transpose",
            "aten::miopen_convolution_transpose",
            "aten::slow_conv_transpose2d",
            "aten::slow_conv_transpose3d",
        ),
        _transposed_convolution,
    ),
    "aten::convolution_backward": _convolution_backward,
    "torchvision::_deform_conv2d_backward": lambda out, /, grad, *args: 2 * _plain_convolution(grad, *args),
    **{
        f"aten::_scaled_dot_product_{kind}": _attention
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    },
    **{
        f"aten::_scaled_dot_product_{kind}_backward": _attention_backward
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    },
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _rnn_layer,
    "aten::mkldnn_rnn_layer_backward": _twice(_rnn_layer),
    "aten::_cudnn_rnn": _rnn,
    "aten::_cudnn_rnn_backward": _twice(_rnn),
    "aten::miopen_rnn": _rnn,
    "aten::miopen_rnn_backward": _twice(_rnn),
    "aten::_trilinear": _trilinear,
    **{f"quantized::linear{kind}": _quantized_linear for kind in ("", "_relu", "_dynamic", "_relu_dynamic")},
    **{f"quantized::conv{d}d{kind}": _quantized_convolution for d in (1, 2, 3) for kind in ("", "_relu", "_dynamic")},
}


# Everything else, in FLOPs


def _first_tensor(out: Any) -> Any:
    return next((part for part in out if isinstance(part, Tensor)), None) if isinstance(out, tuple | list) else out


def _elements_written(out: Any, /, *args: Any, **kwargs: Any) -> int:
    parts = out if isinstance(out, list) else [_first_tensor(out)]  # a list is the result of a foreach operator
    return sum(p.numel() for p in parts if isinstance(p, Tensor) and (p.is_floating_point() or p.is_complex()))


def _read(out: Any, /, x: Tensor, *args: Any, **kwargs: Any) -> int:
    return x.numel() if x.is_floating_point() or x.is_complex() else 0


def _per_element(factor: int, cost: Cost) -> Cost:
    return lambda out, /, *args, **kwargs: factor * cost(out, *args, **kwargs)


def _window(dimensions: int) -> Cost:
    def cost(out: Any, /, x: Tensor, size: Any, *args: Any, **kwargs: Any) -> int:
        window = math.prod(size) if len(size) == dimensions else size[0] ** dimensions
        return _elements_written(out) * int(window)

    return cost


def _fused_cell(out: Any, /, gates: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * gates.numel()  # of an LSTM or GRU, after the matrix products: about two for each gate


def _distances(out: Any, /, left: Tensor, *args: Any, **kwargs: Any) -> int:
    return 3 * _elements_written(out) * left.shape[-1]


def _embedding_bag(out: Any, /, table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> int:
    return indices.numel() * table.shape[-1]


def _fft(factor: float) -> Cost:
    def cost(out: Any, /, x: Tensor, dims: Any, *args: Any, **kwargs: Any) -> float:
        size = max(_elements_written(out), _read(out, x))
        length = math.prod(max(x.shape[d], _first_tensor(out).shape[d]) for d in dims)
        return round(factor * size * math.log2(max(length, 1)))

    return cost


_ESTIMATES: dict[str, Cost] = {
    f"aten::{name}": cost
    for names, cost in (
        (
            "native_dropout _fused_dropout bernoulli dropout prelu _prelu_kernel glu rrelu_with_noise logit",
            _elements_written,
        ),
        (
            "addcmul addcdiv lerp cumsum cumprod logcumsumexp celu elu gelu mish hardswish hardsigmoid",
            _elements_written,
        ),
        ("hardtanh leaky_relu log_sigmoid_forward softplus softshrink _foreach_add _foreach_mul", _elements_written),
        ("mean sum nansum prod amax amin aminmax max min argmax argmin all any norm linalg_vector_norm", _read),
        ("nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss", _read),
        ("binary_cross_entropy binary_cross_entropy_with_logits median mode kthvalue adaptive_max_pool2d", _read),
        ("adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d trace", _read),
        ("var var_mean std std_mean logsumexp _weight_norm_interface", _per_element(3, _read)),
        (
            "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training",
            _per_element(5, _elements_written),
        ),
        (
            "_native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_no_update",
            _per_element(5, _elements_written),
        ),
        (
            "_batch_norm_impl_index cudnn_batch_norm miopen_batch_norm batch_norm_elemt",
            _per_element(5, _elements_written),
        ),
        (
            "native_layer_norm native_group_norm _fused_rms_norm rms_norm _softmax _log_softmax",
            _per_element(5, _elements_written),
        ),
        ("_safe_softmax _masked_softmax", _per_element(5, _elements_written)),
        ("avg_pool1d max_pool1d max_pool1d_with_indices", _window(1)),
        ("avg_pool2d max_pool2d max_pool2d_with_indices mkldnn_max_pool2d", _window(2)),
        ("avg_pool3d max_pool3d max_pool3d_with_indices mkldnn_max_pool3d", _window(3)),
        ("upsample_linear1d", _per_element(3, _elements_written)),
        ("upsample_bilinear2d _upsample_bilinear2d_aa grid_sampler_2d", _per_element(7, _elements_written)),
        ("upsample_trilinear3d grid_sampler_3d", _per_element(15, _elements_written)),
        ("upsample_bicubic2d _upsample_bicubic2d_aa", _per_element(31, _elements_written)),
        ("_thnn_fused_lstm_cell _thnn_fused_gru_cell", _fused_cell),
        ("_cdist_forward _pdist_forward _euclidean_dist", _distances),
        ("_fft_c2c", _fft(5.0)),
        ("_fft_r2c _fft_c2r", _fft(2.5)),
        ("_embedding_bag _embedding_bag_forward_only", _embedding_bag),
    )
    for name in names.split()
}

_FREE_NAMES = """
    affine_grid_generator alias arange argwhere as_strided as_strided_copy _assert_async _assert_scalar block_diag
    bucketize _cat cat channel_shuffle clone col2im complex constant_pad_nd copy count_nonzero detach diag_embed
    dropout_state _efficientzerotensor embedding empty empty_like empty_permuted empty_strided equal expand_copy
    exponential eye fill flip full full_like gather im2col index index_copy index_fill index_put _index_put_impl
    index_select is_nonzero is_same_size isin lift lift_fresh lift_fresh_copy linspace _local_scalar_dense logspace
    masked_fill masked_scatter masked_select max_unpool2d max_unpool3d native_channel_shuffle
    _nested_tensor_from_mask new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_static normal
    ones ones_like _pack_padded_sequence permute_copy pixel_shuffle pixel_unshuffle rand rand_like randint
    randint_like randn randn_like random randperm range reflection_pad1d reflection_pad2d reflection_pad3d repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d _reshape_alias _reshape_copy resize
    resize_as roll rot90 scalar_tensor scatter searchsorted select_scatter set slice_scatter sort split_copy
    split_with_sizes_copy squeeze stack swapaxes swapdims sym_numel sym_size sym_storage_offset sym_stride t
    _to_copy topk transpose tril tril_indices triu triu_indices unfold uniform _unique2 unique_dim _unsafe_index
    unsafe_split unsafe_split_with_sizes _unsafe_view unsqueeze upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d where zero
    zeros zeros_like
"""
_FREE = {f"aten::{name}" for name in _FREE_NAMES.split()}
