"""What all ensembles share: a LightningModule of members, one optimizer, and steps that return what they computed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import currentframe
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.hyperparameters import restricted_classmethod
from lightning_tricks._lightning_compat.imports import other_import_style
from lightning_tricks._lightning_compat.loaders import replace_train_loaders, uses_distributed_sampler
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.checks import check_count
from lightning_tricks._shared.mean_loss import MeanLoss
from lightning_tricks._shared.modes import eval_mode
from lightning_tricks._shared.step_signatures import step_arguments
from lightning_tricks.checkpoint_remapping.load_from_checkpoint import build_module, read_module_checkpoint
from lightning_tricks.ensembles.core.combination import (
    Criterion,
    Uncertainty,
    mean_with_gradient_of_sum,
    member_losses,
    normalized_weights,
)
from lightning_tricks.ensembles.core.factory import Estimator, build_members, class_name, untrusted_class_names
from lightning_tricks.ensembles.core.members import Members, SequentialMembers, as_members, as_sequential
from lightning_tricks.ensembles.core.sampling import (
    MemberLoader,
    batch_of_member,
    is_shuffled,
    member_orders,
    why_not_reorder,
)
from lightning_tricks.ensembles.core.torchensemble_models import TorchensembleInterchange
from lightning_tricks.ensembles.optimizers import (
    CriterionChoice,
    OptimizerChoice,
    ScheduleChoice,
    criterion_to_plain,
    make_optimizer,
    make_schedule,
    merge_member_optimizers,
    objection_to_stacking,
    parse_criterion,
    parse_optimizer,
    parse_schedule,
    to_plain,
)
from lightning_tricks.gradient_clipping.core.methods import AGC


class Ensemble(TorchensembleInterchange, LightningModule):
    """Base of the ensembles: what they share, whatever the members are trained for and however they are combined.

    Attributes:
        estimators_: The members, `estimators_[i]` each; a state dict holds `estimators_.<i>.<name>`.
        n_outputs: Classes, or regression outputs; None until the members were first run.
        seed: Decides about initial weights and sample orders.
    """

    per_member_batches = False  # whether members may see the samples in orders of their own
    bootstrap = False
    builds_one_model = False  # instead of as many as there are members
    uses_member_steps = True  # whether the training_step of a LightningModule is the loss of a member
    estimators_: Members
    weights: Tensor | None

    def __init__(
        self,
        estimator: Estimator | None,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        *,
        optimizer: OptimizerChoice = None,
        lr_scheduler: ScheduleChoice = None,
        criterion: CriterionChoice = None,
        weights: Sequence[float] | None = None,
        n_outputs: int | None = None,
        vectorize: bool | Literal["auto"] = "auto",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if estimator is None:
            raise ValueError("estimator must say what the members are: load_from_checkpoint(path, estimator=Net).")
        self.n_estimators = check_count("n_estimators", n_estimators)
        self.n_outputs = None if n_outputs is None else check_count("n_outputs", n_outputs)
        if vectorize not in (True, False, "auto"):
            raise ValueError(f'vectorize must be True, False or "auto", got {vectorize!r}.')
        self.vectorize = vectorize
        self.seed = int(torch.randint(2**31, ())) if seed is None else check_count("seed", seed, minimum=0)
        self.optimizer, self.lr_scheduler = parse_optimizer(optimizer), parse_schedule(lr_scheduler)
        self._has_own_optimizer = optimizer is not None
        self._messages: list[str] = []
        members = self._build(estimator, estimator_args)
        self.criterion = parse_criterion(criterion) or self.default_criterion()
        weights_of_members = normalized_weights(weights, self.n_estimators)
        self.register_buffer("weights", weights_of_members, persistent=False)
        self._take_members(members)
        self._checked_stages: set[str] = set()
        self._losses = MeanLoss()
        self._has_per_member_rows = False  # whether a training batch holds rows of each member's own
        self._save_plain_hyperparameters(estimator)

    @restricted_classmethod
    def load_from_checkpoint(
        cls: Any,  # noqa: N805  # a classmethod
        checkpoint_path: str | os.PathLike[str] | IO[bytes],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load as Lightning does, but run no code of the file, whatever `weights_only` says.

        Raises:
            CheckpointError: Of the room `checkpoint_remapping`, if the file is unsafe or is none.
            ValueError: If the class of the members is not given (`estimator=Net`), and none of the program.
        """
        read = read_module_checkpoint(checkpoint_path, map_location, hparams_file)
        with untrusted_class_names():
            return build_module(cls, *read, strict, kwargs)

    # --- what a family says

    def default_criterion(self) -> Criterion:
        """Return the loss where none is given."""
        raise NotImplementedError

    def combine(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs (n, B, n_outputs) into the prediction, (B, n_outputs)."""
        raise NotImplementedError

    def prediction_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Measure the combined prediction of the members' outputs (n, B, ...)."""
        raise NotImplementedError

    def member_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what is minimized, for the members' outputs (n, B, ...) and their targets (n, B, ...)."""
        return mean_with_gradient_of_sum(member_losses(self.criterion, outputs, targets))

    def uncertainty(self, outputs: Tensor) -> Uncertainty:
        """Split the uncertainty of the members' outputs (n, B, n_outputs)."""
        raise NotImplementedError

    def check_batch(self, outputs: Tensor, targets: Tensor, stage: str) -> None:
        """Refuse what would be silently wrong, in the first batch of a stage.

        Raises:
            ValueError: If outputs (n, B, ...) and targets (n, B, ...) do not belong together.
        """
        raise NotImplementedError

    def metrics(self, preds: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return what is logged of an evaluation beside its loss."""
        return {}

    @property
    def trained(self) -> Members:
        """The members that a fit trains."""
        return self.estimators_

    @property
    def n_members(self) -> int:
        """How many members predict."""
        return len(self.estimators_)

    # --- prediction

    def member_outputs(self, *x: Tensor) -> Tensor:
        """Return what each member gives: (n_estimators, B, n_outputs), logits of classifiers."""
        return self._as_matrices(self._outputs(*x))

    def forward(self, *x: Tensor) -> Tensor:
        """Return the combined prediction: class probabilities or regression outputs, (B, n_outputs)."""
        return self.combine(self.member_outputs(*x))

    def predict(self, *x: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Predict in evaluation mode, without gradients, whatever the mode; the result lies on the CPU."""
        with eval_mode(self), torch.no_grad():
            return cast(Tensor, self(*map(self._as_input, x))).cpu()

    def predict_uncertainty(self, *x: Tensor | np.ndarray[Any, Any]) -> Uncertainty:
        """Say what the ensemble predicts and what it does not know, in evaluation mode and without gradients."""
        with eval_mode(self), torch.no_grad():
            return self.uncertainty(self.member_outputs(*map(self._as_input, x)))

    # --- steps

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Train each member; returns the loss, the members' scores and the targets of their rows."""
        if self._has_lightning_members:
            return self._train_lightning_members(batch, batch_idx)
        outputs, targets = self._outputs_and_targets(batch)
        if "train" not in self._checked_stages and not torch.compiler.is_compiling():
            self._check_first_batch(outputs, targets, "train")
        try:
            loss = self.member_loss(outputs, targets)
        except IndexError as error:  # a class that there is not
            self.check_batch(outputs, targets, "train")
            raise error from None
        self._losses.update(loss, 1)
        return {"loss": loss, "preds": outputs.detach().flatten(0, 1), "target": targets.flatten(0, 1)}

    def on_train_epoch_end(self) -> None:
        """Log the mean of the steps' losses, once: `log` in each step costs more than the step of a small net."""
        mean = self._losses.compute()
        self._losses = MeanLoss()
        if mean is not None:
            self.log("train/loss", mean, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Measure the combined prediction."""
        return self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Measure the combined prediction."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Predict for a batch of inputs, or of inputs and a target, which is left out."""
        if isinstance(batch, Tensor):
            return cast(Tensor, self(batch))
        return cast(Tensor, self(*(batch[:-1] if len(batch) > 1 else batch)))

    def _evaluate(self, batch: Any, stage: str) -> dict[str, Tensor]:
        *inputs, target = self._unpack(batch)
        outputs = self._outputs(*inputs)
        if stage not in self._checked_stages and not torch.compiler.is_compiling():
            self._check_first_batch(outputs, target.unsqueeze(0), stage)
        preds = self._shape_like(self.combine(self._as_matrices(outputs)), target)
        loss = self.prediction_loss(outputs, target)
        values = {f"{stage}/{name}": value for name, value in {"loss": loss, **self.metrics(preds, target)}.items()}
        taken = self._keys_logged_by_callbacks(stage)
        own = {key: value for key, value in values.items() if key not in taken}
        self.log_dict(own, batch_size=len(target), sync_dist=True)
        return {"loss": loss, "preds": preds, "target": target}

    def _keys_logged_by_callbacks(self, stage: str) -> set[str]:
        """Return the keys that callbacks log, such as a MetricsMonitor, whose accuracy is the better one."""
        try:
            trainer: Any = self.trainer
        except RuntimeError:  # the step is called without one
            return set()
        counts = trainer.num_val_batches if stage == "val" else trainer.num_test_batches
        loaders = len(counts) if isinstance(counts, Sequence) else 1
        callbacks = getattr(trainer, "callbacks", ())
        tricks = (callback for callback in callbacks if isinstance(callback, TrickCallback))
        return {key for trick in tricks for key in trick.logged_keys(stage, loaders)}

    def _outputs_and_targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return outputs and targets, (n, B, ...) each, of rows of the members' own or of rows for all of them."""
        *inputs, target = self._unpack(batch)
        if self._has_per_member_rows:
            n = len(self.trained)
            if len(target) % n or any(len(value) != len(target) for value in inputs):
                sizes = ", ".join(str(len(value)) for value in (*inputs, target))
                raise ValueError(
                    f"the parts of a batch have {sizes} rows, which are not those of {n} members: collate_fn mixes "
                    "samples. Give shared_order=True."
                )
            outputs, targets = self.trained(*inputs), target.reshape(n, -1, *target.shape[1:])
        else:
            outputs = self.trained.forward_shared(*inputs)
            targets = target.expand(len(outputs), *target.shape)
        return outputs, targets

    def _train_lightning_members(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        n = len(self.trained)
        own = [batch_of_member(batch, i, n) if self._has_per_member_rows else batch for i in range(n)]
        members = cast(Sequence[LightningModule], list(self.trained.children()))
        one_of_each = {type(member): member for member in members}
        rest = {kind: step_arguments(m.training_step, batch, batch_idx)[1:] for kind, m in one_of_each.items()}
        results = [member.training_step(part, *rest[type(member)]) for member, part in zip(members, own, strict=True)]
        if any(result is None for result in results):
            raise ValueError("training_step of a member returned None: a member cannot leave out a step.")
        parts: list[Mapping[str, Any]] = [r if isinstance(r, Mapping) else {"loss": r} for r in results]
        loss = mean_with_gradient_of_sum(torch.stack([part["loss"] for part in parts]))
        self._losses.update(loss, 1)
        returned = [name for name in ("preds", "target") if all(isinstance(p.get(name), Tensor) for p in parts)]
        return {"loss": loss, **{name: torch.cat([part[name].detach() for part in parts]) for name in returned}}

    # --- the run

    def setup(self, stage: str) -> None:
        """Agree with the other ranks about the seed, and give members their own sample orders."""
        if stage != "fit":
            return
        self._checked_stages.clear()
        self.seed = self.trainer.strategy.broadcast(self.seed)
        callbacks: list[Any] = callbacks_of(self.trainer)
        if any(isinstance(getattr(callback, "method", None), AGC) for callback in callbacks):
            self.estimators_ = as_sequential(self.estimators_, "AGC clips the units of each layer by itself")
        self._log_info(*self._messages)
        self._log_why_sequential()
        self._messages = []
        for index, member in enumerate(self.trained.children()):
            if isinstance(member, LightningModule):
                member.trainer = self.trainer
                member.log = partial(self._log_of_member, index)  # type: ignore[method-assign]
                member.setup(stage)
        replace_train_loaders(self.trainer, self, self._member_train_loader)

    def teardown(self, stage: str) -> None:
        """Let go of the Trainer."""
        self._has_per_member_rows = False
        self._losses = MeanLoss()
        for member in self.trained.children():
            if isinstance(member, LightningModule):
                vars(member).pop("log", None)

    def configure_optimizers(self) -> Any:
        """Return one optimizer of all members, and its schedule."""
        if self._has_lightning_members and not self._has_own_optimizer:
            members = cast(Sequence[LightningModule], list(self.trained.children()))
            if is_overridden("configure_optimizers", members[0]):
                return merge_member_optimizers(members)
        optimizer = make_optimizer(self.trained, self.optimizer, self.trainer)
        if self.lr_scheduler is None:
            return optimizer
        has_validation = bool(self.trainer.enable_validation)
        return {
            "optimizer": optimizer,
            "lr_scheduler": make_schedule(optimizer, self.lr_scheduler, self.trainer, has_validation),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the seed, and how the parameters lie, which the optimizer's state depends on."""
        checkpoint["ensemble"] = {"seed": self.seed, "stacked": not isinstance(self.trained, SequentialMembers)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the seed; and, to resume, lay out the parameters as the optimizer's state needs them."""
        kept = checkpoint.get("ensemble", {})
        self.seed = kept.get("seed", self.seed)
        stacked = not isinstance(self.trained, SequentialMembers)
        if self._trainer is None or not checkpoint.get("optimizer_states") or kept.get("stacked", stacked) == stacked:
            return
        if stacked:
            self.estimators_ = as_sequential(self.estimators_, "the checkpoint is of members one after another")
        else:
            self.estimators_ = as_members(list(self.estimators_), vectorize=True)
        if (not isinstance(self.estimators_, SequentialMembers)) != kept["stacked"]:
            raise MisconfigurationException(
                "The checkpoint's optimizer has stacked parameters, and these members cannot be stacked "
                f"({self.estimators_.reason}): resume with the members that it was made with."
            )

    # --- torchensemble

    def set_optimizer(self, optimizer_name: str, **kwargs: Any) -> None:
        """Choose the optimizer by torch's name, as in torchensemble."""
        self.optimizer, self._has_own_optimizer = parse_optimizer((optimizer_name, kwargs)), True
        self.hparams["optimizer"] = self.optimizer
        if objection := objection_to_stacking(self.optimizer):
            self.estimators_ = as_sequential(self.estimators_, objection)

    def set_scheduler(self, scheduler_name: str, **kwargs: Any) -> None:
        """Choose the schedule by torch's name, as in torchensemble; it steps at each epoch's end."""
        self.lr_scheduler = parse_schedule((scheduler_name, kwargs))
        self.hparams["lr_scheduler"] = self.lr_scheduler

    def set_criterion(self, criterion: Criterion) -> None:
        """Choose the loss, as in torchensemble."""
        self.criterion = criterion
        self.hparams["criterion"] = criterion_to_plain(criterion)

    # --- inside

    def _take_members(self, members: Sequence[nn.Module]) -> None:
        remedy = next(filter(None, map(other_import_style, map(type, members))), "")
        if self.uses_member_steps and remedy:
            raise TypeError(f"{type(self).__name__} would leave out a member's training_step: {remedy}")
        self._has_lightning_members = self.uses_member_steps and all(
            isinstance(member, LightningModule) and is_overridden("training_step", member) for member in members
        )
        objection = objection_to_stacking(self.optimizer)
        if self._has_lightning_members:
            objection = f"{type(members[0]).__name__} has a training_step of its own"
        self.estimators_ = as_members(members, self.vectorize, objection)

    def _build(self, estimator: Estimator, arguments: Mapping[str, Any] | None) -> list[nn.Module]:
        n = 1 if self.builds_one_model else self.n_estimators
        members, self._messages = build_members(estimator, n, arguments, self.seed)
        if self.builds_one_model and len(members) > 1:
            raise ValueError(f"{type(self).__name__} trains one model, got a list of {len(members)}.")
        if isinstance(estimator, list | tuple) and not self.builds_one_model:
            if n not in (len(members), 10):  # 10 when it was not given
                raise ValueError(f"n_estimators={n}, but estimator holds {len(members)} members.")
            self.n_estimators = len(members)
        return members

    def _save_plain_hyperparameters(self, estimator: Any) -> None:
        """Save the arguments as plain values, so that a checkpoint of the ensemble loads with `weights_only=True`."""
        frame = currentframe()
        self.save_hyperparameters(
            ignore=["estimator", "optimizer", "lr_scheduler", "criterion"], frame=frame and frame.f_back
        )
        plain = {
            "estimator": class_name(estimator),
            "n_estimators": self.n_estimators,
            "criterion": criterion_to_plain(self.criterion),
            "optimizer": to_plain(self.optimizer) if self._has_own_optimizer else None,
            "lr_scheduler": to_plain(self.lr_scheduler),
            "seed": self.seed,
        }
        self.save_hyperparameters(plain)
        unsafe = [name for name, value in self.hparams.items() if not _is_plain(value)]
        for name in unsafe:
            self.hparams.pop(name)
            cast(Any, self._hparams_initial).pop(name, None)

    def _member_train_loader(self, loaders: Any) -> Any:
        """Return what to train with, of what the user gave for it."""
        if isinstance(loaders, DataLoader) and not isinstance(loaders.dataset, IterableDataset) and not len(loaders):
            size = len(loaders.dataset)  # type: ignore[arg-type]
            raise ValueError(
                f"{type(self).__name__} has nothing to train with: the DataLoader has no batches ({size} samples, "
                f"batch_size={loaders.batch_size}, drop_last={loaders.drop_last})."
            )
        own = self.per_member_batches and self.n_estimators > 1
        self._has_per_member_rows = False
        if self.trainer.overfit_batches:  # type: ignore[attr-defined]
            return loaders  # the same batches over and over
        if objection := why_not_reorder(loaders):
            self._share_batches(objection if own else "")
            return loaders
        # one that is not shuffled has the order that the user wants
        self._has_per_member_rows = own and (is_shuffled(loaders) or self.bootstrap)
        kwargs = (self.trainer.distributed_sampler_kwargs or {}) if uses_distributed_sampler(self.trainer) else {}
        ranks = kwargs.get("rank", 0), kwargs.get("num_replicas", 1)
        n = self.n_estimators if self._has_per_member_rows else 1
        return MemberLoader(loaders, member_orders(loaders, n, self.seed, self.bootstrap, ranks))

    def _share_batches(self, reason: str) -> None:
        self._log_info(f"members share the batches: {reason}" if reason else "")

    def _log_of_member(self, index: int, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.log(f"member_{index}/{name}", value, *args, **kwargs)

    def _outputs(self, *x: Tensor) -> Tensor:
        """Return what each member gives for the same rows, (n, B, ...)."""
        return self.estimators_.forward_shared(*x)

    def _unpack(self, batch: Any) -> Sequence[Tensor]:
        if isinstance(batch, list | tuple) and len(batch) > 1 and all(isinstance(part, Tensor) for part in batch):
            return batch
        raise TypeError(
            f"a batch must be (x, y) or (x1, x2, ..., y) of tensors, got {type(batch).__name__}: give a "
            "LightningModule as estimator, whose training_step takes any batch."
        )

    def _check_first_batch(self, outputs: Tensor, targets: Tensor, stage: str) -> None:
        if stage == "train" and not isinstance(self.trained, SequentialMembers):
            self._log_why_sequential()
        self.check_batch(outputs, targets, stage)
        self._checked_stages.add(stage)

    def _as_matrices(self, outputs: Tensor) -> Tensor:
        """Return outputs as (n, B, n_outputs), and learn or check the last number."""
        matrices = outputs.unsqueeze(-1) if outputs.ndim == 2 else outputs
        if matrices.ndim != 3:
            raise ValueError(f"members must return outputs (B, n_outputs), got {tuple(outputs.shape[1:])}.")
        columns = self._num_outputs(matrices)
        if self.n_outputs is None:
            self.n_outputs = columns
        elif self.n_outputs != columns:
            raise ValueError(f"n_outputs={self.n_outputs}, but members return {columns} columns.")
        return matrices

    def _num_outputs(self, matrices: Tensor) -> int:
        return matrices.shape[-1]

    def _shape_like(self, prediction: Tensor, target: Tensor) -> Tensor:
        return prediction

    def _weights(self, outputs: Tensor) -> Tensor | None:
        """Return the weights of the members that there are so far."""
        if self.weights is None or len(self.weights) == len(outputs):
            return self.weights
        return self.weights[: len(outputs)] / self.weights[: len(outputs)].sum()

    def _as_input(self, x: Any) -> Tensor:
        tensor = torch.as_tensor(x)
        first = next(iter(self.parameters()), torch.empty(0))
        return tensor.to(first.device, first.dtype if tensor.is_floating_point() else tensor.dtype)

    def _log_why_sequential(self) -> None:
        if self.trained.reason:
            self._log_info(f"members run one after another: {self.trained.reason}")

    def _log_info(self, *messages: str) -> None:
        for remark in filter(None, messages):
            rank_zero_info(f"{type(self).__name__}: {remark}.")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
