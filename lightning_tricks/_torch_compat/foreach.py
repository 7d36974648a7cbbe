"""Operators that take many tensors at once. They run at each step, so they are looked up, guarded, only once."""

from __future__ import annotations

from inspect import unwrap

import torch

from lightning_tricks._torch_compat.guards import needs_private

with needs_private("GradientClipping or ExponentialMovingAverage"):
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    # The operators take tensors of one device and one dtype only.
    group_by_device_and_dtype = unwrap(_group_tensors_by_device_and_dtype)  # of `no_grad`: it computes nothing
    foreach_norm = torch._foreach_norm
    foreach_mul_ = torch._foreach_mul_
    foreach_clamp_min_ = torch._foreach_clamp_min_
    foreach_clamp_max_ = torch._foreach_clamp_max_
    foreach_add_ = torch._foreach_add_
    foreach_lerp_ = torch._foreach_lerp_
    foreach_sub = torch._foreach_sub
