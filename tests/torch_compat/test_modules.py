"""A probe for each private symbol of modules; run with the oldest and the newest supported torch."""

import copy
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from lightning_tricks._torch_compat.modules import (
    COMPILED_CALL,
    REGISTRIES,
    communication_hooks,
    compiled_module,
    compiles_in_place,
    has_forward_pre_hook,
    is_batch_norm,
    loads_as_torch_does,
    module_internals,
    own_buffers,
    own_modules,
    own_parameters,
    pruned_parameters,
    refer_to_own_weights,
    remove_forward_pre_hook,
    set_state_dict_versions,
    state_dict_versions,
)


def test_what_a_module_registers():
    module = nn.BatchNorm1d(2)
    module.part = nn.Linear(1, 1)
    assert {"weight", "bias"} == own_parameters(module).keys()
    assert {"running_mean", "running_var", "num_batches_tracked"} == own_buffers(module).keys()
    assert own_modules(module) == {"part": module.part}
    assert {*REGISTRIES, "training"} <= module_internals()


def test_parameters_that_are_pruned():
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: None)
    assert list(pruned_parameters(module)) == []
    prune.l1_unstructured(module, "weight", amount=1)
    assert list(pruned_parameters(module)) == ["weight"]


def test_compiled_modules():
    module = nn.Linear(1, 1)
    assert compiled_module(torch.compile(module)) is module
    assert compiled_module(nn.Sequential(module)) is None
    assert not compiles_in_place(module)
    module.compile()
    assert compiles_in_place(module)
    assert COMPILED_CALL in vars(module)


def test_a_recurrent_layer_refers_to_its_own_weights():
    original = nn.LSTM(2, 3)
    part = copy.copy(original)
    part._flat_weights = [torch.zeros_like(weight) for weight in original._flat_weights]
    refer_to_own_weights(part)
    assert all(ref() is weight for ref, weight in zip(part._flat_weight_refs, part._flat_weights, strict=True))


def test_batch_normalizations():
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.InstanceNorm1d)
    assert [is_batch_norm(kind(2)) for kind in kinds] == [True, True, True, True, False, False]


def test_a_state_dict_has_versions_by_which_modules_convert_it():
    """A batch normalization of version 1 counted no batches."""
    module = nn.BatchNorm1d(2)
    saved = module.state_dict()
    assert state_dict_versions(saved) == {"": {"version": 2}}
    assert state_dict_versions({}) is None
    older = OrderedDict((name, value) for name, value in saved.items() if name != "num_batches_tracked")
    set_state_dict_versions(older, {"": {"version": 1}})
    module.load_state_dict(older)
    set_state_dict_versions(older, {"": {"version": 2}})
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        module.load_state_dict(older)


def test_what_others_change_in_loading_is_seen():
    class Child(nn.Linear):
        def _load_from_state_dict(self, *args):
            super()._load_from_state_dict(*args)

    assert loads_as_torch_does(nn.Sequential(nn.MultiheadAttention(4, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2)))
    assert not loads_as_torch_does(nn.Sequential(Child(2, 2)))
    for register in ("load_state_dict_pre_hook", "load_state_dict_post_hook", "state_dict_post_hook"):
        module = nn.Linear(2, 2)
        getattr(module, f"register_{register}")(lambda *_: None)
        assert not loads_as_torch_does(module), register
    module.state_dict = dict
    assert not loads_as_torch_does(module)


def test_communication_hooks():
    assert communication_hooks(nn.Linear(1, 1)) == []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        model.register_comm_hook(None, allreduce_hook)
        assert communication_hooks(model) == [(allreduce_hook, None)]
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"AutoResume does not work with torch .*_comm_hooks"):
        communication_hooks(DistributedDataParallel.__new__(DistributedDataParallel))


CALLS = {
    "_parameters": own_parameters,
    "_buffers": own_buffers,
    "_modules": own_modules,
    "_forward_pre_hooks": lambda bare: list(pruned_parameters(bare)),
    "_compiled_call_impl": compiles_in_place,
    "_flat_weights": refer_to_own_weights,
    "_load_state_dict_pre_hooks": lambda bare: loads_as_torch_does(SimpleNamespace(modules=lambda: [bare])),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_renamed_symbol_is_named_and_no_attribute_is_added(name):
    bare = SimpleNamespace()
    with pytest.raises(RuntimeError, match=rf"^\w+ (or \w+ )?does not work with torch .*{name}.*2\.6 to"):
        CALLS[name](bare)
    assert vars(bare) == {}


def test_a_renamed_class_is_named(monkeypatch):
    monkeypatch.delattr("torch.nn.modules.batchnorm._BatchNorm")
    with pytest.raises(RuntimeError, match=r"ModelReport does not work with torch .*_BatchNorm"):
        is_batch_norm(nn.Linear(1, 1))


def test_hooks_before_forward():
    calls = []

    def hook(module, inputs):
        calls.append(module)

    module = nn.Linear(1, 1)
    assert not has_forward_pre_hook(module, hook)
    module.register_forward_pre_hook(hook)
    copied = copy.deepcopy(module)
    assert has_forward_pre_hook(copied, hook)
    assert remove_forward_pre_hook(copied, hook)
    assert not remove_forward_pre_hook(copied, hook)
    copied(torch.ones(1))
    module(torch.ones(1))
    assert calls == [module]
