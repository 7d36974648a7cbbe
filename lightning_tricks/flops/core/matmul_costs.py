"""Multiply-accumulates (MACs) of matrix products, convolutions, attention and recurrent layers, by exact formulas.

Each formula is called as `cost(out, *args, **kwargs)` with the result of an operator and its arguments. Biases that an
operator adds to a matrix product cost nothing. A product of complex numbers takes four of real ones; convolutions of
them run as real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._torch_compat.memory import parts_of_sparse

Cost = Callable[..., float]


def _matrix_product(left: Tensor, right: Tensor) -> int:
    if right.layout != torch.strided:  # where both are sparse, as many as if their elements were spread evenly
        products = _num_stored(left) * _num_stored(right) // max(left.shape[-1], 1)
    else:
        products = _num_stored(left) * (right.shape[-1] if right.ndim > 1 else 1)
    return products * (4 if left.is_complex() else 1)


def _num_stored(tensor: Tensor) -> int:
    """Return the number of elements of a dense tensor; of a sparse one that of the elements that it stores."""
    parts = parts_of_sparse(tensor)
    return parts[-1].numel() if parts else tensor.numel()


def _mm(out: Any, /, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _matrix_product(left, right)


def _addmm(out: Any, /, added: Any, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _matrix_product(left, right)


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


MATMUL_COSTS: dict[str, Cost] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot"), _mm),
    **dict.fromkeys(("aten::_scaled_mm", "aten::_int_mm", "aten::_sparse_mm"), _mm),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _grouped_mm),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv", "aten::_addmm_activation"), _addmm),
    "aten::_sparse_addmm": _addmm,
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
        _forward_convolution,
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
    "torchvision::_deform_conv2d_backward": lambda out, /, grad, *args: 2 * _forward_convolution(grad, *args),
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
