"""Callbacks that break one promise each, and two that break none: they test the contract itself.

Each mutant is what somebody would have written: the check that must catch it stands beside it.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.nn.utils import clip_grad_norm_

from lightning_tricks import GradientClipping, SeedEverything
from lightning_tricks._callback import TrickCallback
from tests.contract import checks
from tests.contract.case import Case
from tests.contract.checks import Check
from tests.contract.lab import SETTINGS, Lab, Setting
from tests.gradient_clipping import contract as clipping
from tests.seeding import contract as seeding


class Healthy(TrickCallback):
    """Counts optimizer steps and the sum of the losses, and keeps every promise of an observer."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.steps = 0
        self.total = torch.zeros(())

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self.steps, self.total = 0, torch.zeros(())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.total = self.total + self.scale * outputs["loss"].detach()

    def state_dict(self):
        return {"steps": self.steps, "total": self.total.cpu()}

    def load_state_dict(self, state_dict):
        self.steps, self.total = state_dict["steps"], state_dict["total"]


class HealthyOfMany(Healthy):
    """The same, with a state of its own for each instance."""

    allows_several = True

    @property
    def state_key(self) -> str:
        return self._generate_state_key(scale=self.scale)


class ReadsTheHost(Healthy):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.total += self.scale * outputs["loss"].item()


class ReadsAList(Healthy):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.total = torch.tensor(self.scale * outputs["loss"].detach().reshape(1).tolist()[0]) + self.total


class ComparesTensors(Healthy):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += not torch.equal(pl_module.net[0].weight, pl_module.net[4].weight)


class DrawsInValidation(Healthy):
    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        torch.rand(())


class DrawsAtTheEnd(Healthy):
    def on_fit_end(self, trainer, pl_module):
        torch.rand(())


class LeavesAThread(Healthy):
    def on_fit_start(self, trainer, pl_module):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeavesABackwardHook(Healthy):
    def on_train_start(self, trainer, pl_module):
        pl_module.net[0].register_full_backward_hook(lambda *_: None)


class LeavesATensorHook(Healthy):
    def on_train_start(self, trainer, pl_module):
        pl_module.net[0].weight.register_hook(lambda gradient: None)


class LeavesAnAttribute(Healthy):
    def on_train_start(self, trainer, pl_module):
        pl_module.net[0].total_ops = 7


class SpoilsAWeightOnException(Healthy):
    def on_exception(self, trainer, pl_module, exception):
        pl_module.net[0].weight.data.zero_()


class LeavesEvalMode(Healthy):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.net[3].eval()


class LeavesABuffer(Healthy):
    def on_train_start(self, trainer, pl_module):
        pl_module.register_buffer("total_ops", torch.zeros(1))


class KeepsPartOfItsState(Healthy):
    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


class SavesAPath(Healthy):
    def state_dict(self):
        return {**super().state_dict(), "folder": Path("here")}


class KeepsTheModule(Healthy):
    def on_train_end(self, trainer, pl_module):
        self.module = pl_module


class CountsOn(Healthy):
    def setup(self, trainer, pl_module, stage):
        TrickCallback.setup(self, trainer, pl_module, stage)


class RemembersAnException(Healthy):
    broken = False

    def on_exception(self, trainer, pl_module, exception):
        self.broken = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not self.broken:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class TakesAnything(Healthy):
    def __init__(self, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(scale)


class HasNoAnnotation(Healthy):
    def __init__(self, scale=1.0) -> None:
        super().__init__(scale)


class RenamesItsArgument(Healthy):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(factor)


class ChangesItsArgument(Healthy):
    def __init__(self, scale: float = 1.0, names: list[str] | None = None) -> None:
        super().__init__(scale)
        self.names = names
        if names is not None:
            names.append("loss")


class AnnotatesTheWrongType(Healthy):
    def __init__(self, scale: int = 1) -> None:
        super().__init__(scale)


class TakesASecondOne(Healthy):
    allows_several = True

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}{id(self)}"


class SharesItsState(HealthyOfMany):
    @property
    def state_key(self) -> str:
        return "SharesItsState"


