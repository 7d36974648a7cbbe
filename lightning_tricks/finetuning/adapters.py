"""The callback `Adapters`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from lightning.pytorch import LightningModule

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks.finetuning.core.adapter_layers import BottleneckAdapter
from lightning_tricks.finetuning.core.bottleneck_adapters import AdapterSettings, adapters_report, add_adapters
from lightning_tricks.finetuning.core.injection import DEFAULT_MODULES_TO_SAVE, InjectionReport
from lightning_tricks.finetuning.reach_check import ReachCheckingCallback


class Adapters(ReachCheckingCallback):
    """Freeze the module, and train small bottleneck networks behind, or beside, its layers.

    Each adapter is two linear layers with a nonlinearity between them, which add `scale * W_up f(W_down x)`. At first
    it is zero. The kinds differ in where adapters are in a transformer block: `"houlsby"` behind the output
    of each attention and of the feed-forward network, before the residual is added; `"pfeiffer"` behind that of the
    feed-forward network; `"parallel"` beside the feed-forward network, with the same input. Base weights keep their
    names and bits. In the first batch of training, and of evaluation, the callback makes sure that each adapter is
    called. `TrainableCheckpoint` beside this callback saves the adapters alone; they cannot be merged.

    Args:
        bottleneck: The width between the two layers.
        target_modules: `"blocks"` for the blocks of transformers: `nn.TransformerEncoderLayer` and
            `nn.TransformerDecoderLayer`, torchvision's and timm's ViT and Swin, and those of transformers such as BERT,
            GPT-2 and Llama. Or patterns over qualified names of linear layers, or of attentions, whose output gets an
            adapter; with `kind="parallel"` the adapter has the layer's input. A pattern is a glob (`"*.fc2"`) or, with
            the prefix `re:`, a regular expression.
        kind: The kind of adapters.
        nonlinearity: The function `f`; None for that of the kind: GELU for `"houlsby"`, ReLU otherwise.
        scale: The scale of the output; None for that of the kind: 4 for `"parallel"`, 1 otherwise.
        exclude: Patterns of modules that get no adapter, nor does what lies in them.
        modules_to_save: Patterns of modules that are trained whole, such as a new head. The default is any module
            called `head`, if there is one.
        dropout: The probability with which a value between the two layers is set to zero in training.

    Initial values are drawn by a generator of their own, seeded as torch was. Under `ModelParallelStrategy` the layers
    must be there before `configure_model` shards them. A module that is compiled already is refused: pass
    `torch.compile(module)` to the Trainer, or call `add_adapters` first. Layers of `nn.TransformerEncoder` do without
    torch's fused path in evaluation, which would not call adapters.

    Attributes:
        report: What was added to the module of the last run, None before.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: In a run, if a pattern matches nothing, there is no known transformer block, an
            adapter is never called, or the module has other adapters or is compiled.

    Source: Houlsby et al., "Parameter-Efficient Transfer Learning for NLP" (2019); Pfeiffer et al., "AdapterFusion"
    (2021); He et al., "Towards a Unified View of Parameter-Efficient Transfer Learning" (2022).

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[Adapters(bottleneck=32, kind="houlsby")], accelerator="cpu", logger=False)
    """

    training_arguments = (
        "bottleneck",
        "target_modules",
        "kind",
        "nonlinearity",
        "scale",
        "exclude",
        "modules_to_save",
        "dropout",
    )

    def __init__(
        self,
        bottleneck: int = 64,
        target_modules: str | list[str] = "blocks",
        *,
        kind: Literal["houlsby", "pfeiffer", "parallel"] = "pfeiffer",
        nonlinearity: Literal["relu", "gelu", "silu", "tanh"] | None = None,
        scale: float | None = None,
        exclude: str | list[str] = (),  # type: ignore[assignment]
        modules_to_save: str | list[str] = DEFAULT_MODULES_TO_SAVE,  # type: ignore[assignment]
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.bottleneck = bottleneck
        self.target_modules = target_modules
        self.kind = kind
        self.nonlinearity = nonlinearity
        self.scale = scale
        self.exclude = exclude
        self.modules_to_save = modules_to_save
        self.dropout = dropout
        self._settings = AdapterSettings(
            bottleneck, target_modules, kind, nonlinearity, scale, exclude, modules_to_save, dropout
        )

    def adapt(self, module: LightningModule) -> InjectionReport:
        """Add the adapters, unless the module has them."""
        return adapters_report(module, self._settings) or add_adapters(module, self._settings)

    def adapted(self, module: LightningModule) -> Collection[str]:
        """Return the names of the modules that have an adapter."""
        return [name.rpartition(".")[0] for name, part in added_modules(module) if isinstance(part, BottleneckAdapter)]
