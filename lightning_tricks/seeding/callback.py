"""The callback `SeedEverything`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer, TrainerFn, rank_zero_warn
from lightning_tricks._lightning_compat.hyperparameters import hyperparameters_for_loggers
from lightning_tricks._lightning_compat.loaders import repeats_worker_seeds
from lightning_tricks._shared.report_parts import Facts
from lightning_tricks._shared.rng import check_seed, derive_seed, determinism_settings, seed_global_rngs
from lightning_tricks.seeding.functional import check_determinism, seed_everything


class SeedEverything(TrickCallback):
    """Seed a run in `setup`, and record the seed and the settings of determinism.

    A model that is built in `configure_model` gets its initial weights from the seed. A model with existing parameters
    does not change: call `seed_everything(seed)` before you build it (`TricksMixin` does); otherwise a log line reports
    it once. The same applies to a datamodule's `setup`, which also runs earlier.

    When a run resumes, and when one Trainer fits again, random numbers start from (seed, global step): no part of the
    run repeats the random numbers of another part.

    If `deterministic` or `benchmark` is given, it overrides the Trainer's argument of that name.

    Args:
        seed: An integer in [0, 2**32 - 1].
        workers: Whether the seed of a dataloader worker also depends on its rank. (Before 2.6.1, Lightning's worker
            seeding repeats torch's numbers in every epoch; this callback then warns.)
        deterministic: True, "warn" or False configures torch, cuDNN and cuBLAS as `seed_everything` does; None changes
            nothing.
        benchmark: True or False sets cuDNN's benchmark mode; None changes nothing.
        per_rank: Whether each rank draws its own random numbers in the batches of an epoch, so that dropout and
            augmentation differ between ranks. Before the first batch of an epoch, while loaders and samplers draw, all
            ranks have the same generator state and `PL_GLOBAL_SEED`: initial weights agree, and each sample is read
            once. (The usual snippet, seeding `seed + rank` in `setup`, makes ranks read the same samples.)
            Augmentation in dataloader workers needs `workers=True`; without workers, the first batch of an epoch is
            augmented identically on all ranks.

    For other training loops: `lightning_tricks.seed_everything`.

    Raises:
        TypeError: If `seed` is not an integer.
        ValueError: If `seed` is out of range, or `deterministic` has an unknown value.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[SeedEverything(42, per_rank=True)], accelerator="cpu", logger=False)
    """

    training_arguments = ("per_rank",)

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
        self._is_first_fit = True
        self._num_unseeded = 0  # parameter tensors that existed before the seed was set
        self._has_rank_seed = False

    def before_module_init(self) -> None:
        """Seed before the model is built, as `setup` does again."""
        seed_everything(
            self.seed, self.workers, verbose=False, deterministic=self.deterministic, benchmark=self.benchmark
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Seed all generators, before `configure_model` builds the model."""
        super().setup(trainer, pl_module, stage)
        is_covered = self.added_by_mixin or torch.initial_seed() == self.seed
        if stage == "fit" and self._is_first_fit and not is_covered:
            self._num_unseeded = sum(not is_lazy(p) and not p.is_meta for p in pl_module.parameters())
        self.before_module_init()
        if not self.per_rank:
            self.skip_hooks("on_train_batch_start")
        if stage == "fit":
            self._is_first_fit = self._has_rank_seed = False
            self._seed_for_step(trainer.global_step)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Seed all generators for the step that the run resumes at."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved_seed = checkpoint["callbacks"].get(self.state_key, {}).get("seed", self.seed)
        if saved_seed != self.seed:
            rank_zero_warn(
                f"The checkpoint's run was seeded with {saved_seed}, but this one continues with {self.seed}. To "
                "resume exactly, keep the seed."
            )
        self._num_unseeded = 0
        self._seed_for_step(checkpoint["global_step"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say once which weights the seed did not initialize; record the seed in the loggers' hyper-parameters."""
        older = (
            f"; {self._num_unseeded} parameter tensors existed before, and do not depend on it: call "
            f"seed_everything({self.seed}) before building the model, build it in `configure_model`, or use TricksMixin"
        )
        self.say(f"seed {self.seed}{older if self._num_unseeded else ''}")
        self._num_unseeded = 0
        if trainer.loggers and getattr(trainer, "enable_autolog_hparams", True):
            # together with the module's own, which Lightning logs next: TensorBoard shows only the first record
            record = hyperparameters_for_loggers(trainer)
            record |= {f"seeding/{name}": value for name, value in self.state_dict().items()}
            for logger in trainer.loggers:
                logger.log_hyperparams(record)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if DataLoader workers repeat random numbers."""
        if getattr(trainer.train_dataloader, "num_workers", True):
            self._check_workers(trainer)
        super().on_train_start(trainer, pl_module)

    def _check_workers(self, trainer: Trainer) -> None:
        if self.workers and repeats_worker_seeds():
            rank_zero_warn(
                "SeedEverything(workers=True): this version of Lightning gives torch the same random numbers in every "
                "epoch inside DataLoader workers, whatever the seed. Install lightning>=2.6.1, or set workers=False."
            )
        if self.per_rank and not self.workers and trainer.world_size > 1:
            rank_zero_warn(
                f"SeedEverything(per_rank=True, workers=False): the DataLoader workers of all {trainer.world_size} "
                "ranks draw the same numbers. Set workers=True."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed each rank differently once the loaders have drawn their random numbers."""
        if not self._has_rank_seed:
            self._has_rank_seed = True
            self._seed_for_rank(1 + _data_parallel_rank(trainer), trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed all ranks alike for the loaders of the next epoch."""
        if self._has_rank_seed:
            self._has_rank_seed = False
            self._seed_for_rank(0, trainer)

    def report_parts(self, trainer: Trainer) -> list[Facts]:
        """Return the seed and the settings of determinism."""
        facts = [(name.replace("_", " "), str(value)) for name, value in self.state_dict().items()]
        return [Facts(title="Seed", facts=facts)]

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the present settings of determinism."""
        return {"seed": self.seed, "workers": self.workers, "per_rank": self.per_rank, **determinism_settings()}

    def mid_epoch_state(self) -> dict[str, Any]:
        """Return whether the rank has been seeded differently from the others in this epoch."""
        return {"in_batches": self._has_rank_seed}

    def load_mid_epoch_state(self, state: dict[str, Any]) -> None:
        """Restore what `mid_epoch_state` returned, so that the rank is not seeded once more."""
        self._has_rank_seed = state["in_batches"]

    def _seed_for_step(self, global_step: int) -> None:
        if global_step > 0:
            seed_global_rngs(derive_seed(self.seed, global_step, 0, 0))

    def _seed_for_rank(self, rank_key: int, trainer: Trainer) -> None:
        seed_global_rngs(derive_seed(self.seed, trainer.global_step, 1 + trainer.current_epoch, rank_key))


def _data_parallel_rank(trainer: Trainer) -> int:
    """Return the data-parallel rank: tensor-parallel ranks read the same samples, and share one."""
    sharing: dict[str, int] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return sharing.get("rank", trainer.global_rank)
