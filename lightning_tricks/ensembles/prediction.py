"""The prediction of an ensemble from the outputs of its members: combination, uncertainty and evaluation."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import LightningModule
from lightning_tricks._lightning_compat.loaders import evaluation_loaders
from lightning_tricks._lightning_compat.own_samples import OwnSamples
from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._shared.calibration import Calibration
from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.mean_loss import MeanLoss
from lightning_tricks._shared.modules import eval_mode
from lightning_tricks._shared.tensors import to_double
from lightning_tricks.ensembles.core import combination
from lightning_tricks.ensembles.core.members import Members
from lightning_tricks.ensembles.training_data import inputs_to_predict, unpack


class CombinedPrediction(LightningModule):
    """The part of an `Ensemble` that predicts and evaluates; all but the training of its members.

    Attributes:
        criterion: The loss.
        estimators_: The members.
        weights: The weights of the members; None for equal ones.
        n_outputs: Number of classes or of regression outputs; None until the members have first been run.
        voting_strategy: "soft" for a mean, or "hard" for votes of classifiers.
    """

    criterion: combination.Criterion
    estimators_: Members
    weights: Tensor | None
    n_outputs: int | None
    voting_strategy: str = "soft"
    _checked_stages: set[str]
    _own_samples: OwnSamples

    # --- the prediction, which a family overrides

    def default_criterion(self) -> combination.Criterion:
        """Return the loss that is used where none is given."""
        raise NotImplementedError

    def check_voting_strategy(self, strategy: str) -> str:
        """Return how members are combined, if they can be.

        Raises:
            ValueError: If they cannot.
        """
        return check_choice("voting_strategy", strategy, ("soft", "hard"))

    def combine(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs (n, B, n_outputs) into the prediction, (B, n_outputs)."""
        raise NotImplementedError

    def prediction_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of the combined prediction of the members' outputs (n, B, ...)."""
        raise NotImplementedError

    def member_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the value to minimize, for the members' outputs (n, B, ...) and their targets (n, B, ...)."""
        return combination.mean_with_gradient_of_sum(combination.member_losses(self.criterion, outputs, targets))

    def uncertainty(self, outputs: Tensor) -> combination.Uncertainty:
        """Split the uncertainty of the members' outputs (n, B, n_outputs)."""
        raise NotImplementedError

    def check_batch(self, outputs: Tensor, targets: Tensor, stage: str) -> None:
        """Check the first batch of a stage for shapes and classes that would give a wrong result without an error.

        Raises:
            ValueError: If outputs (n, B, ...) and targets (n, B, ...) do not belong together.
        """
        raise NotImplementedError

    def metrics(self, preds: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the values that an evaluation logs beside its loss."""
        return {}

    def is_counted(self, target: Tensor) -> Tensor | None:
        """Return which rows of targets (..., B) the loss does not ignore; None for all."""
        return None

    def num_counted(self, target: Tensor) -> Tensor:
        """Return the number of rows that loss and metrics are means of, in double precision, without a host read."""
        counted = self.is_counted(target)
        return to_double(torch.full((), len(target), device=target.device) if counted is None else counted.sum())

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of outputs of the ensemble, for outputs of members (n, B, columns)."""
        return outputs.shape[-1]

    def shape_like(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the prediction in the shape in which metrics compare it with the target."""
        return prediction

    def predict_members(self, *x: Tensor) -> Tensor:
        """Return the outputs of each member that predicts for the same rows, (n, B, ...)."""
        return self.estimators_.forward_shared(*x)

    def register_count(self, buffer: str, attribute: str) -> None:
        """Add a number that says which members predict, 0 at first.

        Args:
            buffer: Name of the buffer that holds it in the state dict.
            attribute: Name of the attribute, a plain int, which is read without waiting for the device.
        """
        self.register_buffer(buffer, torch.zeros((), dtype=torch.int64))
        setattr(self, attribute, 0)
        hook = partial(_read_count, buffer, attribute)
        self.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]

    def set_count(self, buffer: str, attribute: str, value: int) -> None:
        """Set a registered count."""
        setattr(self, attribute, value)
        getattr(self, buffer).fill_(value)

    # --- prediction

    def member_outputs(self, *x: Tensor) -> Tensor:
        """Return the outputs of each member: (n_members, B, n_outputs), logits of classifiers."""
        return self.as_matrices(self.predict_members(*x))

    def forward(self, *x: Tensor, calibrated: bool = False) -> Tensor:
        """Return the combined prediction: class probabilities or regression outputs, (B, n_outputs).

        Args:
            *x: The inputs.
            calibrated: Whether to return the probabilities as `calibrate` has fitted them.

        Raises:
            RuntimeError: If they are not calibrated.
        """
        outputs = self.as_matrices(self.predict_members(*x))
        return self.calibrated(outputs) if calibrated else self.combine(outputs)

    def predict(self, *x: Tensor | np.ndarray[Any, Any], calibrated: bool = False) -> Tensor:
        """Predict in evaluation mode and without gradients, whatever the mode; the result is on the CPU."""
        with eval_mode(self), torch.no_grad():
            return cast(Tensor, self(*map(self._as_input, x), calibrated=calibrated)).cpu()

    def predict_uncertainty(self, *x: Tensor | np.ndarray[Any, Any]) -> combination.Uncertainty:
        """Return the prediction and its uncertainty, in evaluation mode and without gradients.

        Those of a calibrated ensemble are of the calibrated probabilities.
        """
        with eval_mode(self), torch.no_grad():
            outputs = self.as_matrices(self.predict_members(*map(self._as_input, x)))
            return self.calibrated_uncertainty(self.uncertainty(outputs), outputs)

    def uncalibrated_logits(self, *x: Tensor) -> Tensor:
        """Return what `calibrate` maps to probabilities: the logarithms of the combined ones, (B, n_outputs)."""
        raise TypeError(
            f"{type(self).__name__} is not a classifier: calibrate and calibrated=True are for probabilities."
        )

    def calibrated(self, outputs: Tensor) -> Tensor:
        """Return the calibrated prediction, (B, n_outputs), of outputs (n, B, n_outputs)."""
        return self.uncalibrated_logits()  # which refuses it

    def calibrated_uncertainty(self, found: combination.Uncertainty, outputs: Tensor) -> combination.Uncertainty:
        """Return the uncertainty of the calibrated prediction, for that of the outputs (n, B, n_outputs)."""
        return found

    def evaluate(self, test_loader: Iterable[Any], return_loss: bool = False) -> Any:
        """Evaluate without a Trainer, in evaluation mode and without gradients.

        Args:
            test_loader: Batches (x, y) or (x1, x2, ..., y).
            return_loss: Whether a classifier's loss is returned as well.

        Returns:
            The accuracy of a classifier in per cent, or a tuple of it and the loss; the loss alone of a regressor, and
            of a classifier whose targets are probabilities. Both are means over samples.
        """
        means = defaultdict[str, MeanLoss](MeanLoss)
        with eval_mode(self), torch.no_grad():
            for batch in test_loader:
                *inputs, target = (self._as_input(part) for part in unpack(batch))
                outputs = self.predict_members(*inputs)
                preds = self.shape_like(self.combine(self.as_matrices(outputs)), target)
                count = int(self.num_counted(target))
                for name, value in self._measure(outputs, preds, target).items():
                    means[name].update(value, count)
        totals = {name: mean.compute() for name, mean in means.items()}
        found = {name: math.nan if total is None else total.item() for name, total in totals.items()}
        loss = found.get("loss", math.nan)
        if "acc" not in found:
            return loss
        return (100 * found["acc"], loss) if return_loss else 100 * found["acc"]

    def as_matrices(self, outputs: Tensor) -> Tensor:
        """Return outputs as (n, B, columns), and set or check `n_outputs`."""
        matrices = outputs.unsqueeze(-1) if outputs.ndim == 2 else outputs
        if matrices.ndim != 3:
            raise ValueError(f"members must return outputs (B, n_outputs), got {tuple(outputs.shape[1:])}.")
        columns = self.num_outputs(matrices)
        if self.n_outputs is None:
            self.n_outputs = columns
        elif self.n_outputs != columns:
            raise ValueError(f"n_outputs={self.n_outputs}, but members return {columns} columns.")
        return matrices

    def member_weights(self, outputs: Tensor) -> Tensor | None:
        """Return the weights of the members whose outputs (n, B, ...) these are; None for equal ones.

        Copies of which none has a weight yet count alike.
        """
        if self.weights is None or len(self.weights) == len(outputs):
            return self.weights
        own = self.weights[: len(outputs)]
        return torch.where(own.sum() > 0, own / own.sum(), torch.full_like(own, 1 / len(own)))

    # --- evaluation

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Evaluate the combined prediction."""
        return self._evaluate(batch, "val", batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Evaluate the combined prediction."""
        return self._evaluate(batch, "test", batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Predict for a batch of inputs, or of inputs and a target, which is ignored."""
        return cast(Tensor, self(*inputs_to_predict(batch)))

    def _evaluate(self, batch: Any, stage: str, batch_idx: int, dataloader_idx: int) -> dict[str, Tensor]:
        *inputs, target = unpack(batch)
        outputs = self.predict_members(*inputs)
        self.check_first_batch(outputs, target.unsqueeze(0), stage)
        preds = self.shape_like(self.combine(self.as_matrices(outputs)), target)
        rows = {"outputs": outputs.transpose(0, 1), "preds": preds, "target": target}
        own, num_own = self._own_samples.take(self._trainer, stage, dataloader_idx, batch_idx, rows)
        own = rows if num_own == 0 else own
        count = self.num_counted(own["target"]) * (num_own != 0)
        values = self._measure(own["outputs"].transpose(0, 1), own["preds"], own["target"])
        # a mean of no rows is NaN, and counts for nothing
        values = {name: torch.where(count > 0, value, 0.0) for name, value in values.items()}
        taken = self._keys_logged_by_callbacks(stage)
        to_log = {key: value for name, value in values.items() if (key := f"{stage}/{name}") not in taken}
        # by a floating-point number of rows: of whole ones Lightning rounds the mean over the ranks
        self.log_dict(to_log, batch_size=count, sync_dist=True)  # type: ignore[arg-type]
        return {"loss": values["loss"], "preds": preds, "target": target}

    def _measure(self, outputs: Tensor, preds: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the loss of outputs (n, B, ...) and the metrics of the prediction (B, ...), means over the rows."""
        return {"loss": self.prediction_loss(outputs, target), **self.metrics(preds, target)}

    def _keys_logged_by_callbacks(self, stage: str) -> set[str]:
        """Return the keys that callbacks such as MetricsMonitor log, whose accuracy is the more exact one."""
        if self._trainer is None:  # the step is called without one
            return set()
        tricks, loaders = callbacks_of_type(self._trainer, TrickCallback), len(evaluation_loaders(self._trainer))
        return {key for trick in tricks for key in trick.logged_keys(stage, loaders)}

    def check_first_batch(self, outputs: Tensor, targets: Tensor, stage: str) -> None:
        """Check a batch, (n, B, ...), if it is the first one of its stage."""
        if stage not in self._checked_stages and not torch.compiler.is_compiling():
            self.check_batch(outputs, targets, stage)
            self._checked_stages.add(stage)

    def _as_input(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor | list | tuple | int | float) and not hasattr(x, "__array__"):
            raise TypeError(
                f"{type(self).__name__} predicts for tensors or arrays of inputs, got a {type(x).__name__}: for the "
                "batches of a loader call trainer.predict(ensemble, loader)."
            )
        tensor = torch.as_tensor(x)
        first = next(iter(self.parameters()), torch.empty(0))
        return tensor.to(first.device, first.dtype if tensor.is_floating_point() else tensor.dtype)


class ClassifierEnsemble(CombinedPrediction):
    """The prediction of classifiers: members give logits (B, n_outputs); the prediction is one of probabilities."""

    outputs_kind = "probabilities"  # of `forward`, for `calibrate` and `ConformalClassifier`
    calibration: Calibration

    def __init__(self) -> None:
        super().__init__()
        self.calibration = Calibration()

    def default_criterion(self) -> combination.Criterion:
        """Return the cross-entropy."""
        return nn.CrossEntropyLoss()

    def combine(self, outputs: Tensor) -> Tensor:
        """Average the members' probabilities, or count their votes."""
        vote = combination.majority if self.voting_strategy == "hard" else combination.mean_probabilities
        return vote(outputs, self.member_weights(outputs))

    def log_prediction(self, outputs: Tensor) -> Tensor:
        """Return the logarithm of the combined probabilities; those of soft voting."""
        return combination.log_mean_probabilities(outputs, self.member_weights(outputs))

    def prediction_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the criterion of the combined log-probabilities, which are logits like others."""
        return self.criterion(self.log_prediction(outputs), target)

    def uncertainty(self, outputs: Tensor) -> combination.Uncertainty:
        """Split the entropy."""
        return combination.classification_uncertainty(outputs, self.member_weights(outputs))

    def uncalibrated_logits(self, *x: Tensor) -> Tensor:
        """Return what `calibrate` maps to probabilities: the logarithms of the combined ones, (B, n_outputs)."""
        if self.voting_strategy == "hard":
            raise ValueError('voting_strategy="hard" gives votes, which cannot be calibrated: use "soft".')
        return self._log_combined(self.as_matrices(self.predict_members(*x)))

    def _log_combined(self, outputs: Tensor) -> Tensor:
        return self.combine(to_double(outputs)).log()

    def calibrated(self, outputs: Tensor) -> Tensor:
        """Return the calibrated prediction, (B, n_outputs), of outputs (n, B, n_outputs)."""
        return cast(Tensor, self.calibration(self._log_combined(outputs))).to(outputs.dtype)

    def calibrated_uncertainty(self, found: combination.Uncertainty, outputs: Tensor) -> combination.Uncertainty:
        """Return the entropy of the calibrated prediction, of which the members' disagreement explains what it can."""
        if self.calibration.method is None:
            return found
        return combination.around_prediction(found, self.calibrated(combination.at_least_single(outputs)))

    def metrics(self, preds: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the accuracy, of class indices."""
        if target.is_floating_point():
            return {}
        hits, counted = preds.argmax(-1) == target, self.is_counted(target)
        hits = hits if counted is None else hits & counted
        return {"acc": (hits.sum() / self.num_counted(target)).float()}

    def is_counted(self, target: Tensor) -> Tensor | None:
        """Return which rows of targets (..., B) do not have the class that the loss ignores."""
        ignored = self._ignore_index
        return None if ignored is None or target.is_floating_point() else target != ignored

    @property
    def _ignore_index(self) -> Any:
        """The class whose rows the criterion ignores: its own, that of a loss within it, or a function's default."""
        criterion: Any = self.criterion
        if isinstance(criterion, nn.Module):
            return next((part.ignore_index for part in criterion.modules() if hasattr(part, "ignore_index")), None)
        return _ignored_by(criterion)

    def check_batch(self, outputs: Tensor, targets: Tensor, stage: str) -> None:
        """Refuse one output, and classes that there are not."""
        columns = self.as_matrices(outputs).shape[-1]
        if columns < 2:
            raise ValueError(
                f"members return {columns} output for each sample; a classifier needs one for each class, so two for a "
                "binary problem."
            )
        if targets.is_floating_point():
            return  # probabilities of the classes
        if targets.ndim != 2:
            raise ValueError(f"{stage}: targets must be class indices (B,), got {tuple(targets.shape[1:])}.")
        ignored = self._ignore_index
        wrong = targets[((targets < 0) | (targets >= columns)) & (targets != (columns if ignored is None else ignored))]
        if len(wrong):
            raise ValueError(
                f"{stage}: class {int(wrong[0])} is not one of the {columns} classes 0 to {columns - 1}, the outputs "
                "of the members."
            )


class RegressorEnsemble(CombinedPrediction):
    """The prediction of regressors: members give numbers (B, n_outputs); the prediction is their mean.

    With `criterion=nn.GaussianNLLLoss()` they give 2 x n_outputs columns: means, then logarithms of variances.
    """

    def default_criterion(self) -> combination.Criterion:
        """Return the mean squared error."""
        return nn.MSELoss()

    def check_voting_strategy(self, strategy: str) -> str:
        """Return "soft": numbers are averaged."""
        if strategy != "soft":
            raise ValueError(
                f"voting_strategy={strategy!r} is for classifiers, and {type(self).__name__} averages numbers: leave "
                "it out."
            )
        return strategy

    def combine(self, outputs: Tensor) -> Tensor:
        """Average the members' means."""
        return combination.weighted_mean(self._means_and_variances(outputs)[0], self.member_weights(outputs))

    def prediction_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the criterion of the combined prediction."""
        if not self._predicts_variance:
            prediction = combination.weighted_mean(outputs, self.member_weights(outputs))
            return self.criterion(prediction, target)
        mixture = self.uncertainty(self.as_matrices(outputs))
        return cast(Tensor, cast(nn.GaussianNLLLoss, self.criterion)(mixture.mean, target, mixture.total))

    def member_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the value to minimize, for the members' outputs (n, B, ...) and their targets (n, B, ...)."""
        if not self._predicts_variance:
            return super().member_loss(outputs, targets)
        criterion = cast(nn.GaussianNLLLoss, self.criterion)
        means, variances = self._means_and_variances(outputs)
        parts = zip(means, targets, cast(Tensor, variances), strict=True)
        return combination.mean_with_gradient_of_sum(
            torch.stack([criterion(mean, target, variance) for mean, target, variance in parts])
        )

    def uncertainty(self, outputs: Tensor) -> combination.Uncertainty:
        """Split the variance."""
        means, variances = self._means_and_variances(outputs)
        return combination.regression_uncertainty(means, variances, self.member_weights(outputs))

    def check_batch(self, outputs: Tensor, targets: Tensor, stage: str) -> None:
        """Refuse targets that broadcasting would spread over outputs of another shape."""
        shape = outputs.shape[1:]
        if self._predicts_variance:
            if outputs.shape[-1] % 2:
                raise ValueError(
                    f"GaussianNLLLoss needs a mean and a log-variance each, members return {tuple(shape)}."
                )
            shape = torch.Size((*shape[:-1], shape[-1] // 2))
        if targets.shape[1:] != shape:
            given, made = tuple(targets.shape[1:]), tuple(shape)
            hint = " (y.unsqueeze(1), or members that return x.squeeze(1))" if len(given) != len(made) else ""
            raise ValueError(f"{stage}: targets of shape {given} do not fit members' outputs of shape {made}{hint}.")
        self.as_matrices(outputs)

    @property
    def _predicts_variance(self) -> bool:
        return isinstance(self.criterion, nn.GaussianNLLLoss)

    def _means_and_variances(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self._predicts_variance:
            return outputs, None
        means, logs = outputs.chunk(2, dim=-1)
        return means, logs.exp()

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of means, without that of the variances."""
        return outputs.shape[-1] // (2 if self._predicts_variance else 1)

    def shape_like(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the prediction in the shape of the target, where both have as many values."""
        return prediction.view_as(target) if prediction.numel() == target.numel() else prediction


def _read_count(buffer: str, attribute: str, ensemble: Any, keys: Any) -> None:
    setattr(ensemble, attribute, int(getattr(ensemble, buffer)))


@lru_cache
def _ignored_by(loss: Any) -> Any:
    """Return the default of a function's `ignore_index`; None if it has none, or no signature, as functions in C."""
    with suppress(ValueError):
        parameter = inspect.signature(loss).parameters.get("ignore_index")
        return parameter.default if parameter else None
    return None
