"""Pretrained weights, a new head and fine-tuning as one story, and what other tricks see of an adapted model."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import (
    GradualUnfreezing,
    OptimizerSpec,
    TrainableCheckpoint,
    count_flops,
    load_weights,
    replace_head,
    save_weights,
    summarize_model,
)
from lightning_tricks.checkpoint_remapping import CheckpointError
from lightning_tricks.finetuning import LoRASettings, add_lora, merge
from lightning_tricks.lr_schedules import build_optimizer
from tests.finetuning.models import IMAGES, disturb, timm_resnet, timm_vit, torchvision_vit
from tests.small import QUIET, same


class _Classifier(LightningModule):
    def __init__(self, model, lr=0.01):
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)}


def _loader():
    return DataLoader(TensorDataset(IMAGES.repeat(2, 1, 1, 1), torch.arange(4)), batch_size=2)


def _trainer(*callbacks, **options):
    return Trainer(callbacks=list(callbacks), **{**QUIET, "max_epochs": 4, **options})


class _StopsAfter(Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 == self.epochs


@pytest.mark.parametrize("build", [timm_vit, timm_resnet, torchvision_vit])
def test_a_new_head_first_then_the_last_block(build, tmp_path):
    """The weights of a file, a head for other classes, layers released in turn, small files, resumed exactly."""
    torch.manual_seed(0)
    save_weights(build(), tmp_path / "pretrained.safetensors")
    last = "*blocks.1.*" if build is timm_vit else "*layer4.*" if build is timm_resnet else "*layers.encoder_layer_1.*"
    head = "*head*" if build is timm_vit else "*fc.*" if build is timm_resnet else "*heads.*"

    def module():
        torch.manual_seed(1)
        model = build()
        load_weights(model, tmp_path / "pretrained.safetensors")
        replace_head(model, 4)
        return _Classifier(model)

    def callbacks():
        return GradualUnfreezing({0: head, 2: last}, lr_multipliers={last: 0.1}), TrainableCheckpoint()

    whole, base = module(), module().state_dict()
    _trainer(*callbacks()).fit(whole, _loader())
    sizes = []
    for epochs in (1, 2, 3):
        first, resumed = module(), module()
        trainer = _trainer(*callbacks(), _StopsAfter(epochs))
        trainer.fit(first, _loader())
        trainer.save_checkpoint(tmp_path / "small.ckpt")
        saved = torch.load(tmp_path / "small.ckpt", weights_only=True)["state_dict"]
        sizes.append(sum(value.numel() for value in saved.values()))
        _trainer(*callbacks()).fit(resumed, _loader(), ckpt_path=tmp_path / "small.ckpt")
        assert same(dict(resumed.state_dict()), dict(whole.state_dict())), f"resumed after {epochs} epochs"
        if epochs == 1:
            trained = {name for name, value in first.state_dict().items() if not torch.equal(value, base[name])}
            assert trained == {
                name for name in base if any(word in name for word in ("head", "fc.")) and "mlp" not in name
            }
    assert sizes[0] == sizes[1] == sizes[2] < sum(value.numel() for value in base.values())


def test_a_head_of_an_adapted_model_is_replaced():
    model = timm_vit()
    add_lora(model, LoRASettings(rank=2, target_modules="*", exclude="patch_embed", modules_to_save=()))
    new = replace_head(model, 7)
    assert type(new) is nn.Linear
    assert model(IMAGES).shape == (2, 7)


def test_an_adapted_file_says_what_its_model_needs():
    model = timm_vit()
    add_lora(model, LoRASettings(rank=2))
    with pytest.raises(CheckpointError, match=r"changes of LoRA: call add_lora\(model\) first"):
        load_weights(timm_vit(), model.state_dict())


def test_what_other_tricks_see_of_an_adapted_model():
    plain = timm_vit()
    model = timm_vit()
    add_lora(model, LoRASettings(rank=2, target_modules=["blocks.*.qkv", "blocks.*.fc?"]))
    more = count_flops(model, IMAGES).flops - count_flops(plain, IMAGES).flops
    tokens = IMAGES.shape[0] * 5
    assert more == 2 * 2 * tokens * 2 * ((16 + 48) + (16 + 64) + (64 + 16))  # both blocks, multiply and add, rank 2
    summary = str(summarize_model(model, IMAGES))
    assert "lora_weight" in summary
    groups = build_optimizer(model, OptimizerSpec("AdamW", lr=0.1, groups={"*.lora_*": {"lr": 1.0}})).param_groups
    assert {group["lr"] for group in groups} == {0.1, 1.0}
    disturb(model)
    assert isinstance(merge(model).blocks[0].mlp.fc1, nn.Linear)
