"""What an operator costs: exact multiply-accumulates (MACs), or an estimate of other FLOPs.

Each formula is called as `cost(out, *args, **kwargs)` with the result of an operator and its arguments.

MACs are those of matrix products, convolutions, attention and recurrent layers. Biases that an operator adds to a
matrix product cost nothing. A product of complex numbers takes four of real ones; convolutions of them run as real
ones.

The estimates for all other operators are conventions: one FLOP for each element that a pointwise operator writes or a
reduction reads, five for each element of a normalization or softmax, and the size of the window for each element that a
pooling writes. Operators on integers, and those that only move data, cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._torch_compat.memory import parts_of_sparse

Cost = Callable[..., float]


def _mm(out: Any, /, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    if right.layout != torch.strided:  # where both are sparse, as many as if their elements were spread evenly
        products = _num_stored(left) * _num_stored(right) // max(left.shape[-1], 1)
    else:
        products = _num_stored(left) * (right.shape[-1] if right.ndim > 1 else 1)
    return products * (4 if left.is_complex() else 1)


def _num_stored(tensor: Tensor) -> int:
    """Return the number of elements of a dense tensor; of a sparse one only those that it stores."""
    parts = parts_of_sparse(tensor)
    return parts[-1].numel() if parts else tensor.numel()


def _addmm(out: Any, /, added: Any, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _mm(out, left, right)


def _grouped_mm(out: Any, /, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    # one product for each expert: the rows, the columns or the sums of a matrix are split among the experts
    if left.ndim == 3 and right.ndim == 2:
        return right.numel() * left.shape[-2]
    return left.numel() * right.shape[-1]


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


def _forward_convolution(out: Any, /, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
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
) -> int:
    # the scores are computed again, then the gradients of values, scores, queries and keys
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
    """Cost of a backward pass: the gradients of inputs and of weights cost as much as the forward pass each."""
    return lambda out, /, *args, **kwargs: 2 * cost(out, *args, **kwargs)


def _of_aten(*table: tuple[str, Cost]) -> dict[str, Cost]:
    """Return the costs of operators by name, from texts that list those which cost the same."""
    return {f"aten::{name}": cost for names, cost in table for name in names.split()}


_ATTENTIONS = (
    *("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"),
    "fused_attention_overrideable",
)
MATMUL_COSTS: dict[str, Cost] = {
    **_of_aten(
        ("mm bmm mv dot vdot _scaled_mm _int_mm _sparse_mm", _mm),
        ("_grouped_mm _scaled_grouped_mm", _grouped_mm),
        ("addmm baddbmm addbmm addmv _addmm_activation _sparse_addmm addmm_ baddbmm_ addbmm_ addmv_", _addmm),
        ("mkldnn_linear _weight_int8pack_mm", _linear),
        ("convolution _convolution convolution_overrideable", _convolution),
        ("_conv_depthwise2d conv_depthwise3d cudnn_convolution cudnn_convolution_add_relu", _forward_convolution),
        ("cudnn_convolution_relu miopen_convolution miopen_depthwise_convolution", _forward_convolution),
        ("mkldnn_convolution _slow_conv2d_forward slow_conv3d_forward", _forward_convolution),
        ("slow_conv_dilated2d slow_conv_dilated3d", _forward_convolution),
        ("cudnn_convolution_transpose miopen_convolution_transpose", _transposed_convolution),
        ("slow_conv_transpose2d slow_conv_transpose3d", _transposed_convolution),
        ("convolution_backward", _convolution_backward),
        ("mkldnn_rnn_layer", _rnn_layer),
        ("mkldnn_rnn_layer_backward", _twice(_rnn_layer)),
        ("_cudnn_rnn miopen_rnn", _rnn),
        ("_cudnn_rnn_backward miopen_rnn_backward", _twice(_rnn)),
        ("_trilinear", _trilinear),
    ),
    **{f"aten::_scaled_dot_product_{kind}": _attention for kind in _ATTENTIONS},
    **{f"aten::_scaled_dot_product_{kind}_backward": _attention_backward for kind in _ATTENTIONS},
    "mkldnn::_linear_pointwise": _linear,
    "torchvision::deform_conv2d": _forward_convolution,
    "torchvision::_deform_conv2d_backward": lambda out, /, grad, *args: 2 * _forward_convolution(grad, *args),
    **{f"quantized::linear{kind}": _quantized_linear for kind in ("", "_relu", "_dynamic", "_relu_dynamic")},
    **{f"quantized::conv{d}d{kind}": _quantized_convolution for d in (1, 2, 3) for kind in ("", "_relu", "_dynamic")},
}


# Estimates


def elements_written(out: Any, /, *args: Any, **kwargs: Any) -> int:
    """Return the number of floating-point and complex elements in the result of an operator."""
    tensors = out if isinstance(out, list) else [_first_tensor(out)]  # foreach operators return a list
    return sum(t.numel() for t in tensors if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()))


def _first_tensor(out: Any) -> Any:
    return next((part for part in out if isinstance(part, Tensor)), None) if isinstance(out, tuple | list) else out


def _elements_read(out: Any, /, x: Tensor, *args: Any, **kwargs: Any) -> int:
    return x.numel() if x.is_floating_point() or x.is_complex() else 0


def _reads(flops_per_element: int) -> Cost:
    return lambda out, /, *args, **kwargs: flops_per_element * _elements_read(out, *args, **kwargs)


def _writes(flops_per_element: int) -> Cost:
    return lambda out, /, *args, **kwargs: flops_per_element * elements_written(out)


def _pooling(dimensions: int) -> Cost:
    def cost(out: Any, /, x: Tensor, size: Any, *args: Any, **kwargs: Any) -> int:
        window = math.prod(size) if len(size) == dimensions else size[0] ** dimensions
        return elements_written(out) * int(window)

    return cost


def _fused_cell(out: Any, /, gates: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * gates.numel()  # of an LSTM or GRU after its matrix products: about two for each gate


def _distances(out: Any, /, left: Tensor, *args: Any, **kwargs: Any) -> int:
    return 3 * elements_written(out) * left.shape[-1]


def _embedding_bag(out: Any, /, table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> int:
    return indices.numel() * table.shape[-1]


def _fft(factor: float) -> Cost:
    """Return the cost `factor * n * log2(n)` for transforms of n elements."""

    def cost(out: Any, /, x: Tensor, dims: Any, *args: Any, **kwargs: Any) -> float:
        size = max(elements_written(out), _elements_read(out, x))
        length = math.prod(max(x.shape[d], _first_tensor(out).shape[d]) for d in dims)
        return round(factor * size * math.log2(max(length, 1)))

    return cost


ESTIMATED_COSTS = _of_aten(
    ("native_dropout _fused_dropout bernoulli dropout prelu _prelu_kernel glu rrelu_with_noise logit", _writes(1)),
    ("addcmul addcdiv lerp cumsum cumprod logcumsumexp celu elu gelu mish hardswish hardsigmoid", _writes(1)),
    ("hardtanh leaky_relu log_sigmoid_forward softplus softshrink _foreach_add _foreach_mul", _writes(1)),
    ("mean sum nansum prod amax amin aminmax max min argmax argmin all any norm linalg_vector_norm", _reads(1)),
    ("nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss", _reads(1)),
    ("binary_cross_entropy binary_cross_entropy_with_logits median mode kthvalue adaptive_max_pool2d", _reads(1)),
    ("adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d trace histc", _reads(1)),
    ("var var_mean std std_mean logsumexp _weight_norm_interface", _reads(3)),
    ("floor_divide", _writes(1)),
    ("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training", _writes(5)),
    ("_native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_no_update", _writes(5)),
    ("_batch_norm_impl_index cudnn_batch_norm miopen_batch_norm batch_norm_elemt", _writes(5)),
    ("native_layer_norm native_group_norm _fused_rms_norm rms_norm _softmax _log_softmax", _writes(5)),
    ("_safe_softmax _masked_softmax", _writes(5)),
    ("avg_pool1d max_pool1d max_pool1d_with_indices", _pooling(1)),
    ("avg_pool2d max_pool2d max_pool2d_with_indices mkldnn_max_pool2d", _pooling(2)),
    ("avg_pool3d max_pool3d max_pool3d_with_indices mkldnn_max_pool3d", _pooling(3)),
    ("upsample_linear1d", _writes(3)),
    ("upsample_bilinear2d _upsample_bilinear2d_aa grid_sampler_2d", _writes(7)),
    ("upsample_trilinear3d grid_sampler_3d", _writes(15)),
    ("upsample_bicubic2d _upsample_bicubic2d_aa", _writes(31)),
    ("_thnn_fused_lstm_cell _thnn_fused_gru_cell", _fused_cell),
    ("_cdist_forward _pdist_forward _euclidean_dist", _distances),
    ("_fft_c2c", _fft(5.0)),
    ("_fft_r2c _fft_c2r", _fft(2.5)),
    ("_embedding_bag _embedding_bag_forward_only", _embedding_bag),
)

_FREE_NAMES = """
    affine_grid_generator alias arange argwhere as_strided as_strided_copy _assert_async _assert_scalar block_diag
    bucketize _cat cat channel_shuffle clone col2im complex constant_pad_nd copy count_nonzero detach diag_embed
    dropout_state _efficientzerotensor embedding empty empty_like empty_permuted empty_strided equal expand_copy
    exponential eye fill flip full full_like gather _has_same_storage_numel im2col index index_copy index_fill
    index_put _index_put_impl index_select is_nonzero is_same_size isin lift lift_fresh lift_fresh_copy
    _linalg_check_errors linspace _local_scalar_dense logspace masked_fill masked_scatter masked_select max_unpool2d
    max_unpool3d native_channel_shuffle _nested_tensor_from_mask new_empty new_empty_strided new_full new_ones
    new_zeros nonzero nonzero_static normal ones ones_like _pack_padded_sequence permute_copy pixel_shuffle
    pixel_unshuffle rand rand_like randint randint_like randn randn_like random randperm range reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    _reshape_alias _reshape_copy resize resize_as roll rot90 scalar_tensor scatter searchsorted select_scatter set
    slice_scatter sort split_copy split_with_sizes_copy squeeze stack swapaxes swapdims sym_numel sym_size
    sym_storage_offset sym_stride t _to_copy topk transpose tril tril_indices triu triu_indices unfold uniform
    _unique2 unique_dim _unsafe_index unsafe_split unsafe_split_with_sizes _unsafe_view unsqueeze upsample_nearest1d
    upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d where zero zeros zeros_like
"""
FREE_OPERATORS = {f"aten::{name}" for name in _FREE_NAMES.split()}