class KeepsAnInferenceTensor(Healthy):
    def on_validation_start(self, trainer, pl_module):
        self.total = torch.zeros(())

    def teardown(self, trainer, pl_module, stage):
        self.total += 1


class NeedsTwoEpochs(Healthy):
    """Refuses a run that only tries whether all works."""

    def on_fit_start(self, trainer, pl_module):
        if trainer.max_epochs == 1 and not trainer.fast_dev_run:
            raise ValueError("Train longer.")


class ChangesWhatValidationGives(Healthy):
    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        batch[0].zero_()


class StaysAfterAnException(Healthy):
    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        trainer.fit_loop.watched = True

    def teardown(self, trainer, pl_module, stage):
        del trainer.fit_loop.watched


class _Restores(Healthy):
    """Puts back what it found, whoever came in between."""

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self.found, trainer.strategy.checkpoint_io = trainer.strategy.checkpoint_io, TorchCheckpointIO()
        trainer.strategy.checkpoint_io.inner = self.found

    def teardown(self, trainer, pl_module, stage):
        trainer.strategy.checkpoint_io = self.found
        del self.found

    on_exception = teardown


class RestoresWhatItFound(_Restores):
    pass


class RestoresWhatItFoundToo(_Restores):
    pass


class WritesWhereAFileSays(Healthy):
    def __init__(self, scale: float = 1.0, notes: str | None = None) -> None:
        super().__init__(scale)
        self.notes = notes

    def on_fit_end(self, trainer, pl_module):
        if self.notes:
            Path(self.notes).write_text(f"{self.steps} steps")


class DoesNotListItsPath(Healthy):
    def __init__(self, scale: float = 1.0, report_path: Path | None = None) -> None:
        super().__init__(scale)
        self.report_path = report_path


class WritesToALocalFolderS3(DoesNotListItsPath):
    path_arguments = ("report_path",)


class WritesBesideTheCheckpoints(Healthy):
    def on_fit_end(self, trainer, pl_module):
        path = Path(trainer.default_root_dir, "steps.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{self.steps} steps")


class _Unwatched(GradientClipping):
    """Does not notice the steps that it does not clip."""

    def _refuse_unseen_step(self, trainer, index):
        return lambda *_: None


class ClipsScaledGradients(_Unwatched):
    """The copied snippet: right everywhere but under fp16 with a fused optimizer."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        clip_grad_norm_(pl_module.parameters(), self.max_norm)


class ClipsLocalShards(_Unwatched):
    """Takes a rank's own shard for the gradient."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        shards = [getattr(p.grad, "_local_tensor", p.grad) for p in pl_module.parameters()]
        norm = torch.stack([shard.norm() for shard in shards]).norm()
        for shard in shards:
            shard.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))


class AlmostNeutral(GradientClipping):
    """Multiplies by one minus a rounding error."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        for parameter in pl_module.parameters():
            parameter.grad.mul_(1 - 1e-7)


class ClipsByRank(GradientClipping):
    """Lets the ranks drift apart."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            parameter.grad.mul_(1 / (1 + trainer.global_rank))
        super().on_before_optimizer_step(trainer, pl_module, optimizer)


class SeedsTooLate(SeedEverything):
    """Seeds after the model is built."""

    def setup(self, trainer, pl_module, stage):
        pass

    def on_fit_start(self, trainer, pl_module):
        self.before_module_init()


@dataclass(frozen=True)
class Mutant:
    """A broken case and the check that must catch it, in a setting where that matters."""

    case: Case
    caught_by: Check
    setting: Setting | None = None
    error: type[BaseException] | tuple[type[BaseException], ...] = AssertionError


def _fits(lab: Lab, setting: Setting) -> None:
    assert lab.fit([Healthy()], setting)


_HEALTHY = Case(
    callback=Healthy,
    arguments={"scale": 2.0},
    kind="observer",
    neutral=None,
    why_no_neutral="it only looks",
    instances=1,
    verify=_fits,
)
CONTROLS = (_HEALTHY, replace(_HEALTHY, callback=HealthyOfMany, instances="n"))


