"""The callback `PrefixTuning`."""

from __future__ import annotations

from collections.abc import Collection

from lightning.pytorch import LightningModule

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks.finetuning.core.injection import DEFAULT_MODULES_TO_SAVE, InjectionReport
from lightning_tricks.finetuning.core.prefix_attention import Prefix
from lightning_tricks.finetuning.core.prefixes import PrefixSettings, add_prefixes, prefixes_report
from lightning_tricks.finetuning.reach_check import ReachCheckingCallback


class PrefixTuning(ReachCheckingCallback):
    """Freeze the module, and train keys and values that its attentions have before those of their input.

    Each `nn.MultiheadAttention`, alone or in `nn.TransformerEncoder`, `nn.TransformerDecoder` or torchvision's ViT, has
    `length` keys and values of its own, for all samples, which no mask forbids. Base weights keep their names and bits.
    In the first batch of training, and of evaluation, the callback makes sure that each prefix is read.
    `TrainableCheckpoint` beside this callback saves the prefixes alone; they cannot be merged.

    Args:
        length: The number of keys and values of each attention.
        target_modules: `"attention"` for each `nn.MultiheadAttention`, or patterns over their qualified names: globs
            (`"*.self_attn"`) or, with the prefix `re:`, regular expressions.
        exclude: Patterns of modules that get no prefix, nor does what lies in them.
        modules_to_save: Patterns of modules that are trained whole, such as a new head. The default is any module
            called `head`, if there is one.

    Initial values are drawn by a generator of their own, seeded as torch was. Under `ModelParallelStrategy` the layers
    must be there before `configure_model` shards them. A module that is compiled already is refused: pass
    `torch.compile(module)` to the Trainer, or call `add_prefixes` first. Layers of `nn.TransformerEncoder` do without
    torch's fused path in evaluation, which would not read prefixes. Weights that an attention returns are those of
    the given keys; with those of the prefix they sum up to 1.

    Attributes:
        report: What was added to the module of the last run, None before.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: In a run, if a pattern matches nothing, there is no `nn.MultiheadAttention`, a prefix
            is never read, or the module has other prefixes or is compiled.

    Source: Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation" (2021).

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[PrefixTuning(length=8)], accelerator="cpu", logger=False)
    """

    training_arguments = ("length", "target_modules", "exclude", "modules_to_save")

    def __init__(
        self,
        length: int = 16,
        target_modules: str | list[str] = "attention",
        *,
        exclude: str | list[str] = (),  # type: ignore[assignment]
        modules_to_save: str | list[str] = DEFAULT_MODULES_TO_SAVE,  # type: ignore[assignment]
    ) -> None:
        super().__init__()
        self.length = length
        self.target_modules = target_modules
        self.exclude = exclude
        self.modules_to_save = modules_to_save
        self._settings = PrefixSettings(length, target_modules, exclude, modules_to_save)

    def adapt(self, module: LightningModule) -> InjectionReport:
        """Add the prefixes, unless the module has them."""
        return prefixes_report(module, self._settings) or add_prefixes(module, self._settings)

    def adapted(self, module: LightningModule) -> Collection[str]:
        """Return the names of the attentions that have a prefix."""
        return [name.rpartition(".")[0] for name, part in added_modules(module) if isinstance(part, Prefix)]
