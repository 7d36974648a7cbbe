"""The callbacks that train few parameters of a frozen module: `LoRA`, `Adapters`, `PrefixTuning`."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from lightning_tricks.finetuning.adaptation import AdaptationCallback, CoverageCheckingCallback
from lightning_tricks.finetuning.core.bottleneck_adapters import AdapterInjection, AdapterSettings
from lightning_tricks.finetuning.core.injection import DEFAULT_MODULES_TO_SAVE
from lightning_tricks.finetuning.core.lora_injection import LoRAInjection
from lightning_tricks.finetuning.core.lora_layers import LoRASettings
from lightning_tricks.finetuning.core.prefixes import PrefixInjection, PrefixSettings


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
        exclude: Patterns of modules that are not changed, nor are their parts.
        modules_to_save: Patterns of modules that are trained whole, such as a new head. The default is any module
            called `head`, unless a pattern of `target_modules` matches nothing else.
        dropout: The probability with which an input of the change is set to zero in training; only in layers whose own
            forward pass is called.
        rank_pattern: Pattern over names of target modules -> their rank; the first that matches counts.
        use_rslora: Whether the change is `alpha / sqrt(rank) * B @ A`.

    Initial values are drawn by a generator of their own, seeded as torch was. Strategies that spawn or fork processes,
    such as `ddp_spawn` and `ddp_notebook`, give nothing back that was added there: call `add_lora` before the fit, or
    evaluate a checkpoint. Under `ModelParallelStrategy` the layers must be there before `configure_model` shards them.
    A module, or a part of it, may be compiled before or after, in whichever way; what is compiled already is compiled
    anew.

    Attributes:
        report: The `InjectionReport` of the last run, None before.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: In a run, if a pattern matches nothing, a rank exceeds a layer, or the module has
            another LoRA.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[LoRA(rank=8, exclude="stem")], accelerator="cpu", logger=False)
    """

    injection = LoRAInjection
    training_arguments = tuple(field.name for field in fields(LoRASettings))

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
        super().__init__(locals())


class Adapters(CoverageCheckingCallback):
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
        exclude: Patterns of modules that get no adapter, nor do their parts.
        modules_to_save: Patterns of modules that are trained whole, such as a new head. The default is any module
            called `head`, unless a pattern of `target_modules` matches nothing else.
        dropout: The probability with which a value between the two layers is set to zero in training.

    Initial values are drawn by a generator of their own, seeded as torch was. Under `ModelParallelStrategy` the layers
    must be there before `configure_model` shards them. A module, or a part of it, may be compiled before or after.
    Layers of `nn.TransformerEncoder` do without torch's fused path in evaluation, which would not call adapters.

    Attributes:
        report: The `InjectionReport` of the last run, None before.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: In a run, if a pattern matches nothing, there is no known transformer block, an
            adapter is never called, or the module has other adapters.

    Source: Houlsby et al., "Parameter-Efficient Transfer Learning for NLP" (2019); Pfeiffer et al., "AdapterFusion"
    (2021); He et al., "Towards a Unified View of Parameter-Efficient Transfer Learning" (2022).

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[Adapters(bottleneck=32, kind="houlsby")], accelerator="cpu", logger=False)
    """

    injection = AdapterInjection
    training_arguments = tuple(field.name for field in fields(AdapterSettings))

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
        super().__init__(locals())


class PrefixTuning(CoverageCheckingCallback):
    """Freeze the module, and train keys and values that its attentions have before those of their input.

    Each `nn.MultiheadAttention`, alone or in `nn.TransformerEncoder`, `nn.TransformerDecoder` or torchvision's ViT, has
    `length` keys and values of its own, for all samples, which no mask forbids. Base weights keep their names and bits.
    In the first batch of training, and of evaluation, the callback makes sure that each prefix is read.
    `TrainableCheckpoint` beside this callback saves the prefixes alone; they cannot be merged.

    Args:
        length: The number of keys and values of each attention.
        target_modules: `"attention"` for each `nn.MultiheadAttention`, or patterns over their qualified names: globs
            (`"*.self_attn"`) or, with the prefix `re:`, regular expressions.
        exclude: Patterns of modules that get no prefix, nor do their parts.
        modules_to_save: Patterns of modules that are trained whole, such as a new head. The default is any module
            called `head`, unless a pattern of `target_modules` matches nothing else.

    Initial values are drawn by a generator of their own, seeded as torch was. Under `ModelParallelStrategy` the layers
    must be there before `configure_model` shards them. A module, or a part of it, may be compiled before or after.
    Layers of `nn.TransformerEncoder` do without torch's fused path in evaluation, which would not read prefixes.
    Weights that an attention returns are those of the given keys; with those of the prefix they sum up to 1.

    Attributes:
        report: The `InjectionReport` of the last run, None before.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: In a run, if a pattern matches nothing, there is no `nn.MultiheadAttention`, a prefix
            is never read, or the module has other prefixes.

    Source: Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation" (2021).

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[PrefixTuning(length=8)], accelerator="cpu", logger=False)
    """

    injection = PrefixInjection
    training_arguments = tuple(field.name for field in fields(PrefixSettings))

    def __init__(
        self,
        length: int = 16,
        target_modules: str | list[str] = "attention",
        *,
        exclude: str | list[str] = (),  # type: ignore[assignment]
        modules_to_save: str | list[str] = DEFAULT_MODULES_TO_SAVE,  # type: ignore[assignment]
    ) -> None:
        super().__init__(locals())
