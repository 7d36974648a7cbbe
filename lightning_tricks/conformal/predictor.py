"""What both conformal predictors share: they calibrate a module, and keep the quantiles that they find."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks._lightning_compat.flavor import LightningModule
from lightning_tricks._lightning_compat.hyperparameters import restricted_classmethod
from lightning_tricks._lightning_compat.loaders import lightning_module_in, transferred_batches
from lightning_tricks._shared.calibration import placed
from lightning_tricks._shared.dry_run.shared_state import evaluated_unchanged
from lightning_tricks._shared.modules import eval_mode, explained_arguments
from lightning_tricks._shared.tensors import outside_inference_mode
from lightning_tricks._shared.text import counted
from lightning_tricks.checkpoint_remapping.load_from_checkpoint import build_module, read_module_checkpoint
from lightning_tricks.conformal.functional import check_alpha, group_quantiles, quantiles_of

_STATE = ("quantiles", "calibrated_groups", "penalty", "calibrated_as")


class ConformalPredictor(LightningModule):
    """A module with the quantiles of its scores on calibration data.

    Attributes:
        module: The module, unchanged.
        quantiles: The quantile of each group, (G,); empty before it is calibrated.
        calibrated_groups: The groups, (G,), ascending: classes, or values of the function; 0 where there are none.
        penalty: The weight and `k_reg` of "raps", (2,); 0 for other scores.
        calibrated_as: The arguments that the quantiles belong to, as the bytes of a JSON text.
    """

    quantiles: Tensor
    calibrated_groups: Tensor
    penalty: Tensor
    calibrated_as: Tensor

    def __init__(
        self, module: nn.Module, alpha: float, score: str, groups: Any, arguments: Mapping[str, Any], **others: Any
    ) -> None:
        """Keep the arguments; the quantiles depend on all but `others`."""
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module that is trained, got {module!r}.")
        self.module, self._alpha, self.score, self.groups = module, check_alpha(alpha), score, groups
        kept = {"alpha": self.alpha, "score": score, "groups": groups, **arguments}
        self.hparams.update({name: value for name, value in {**kept, **others}.items() if not callable(value)})
        text = json.dumps({name: "a function" if callable(value) else value for name, value in kept.items()})
        self._inputs = 1  # of a batch, beside its target
        device = self._example().device
        self.register_buffer("quantiles", torch.empty(0, device=device))
        self.register_buffer("calibrated_groups", torch.empty(0, dtype=torch.int64, device=device))
        self.register_buffer("penalty", torch.zeros(2, device=device))
        self.register_buffer("calibrated_as", torch.tensor([*text.encode()], dtype=torch.uint8, device=device))

    @property
    def alpha(self) -> float:
        """The share of errors that is allowed, which the quantiles belong to."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        raise AttributeError(f"alpha={value!r} needs other quantiles: make a new {type(self).__name__} with it.")

    # --- what a kind of prediction adds

    @abstractmethod
    def prediction(self, inputs: Sequence[Any]) -> Tensor:
        """Return the sets or intervals of a batch."""

    @abstractmethod
    def calibration_rows(self, inputs: Sequence[Any], target: Tensor, draws: torch.Generator) -> tuple[Tensor, ...]:
        """Return what calibration needs of the N rows of a batch: first their scores, then their groups, (N,)."""

    @abstractmethod
    def covers(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return which of the sets or intervals of a batch contain the truth, (N,)."""

    def finish_calibration(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scores (n,), groups (n,), all groups (G,) and penalty (2,), for the rows of all batches."""
        return rows[0], rows[1], rows[1].unique(), rows[0].new_zeros(2)

    # --- calibration

    def calibrate(self, loader: Iterable[Any]) -> None:
        """Find the quantiles on the rows of a loader, in place of earlier ones.

        The module runs in evaluation mode, without gradients, on its device. Its weights, buffers and modes, and the
        random state, are as before, also after an error. A row takes the memory of a few numbers.

        Args:
            loader: Batches (x, y) or (x1, x2, ..., y) of rows that the module was not trained on.

        Raises:
            TypeError: If a batch has no target.
            ValueError: If there are too few rows, or outputs, targets or scores are not valid.
        """
        draws = torch.Generator("cpu").manual_seed(0)
        with outside_inference_mode():
            rows, inputs = self.evaluated(loader, self.calibration_rows, draws)
            if bad := int((~rows[0].isfinite()).sum()):
                raise ValueError(
                    f"The scores of {bad} of {len(rows[0])} calibration rows are NaN or infinite: outputs and targets "
                    "must be finite, and a scale a number > 0, no logarithm."
                )
            scores, ids, groups, penalty = self.finish_calibration(rows)
            self.quantiles = group_quantiles(scores, ids, groups, self.alpha)
            self.calibrated_groups, self.penalty, self._inputs = groups, penalty, inputs

    @outside_inference_mode()
    def coverage(self, loader: Iterable[Any]) -> dict[int, float]:
        """Return the share of sets or intervals that hold the truth, for each class or group; under 0 without groups.

        Args:
            loader: Batches as for `calibrate`, of rows that did not calibrate it.
        """

        def found(inputs: Sequence[Any], target: Tensor) -> tuple[Tensor, ...]:
            groups = self.calibration_rows(inputs, target, torch.Generator("cpu"))[1]
            return self.covers(self(*inputs), target), groups

        (held, groups), _ = self.evaluated(loader, found)
        return {int(group): held[groups == group].double().mean().item() for group in groups.unique()}

    def evaluated(self, loader: Iterable[Any], function: Callable[..., Any], *others: Any) -> tuple[list[Tensor], int]:
        """Return what a function makes of all inputs and targets, and others, and how many inputs a batch has."""
        with evaluated_unchanged(self.module, loader):
            batches: list[tuple[Tensor, ...]] = []
            for batch in transferred_batches(self, loader, self._example().device):
                inputs, target = self._inputs_and_target(batch)
                with explained_arguments():
                    batches.append(function(inputs, target, *others))
            if not sum(len(first) for first, *_ in batches):
                raise ValueError("loader has no rows to calibrate with.")
            return [torch.cat(parts) for parts in zip(*batches, strict=True)], len(inputs)

    def _inputs_and_target(self, batch: Any) -> tuple[Sequence[Any], Tensor]:
        if isinstance(batch, list | tuple) and len(batch) > 1:
            *inputs, target = batch
            if isinstance(target, Tensor | np.ndarray):
                return [*map(self._as_input, inputs)], torch.as_tensor(target, device=self._example().device)
        got = type(batch).__name__
        raise TypeError(f"loader must give batches (x, y) or (x1, ..., y) with a tensor y (by collate_fn), got {got}.")

    def group_ids(self, inputs: Sequence[Any], like: Tensor) -> Tensor:
        """Return the group of each of the rows (N, ...) of a tensor, on its device, (N,)."""
        if not callable(self.groups):
            return torch.zeros(len(like), dtype=torch.int64, device=like.device)
        ids = torch.as_tensor(self.groups(*inputs), device=like.device)
        if ids.shape != like.shape[:1] or ids.is_floating_point():
            raise ValueError(f"groups must return whole numbers ({len(like)},), got {tuple(ids.shape)} of {ids.dtype}.")
        return ids.long()

    def row_quantiles(self, inputs: Sequence[Any], like: Tensor) -> Tensor:
        """Return the quantile of each of the rows (N, ...) of a tensor, (N,)."""
        return quantiles_of(self.group_ids(inputs, like), self.calibrated_groups, self.quantiles)

    # --- prediction

    def forward(self, *x: Any) -> Tensor:
        """Return the sets, boolean masks (N, C), or intervals, (N, 2), for inputs on the device of the module."""
        if not len(self.quantiles):
            raise RuntimeError(f"{type(self).__name__} is not calibrated: give loader=, or load its state dict.")
        with eval_mode(self.module), torch.no_grad():
            return self.prediction(x)

    def predict(self, *x: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Predict for inputs on any device; the result is on the CPU."""
        return self.forward(*map(self._as_input, x)).cpu()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Predict for a batch of inputs, or of inputs and a target, which is ignored.

        Raises:
            ValueError: If it has other inputs than the calibration.
        """
        inputs = batch if isinstance(batch, list | tuple) else [batch]
        if not 0 <= len(inputs) - self._inputs <= 1:
            wanted = f"{counted(self._inputs, 'input')} as in calibration, and perhaps a target"
            raise ValueError(f"a batch must hold {wanted}, got {len(inputs)} elements: change the loader.")
        return self.forward(*map(self._as_input, inputs[: self._inputs]))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Do as the module does, if it is a LightningModule."""
        return self._owner_of_hooks().on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Do as the module does, if it is a LightningModule."""
        return self._owner_of_hooks().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Do as the module does, if it is a LightningModule."""
        return self._owner_of_hooks().on_after_batch_transfer(batch, dataloader_idx)

    def _owner_of_hooks(self) -> Any:
        found = lightning_module_in(self.module)
        return super() if found is None else found

    def _example(self) -> Tensor:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return next(filter(Tensor.is_floating_point, tensors), torch.empty(0, device="cpu"))

    def _as_input(self, x: Any) -> Any:
        if not isinstance(x, Tensor | np.ndarray):
            return x
        tensor, like = torch.as_tensor(x), self._example()
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() and like.numel() else tensor.dtype)

    # --- the state

    @restricted_classmethod
    def load_from_checkpoint(cls: Any, checkpoint_path: Any, map_location: Any = None, **kwargs: Any) -> Any:  # noqa: N805
        """Load as Lightning does, but run no code of the file; `module`, and what is no plain value, has to be given.

        Raises:
            CheckpointError: If the file is unsafe or is not a checkpoint.
            ValueError: If it was calibrated with other arguments.
        """
        strict, _ = kwargs.pop("strict", None), kwargs.pop("weights_only", None)  # which it always is
        return build_module(cls, read_module_checkpoint(checkpoint_path, map_location, None), strict, kwargs)

    def get_extra_state(self) -> Tensor:
        """Return how many inputs a batch has, beside its target."""
        return torch.tensor(self._inputs, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Set how many inputs a batch has, beside its target."""
        self._inputs = int(state)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        found = {name: state_dict[prefix + name] for name in _STATE if prefix + name in state_dict}
        own = bytes(self.calibrated_as.tolist())
        saved = bytes(found.get("calibrated_as", self.calibrated_as).tolist())
        if saved != own:
            raise ValueError(
                f"The state dict was calibrated with {saved[:500].decode(errors='replace')}, and this "
                f"{type(self).__name__} has {own.decode()}: give the same arguments, or calibrate it again."
            )
        for name, value in found.items():  # of any size
            setattr(self, name, torch.empty_like(placed(value, self.penalty.device)))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move the state, but keep its precision: a quantile that is rounded covers less."""
        exact = {name: getattr(self, name) for name in _STATE}
        self.quantiles = self.quantiles.float()  # some devices have no double
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for name, value in exact.items():
            setattr(self, name, placed(value, getattr(self, name).device))
        return self
