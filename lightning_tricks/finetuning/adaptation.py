"""What the callbacks share that add parameters to a model before its optimizer is made."""

from __future__ import annotations

import logging
import multiprocessing
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_tricks._callback import TrickCallback, UnusedParameterCheck
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type
from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.rng import isolated_rng

_log = logging.getLogger("lightning.pytorch.tricks.finetuning")


class AdaptationCallback(TrickCallback):
    """The base of callbacks that add parameters to a module: after its layers are there, before its optimizer is.

    The module keeps what was added when the fit is over. A module that has it already, from an earlier fit or from
    pickle, is left as it is.

    Attributes:
        report: What was added to the module of the last run; None before the first.
    """

    report: Any = None

    def __init__(self) -> None:
        self.report = None
        self._installed = ExitStack()  # between setup and teardown
        self._unused = UnusedParameterCheck(type(self).__name__)

    def adapt(self, module: LightningModule) -> Any:
        """Add the parameters to a module, unless it has them, and return a report.

        Raises:
            ValueError: If that is impossible; the module is not changed then.
        """
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the parameters now, or once the module's own `setup` and `configure_model` have made its layers."""
        super().setup(trainer, pl_module, stage)
        self._installed.close()
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
        rank_zero_info(f"{type(self).__name__}: {self.report}")
        if is_new and _is_lost_after_fit(pl_module.trainer):
            _log.warning(
                "%s: this strategy trains in processes that it spawns or forks, and what they add to the module does "
                "not come back: after the fit, the module has no trained changes, and is another model than the "
                "trained one. Add them before the fit, as by add_lora(module, LoRASettings(...)), or evaluate a "
                "checkpoint.",
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
        self._unused.start({strip_compile_prefix(name): one for name, one in pl_module.named_parameters()})

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for parameters without a gradient."""
        self._unused.after_backward(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Warn about parameters without a gradient."""
        self._unused.after_batch(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove what `setup` installed."""
        self._installed.close()
        self._unused.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove what `setup` installed."""
        self._installed.close()
        self._unused.stop()

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_installed": ExitStack(), "_unused": UnusedParameterCheck(type(self).__name__)}
        return super().__getstate__() | fresh


def _is_lost_after_fit(trainer: Trainer) -> bool:
    """Whether this is rank 0 in a process that was started for the fit, which gives back no new names of weights."""
    is_started = trainer.strategy.launcher is not None and multiprocessing.parent_process() is not None
    return is_started and trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero
