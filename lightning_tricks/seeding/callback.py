"""The Lightning shell of the seeding room."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parameter import is_lazy

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat import hyperparameters_for_loggers, repeats_worker_streams
from lightning_tricks.seeding.functional import (
    check_determinism,
    check_seed,
    derive_seed,
    determinism,
    seed_everything,
    seed_streams,
)


class SeedEverything(TrickCallback):
    """Seed a run in `setup`, and record the seed and the determinism switches with it.

    A model that is built in `configure_model` is covered. A model whose parameters exist already is left alone: its
    initial weights are covered only if `seed_everything(seed)` ran before it was built (`TricksMixin` does that), and
    so is whatever a datamodule draws in its own `setup`, which Lightning calls before the callbacks'. A note says so
    once.

    On a resume, and when one Trainer fits again, the streams start from (seed, global step): no part of the run
    repeats the random numbers of another.

    Args:
        seed: An integer in [0, 2**32 - 1].
        workers: Whether every DataLoader worker gets a stream of its own. (Before 2.6.1 Lightning's worker seeding
            repeats torch's numbers in every epoch: a warning says so where there are workers.)
        deterministic: True, "warn" or False sets torch's, cuDNN's and cuBLAS' switches, None leaves them.
        benchmark: True or False sets cuDNN's benchmark mode, None leaves it.
        per_rank: Whether each rank goes on with a stream of its own from the start of training, so that dropout and
            augmentation differ between ranks. Initial weights still agree, and so does `PL_GLOBAL_SEED`, by which
            `DistributedSampler` divides the samples (seeding `seed + rank` in `setup` makes ranks read samples twice).

    The seeding itself: `lightning_tricks.seeding.functional.seed_everything`.

    Raises:
        TypeError: If `seed` is no integer.
        ValueError: If `seed` is out of range, or `deterministic` unknown.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[SeedEverything(42, per_rank=True)], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        seed: int = 42,
        *,
        workers: bool = True,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        per_rank: bool = False,
    ) -> None:
        self.seed = check_seed(seed)
        self.workers = workers
        self.deterministic = check_determinism(deterministic)
        self.benchmark = benchmark
        self.per_rank = per_rank
        self._is_first_setup = True

    def apply(self) -> None:
        """Seed now, as `setup` will do again."""
        seed_everything(
            self.seed, self.workers, verbose=False, deterministic=self.deterministic, benchmark=self.benchmark
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Seed all streams, before `configure_model` builds the model."""
        super().setup(trainer, pl_module, stage)
        if self._is_first_setup:
            self._is_first_setup = False
            self._note_existing_weights(pl_module)
        self.apply()
        if stage == "fit":
            rank_zero_info(f"Seed set to {self.seed}")
            self._continue_at(trainer.global_step)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue with the streams of the step that the run resumes at."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved_seed = checkpoint["callbacks"].get(self.state_key, {}).get("seed", self.seed)
        if saved_seed != self.seed:
            rank_zero_warn(f"The checkpoint's run was seeded with {saved_seed}, this one goes on with {self.seed}.")
        self._continue_at(checkpoint["global_step"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the seed and the switches in the loggers' hyper-parameters."""
        if getattr(trainer, "enable_autolog_hparams", True):
            record = {f"seeding/{name}": value for name, value in self.state_dict().items()}
            for logger in trainer.loggers:
                # with the module's own, which follow in a moment: TensorBoard shows the first record alone
                logger.log_hyperparams({**hyperparameters_for_loggers(trainer), **record})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the streams of each rank."""
        if self.workers and repeats_worker_streams() and getattr(trainer.train_dataloader, "num_workers", True):
            rank_zero_warn(
                "SeedEverything(workers=True): this version of Lightning gives torch the same random numbers in every "
                "epoch inside DataLoader workers, whatever the seed. Install lightning>=2.6.1, or set workers=False."
            )
        if self.per_rank:
            seed_streams(derive_seed(self.seed, trainer.global_step, 1 + trainer.global_rank))

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the switches as they are now, for the checkpoint."""
        return {"seed": self.seed, "workers": self.workers, "per_rank": self.per_rank, **determinism()}

    def _continue_at(self, global_step: int) -> None:
        if global_step > 0:
            seed_streams(derive_seed(self.seed, global_step, 0))

    def _note_existing_weights(self, pl_module: LightningModule) -> None:
        built = sum(not is_lazy(parameter) and not parameter.is_meta for parameter in pl_module.parameters())
        if built and torch.initial_seed() != self.seed:
            rank_zero_info(
                f"SeedEverything({self.seed}): {built} parameter tensors existed before `setup`, so their initial "
                f"values are not covered by this seed. Call lightning_tricks.seed_everything({self.seed}) before "
                "building the model, build it in `configure_model`, or use TricksMixin."
            )
