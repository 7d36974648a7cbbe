"""A probe for each private symbol of tensors, operators, gradients and optimizers; with the oldest and newest torch."""

from functools import partial
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.optim import SGD
from torch.optim import lr_scheduler as lrs
from torch.utils.checkpoint import checkpoint

from lightning_tricks._torch_compat import foreach, operators, optimizers, tensors
from lightning_tricks._torch_compat.gradients import observing_clipping, observing_cut_checkpoints

ATEN = torch.ops.aten


def test_changes_in_place_are_counted():
    tensor = torch.zeros(2)
    before = tensors.tensor_version(tensor)
    tensor += 1
    assert tensors.tensor_version(tensor) == before + 1


def test_negative_views():
    tensor = torch.ones(2)
    assert tensors.negative_view(tensor).tolist() == [-1, -1]
    assert tensors.negative_view(tensor).data_ptr() == tensor.data_ptr()


def test_nested_containers():
    assert tensors.tree_map(str, {"a": (1, [2])}) == {"a": ("1", ["2"])}
    assert tensors.tree_map_only(int, str, {"a": (1, [2.5])}) == {"a": ("1", [2.5])}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, for jvp
def test_transforms_can_be_left():
    seen = []

    def look(x):
        with tensors.outside_transforms({"x": x}) as plain:
            seen.append(plain["x"] + 1)
        return x.sum()

    rows = torch.arange(6.0).view(2, 3)
    torch.func.vmap(torch.func.grad(look))(rows)
    torch.func.jvp(look, (rows,), (rows,))
    look(rows)
    assert all(torch.equal(each, rows + 1) for each in seen)
    assert len(seen) == 3


def test_many_tensors_at_once():
    values = [torch.tensor([3.0, 4.0]), torch.tensor([-2.0])]
    assert torch.stack(foreach.foreach_norm(values, 2.0, dtype=torch.float32)).tolist() == [5, 2]
    foreach.foreach_mul_(values, torch.tensor(2.0))
    foreach.foreach_clamp_min_(values, -1)
    foreach.foreach_clamp_max_(values, 7)
    assert [value.tolist() for value in values] == [[6, 7], [-1]]


def test_tensors_by_device_and_dtype():
    values = [torch.ones(1), torch.ones(1, dtype=torch.float64), torch.zeros(2)]
    grouped = foreach.group_by_device_and_dtype([values], with_indices=True)
    found = {dtype: ([len(one) for one in part], list(places)) for (_, dtype), ((part,), places) in grouped.items()}
    assert found == {torch.float32: ([1, 2], [0, 2]), torch.float64: ([1], [1])}


def test_kinds_of_operators():
    assert isinstance(ATEN.add.Tensor, operators.OpOverload)
    assert isinstance(ATEN.add, operators.OpOverloadPacket)
    assert isinstance(torch.ops.higher_order.cond, operators.HigherOrderOperator)
    assert operators.is_composite(ATEN.linear.default)
    assert not operators.is_composite(ATEN.mm.default)


