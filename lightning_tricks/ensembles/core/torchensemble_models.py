"""Export to and import from torchensemble; files are read as data, and run no code."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint
from lightning_tricks.checkpoint_remapping.core.loading import load_weights
from lightning_tricks.ensembles.core.factory import build_members, class_name

_MEMBER = "estimators_"


class TorchensembleInterchange:
    """The methods of an ensemble that export to and import from torchensemble.

    Attributes:
        why_not_torchensemble: Why torchensemble's class of the same name would predict something else, or nothing.
    """

    hparams: Any
    why_not_torchensemble = ""

    def to_torchensemble(self) -> Any:
        """Return a fitted object of torchensemble's class of the same name, whose `predict` equals this one's.

        torchensemble's `io.load` reads the file that its `io.save` writes, also with torch 2.6 and later: the class of
        the criterion, if it is one of torch.nn, is added to `torch.serialization`'s safe globals of this process.

        Raises:
            ValueError: If torchensemble cannot combine members in this way, with the reason.
        """
        import torchensemble

        ensemble: Any = self
        name, n, weights = type(self).__name__, ensemble.n_members, ensemble.weights
        if self.why_not_torchensemble:
            raise ValueError(f"{name}.to_torchensemble: {self.why_not_torchensemble}.")
        if weights is not None and not (weights == weights[0]).all():
            raise ValueError(
                f"torchensemble has no weights of members: to_torchensemble needs equal ones, got {weights}."
            )
        if not n:
            raise ValueError(f"{name} has no snapshots yet: fit it first.")
        kind = getattr(torchensemble, name)
        options = {**ensemble.torchensemble_arguments(), "n_estimators": n, "cuda": False}
        if getattr(ensemble, "voting_strategy", "soft") != "soft":
            if "voting_strategy" not in inspect.signature(kind).parameters:
                raise ValueError(f"{name} of torchensemble has no voting_strategy, it averages.")
            options["voting_strategy"] = ensemble.voting_strategy
        model = kind(**options)
        model.estimators_.extend(map(ensemble.torchensemble_member, range(n)))
        model.n_outputs = ensemble.n_outputs
        if hasattr(ensemble, "n_inputs"):
            model.n_inputs = ensemble.n_inputs
        model.set_criterion(ensemble.criterion)
        loss = type(ensemble.criterion)
        if vars(nn).get(loss.__name__) is loss:
            # without it no torch since 2.6 reads the file that torchensemble saves
            torch.serialization.add_safe_globals([loss])
        return model

    def torchensemble_arguments(self) -> dict[str, Any]:
        """Return the arguments of torchensemble's class beside the number of members."""
        # the class: an object would be registered, and its weights be in files that no other model reads
        return {"estimator": type(self.torchensemble_member(0)), "estimator_args": self.hparams.get("estimator_args")}

    def torchensemble_member(self, index: int) -> nn.Module:
        """Return a copy of a member as torchensemble has it."""
        ensemble: Any = self
        member: nn.Module = copy.deepcopy(ensemble.estimators_.member(index))
        return member.cpu().eval().requires_grad_(True)

    @classmethod
    def member_of_torchensemble(cls, member: nn.Module) -> nn.Module:
        """Return a copy of torchensemble's member as this class has it."""
        return copy.deepcopy(member).train()

    @classmethod
    def options_of_torchensemble(cls, model: Any) -> dict[str, Any]:
        """Return the options of this class that a fitted object of torchensemble tells."""
        names = ("voting_strategy", "shrinkage_rate")
        criterion = copy.deepcopy(getattr(model, "_criterion", None))
        options = {name: getattr(model, name) for name in names if hasattr(model, name)}
        return {"criterion": criterion.train() if isinstance(criterion, nn.Module) else criterion, **options}

    @classmethod
    def estimator_of_torchensemble(cls, weights: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Return the class and the arguments of members with such weights in a file, where they tell; or None."""
        return None

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
        kind, name = type(model_or_path).__name__, cls.__name__
        if isinstance(model_or_path, str | os.PathLike):
            members, n_outputs, options = _import_file(cls, model_or_path, estimator, estimator_args)
        elif kind != name:
            raise ValueError(
                f"{name}.from_torchensemble got a {kind}: call {kind}.from_torchensemble, if there is one."
            )
        elif not len(model_or_path.estimators_):
            raise ValueError(f"the {kind} has no members yet: call its fit first.")
        else:
            members = [cls.member_of_torchensemble(member) for member in model_or_path.estimators_]
            n_outputs = getattr(model_or_path, "n_outputs", None)
            options = cls.options_of_torchensemble(model_or_path)
        ensemble = cls.from_members(members, n_outputs=n_outputs, **{**options, **kwargs})
        if class_name(estimator):
            ensemble.hparams.update({"estimator": class_name(estimator), "estimator_args": estimator_args})
        return ensemble

    @classmethod
    def from_members(cls, members: list[nn.Module], **options: Any) -> Any:
        """Return an ensemble of trained members."""
        made: Any = cls
        return made(members, len(members), **options)


def _import_file(
    cls: Any, path: str | os.PathLike[str], estimator: Any, arguments: Mapping[str, Any] | None
) -> tuple[list[nn.Module], int | None, dict[str, Any]]:
    """Return the members, the number of outputs and the options that a file of torchensemble tells."""
    name, file = cls.__name__, Path(path).name
    if file.endswith("_ckpt.pth") and not file.startswith(f"{name}_"):
        warnings.warn(f"{file!r} has a name that torchensemble does not give to the files of a {name}.", stacklevel=4)
    checkpoint = read_checkpoint(path, key="model")
    weights = checkpoint.state_dict
    estimator, arguments = (
        (estimator, arguments) if estimator else cls.estimator_of_torchensemble(weights) or (None, None)
    )
    if estimator is None:
        raise ValueError(f"{os.fspath(path)!r} holds only weights: give the class of the members, estimator=Net.")
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
