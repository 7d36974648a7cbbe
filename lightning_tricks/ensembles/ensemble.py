"""The base of all ensembles: a LightningModule of members, and the methods that a family of ensembles overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from inspect import currentframe
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._lightning_compat.fit import closed_on_exception
from lightning_tricks._lightning_compat.flavor import rank_zero_warn
from lightning_tricks._lightning_compat.hyperparameters import restricted_classmethod
from lightning_tricks._lightning_compat.loaders import replaced_train_loaders
from lightning_tricks._lightning_compat.own_samples import OwnSamples
from lightning_tricks._shared.calibration import calibration_of
from lightning_tricks._shared.checks import check_count, check_optional_count
from lightning_tricks._shared.mean_loss import MeanLoss
from lightning_tricks.checkpoint_remapping.load_from_checkpoint import build_module, read_module_checkpoint
from lightning_tricks.ensembles import arguments, lightning_members, optimizers
from lightning_tricks.ensembles.core.combination import Criterion, normalized_weights
from lightning_tricks.ensembles.core.factory import Estimator, build_members, untrusted_class_names
from lightning_tricks.ensembles.core.members import Members
from lightning_tricks.ensembles.core.stacked_members import as_members, as_sequential
from lightning_tricks.ensembles.core.torchensemble_models import TorchensembleInterchange
from lightning_tricks.ensembles.members_at_once import MembersAtOnce


class Ensemble(TorchensembleInterchange, MembersAtOnce):
    """Base of the ensembles.

    A family of ensembles is one file with a subclass of this class, or of `StagedEnsemble` for members that are trained
    stage by stage, and `ClassifierEnsemble` or `RegressorEnsemble` beside it. It overrides some of these methods, and
    hooks of `LightningModule` (with a call of `super()`), and nothing else. Outputs of n members have the shape
    (n, B, ...).

    The prediction and its measure, which `ClassifierEnsemble` and `RegressorEnsemble` define:

    - `combine(outputs)`: the prediction; `prediction_loss(outputs, target)`: its loss in an evaluation;
    - `uncertainty(outputs)`, `metrics(preds, target)`, `default_criterion()`, `check_batch(outputs, targets, stage)`,
      `num_outputs(outputs)`, `shape_like(prediction, target)`;
    - `predictor_without_variance`: the predictor, in words, if it gives no variance, which the loss must then not need.

    The members:

    - `trains_one_model`: whether one model is built, of which the members are copies;
    - `set_members(members)`: where the built models are kept, and what else is registered beside them;
    - `trained_members()`: the members that training steps run and that the optimizer updates;
    - `fit_members()`: the members that are trained at any time of a fit, if these are more;
    - `predict_members(*x)` and `n_members`: the outputs and the number of the members that predict;
    - `from_members(members)`: an ensemble of trained members.

    A training step:

    - `member_loss(outputs, targets)`: the value to minimize, a function of the outputs;
    - `training_loss(inputs, targets)`: the same for a loss that also needs the inputs, such as one of perturbed inputs
      or of the residuals of earlier members;
    - `uses_member_steps`, `uses_member_optimizers`: whether members that are LightningModules train by their own
      `training_step` and optimizers.

    The samples:

    - `per_member_batches`: whether members see the samples in orders of their own;
    - `member_rows(size)`: the rows of the data set that each member is trained on, such as those of its folds;
    - `on_shared_batches(reason)`: called where members cannot have batches of their own;
    - `training_loader(loaders)`: the loader to train with.

    The optimization: `make_optimizer()` and `make_schedule(optimizer)`.

    Attributes:
        estimators_: The members, `estimators_[i]` each; the state dict has the keys `estimators_.<i>.<name>`.
        n_outputs: Number of classes or of regression outputs; None until the members have first been run.
        seed: Seed of the initial weights and of the sample orders.
        has_given_optimizer: Whether the user chose the optimizer.
    """

    predictor_without_variance = ""
    trains_one_model = False
    uses_member_steps = True

    def __init__(
        self,
        estimator: Estimator | None,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        *,
        optimizer: arguments.OptimizerChoice = None,
        lr_scheduler: arguments.ScheduleChoice = None,
        criterion: arguments.CriterionChoice = None,
        weights: Sequence[float] | None = None,
        n_outputs: int | None = None,
        vectorize: bool | Literal["auto"] = "auto",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if estimator is None:
            raise ValueError("estimator must be given, as it is not saved: load_from_checkpoint(path, estimator=Net).")
        self.n_estimators = check_count("n_estimators", n_estimators)
        self.n_outputs = check_optional_count("n_outputs", n_outputs)
        if vectorize not in (True, False, "auto"):
            raise ValueError(f'vectorize must be True, False or "auto", got {vectorize!r}.')
        self.vectorize = vectorize
        self.seed = int(torch.randint(2**31, ())) if seed is None else check_count("seed", seed, minimum=0)
        self.optimizer = arguments.parse_optimizer(optimizer)
        self.lr_scheduler = arguments.parse_schedule(lr_scheduler)
        self.has_given_optimizer = optimizer is not None
        self._messages: list[str] = []  # about the members, for the first fit
        members = self._build_members(estimator, estimator_args)
        self.criterion = self._parse_criterion(criterion)
        self.register_buffer("weights", normalized_weights(weights, self.n_estimators), persistent=False)
        self.set_members(members)
        self._checked_stages: set[str] = set()
        self._losses = MeanLoss()
        self._own_samples = OwnSamples(type(self).__name__)
        self._installed = ExitStack()  # the context managers that a fit has entered
        frame = currentframe()
        self._unsaved_arguments = arguments.save_plain_hyperparameters(self, estimator, frame)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_installed": ExitStack()}

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets the name of the running hook 44 times a step, and nn.Module looks for a parameter each time
        if (value is None or type(value) is str) and name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @restricted_classmethod
    def load_from_checkpoint(
        cls: Any,  # noqa: N805  # a classmethod
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load as Lightning does, but run no code of the file, whatever `weights_only` says.

        Raises:
            CheckpointError: If the file is unsafe or is not a checkpoint.
            ValueError: If the class of the members is neither given (`estimator=Net`) nor a class of the program, or
                another argument was not saved, such as an `estimator_args` that holds a function, and is not given.
        """
        read = read_module_checkpoint(checkpoint_path, map_location, hparams_file)
        arguments.refuse_unsaved_arguments(read.metadata.get("ensemble"), kwargs)
        with untrusted_class_names(paths=not kwargs.keys() & {"estimator", "estimators"}):
            return build_module(cls, read, strict, kwargs)

    # --- the members

    def set_members(self, members: Sequence[nn.Module]) -> None:
        """Keep the built models as `estimators_`, stacked where that is possible and faster."""
        have_steps = [False]
        if self.uses_member_steps:
            lightning_members.check_flavor(self, members)
            have_steps = [lightning_members.has_training_step(member) for member in members]
        self._has_lightning_members = all(have_steps)
        if self._has_lightning_members:
            why_not = f"{type(members[0]).__name__} has its own training_step"
        else:
            why_not = optimizers.why_not_step_stacked(self.optimizer, members)
            if any(have_steps):
                self._messages.append("not all members have a training_step, so that criterion= is the loss of all")
        self.estimators_ = as_members(members, self.vectorize, why_not)

    def fit_members(self) -> Members:
        """Return the members that are trained at any time of a fit; LightningModules log through the ensemble."""
        return self.trained_members()

    @property
    def n_members(self) -> int:
        """The number of members that predict."""
        return len(self.estimators_)

    # --- a training step

    def training_loss(self, inputs: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value to minimize in a training step, and the outputs that metrics see.

        Args:
            inputs: The inputs of the batch, which `training_outputs(inputs, targets)` runs.
            targets: The targets of each trained member, (n, B, ...).

        Returns:
            The loss, and the outputs of the trained members, (n, B, ...), or of the ensemble, (1, B, ...).
        """
        outputs = self.training_outputs(inputs, targets)
        return self.member_loss(outputs, targets), outputs

    def training_outputs(self, inputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Run the trained members on the inputs of a training batch, each on its own rows: outputs (n, B, ...).

        The first batch of a fit is checked.
        """
        members = self.trained_members()
        outputs = members(*inputs) if self.has_member_rows else members.forward_shared(*inputs)
        self.check_first_batch(outputs, targets, "train")
        return outputs

    @property
    def uses_member_optimizers(self) -> bool:
        """Whether members train with optimizers of their own `configure_optimizers`."""
        if self.has_given_optimizer or not self._has_lightning_members:
            return False
        return lightning_members.have_optimizers(self.trained_members())

    # --- the optimization

    def make_optimizer(self) -> Optimizer:
        """Make the optimizer of the trained members."""
        if self.uses_member_optimizers:
            return lightning_members.merge_member_optimizers(self.trained_members())
        return optimizers.make_optimizer(self.trained_members(), self.optimizer, self.trainer)

    def schedule_epochs(self) -> int | None:
        """Return the length in epochs of a schedule that has none of its own; None for that of the run."""
        return None

    def make_schedule(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Make the schedule of the optimizer, as `configure_optimizers` returns it, or None."""
        if self.lr_scheduler is None or self.uses_member_optimizers:
            return None
        has_validation, epochs = bool(self.trainer.enable_validation), self.schedule_epochs()
        return optimizers.make_schedule(optimizer, self.lr_scheduler, self.trainer, has_validation, epochs)

    # --- steps

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Train the members; returns the loss, the members' scores and the targets of their rows."""
        members = self.trained_members()
        if self._has_lightning_members:
            batches = self.batches_of_members(batch, len(members), batch_idx)
            results = lightning_members.run_training_steps(members, batches, batch_idx)
        else:
            inputs, targets = self.split_batch(batch, len(members))
            try:
                loss, outputs = self.training_loss(inputs, targets)
            except IndexError as error:  # a class index that does not exist
                self.check_batch(self.training_outputs(inputs, targets), targets, "train")
                raise error from None
            targets = targets[: len(outputs)]
            results = {"loss": loss, "preds": outputs.detach().flatten(0, 1), "target": targets.flatten(0, 1)}
        self._losses.update(results["loss"], 1)
        return results

    def on_train_epoch_end(self) -> None:
        """Log the mean of the steps' losses, once: `log` in each step costs more than the step of a small net."""
        mean = self._losses.compute()
        self._losses = MeanLoss()
        if mean is not None:
            # times the ranks, as Lightning takes the mean of these numbers as a whole one
            weight = 1 if self.own_members is None else len(self.own_members) * self.trainer.world_size
            self.log("train/loss", mean, sync_dist=True, batch_size=weight)

    def mid_epoch_state(self) -> dict[str, Any]:
        """Return what this epoch's means are made of: `SpikeGuard` takes back batches that it leaves out."""
        return {"losses": copy(self._losses)}

    def load_mid_epoch_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what `mid_epoch_state` returned."""
        self._losses = copy(state["losses"])

    def log_of_member(self, index: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log what a member logs in its `training_step`."""
        self.log(f"member_{index}/{name}", value, *args, **kwargs)

    # --- the fit

    def setup(self, stage: str) -> None:
        """Share the seed of rank 0, and replace the training loader by that of the members."""
        self.forget_comparisons()
        if stage != "fit":
            return
        if self._has_lightning_members:
            lightning_members.refuse_manual_optimization(self, self.estimators_)
        if (found := calibration_of(self)) is not None and found.method is not None:
            rank_zero_warn(
                f"{type(self).__name__} is calibrated, and training changes it: call calibrate again after it."
            )
        self._checked_stages.clear()
        self.seed = self.trainer.strategy.broadcast(self.seed)
        self.unstack_where_needed()
        self._log_info(*self._messages)
        self._log_why_sequential(self.trained_members())
        self._messages = []
        self._installed.close()
        self._installed.enter_context(closed_on_exception(self.trainer, self._installed))
        self._installed.enter_context(replaced_train_loaders(self.trainer, self, self.training_loader))
        self._installed.enter_context(lightning_members.attached_members(self.fit_members(), self, stage))

    def teardown(self, stage: str) -> None:
        """Close the context managers that `setup` has entered."""
        self._installed.close()
        self.has_member_rows = False
        self._losses = MeanLoss()

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the trained members, and its schedule."""
        optimizer = self.make_optimizer()
        schedule = self.make_schedule(optimizer)
        return optimizer if schedule is None else {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the seed, the names of the arguments that the hyperparameters lack, and how members run."""
        checkpoint["ensemble"] = {"seed": self.seed, **self.how_members_run()}
        if self._unsaved_arguments:
            checkpoint["ensemble"]["unsaved"] = self._unsaved_arguments

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the seed and, to resume, let members run as they did."""
        kept = checkpoint.get("ensemble", {})
        self.seed = kept.get("seed", self.seed)
        if self._trainer is not None and checkpoint.get("optimizer_states"):
            self.run_members_as(kept)

    # --- torchensemble

    def set_optimizer(self, optimizer_name: str, **kwargs: Any) -> None:
        """Choose the optimizer by torch's name, as in torchensemble."""
        self.optimizer, self.has_given_optimizer = arguments.parse_optimizer((optimizer_name, kwargs)), True
        self.hparams["optimizer"] = self.optimizer
        if why_not := optimizers.why_not_step_stacked(self.optimizer, list(self.estimators_)):
            self.estimators_ = as_sequential(self.estimators_, why_not)

    def set_scheduler(self, scheduler_name: str, **kwargs: Any) -> None:
        """Choose the schedule by torch's name, as in torchensemble; it steps at each epoch's end."""
        self.lr_scheduler = arguments.parse_schedule((scheduler_name, kwargs))
        self.hparams["lr_scheduler"] = self.lr_scheduler

    def set_criterion(self, criterion: Criterion) -> None:
        """Choose the loss, as in torchensemble."""
        self.criterion = self._parse_criterion(criterion)
        self.hparams["criterion"] = arguments.criterion_to_plain(self.criterion)

    # --- helpers

    def _parse_criterion(self, choice: arguments.CriterionChoice) -> Criterion:
        criterion: Criterion = arguments.parse_criterion(choice) or self.default_criterion()
        if self.predictor_without_variance and isinstance(criterion, nn.GaussianNLLLoss):
            raise ValueError(
                f"criterion=GaussianNLLLoss() needs a variance, which {self.predictor_without_variance} does not give: "
                "use VotingRegressor."
            )
        return criterion

    def _build_members(self, estimator: Estimator, estimator_args: Mapping[str, Any] | None) -> list[nn.Module]:
        n = 1 if self.trains_one_model else self.n_estimators
        members, self._messages = build_members(estimator, n, estimator_args, self.seed)
        if self.trains_one_model and len(members) > 1:
            raise ValueError(f"{type(self).__name__} trains one model, got a list of {len(members)}.")
        if isinstance(estimator, list | tuple) and not self.trains_one_model:
            if n not in (len(members), 10):  # 10 when it was not given
                raise ValueError(f"n_estimators={n}, but estimator holds {len(members)} members.")
            self.n_estimators = len(members)
        return members
