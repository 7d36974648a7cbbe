"""What other tricks see of an adapted model."""

import pytest
from torch import nn

from lightning_tricks import OptimizerSpec, count_flops, load_weights, replace_head
from lightning_tricks.checkpoint_remapping import CheckpointError
from lightning_tricks.finetuning import LoRASettings, add_lora, merge
from lightning_tricks.lr_schedules import build_optimizer
from lightning_tricks.model_report import summarize_model
from tests.finetuning.models import IMAGES, disturb, timm_vit


def test_a_head_of_an_adapted_model_is_replaced():
    model = timm_vit()
    add_lora(model, LoRASettings(rank=2, target_modules="*", exclude="patch_embed", modules_to_save=()))
    new = replace_head(model, 7)
    assert type(new) is nn.Linear
    assert model(IMAGES).shape == (2, 7)


def test_an_adapted_file_says_what_its_model_needs():
    model = timm_vit()
    add_lora(model, LoRASettings(rank=2))
    with pytest.raises(CheckpointError, match=r"has LoRA weights: call add_lora\(model\) first"):
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
