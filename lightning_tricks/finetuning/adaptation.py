"""The callbacks that train few parameters of a frozen module: `LoRA`, `Adapters`, `PrefixTuning`, and their bases."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.ddp import ddp_wrapper, stops_at_unused_parameters
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    ModelParallelStrategy,
    Trainer,
    TrainerFn,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type, is_compiled_by_lightning
from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.lightning_name import lightning_logger
from lightning_tricks._shared.modules import describe_without_gradient, names_without_gradient
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.gradients import observing_cut_checkpoints
from lightning_tricks.finetuning.core.adapter_coverage import AdapterCoverage, is_compiled, watching_coverage
from lightning_tricks.finetuning.core.bottleneck_adapters import AdapterInjection, AdapterSettings
from lightning_tricks.finetuning.core.injection import DEFAULT_MODULES_TO_SAVE, Injection, InjectionReport
from lightning_tricks.finetuning.core.lora_injection import LoRAInjection
from lightning_tricks.finetuning.core.lora_layers import LoRASettings
from lightning_tricks.finetuning.core.prefixes import PrefixInjection, PrefixSettings

_CUT = (
    " torch.utils.checkpoint(use_reentrant=True) gives its layers no gradient where none of its inputs requires one, "
    "as behind frozen layers: pass use_reentrant=False (to transformers, "
    "gradient_checkpointing_kwargs={'use_reentrant': False})."
)
_TRAINING = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
_EVALUATION = tuple(
    f"on_{stage}_batch_{edge}" for stage in ("validation", "test", "predict") for edge in ("start", "end")
)


class GradientCheckingCallback(TrickCallback):
    """The base of callbacks that name the parameters that the first batch gave no gradient.

    DDP would stop at them without a name, so that this is an error. Without DDP, and where DDP looks for such
    parameters itself, it is one warning.
    """

    def _forget_run(self) -> None:
        self._waiting: dict[str, Tensor] = {}  # the parameters that had no gradient yet
        self._had_backward = False
        self._checkpoints = ExitStack()  # as long as parameters wait
        self._cause = ""  # why they have none, if that was seen

    def _expect_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Look at the next batch for gradients of parameters, given by name; those that are frozen need none."""
        self._waiting, self._had_backward, self._cause = dict(parameters), False, ""
        self._checkpoints.close()
        if parameters:
            self._installed.enter_context(self._checkpoints)
            self._checkpoints.enter_context(observing_cut_checkpoints(partial(setattr, self, "_cause", _CUT)))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for parameters without a gradient.

        Raises:
            MisconfigurationException: Where DDP would fail in the next pass; it names the parameters and the rank.
        """
        if not self._waiting:
            return
        self._had_backward = True
        missing = names_without_gradient(self._waiting)
        self._waiting = {name: self._waiting[name] for name in missing}
        if missing and stops_at_unused_parameters(trainer):
            raise MisconfigurationException(
                f"{type(self).__name__}: {describe_without_gradient(missing, trainer.global_rank)}.{self._cause} DDP "
                "waits for each of them and fails in the next pass. Freeze or remove what the loss does not depend on, "
                'or use Trainer(strategy="ddp_find_unused_parameters_true").'
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Warn about parameters without a gradient."""
        if not self._had_backward:
            return
        missing, cause = list(self._waiting), self._cause
        self._expect_gradients({})
        if missing and trainer.is_global_zero:
            rank = trainer.global_rank if ddp_wrapper(trainer) is not None else None
            words = describe_without_gradient(missing, rank)
            rank_zero_warn(
                f"{type(self).__name__}: in its first batch, {words}. These parameters stay as they are.{cause}"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove everything that this callback installed, and say why a loss had no gradient."""
        if self._cause and not self._had_backward and "does not require grad" in str(exception):
            rank_zero_warn(f"{type(self).__name__}: the loss has no gradient.{self._cause}")
        super().on_exception(trainer, pl_module, exception)


class AdaptationCallback(GradientCheckingCallback):
    """The base of callbacks that add parameters to a module: after its layers are there, before its optimizer is.

    The module keeps the added parameters when the fit is over. A module that has them already, from an earlier fit or
    from pickle, is left as it is. The arguments of such a callback, which are its attributes, are the settings of an
    `Injection`.

    Args:
        arguments: The arguments of the callback, by name; others are not used.

    Attributes:
        injection: The parameters that it adds.
        report: The report on the module of the last run; None before the first.
    """

    injection: ClassVar[type[Injection]]

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        given = {field.name: arguments[field.name] for field in fields(self.injection.settings_type)}
        self._settings = self.injection.settings_type(**given)
        vars(self).update(given)
        self.report: InjectionReport | None = None

    def adapt(self, module: LightningModule) -> InjectionReport:
        """Add the parameters to a module, unless it has them, and return a report.

        Raises:
            ValueError: If that is impossible; the module is not changed then.
        """
        return self.injection.ensure(module, self._settings)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the parameters now, or once the module's own `setup` and `configure_model` have made its layers."""
        super().setup(trainer, pl_module, stage)
        kind = type(pl_module)
        if kind.setup is LightningModule.setup and kind.configure_model is LightningModule.configure_model:
            self._adapt(pl_module)
            return
        configure_model = pl_module.configure_model
        adapts_first = isinstance(trainer.strategy, ModelParallelStrategy)  # there configure_model shards what it finds

        def configure_and_adapt() -> None:
            if adapts_first:
                self._adapt(pl_module)
            configure_model()
            if not adapts_first:
                self._adapt(pl_module)

        self._installed.enter_context(overriding(pl_module, configure_model=configure_and_adapt))

    def _adapt(self, pl_module: LightningModule) -> None:
        self._installed.close()
        is_new = not any(added_modules(pl_module))
        try:
            with isolated_rng():
                for callback in callbacks_of_type(pl_module.trainer, TrickCallback):
                    callback.before_module_init()  # so that SeedEverything seeds this wherever it stands
                self.report = self.adapt(pl_module)
        except ValueError as error:
            raise MisconfigurationException(f"{type(self).__name__}: {error}") from error
        self.say(str(self.report))
        if is_new and _is_lost_after_fit(pl_module.trainer):
            lightning_logger("finetuning").warning(
                "%s: this strategy trains in processes that it spawns or forks, and layers that are added there do "
                "not come back: after the fit, the module has no trained changes, and is not the trained model. Add "
                "them before the fit, such as by add_lora(module, LoRASettings(...)), or evaluate a checkpoint.",
                type(self).__name__,
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse callbacks that have copied the module, to average its weights, before it had the new parameters."""
        names = {name for name, _ in pl_module.named_parameters()}
        for callback in callbacks_of(trainer):
            for copied in (value for value in vars(callback).values() if isinstance(value, nn.Module)):
                twins = [part for part in copied.modules() if type(part) is type(pl_module) and part is not pl_module]
                if any({name for name, _ in twin.named_parameters()} != names for twin in twins):
                    own, other = type(self).__name__, type(callback).__name__
                    raise MisconfigurationException(
                        f"{other} has copied the module before {own} changed it: pass {own} to the Trainer before "
                        f"{other}, and create the layers in __init__, not in setup or configure_model."
                    )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to look for parameters without a gradient."""
        self._expect_gradients({strip_compile_prefix(name): weight for name, weight in pl_module.named_parameters()})
        super().on_train_start(trainer, pl_module)


class CoverageCheckingCallback(AdaptationCallback):
    """The base of callbacks whose modules are checked in the first batch of training and in that of evaluation.

    A module that is never called, because the one around it reads its weights, is an error; one that the batch did not
    need is named in a warning. The hooks are disabled after these batches.
    Compiled modules are not checked: calls inside them cannot be seen.
    """

    def _forget_run(self) -> None:
        super()._forget_run()
        self._watch: ExitStack | None = None  # during a batch
        self._coverage: AdapterCoverage | None = None

    def _start(self, pl_module: LightningModule) -> None:
        if is_compiled_by_lightning(pl_module) or is_compiled(pl_module):
            self.say("does not check in a compiled module that all adapted modules are called")
            return
        if self._watch is not None:
            self._watch.close()  # a batch that the module skips has no end
        self._watch = self._installed.enter_context(ExitStack())
        self._coverage = self._watch.enter_context(watching_coverage(pl_module, self.injection.names_in(pl_module)))

    def _end(self, what: str, hooks: tuple[str, ...]) -> None:
        self.skip_hooks(*hooks)
        if self._watch is None or self._coverage is None:
            return
        self._watch.close()
        coverage, self._watch, self._coverage = self._coverage, None, None
        trick, count = type(self).__name__, len(coverage.called) + len(coverage.bypassed) + len(coverage.idle)
        if coverage.bypassed:
            raise MisconfigurationException(
                f"{trick}: {len(coverage.bypassed)} of {count} adapted modules have no effect in {what}: "
                f"{list_names(coverage.bypassed)}. The module around them does not call them, but reads their weights, "
                "or does without them: use LoRA(...), which changes the weights themselves, or leave them out by "
                "target_modules or exclude."
            )
        if coverage.idle:
            rank_zero_warn(
                f"{trick}: the first batch of {what} did not use {len(coverage.idle)} of {count} adapted modules, nor "
                f"the modules that contain them: {list_names(coverage.idle)}."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Watch which modules are called."""
        self._start(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Report modules that were not called, and parameters without a gradient."""
        self._end("training", _TRAINING)
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Report modules that were not called."""
        self._end("evaluation", _EVALUATION)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def _is_lost_after_fit(trainer: Trainer) -> bool:
    """Whether this is rank 0 in a process that was started for the fit, which gives back no new names of weights."""
    is_started = trainer.strategy.launcher is not None and multiprocessing.parent_process() is not None
    return is_started and trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero


class LoRA(AdaptationCallback):
    """Freeze the module, and train a low-rank change of the weights of its linear layers (LoRA).

    Code that reads a weight always gets the changed weight. This includes fused layers of `nn.TransformerEncoderLayer`
    in evaluation mode, `nn.MultiheadAttention`, torchvision's Swin, and recurrent layers. Base weights keep their names
    and bits. Pass `self.parameters()` to the optimizer as usual: frozen parameters have no gradients and no optimizer
    state. `lightning_tricks.finetuning.merge(model)` folds the change into the weights. Together with this callback,
    `TrainableCheckpoint` saves only the change.

    Args:
        rank: The rank of the change of each weight, at most that of the weight.
        alpha: The change is `alpha / rank * B @ A`.
        target_modules: Patterns over qualified names of modules to change: linear layers,
            convolutions, embeddings, attention, recurrent layers, or any module with a `weight`; or `"linear"` for all
            linear layers and `nn.MultiheadAttention`. A pattern is a glob (`"*.q_proj"`) or, with the prefix `re:`, a
            regular expression.
        exclude: Patterns of modules that are not changed; this includes their parts.
        modules_to_save: Patterns of modules that are trained in full, such as a new head. The default is any module
            called `head`, unless a pattern of `target_modules` matches nothing else.
        dropout: The probability with which an input of the change is set to zero in training; only in layers with a
            forward pass that is called.
        rank_pattern: Pattern over names of target modules -> their rank; the first match applies.
        use_rslora: Whether the change is `alpha / sqrt(rank) * B @ A`.

    Initial values come from a separate generator with torch's seed. Strategies that spawn or fork processes, such as
    `ddp_spawn` and `ddp_notebook`, do not return what was added there: call `add_lora` before the fit, or evaluate a
    checkpoint. Under `ModelParallelStrategy`, the layers must exist before `configure_model` shards them. A module, or
    a part of it, may be compiled before or after; compiled modules are compiled again.

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

    Each adapter is two linear layers with a nonlinearity between them, which add `scale * W_up f(W_down x)`, initially
    zero. The kinds place adapters differently in a transformer block: `"houlsby"` behind the output of each attention
    and of the feed-forward network, before the residual is added; `"pfeiffer"` only behind the feed-forward network;
    `"parallel"` beside the feed-forward network, with the same input. Base weights keep their names and bits. In the
    first batch of training and of evaluation, the callback checks that each adapter is called. Together with this
    callback, `TrainableCheckpoint` saves only the adapters; they cannot be merged.

    Args:
        bottleneck: The width between the two layers.
        target_modules: `"blocks"` for the blocks of transformers: `nn.TransformerEncoderLayer` and
            `nn.TransformerDecoderLayer`, torchvision's and timm's ViT and Swin, and those of transformers such as BERT,
            GPT-2 and Llama. Or patterns over qualified names of linear layers or attentions, which get an adapter
            at their output; with `kind="parallel"`, it gets the layer's input. A pattern is a glob (`"*.fc2"`) or, with
            the prefix `re:`, a regular expression.
        kind: The kind of adapters.
        nonlinearity: The function `f`; None for the default of the kind: GELU for `"houlsby"`, ReLU otherwise.
        scale: The scale of the output; None for the default of the kind: 4 for `"parallel"`, 1 otherwise.
        exclude: Patterns of modules that get no adapter; this includes their parts.
        modules_to_save: Patterns of modules that are trained in full, such as a new head. The default is any module
            called `head`, unless a pattern of `target_modules` matches nothing else.
        dropout: The probability with which a value between the two layers is set to zero in training.

    Initial values come from a separate generator with torch's seed. Under `ModelParallelStrategy`, the layers must
    exist before `configure_model` shards them. A module, or a part of it, may be compiled before or after. Layers of
    `nn.TransformerEncoder` do not use torch's fused path in evaluation, as it would not call adapters.

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
    """Freeze the module, and train keys and values that its attentions prepend to those of the input.

    Each `nn.MultiheadAttention`, alone or in `nn.TransformerEncoder`, `nn.TransformerDecoder` or torchvision's ViT,
    gets `length` keys and values, which all samples share and no mask hides. Base weights keep their names and bits. In
    the first batch of training and of evaluation, the callback checks that each prefix is read. Together with this
    callback, `TrainableCheckpoint` saves only the prefixes; they cannot be merged.

    Args:
        length: The number of keys and values of each attention.
        target_modules: `"attention"` for each `nn.MultiheadAttention`, or patterns over their qualified names: globs
            (`"*.self_attn"`) or, with the prefix `re:`, regular expressions.
        exclude: Patterns of modules that get no prefix; this includes their parts.
        modules_to_save: Patterns of modules that are trained in full, such as a new head. The default is any module
            called `head`, unless a pattern of `target_modules` matches nothing else.

    Initial values come from a separate generator with torch's seed. Under `ModelParallelStrategy`, the layers must
    exist before `configure_model` shards them. A module, or a part of it, may be compiled before or after. Layers of
    `nn.TransformerEncoder` do not use torch's fused path in evaluation, as it would not read prefixes. Attention
    weights that an attention returns exclude the prefix; together with its weights they sum to 1.

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
