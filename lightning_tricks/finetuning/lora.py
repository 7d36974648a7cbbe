"""The callback `LoRA`."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from lightning_tricks.finetuning.adaptation import AdaptationCallback
from lightning_tricks.finetuning.core.injection import DEFAULT_MODULES_TO_SAVE, InjectionReport
from lightning_tricks.finetuning.core.lora_injection import add_lora, lora_report
from lightning_tricks.finetuning.core.lora_plan import LoRASettings


class LoRA(AdaptationCallback):
    """Freeze the module, and train a low-rank change of the weights of its linear layers (LoRA).

    A weight that is read is the changed one, whoever reads it: also the fused layers of `nn.TransformerEncoderLayer` in
    evaluation mode, `nn.MultiheadAttention`, torchvision's Swin, and recurrent layers. Base weights keep their names
    and bits. The optimizer gets what `configure_optimizers` makes of `self.parameters()`; frozen parameters have no
    gradients, and no optimizer state. `lightning_tricks.finetuning.merge(model)` folds the change into the weights, and
    `TrainableCheckpoint` beside this callback saves the change alone.

    Args:
        rank: The rank of the change of each weight, at most that of the weight.
        alpha: The change is `alpha / rank * B @ A`.
        target_modules: Patterns over qualified names of modules whose matrices are changed: linear layers,
            convolutions, embeddings, attention, recurrent layers, or any module with a `weight`; or `"linear"` for all
            linear layers and `nn.MultiheadAttention`. A pattern is a glob (`"*.q_proj"`) or, with the prefix `re:`, a
            regular expression.
        exclude: Patterns of modules that are not changed, nor is what lies in them.
        modules_to_save: Patterns of modules that are trained whole, such as a new head. The default is any module
            called `head`, if there is one.
        dropout: The probability with which an input of the change is set to zero in training; only in layers whose own
            forward pass is called.
        rank_pattern: Pattern over names of target modules -> their rank; the first that matches counts.
        use_rslora: Whether the change is `alpha / sqrt(rank) * B @ A`.

    Initial values are drawn by a generator of their own, seeded as torch was. Strategies that spawn or fork processes,
    such as `ddp_spawn` and `ddp_notebook`, give nothing back that was added there: call `add_lora` before the fit, or
    evaluate a checkpoint. Under `ModelParallelStrategy` the layers must be there before `configure_model` shards them.
    A module that is compiled already is refused: pass `torch.compile(module)` to the Trainer, which compiles what it
    finds in the first step, or call `add_lora` first.

    Attributes:
        report: The `InjectionReport` of the last run, None before.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: In a run, if a pattern matches nothing, a rank exceeds a layer, or the module has
            another LoRA or is compiled.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[LoRA(rank=8, exclude="stem")], accelerator="cpu", logger=False)
    """

    training_arguments = (
        "rank",
        "alpha",
        "target_modules",
        "exclude",
        "modules_to_save",
        "dropout",
        "rank_pattern",
        "use_rslora",
    )

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        target_modules: str | list[str] = "linear",
        *,
        exclude: str | list[str] = (),  # type: ignore[assignment]
        modules_to_save: str | list[str] = DEFAULT_MODULES_TO_SAVE,  # type: ignore[assignment]
        dropout: float = 0.0,
        rank_pattern: dict[str, int] | None = None,
        use_rslora: bool = False,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.alpha = alpha
        self.target_modules = target_modules
        self.exclude = exclude
        self.modules_to_save = modules_to_save
        self.dropout = dropout
        self.rank_pattern = rank_pattern
        self.use_rslora = use_rslora
        self._settings = LoRASettings(
            rank, alpha, target_modules, exclude, modules_to_save, dropout, rank_pattern, use_rslora
        )

    def adapt(self, module: LightningModule) -> InjectionReport:
        """Add the changes, unless the module has them."""
        return lora_report(module, self._settings) or add_lora(module, self._settings)
