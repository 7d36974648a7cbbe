"""Export to and import from torchensemble; files are read as data, and run no code."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint
from lightning_tricks.checkpoint_remapping.core.loading import load_weights
from lightning_tricks.ensembles.core.factory import build_members, class_name

_MEMBER = "estimators_"


class TorchensembleInterchange:
    """The methods of an ensemble that export to and import from torchensemble."""

    hparams: Any

    def to_torchensemble(self) -> Any:
        """Return a fitted object of torchensemble's class of the same name, whose `predict` equals this one's.

        Raises:
            ValueError: If torchensemble cannot combine members in this way, such as by unequal weights.
        """
        return _export(self)

    @classmethod
    def from_torchensemble(
        cls, model_or_path: Any, estimator: Any = None, estimator_args: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Import a fitted torchensemble model, or the file that it saved, without running code of the file.

        Args:
            model_or_path: The object, or the path of its `..._ckpt.pth`.
            estimator: Class, factory or module of the members, for a path; an object has members already.
            estimator_args: Arguments of the estimator.
            **kwargs: Further arguments of this class.

        Raises:
            ValueError: If it is of another class, was not fitted, or a path comes without an estimator.
            CheckpointError: If the file is unsafe or does not fit the members.
        """
        members, n_outputs, options = _import(cls.__name__, model_or_path, estimator, estimator_args)
        ensemble = cls.from_members(members, n_outputs=n_outputs, **{**options, **kwargs})
        if class_name(estimator):
            ensemble.hparams.update({"estimator": class_name(estimator), "estimator_args": estimator_args})
        return ensemble

    @classmethod
    def from_members(cls, members: list[nn.Module], **options: Any) -> Any:
        """Return an ensemble of trained members."""
        made: Any = cls
        return made(members, len(members), **options)


def _export(ensemble: Any) -> Any:
    """Return torchensemble's object for an ensemble of the collection, with copies of its members."""
    import torchensemble

    weights: Tensor | None = ensemble.weights
    if weights is not None and not (weights == weights[0]).all():
        raise ValueError(f"torchensemble has no weights of members: to_torchensemble needs equal ones, got {weights}.")
    if not ensemble.n_members:
        raise ValueError(f"{type(ensemble).__name__} has no snapshots yet: fit it first.")
    members = [copy.deepcopy(ensemble.estimators_.member(index)) for index in range(ensemble.n_members)]
    kind = getattr(torchensemble, type(ensemble).__name__)
    options = {"estimator": members[0], "n_estimators": len(members), "cuda": False}
    if getattr(ensemble, "voting_strategy", "soft") != "soft":
        if "voting_strategy" not in inspect.signature(kind).parameters:
            raise ValueError(f"{kind.__name__} of torchensemble has no voting_strategy, it averages.")
        options["voting_strategy"] = ensemble.voting_strategy
    model = kind(**options)
    model.estimators_.extend(member.cpu().eval().requires_grad_(True) for member in members)
    model.n_outputs = ensemble.n_outputs
    model.set_criterion(ensemble.criterion)
    return model


def _import(
    name: str, model_or_path: Any, estimator: Any, arguments: Mapping[str, Any] | None
) -> tuple[list[nn.Module], int | None, dict[str, Any]]:
    """Return the members, the number of outputs and the options of a fitted torchensemble model.

    Args:
        name: Name of the expected class.
        model_or_path: The object, or the path of the file that it saved.
        estimator: Class, factory or module of the members, for a path.
        arguments: Arguments of the estimator.
    """
    if isinstance(model_or_path, str | os.PathLike):
        return _import_file(name, model_or_path, estimator, arguments)
    kind = type(model_or_path).__name__
    if kind != name:
        raise ValueError(f"{name}.from_torchensemble got a {kind}: call {kind}.from_torchensemble, if there is one.")
    members: list[nn.Module] = list(model_or_path.estimators_)
    if not members:
        raise ValueError(f"the {kind} has no members yet: call its fit first.")
    criterion = copy.deepcopy(getattr(model_or_path, "_criterion", None))
    options = {"criterion": criterion.train() if isinstance(criterion, nn.Module) else criterion}
    if hasattr(model_or_path, "voting_strategy"):
        options["voting_strategy"] = model_or_path.voting_strategy
    members = [copy.deepcopy(member).train() for member in members]
    return members, getattr(model_or_path, "n_outputs", None), options


def _import_file(
    name: str, path: str | os.PathLike[str], estimator: Any, arguments: Mapping[str, Any] | None
) -> tuple[list[nn.Module], int | None, dict[str, Any]]:
    if estimator is None:
        raise ValueError(f"{os.fspath(path)!r} holds only weights: give the class of the members, estimator=Net.")
    file = Path(path).name
    if file.endswith("_ckpt.pth") and not file.startswith(f"{name}_"):
        warnings.warn(f"{file!r} has a name that torchensemble does not give to the files of a {name}.", stacklevel=3)
    checkpoint = read_checkpoint(path, key="model")
    weights = checkpoint.state_dict
    count = 1 + max((int(key.split(".")[1]) for key in weights if key.startswith(f"{_MEMBER}.")), default=-1)
    if count == 0:
        raise ValueError(
            f"{os.fspath(path)!r} is not a file of torchensemble: it has no weights called {_MEMBER}.0...."
        )
    members, _ = build_members(estimator, count, arguments, seed=0)
    for index, member in enumerate(members):
        prefix = f"{_MEMBER}.{index}."
        load_weights(member, {key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)})
    n_outputs = checkpoint.metadata.get("n_outputs")
    return members, n_outputs if isinstance(n_outputs, int) else None, {}
