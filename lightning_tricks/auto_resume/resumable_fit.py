"""One fit that can be stopped at any moment: when it is saved, how it is stopped, and how it is taken up again."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import (
    FitWatcher,
    batches_done,
    checkpoint_of,
    choose_what_to_resume,
    end_workers,
    forget_restart,
    is_at_end_of_epoch,
    is_between_steps,
    skip_finders,
    skip_sanity_check,
    slurm_requeue_signal,
    watch_fit,
)
from lightning_tricks._lightning_compat.fit_end import call_after_training, give_back_epoch, give_back_scheduler
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.ranks import gather_objects
from lightning_tricks._shared.rng import isolated_rng, restore_rng_state
from lightning_tricks.auto_resume.core.attributes.comparison import differing
from lightning_tricks.auto_resume.core.attributes.model_structure import groups_of, make_room
from lightning_tricks.auto_resume.core.checkpoint_files import (
    FORMAT,
    Manifest,
    NewerFormatError,
    differences,
)
from lightning_tricks.auto_resume.core.data.rng_state import pack_streams, unpack_streams
from lightning_tricks.auto_resume.core.rank_agreement import Agreement
from lightning_tricks.auto_resume.core.safe_loading import objects_in, read_as_data
from lightning_tricks.auto_resume.core.signals import StopRequest, send_output_to
from lightning_tricks.auto_resume.epoch_start_replay import replay_epoch_start
from lightning_tricks.auto_resume.loader_tracker import LoadersOfFit
from lightning_tricks.auto_resume.module_state import identity, shape_differences
from lightning_tricks.auto_resume.rank_state import EXCHANGED, RankState
from lightning_tricks.auto_resume.unsafe_objects import describe_object
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.callback import AutoResume
    from lightning_tricks.auto_resume.run_files import Surroundings

KEY = "auto_resume"  # in a checkpoint
_SECONDS_BETWEEN_STATUS = 10.0

# Compared after a resume: of what ranks keep these, of a checkpoint all but those, which each save writes anew
_KEPT_BY_RANKS = ("rng", "trainer", "buffers", "gradients", "callbacks")
_NOT_COMPARED = (KEY, "epoch", "global_step", "loops", "pytorch-lightning_version", "hparams_name", "hyper_parameters")

# Moments of a save
_AFTER_BATCH, _AT_EPOCH_START, _AT_END = "after a batch", "at an epoch's start", "at the end"


class GuardedFit(FitWatcher):
    """Saves a fit at the boundaries of its steps, stops it there when asked to, and takes it up from there.

    A boundary is the moment after a batch with an optimizer step, when all that belongs to it is done and logged, and
    before the validation that may follow; or the moment before the first batch of an epoch.

    Args:
        callback: With the settings.
        trainer: That fits.
        module: That is fitted.
        around: Of this fit, with the folder for its checkpoints.
    """

    def __init__(self, callback: AutoResume, trainer: Trainer, module: LightningModule, around: Surroundings) -> None:
        self.settings, self.trainer, self.module, self.around = callback, trainer, module, around
        self.folder = around.folder
        self.resumed: Manifest | None = None
        self._ended: Manifest | None = None  # written at the end of this fit
        requeue = slurm_requeue_signal(trainer)
        detach = self._detach if callback.on_hangup == "detach" else None
        self.request = StopRequest([name for name in callback.signals if name != requeue], detach)
        self.loaders = LoadersOfFit(self.request)
        self.rank: RankState
        self.agreement: Agreement
        self._identity: Mapping[str, Any] = {}
        self._runs = False  # before that, a tuner may train in a fit of its own
        self._moment = ""  # of the checkpoint that is to be taken up; empty once that is done
        self._own: Mapping[str, Any] = {}  # this rank's part of it
        self._shared: Mapping[str, Any] = {}  # the part of all ranks
        self._other_ranks = False  # wrote it
        self._made: dict[str, Any] = {}  # what loaders were made from: "training" and "validation"
        self._epoch: Mapping[str, Any] | None = None  # what the hooks of the epoch's start found
        self._narrowed: Mapping[str, Any] | None = None  # weights that were loaded in another precision
        self._last_step = self._saved_step = -1
        self._told_objects: set[str] = set()
        self._saved_at = self._told_at = time.monotonic()
        choosing = choose_what_to_resume(trainer, self._choose)
        watching = watch_fit(trainer, self)
        ending = call_after_training(trainer, self.train_ends)
        self._undo = [choosing, watching, ending, self.loaders.release, self.request.end]

    def release(self) -> None:
        """Leave the Trainer and its loaders as they were."""
        for undo in self._undo:
            undo()

    # -- taking up

    def _choose(self, given: str | os.PathLike[str] | None) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest checkpoint on all ranks, and see that it is this run's."""
        self._identity = identity(self.module, os.environ.get("PL_GLOBAL_SEED"))
        self.rank = RankState(self.trainer, self.module)
        manifest, problem = None, ""
        if self.trainer.is_global_zero:
            try:
                manifest = self.folder.newest(lambda sentence: rank_zero_warn(f"AutoResume: {sentence}"))
            except (NewerFormatError, OSError) as error:
                problem = str(error)
            if manifest is not None and self._is_newer(given, manifest):
                manifest = None
        manifest, problem = self.trainer.strategy.broadcast((manifest, problem))
        if problem:
            raise MisconfigurationException(f"AutoResume: {problem}")
        if manifest is None:
            return None
        path = self.folder.path / manifest.file
        self._compare(manifest, path)
        checkpoint = self._read(path)
        self._take(checkpoint)
        self.resumed = manifest
        where = "was at its end" if manifest.finished else f"goes on at epoch {manifest.epoch}, step {manifest.step}"
        rank_zero_info(f"AutoResume: the run {where} ({path}).")
        return path, checkpoint

    def _is_newer(self, given: str | os.PathLike[str] | None, manifest: Manifest) -> bool:
        """Say which is resumed where the user gave a checkpoint, too, and whether it is that one."""
        if given is None:
            return False
        newer = Path(given).exists() and Path(given).stat().st_mtime > manifest.written
        which, other = (given, manifest.file) if newer else (manifest.file, given)
        rank_zero_info(f"AutoResume: {str(which)!r} is newer than {str(other)!r} and is resumed.")
        return newer

    def _compare(self, manifest: Manifest, path: Path) -> None:
        found = differences(manifest.run, self._identity)
        shapes = [phrase for phrase in found if phrase.startswith("parameters was")]
        if shapes:
            found.remove(shapes[0])
            found += shape_differences(self.module, _as_data(path)["state_dict"])
        if not found:
            return
        what = f"{self.folder.path} holds checkpoints of another run: {'; '.join(found)}."
        if not self.settings.force:
            raise MisconfigurationException(
                f"AutoResume: {what} Choose another dirpath to begin afresh, or force=True to go on from it."
            )
        rank_zero_warn(f"AutoResume(force=True): {what} The run goes on from it.")

    def _read(self, path: Path, *, mmap: bool = False) -> dict[str, Any]:
        if self.settings.allow_pickle:
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
            return checkpoint
        checkpoint = _as_data(path, mmap=mmap)
        for place, kind in objects_in(checkpoint).items():
            raise MisconfigurationException(
                f"AutoResume: {describe_object(self.trainer, self.module, place, kind)} in {path}. Objects are not "
                "restored, as that runs code of the file. If nobody else writes to that directory, "
                "AutoResume(..., allow_pickle=True) restores them."
            )
        return checkpoint

    def _take(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep what is restored later than the Trainer's own part."""
        written = checkpoint[KEY]["format"]
        if written != FORMAT:
            raise MisconfigurationException(
                f"AutoResume: the checkpoints in {self.folder.path} are of format {written}, this release writes "
                f"{FORMAT}. Choose another dirpath, or finish the run with the release that began it."
            )
        ranks: Sequence[Mapping[str, Any]] = checkpoint[KEY]["ranks"]
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        self._moment, self._own = checkpoint[KEY]["moment"], ranks[rank % len(ranks)]
        self._shared, self._made = checkpoint[KEY]["shared"], dict(self._own["made"])
        make_room(self.module, checkpoint["state_dict"], self._shared["buffers"])
        self._undo.append(skip_finders(self.trainer))
        own, saved = _tensors(self.module.state_dict()), _tensors(checkpoint["state_dict"])
        if any(name in own and own[name].dtype != value.dtype for name, value in saved.items()):
            self._narrowed = saved
        self._other_ranks = len(ranks) != world_size
        if self._other_ranks:
            self._own = {**self._own, "buffers": {}, "trainer": {**self._own["trainer"], "results": []}}
            rank_zero_warn(
                f"AutoResume: the run had {len(ranks)} ranks and goes on with {world_size}. Weights, optimizer and "
                "position are restored. The shares of samples and the random numbers of the ranks are others than they "
                "would have been, and the means of this epoch lack what was logged before."
            )

    def fit_starts(self) -> None:
        """Note what a later save is compared with; restore what was loaded before the Trainer chose the precision."""
        if self.trainer.is_global_zero:
            self.around.fit_starts(self.resumed)
        self.agreement = Agreement()
        self.rank.fit_starts(self._shared)
        narrowed, self._narrowed = self._narrowed, None
        if narrowed is not None:
            with torch.no_grad():
                for name, value in _tensors(self.module.state_dict()).items():
                    if name in narrowed:
                        value.copy_(narrowed[name])

    def signals_registered(self) -> None:
        """Heed signals from here on; a fit that had ended gives its results again."""
        self._runs = True
        if not self.request.listen():
            rank_zero_warn("AutoResume: signals can be heeded in the main thread only; periodic saves go on.")
        if self._moment == _AT_END:
            self.rank.restore_structure(self._shared)
            self.rank.restore_results(self._own)
            self._withdraw()
            for averaging in self._averaging():
                give_back_scheduler(self.trainer, averaging)
            skip_sanity_check(self.trainer)

    def epoch_of_loaders(self, epoch: int) -> int:
        """The epoch that is taken up, also where the loaders are made before the Trainer's loops know of it."""
        return int(self._own["loaders"]["epoch"]) if self._moment else epoch

    def loaders_come(self, kind: str) -> None:
        """Note what loaders are made from, or put that back: streams, and attributes such as a batch size."""
        if not self._moment:
            self._made[kind] = {"streams": pack_streams(), "attributes": self.rank.attributes()}
        elif kind in self._made:
            self.rank.restore_attributes(self._made[kind]["attributes"])
            unpack_streams(self._made[kind]["streams"])

    def train_loaders_ready(self, loaders: list[Any], all_sized: bool) -> None:
        """Follow the loaders, or take them to where they were."""
        self.loaders.follow(loaders, all_sized, self._own["loaders"] if self._moment else None)

    def validation_loaders_ready(self, loaders: list[Any]) -> None:
        """Follow the loaders."""
        self.loaders.follow_validation(loaders)

    def train_starts(self) -> None:
        """Go on after the end of a fit that was given more epochs."""
        if self._moment == _AT_END:
            self._moment = ""
            forget_restart(self.trainer)
            self.loaders.make_iterators(self.trainer, self._own["loaders"])
            self.rank.restore_structure(self._shared)
            self.rank.restore(self._own)
            self._say([*self.rank.failed, *self._own["not_saved"]])
            self._own = self._shared = {}

    def is_resumed(self) -> bool:
        """Whether the epoch that begins goes on where another process was stopped."""
        return self._runs and bool(self._moment)

    def epoch_hooks_come(self) -> None:
        """Note what the hooks of the epoch's start draw from."""
        if not self._moment:
            groups = groups_of(self.module, self.trainer.optimizers)
            self._epoch = {"streams": pack_streams(), "groups": groups, "attributes": self.rank.attributes()}

    def epoch_starts(self) -> None:
        """Note what the epoch's order comes from."""
        if not self._moment:
            self.loaders.note("iterator")

    def epoch_started(self, finish_batch: Callable[[], None]) -> None:
        """Go on where another process was stopped; else save between two epochs."""
        if not self._runs:
            return
        moment, self._moment = self._moment, ""
        if moment:
            self._load_mid_epoch_state()
            self._last_step = self._saved_step = self.trainer.global_step
            if moment == _AFTER_BATCH:
                finish_batch()
            return
        self.loaders.note("batch")
        epoch, every = self.trainer.current_epoch, self.settings.every_n_epochs
        asked, timed = self.agreement.ask(bool(self.request.received), self._is_time())
        if epoch > 0 and (asked or timed or (every and epoch % every == 0)):
            self._save(_AT_EPOCH_START)
        if asked:
            self._leave()

    def _load_mid_epoch_state(self) -> None:
        """Bring the epoch to where it was: its hooks are called again, its loaders skip, all else is put back."""
        trainer, own = self.trainer, self._own
        forget_restart(trainer)
        self.rank.restore_structure(self._shared)
        self._epoch = own["epoch"]
        if self._epoch is not None:
            self.rank.restore_attributes(self._epoch["attributes"], before_hooks=True)
            unpack_streams(self._epoch["streams"])
            replay_epoch_start(trainer, self.module, self._epoch["groups"], self._load_again)
            for averaging in self._averaging():  # it makes no scheduler in the epoch for batch statistics
                give_back_scheduler(trainer, averaging)
            self.rank.restore_structure(self._shared)
        self.loaders.return_to_places(trainer, own["loaders"])
        self.rank.restore(own)
        self._say_what_differs()
        self._withdraw()
        self._own = self._shared = {}

    def _load_again(self) -> None:
        """Load weights and the states of the optimizers from the checkpoint that is resumed."""
        checkpoint = self._read(self._path_resumed())
        self.module.on_load_checkpoint(checkpoint)
        self.module.load_state_dict(checkpoint["state_dict"], strict=False)
        for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _path_resumed(self) -> Path:
        if self.resumed is None:
            raise RuntimeError("no checkpoint is resumed.")
        return self.folder.path / self.resumed.file

    def _say_what_differs(self) -> None:
        """Compare what was restored with what was saved, and name what is not the same."""
        own, now = self._own, self.rank.collect()
        kept = [name for name in _KEPT_BY_RANKS if name in own and not (name == "callbacks" and self._other_ranks)]
        found = [*self.rank.failed, *_attributes_that_differ(own, now)]
        found += differing({name: own[name] for name in kept}, now)
        found += self._differs_from_file()
        made_again = {place for place in self.rank.not_saved(now) if place.endswith(EXCHANGED)}  # by hooks
        self._say([*found, *(place for place in own["not_saved"] if place not in made_again)])

    def _differs_from_file(self) -> list[str]:
        """Return where what the Trainer saves now is other than what it saved then; every rank has to call it."""
        with isolated_rng():  # which hooks may draw from
            checkpoint = checkpoint_of(self.trainer)
        if not self.trainer.is_global_zero:
            return []
        saved: dict[str, Any] = {}
        with suppress(MisconfigurationException):  # a file that somebody wrote since it was read
            saved = self._read(self._path_resumed(), mmap=True)
        places = differing({name: saved[name] for name in saved if name not in _NOT_COMPARED}, checkpoint)
        callbacks = callbacks_of(self.trainer)
        clocks = tuple(f"callbacks.{one.state_key}." for one in callbacks if isinstance(one, Timer))
        return [place for place in places if not place.startswith(clocks)]

    def _say(self, found: Sequence[str]) -> None:
        """Warn of what is not as it was, on any rank, and tell the callbacks that want to know."""
        ranks = gather_objects((list(found), self.loaders.differences))
        places = list(dict.fromkeys(place for found, _ in ranks for place in found))
        sentences = list(dict.fromkeys(sentence for _, differences in ranks for sentence in differences))
        for callback in callbacks_of(self.trainer):
            if isinstance(callback, TrickCallback):
                callback.resumed(self.trainer, [*places, *("the data" for _ in sentences[:1])])
        if places:
            sentences.append(
                f"not restored: {summed_up(places)}. The run goes on and may diverge from the one that was never "
                "stopped. Keep such values in a state_dict, or in on_save_checkpoint and on_load_checkpoint."
            )
        for sentence in sentences:
            rank_zero_warn(f"AutoResume: {sentence}")

    # -- saving

    def batch_done(self) -> None:
        """Save, or stop, where it is time for that."""
        if not self._runs:
            return
        trainer = self.trainer
        step = trainer.global_step
        if not is_between_steps(trainer) or (step == self._last_step and not self.module.automatic_optimization):
            return
        self._last_step = step
        asked, timed = self.agreement.ask(bool(self.request.received), self._is_time())
        every = self.settings.every_n_train_steps
        if asked or timed or (every and step % every == 0 and step != self._saved_step):
            self._save(_AFTER_BATCH)
        if asked:
            self._leave()
        if time.monotonic() - self._told_at > _SECONDS_BETWEEN_STATUS:
            self._tell("running")

    def train_ends(self) -> None:
        """Save the end, when no hook changes it any more."""
        if not self._runs or self.settings not in callbacks_of(self.trainer):
            return  # a tuner's fit, which leaves the callbacks out
        self._save(_AT_END)
        self._tell("finished")

    def fit_ends(self) -> None:
        """Note what was logged after the end; leave the random streams where the run left them, if it had ended."""
        if self._ended is not None and self.trainer.is_global_zero:
            self.around.ended(self._ended)
        if self._moment:
            forget_restart(self.trainer)
            for averaging in self._averaging():
                give_back_epoch(self.trainer, averaging)
            restore_rng_state(self._own["rng"])

    def _averaging(self) -> list[StochasticWeightAveraging]:
        callbacks = callbacks_of(self.trainer)
        return [one for one in callbacks if isinstance(one, StochasticWeightAveraging)]

    def _withdraw(self) -> None:
        """Take back what was logged after the save that is resumed, by this process as well."""
        if self.trainer.is_global_zero and self.resumed is not None:
            self.around.withdraw(self.resumed)

    def _is_time(self) -> bool:
        if not self.trainer.is_global_zero:
            return False
        return time.monotonic() - self._saved_at >= self.settings.seconds_between_saves

    def _save(self, moment: str) -> None:
        trainer = self.trainer
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        at_end = moment == _AT_END or (moment == _AFTER_BATCH and is_at_end_of_epoch(trainer))
        own = self.rank.collect()
        own |= {"made": self._made, "epoch": self._epoch, "loaders": self.loaders.state(trainer, at_end)}
        own["not_saved"] = self.rank.not_saved(own)
        ranks = gather_objects(own)
        self._tell_not_saved(ranks)
        with isolated_rng():  # the hooks of a save are none of the run's
            checkpoint = checkpoint_of(trainer)
        failure = ""
        if trainer.is_global_zero:
            shared = self.rank.shared()
            checkpoint[KEY] = {"format": FORMAT, "moment": moment, "shared": shared, "ranks": ranks}
            failure = self._write(checkpoint, finished=moment == _AT_END)
        failure = trainer.strategy.broadcast(failure)
        if failure and self.settings.on_failed_save == "raise":
            raise OSError(failure)
        if failure:
            rank_zero_warn(f"{failure} Training goes on.")
        else:
            self._told_at = -math.inf  # the status is due

    def _write(self, checkpoint: Mapping[str, Any], finished: bool) -> str:
        """Write a checkpoint and remove old ones; return why that failed, or nothing."""
        trainer = self.trainer
        try:
            for logger in trainer.loggers:  # or what was logged before is lost when the process is killed
                logger.save()
            manifest = self.folder.save(
                checkpoint,
                epoch=trainer.current_epoch,
                step=trainer.global_step,
                batches=batches_done(trainer),
                finished=finished,
                loggers=self.around.loggers.records(),
                run=self._identity,
            )
            self.around.saved(manifest)
            self._ended = manifest if finished else None
            self.folder.prune(self.settings.keep_last)
            return "" if self.settings.allow_pickle else self._objects_saved(self.folder.path / manifest.file)
        except Exception as error:  # of a disk, a logger, or what pickling an object of the user's raises
            return (
                f"AutoResume: step {trainer.global_step} could not be saved in {self.folder.path}: {error}. The "
                "checkpoint before it is whole."
            )

    def _tell_not_saved(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Say what a resumed run will lack, once."""
        found = dict.fromkeys(place for own in ranks for place in own["not_saved"] if not place.endswith(EXCHANGED))
        new = [place for place in found if place not in self._told_objects]
        self._told_objects.update(new)
        if new:
            rank_zero_warn(
                f"AutoResume: changed in this fit, and cannot be saved: {summed_up(new)}. A resumed run begins with "
                "them anew. Keep plain values, tensors or what has a state_dict there, or save them in "
                "on_save_checkpoint."
            )

    def _objects_saved(self, path: Path) -> str:
        """Return why a checkpoint that was just written could not be resumed, once for each reason; or nothing."""
        try:
            found = objects_in(read_as_data(path, mmap=True)).items()
            saved = [describe_object(self.trainer, self.module, place, kind) for place, kind in found]
        except CheckpointError as error:
            saved = [str(error)]
        new = [phrase for phrase in saved if phrase not in self._told_objects]
        self._told_objects.update(new)
        if not new:
            return ""
        return (
            f"AutoResume: {'; '.join(new)}. A run is not resumed from a checkpoint with objects, as that runs code of "
            "the file. Save plain values and tensors, such as float(x) or x.tolist(), or set "
            "AutoResume(..., allow_pickle=True)."
        )

    def _tell(self, state: str) -> None:
        """Write the status file."""
        self._told_at = time.monotonic()
        trainer = self.trainer
        if not trainer.is_global_zero:
            return
        try:
            self.folder.write_status(
                state=state,
                epoch=trainer.current_epoch,
                step=trainer.global_step,
                max_epochs=trainer.max_epochs,
                max_steps=trainer.max_steps,
            )
        except OSError:
            return  # a full disk is reported where a checkpoint is lost

    # -- stopping

    def _leave(self) -> NoReturn:
        name = self.request.received or "a signal to another rank"
        step = self.trainer.global_step
        rank_zero_info(f"AutoResume: stopped by {name} at step {step}. Run the same command again to go on.")
        self._tell("stopped")
        end_workers(self.trainer)  # nobody else does in a forked rank
        raise SystemExit(self.settings.exit_code)

    def _detach(self) -> None:
        send_output_to(self.folder.log_path)


def _attributes_that_differ(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the attributes that changed in both processes, and to different values."""
    ours, theirs = (state["attributes"]["values"] for state in (saved, now))
    for place in ours.keys() & theirs.keys():
        if isinstance(ours[place]["value"], dict) and ours[place]["value"].get("kind") == "clock":
            continue  # which is not put back
        if any(True for _ in differing(ours[place]["value"], theirs[place]["value"])):
            yield place


def summed_up(places: Sequence[str], most: int = 5) -> str:
    """Return the first of many names, and how many there are beside them."""
    more = len(places) - most
    return ", ".join(places[:most]) + (f" and {more} more" if more > 0 else "")


def _tensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, which may hold what `get_extra_state` returns, too."""
    return {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def _as_data(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    try:
        return read_as_data(path, mmap=mmap)
    except CheckpointError as error:
        raise MisconfigurationException(f"AutoResume: {error}") from error