def _observer(
    callback: type[Callback],
    caught_by: Check,
    error: type[BaseException] | tuple[type[BaseException], ...] = AssertionError,
    **changes: Any,
) -> Mutant:
    return Mutant(replace(_HEALTHY, callback=callback, **changes), caught_by, error=error)


def _clipping(callback: type[Callback], caught_by: Check, setting: str = "fp32") -> Mutant:
    case = Case(
        callback=callback,
        arguments={"max_norm": 0.5},
        kind="changer",
        neutral={"max_norm": math.inf},
        instances=1,
        verify=lambda lab, at: clipping.verify(lab, at, callback),
    )
    return Mutant(case, caught_by, SETTINGS[setting])


_OTHER = replace(_HEALTHY, callback=RestoresWhatItFoundToo)
MUTANTS = (
    _observer(ReadsTheHost, checks.no_host_reads),
    _observer(ReadsAList, checks.no_host_reads),
    _observer(ComparesTensors, checks.no_host_reads),
    _observer(DrawsInValidation, checks.observer_changes_nothing),
    _observer(DrawsAtTheEnd, checks.observer_changes_nothing),
    _observer(LeavesABackwardHook, checks.leaves_module_alone),
    _observer(LeavesATensorHook, checks.leaves_module_alone),
    _observer(LeavesAnAttribute, checks.leaves_module_alone),
    _observer(SpoilsAWeightOnException, checks.observer_changes_nothing),
    _observer(LeavesEvalMode, checks.observer_changes_nothing),
    _observer(LeavesABuffer, checks.leaves_module_alone),
    _observer(KeepsPartOfItsState, checks.resume),
    _observer(SavesAPath, checks.safe_state, UnpicklingError),
    _observer(KeepsTheModule, checks.pickles_small),
    _observer(CountsOn, checks.fits_twice),
    _observer(RemembersAnException, checks.fits_twice),
    _observer(TakesAnything, checks.signature),
    _observer(HasNoAnnotation, checks.signature),
    _observer(RenamesItsArgument, checks.signature, arguments={"factor": 2.0}),
    _observer(ChangesItsArgument, checks.signature, arguments={"names": []}),
    _observer(AnnotatesTheWrongType, checks.yaml_round_trip, SystemExit, arguments={"scale": 2.5}),
    _observer(TakesASecondOne, checks.several_instances, pytest.fail.Exception),
    _observer(SharesItsState, checks.several_instances, instances="n"),
    _observer(KeepsAnInferenceTensor, checks.every_stage_alone, RuntimeError),
    _observer(KeepsAnInferenceTensor, checks.stages_in_turn, RuntimeError),
    _observer(ChangesWhatValidationGives, checks.every_stage_alone),
    _observer(ChangesWhatValidationGives, checks.stages_in_turn),
    _observer(NeedsTwoEpochs, checks.short_runs, ValueError),
    _observer(LeavesAThread, checks.trainer_as_it_was),
    _observer(StaysAfterAnException, checks.trainer_as_it_was),
    _observer(RestoresWhatItFound, partial(checks.trainer_as_it_was, other=_OTHER)),
    _observer(WritesWhereAFileSays, checks.names_no_file, arguments={"notes": "notes.txt"}),
    _observer(DoesNotListItsPath, checks.names_no_file),
    _observer(WritesToALocalFolderS3, checks.writes_to_no_address, pytest.fail.Exception),
    _observer(WritesBesideTheCheckpoints, checks.writes_to_no_address),
    _clipping(ClipsScaledGradients, checks.works, "fp16 fused"),
    _clipping(ClipsLocalShards, checks.works, "FSDP2"),
    _clipping(AlmostNeutral, checks.neutral_is_absence),
    _clipping(ClipsByRank, checks.ranks_agree, "DDP"),
    Mutant(
        replace(seeding.CASES[0], callback=SeedsTooLate, verify=lambda lab, at: seeding.verify(lab, at, SeedsTooLate)),
        checks.works,
        SETTINGS["fp32"],
    ),
)
