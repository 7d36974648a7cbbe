"""LoRA and TrainableCheckpoint together: small files that resume exactly, alone and by AutoResume."""

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_tricks import GradualUnfreezing, LoRA, TrainableCheckpoint
from lightning_tricks.finetuning import BaseMismatchError, LoRASettings, add_lora, load_trainable, merge
from lightning_tricks.seeding import isolated_rng
from tests.small import QUIET, EvaluatedNet, loader


def _module(seed=0):
    with isolated_rng(seed=seed):
        return EvaluatedNet(hidden=64, dropout=0.2)


def _fit(module, *callbacks, ckpt_path=None, seed=1, **options):
    torch.manual_seed(seed)
    trainer = Trainer(callbacks=[LoRA(2), TrainableCheckpoint(), *callbacks], **{**QUIET, "max_epochs": 3, **options})
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return trainer


def test_evaluation_and_merging_from_a_small_file(tmp_path):
    module = _module()
    trainer = _fit(module)
    wanted = trainer.test(module, loader(), verbose=False)
    trainer.save_checkpoint(tmp_path / "small.ckpt")

    other = _module()
    tester = Trainer(callbacks=[LoRA(2), TrainableCheckpoint()], **QUIET)
    assert tester.test(other, loader(), ckpt_path=tmp_path / "small.ckpt", verbose=False) == wanted

    by_hand = _module()
    add_lora(by_hand, LoRASettings(rank=2))
    load_trainable(by_hand, tmp_path / "small.ckpt")
    merge(by_hand)
    got = Trainer(**QUIET).test(by_hand, loader(), verbose=False)
    assert got[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("rank", [2, 3])
def test_another_base_and_another_rank_are_refused(tmp_path, rank):
    trainer = _fit(_module(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    tester = Trainer(callbacks=[LoRA(rank), TrainableCheckpoint()], **QUIET)
    words = r"Of 8 tensors .* 4 are of other values" if rank == 2 else r"of other values \(net\.0\.lora_weight\.scale"
    with pytest.raises(BaseMismatchError, match=words):
        tester.test(_module(seed=9 if rank == 2 else 0), loader(), ckpt_path=tmp_path / "small.ckpt", verbose=False)


def test_what_a_schedule_froze_is_left_out_after_the_fit_as_well(tmp_path):
    torch.manual_seed(0)
    module = _module()
    callbacks = [GradualUnfreezing({0: "net.4.*"}), TrainableCheckpoint()]
    trainer = Trainer(callbacks=callbacks, **{**QUIET, "max_epochs": 2})
    trainer.fit(module, loader(), loader())
    assert all(parameter.requires_grad for parameter in module.parameters()), "the flags are the user's again"
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    saved = torch.load(tmp_path / "small.ckpt", weights_only=True)["state_dict"]
    assert {name for name, value in saved.items() if value.numel()} == {"net.4.weight", "net.4.bias"}


def test_a_class_without_lora_is_told_so(tmp_path):
    _fit(_module(), max_epochs=1).save_checkpoint(tmp_path / "small.ckpt")
    words = r"trained with LoRA, which the model does not have: add it before .*LoRA\("
    with pytest.raises(BaseMismatchError, match=words):
        load_trainable(_module(), tmp_path / "small.ckpt")
