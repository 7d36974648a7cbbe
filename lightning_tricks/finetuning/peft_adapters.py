"""The callback `PeftAdapters`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.injection import InjectionReport
from lightning_tricks.finetuning.core.peft_injection import (
    adapted_names,
    inject_peft,
    peft_config,
    peft_report,
)
from lightning_tricks.finetuning.reach_check import ReachCheckingCallback


class PeftAdapters(ReachCheckingCallback):
    """Freeze the module, and train adapters of the peft library in it: IA3, OFT, BOFT, LoHa, LoKr, DoRA and others.

    For low-rank adapters `LoRA` is the better choice: it changes weights, which nothing can ignore. Those of peft are
    modules in the place of layers. That each of them is called is checked in the first batch of training and of
    evaluation; in evaluation mode `nn.TransformerEncoderLayer` does not, and neither does torchvision's Swin. A
    checkpoint has peft's names (`layer.base_layer.weight`), and is loaded into a module with this callback.

    Args:
        config: A `peft.PeftConfig`, or a dict of its fields and `peft_type`, such as
            `{"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []}`. Every entry of its lists
            has to match a module; `modules_to_save` are trained whole.
        submodule: The part of the module that gets the adapters, such as `"model"`; None for all of it. Outside of it
            parameters are trained as they were.

    Needs the extra `finetune`. Initial values are drawn by a generator of their own, seeded as torch was. Under
    `ModelParallelStrategy` the layers must be there before `configure_model` shards them. Refused are methods that need
    more than a module: prompts (`PrefixTuning` is one for any attention), AdaLoRA, and those with values that layers
    share, such as VeRA; LoRA of `nn.MultiheadAttention`; layers that are used in two places; compiled modules.

    Attributes:
        report: The `InjectionReport` of the last run, None before.

    Raises:
        ModuleNotFoundError: If peft is missing.
        TypeError: If the config is no configuration of peft, or has a field that its method has not.
        ValueError: If the method is refused.
        MisconfigurationException: In a run, if an entry matches nothing, a rank exceeds a layer, the module has other
            adapters or is compiled, or an adapter is not called.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> config = {"peft_type": "IA3", "target_modules": ["fc1"], "feedforward_modules": ["fc1"]}
        >>> trainer = Trainer(callbacks=[PeftAdapters(config)], accelerator="cpu", logger=False)
    """

    training_arguments = ("config", "submodule")

    def __init__(self, config: Any, submodule: str | None = None) -> None:
        super().__init__()
        if submodule is not None and (not isinstance(submodule, str) or not submodule):
            raise TypeError(f"submodule must be the name of a part of the module or None, got {submodule!r}.")
        peft_config(config)
        self.config = config
        self.submodule = submodule

    def adapt(self, module: LightningModule) -> InjectionReport:
        """Add the adapters, unless the module has them."""
        part = self._part(module)
        return peft_report(part, self.config) or inject_peft(part, self.config)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what another callback has added since: each freezes all but its own."""
        super().on_fit_start(trainer, pl_module)
        others = [name for name, _ in added_modules(self._part(pl_module))]
        if others:
            raise MisconfigurationException(
                f"PeftAdapters: {list_names(others)} were added to the module after the adapters of peft, which are "
                "frozen by that. Use one of LoRA, Adapters, PrefixTuning and PeftAdapters."
            )

    def adapted(self, module: LightningModule) -> list[str]:
        """Return the names of the adapters."""
        front = f"{self.submodule}." if self.submodule else ""
        return [f"{front}{name}".rstrip(".") for name in adapted_names(self._part(module))]

    def _part(self, module: LightningModule) -> nn.Module:
        try:
            return module.get_submodule(self.submodule or "")
        except AttributeError as error:
            raise ValueError(f"submodule={self.submodule!r}: {error}.") from error
