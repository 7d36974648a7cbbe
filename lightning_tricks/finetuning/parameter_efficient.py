"""The callbacks that train few parameters of a frozen module: `LoRA`, `Adapters`, `PrefixTuning`, `PeftAdapters`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal

from torch import nn

from lightning_tricks._lightning_compat.flavor import LightningModule, MisconfigurationException, Trainer
from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.adaptation import AdaptationCallback, CoverageCheckingCallback
from lightning_tricks.finetuning.core.bottleneck_adapters import AdapterInjection, AdapterSettings
from lightning_tricks.finetuning.core.injection import DEFAULT_MODULES_TO_SAVE, Injection, InjectionReport
from lightning_tricks.finetuning.core.lora_injection import LoRAInjection
from lightning_tricks.finetuning.core.lora_layers import LoRASettings
from lightning_tricks.finetuning.core.peft_injection import adapters_in, ensure_peft, peft_config
from lightning_tricks.finetuning.core.prefixes import PrefixInjection, PrefixSettings


class InjectionCallback(AdaptationCallback):
    """The base of the callbacks whose arguments are the settings of an `Injection`, which are their attributes, too.

    Args:
        arguments: The arguments of the callback, by name; others are not used.
    """

    injection: ClassVar[type[Injection]]

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        given = {field.name: arguments[field.name] for field in fields(self.injection.settings_type)}
        self._settings = self.injection.settings_type(**given)
        vars(self).update(given)

    def adapt(self, module: LightningModule) -> InjectionReport:
        """Add the parameters, unless the module has them."""
        return self.injection.ensure(module, self._settings)

    def adapted(self, module: LightningModule) -> Collection[str]:
        """Return the names of the modules that have such parameters."""
        return self.injection.names_in(module)


class LoRA(InjectionCallback):
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
            called `head`, if there is one.
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


class Adapters(InjectionCallback, CoverageCheckingCallback):
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
            called `head`, if there is one.
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


class PrefixTuning(InjectionCallback, CoverageCheckingCallback):
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
            called `head`, if there is one.

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


class PeftAdapters(CoverageCheckingCallback):
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
        TypeError: If the config is not a configuration of peft, or has a field that its method does not have.
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
        return ensure_peft(self._part(module), self.config)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse parameters that another callback has added since: each freezes all but its own."""
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
        return [f"{front}{name}".rstrip(".") for name in adapters_in(self._part(module))]

    def _part(self, module: LightningModule) -> nn.Module:
        try:
            return module.get_submodule(self.submodule or "")
        except AttributeError as error:
            raise ValueError(f"submodule={self.submodule!r}: {error}.") from error