def test_a_mode_sees_operators_and_can_be_left():
    class Names(operators.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names, tensor = [], torch.ones(1)
    with Names():
        torch.neg(tensor)
        with operators.without_dispatch_modes():
            torch.abs(tensor)
    assert names == ["aten::neg"]


def test_tensors_without_data():
    mode = operators.FakeTensorMode(allow_non_fake_inputs=True)
    fake = operators.FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cpu"))
    assert not isinstance(fake, nn.Parameter)
    operators.mark_as_parameter(fake)
    assert isinstance(fake, nn.Parameter)
    assert fake.device.type == "cpu"


def test_a_fused_optimizer_unscales_by_itself():
    weight = nn.Parameter(torch.ones(1))
    assert optimizers.takes_scale(torch.optim.AdamW([weight], fused=True))
    assert optimizers.is_fused(torch.optim.AdamW([weight], fused=True))
    optimizer = torch.optim.AdamW([weight])
    assert not optimizers.takes_scale(optimizer)
    assert not optimizers.is_fused(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    assert optimizers.scale_of(scaler).item() == 4
    assert not optimizers.is_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert optimizers.is_unscaled(scaler, optimizer)
    assert weight.grad.item() == 1


def test_inner_schedulers_and_last_rates():
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    parts = [lrs.ConstantLR(optimizer), lrs.StepLR(optimizer, 1)]
    assert optimizers.inner_schedulers(lrs.SequentialLR(optimizer, parts, [2])) == parts
    assert optimizers.inner_schedulers(lrs.ChainedScheduler(parts)) == parts
    assert optimizers.inner_schedulers(parts[0]) == []
    for scheduler in (parts[0], lrs.ReduceLROnPlateau(optimizer)):
        optimizers.set_last_lr(scheduler, [0.5])
        assert scheduler.get_last_lr() == [0.5]


def test_calls_that_clip_are_seen_and_clip_as_before():
    weight, seen = torch.ones(2, requires_grad=True), []
    with observing_clipping(lambda parameters, bound: seen.append((parameters, bound))):
        for clip in (clip_grad_norm_, clip_grad_value_, lambda p, n: clip_grads_with_norm_(p, n, torch.tensor(4.0))):
            weight.grad = torch.tensor([3.0, 4.0])
            clip(iter([weight]), 2)
            assert weight.grad.max() <= 2
    clip_grad_norm_(weight, 1.0)
    assert [(parameter is weight, bound) for (parameter,), bound in seen] == [(True, 2.0)] * 3


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_that_give_no_gradient_are_seen():
    layer, seen = torch.nn.Linear(1, 1), []
    for again in (True, False):
        with observing_cut_checkpoints(partial(seen.append, again)):
            for needs_gradient in (True, False):
                checkpoint(layer, torch.ones(1, 1, requires_grad=needs_gradient), use_reentrant=again)
    assert seen == [True]


BARE = SimpleNamespace()
CALLS = {
    "_version": lambda: tensors.tensor_version(BARE),
    "_per_optimizer_states": lambda: optimizers.is_unscaled(BARE, BARE),
    "_scale": lambda: optimizers.scale_of(BARE),
    "_schema": lambda: operators.argument_names(BARE),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_renamed_symbol_is_named(name):
    with pytest.raises(RuntimeError, match=rf"^[\w, ]+ does not work with torch .*{name}.*2\.6 to"):
        CALLS[name]()


def test_a_renamed_function_is_named(monkeypatch):
    monkeypatch.delattr("torch._neg_view")
    with pytest.raises(RuntimeError, match=r"^CheckpointRemapping does not work with torch .*_neg_view"):
        tensors.negative_view(torch.ones(1))
    monkeypatch.delattr("torch._C._dispatch_has_kernel_for_dispatch_key")
    with pytest.raises(RuntimeError, match=r"ensemble does not work with torch .*_dispatch_has_kernel"):
        operators.is_composite(ATEN.mm.default)


IMPORTED = {
    "torch._foreach_norm": foreach,
    "torch._foreach_mul_": foreach,
    "torch._foreach_clamp_min_": foreach,
    "torch._foreach_clamp_max_": foreach,
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype": foreach,
    "torch._C._functorch.get_unwrapped": tensors,
    "torch._C._functorch.is_functorch_wrapped_tensor": tensors,
    "torch._C._functorch.peek_interpreter_stack": tensors,
    "torch.utils._pytree.tree_map": tensors,
    "torch.utils._pytree.tree_map_only": tensors,
    "torch._ops.HigherOrderOperator": operators,
    "torch._ops.OpOverload": operators,
    "torch._ops.OpOverloadPacket": operators,
    "torch.utils._python_dispatch.TorchDispatchMode": operators,
    "torch.utils._python_dispatch._disable_current_modes": operators,
    "torch._subclasses.fake_tensor.FakeTensor": operators,
    "torch._subclasses.fake_tensor.FakeTensorMode": operators,
}


@pytest.mark.parametrize("symbol", IMPORTED)
def test_a_renamed_symbol_is_named_on_import(symbol, monkeypatch):
    spec = find_spec(IMPORTED[symbol].__name__)
    monkeypatch.delattr(symbol)
    with pytest.raises(RuntimeError, match=rf"^[\w, ]+ does not work with torch .*{symbol.rpartition('.')[2]}"):
        spec.loader.exec_module(module_from_spec(spec))
