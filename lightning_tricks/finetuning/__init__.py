"""Fine-tune a pretrained model: freeze and unfreeze on a schedule, LoRA, adapters, prefixes, small checkpoints.

When to use it: your model has pretrained weights, and you want to train it part by part, or train a few new
parameters beside the frozen weights.

Unlike with Lightning's `BaseFinetuning`, a resumed run has the frozen parameters and learning rates of an uninterrupted
one, frozen normalization keeps its statistics, and ranks stay equal. Unlike peft's, LoRA in this package is part of the
weight itself, so no fused layer and no function that reads the weight can ignore it; the base weights keep their names
and bits.

Caveats: injected parameters stay in the module after the fit (`merge` folds LoRA into the weights). Each parameter
that a schedule names must be in an optimizer from the start.

Sources: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification" (2018); Hu et al., "LoRA:
Low-Rank Adaptation of Large Language Models" (2021); Houlsby et al., "Parameter-Efficient Transfer Learning for NLP"
(2019); Li and Liang, "Prefix-Tuning" (2021); the peft library.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks._shared.modules import parameters_without_gradient as parameters_without_gradient
    from lightning_tricks.finetuning.adaptation import Adapters as Adapters
    from lightning_tricks.finetuning.adaptation import LoRA as LoRA
    from lightning_tricks.finetuning.adaptation import PrefixTuning as PrefixTuning
    from lightning_tricks.finetuning.core.adapter_loading import load_adapter as load_adapter
    from lightning_tricks.finetuning.core.adapter_saving import save_adapter as save_adapter
    from lightning_tricks.finetuning.core.bottleneck_adapters import AdapterSettings as AdapterSettings
    from lightning_tricks.finetuning.core.bottleneck_adapters import add_adapters as add_adapters
    from lightning_tricks.finetuning.core.freezing import freeze_ as freeze_
    from lightning_tricks.finetuning.core.freezing import trainable_summary as trainable_summary
    from lightning_tricks.finetuning.core.freezing import unfreeze_ as unfreeze_
    from lightning_tricks.finetuning.core.injection import InjectionReport as InjectionReport
    from lightning_tricks.finetuning.core.lora_injection import add_lora as add_lora
    from lightning_tricks.finetuning.core.lora_injection import merge as merge
    from lightning_tricks.finetuning.core.lora_layers import LoRASettings as LoRASettings
    from lightning_tricks.finetuning.core.prefixes import PrefixSettings as PrefixSettings
    from lightning_tricks.finetuning.core.prefixes import add_prefixes as add_prefixes
    from lightning_tricks.finetuning.core.trainable_weights import BaseMismatchError as BaseMismatchError
    from lightning_tricks.finetuning.core.trainable_weights import load_trainable as load_trainable
    from lightning_tricks.finetuning.gradual_unfreezing import GradualUnfreezing as GradualUnfreezing
    from lightning_tricks.finetuning.trainable_checkpoint import TrainableCheckpoint as TrainableCheckpoint
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
