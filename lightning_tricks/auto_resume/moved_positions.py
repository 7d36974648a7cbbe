"""Saved positions of training loaders, where the run goes on with other batches, ranks or workers.

Of one order of all samples, torch's DistributedSampler gives rank r of R what lies at r, r + R, r + 2R and so on, and
the order is the same for any number of ranks above one. After k batches on each of R ranks, the samples that were read
are those of k * R / S batches on each of S ranks: the epoch continues there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from lightning_tricks._lightning_compat.flavor import MisconfigurationException, Trainer, rank_zero_warn
from lightning_tricks.auto_resume.core.data.tracked_loader import MOVED_KEY, POSITION_KEY, num_shares
from lightning_tricks.auto_resume.parts import SavedState, Settings


def continued_positions(
    loaders: Sequence[Any], saved: SavedState, scale: float | None, settings: Settings, trainer: Trainer
) -> Mapping[str, Any]:
    """Return the saved state of training loaders, as those of now continue it.

    Args:
        loaders: The training loaders.
        saved: What is restored.
        scale: How many times as large as before the batches are; None if nothing changed in the loaders.
        settings: The choices of the user.
        trainer: The Trainer of the fit.

    Raises:
        MisconfigurationException: If data that only an iterable dataset shares out are to be read by another number of
            ranks or workers.
    """
    state, of_first = saved.rank["loaders"], saved.rank_zero["loaders"]
    positions = [position for one in of_first["train"] if (position := one[POSITION_KEY]) is not None]
    is_tracked = len(positions) == len(loaders)
    is_inside = is_tracked and any(position["batches"] and not position["at_end"] for position in positions)
    if is_inside and settings.on_change != "new":
        for loader, one in zip(loaders, of_first["train"], strict=True):
            _refuse_other_streams(loader, one["n_workers"], saved, trainer)
    if is_inside and saved.world_size_changed:
        return _on_other_ranks(loaders, saved, scale, trainer)
    if is_tracked and saved.world_size_changed and any(position["batches"] for position in positions):
        lengths = [None if _is_stream(loader) else len(loader) for loader in loaders]  # of the epoch, which is over
        return _with_positions(state, lambda index, own: _moved(own, lengths[index] or own["batches"]))
    return state if scale is None else _with_other_batches(state, scale)


def _with_positions(
    state: Mapping[str, Any], change: Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
) -> Mapping[str, Any]:
    positions = [one[POSITION_KEY] for one in state["train"]]
    changed = [None if position is None else change(index, position) for index, position in enumerate(positions)]
    return {
        **state,
        "train": [{**one, POSITION_KEY: position} for one, position in zip(state["train"], changed, strict=True)],
    }


def _moved(position: Mapping[str, Any], batches: int) -> dict[str, Any]:
    """Return a position after so many batches of another loader, with which there is nothing to compare."""
    none = {"order": "", "first": "", "ended": False}
    return {**position, **none, MOVED_KEY: True, "batches": batches}


def _with_other_batches(state: Mapping[str, Any], scale: float) -> Mapping[str, Any]:
    """Continue after the samples that were seen; what is less than one batch of them comes once more."""
    return _with_positions(state, lambda _, own: _moved(own, int(own["batches"] / scale)))


def _on_other_ranks(
    loaders: Sequence[Any], saved: SavedState, scale: float | None, trainer: Trainer
) -> Mapping[str, Any]:
    """Continue after as large a share of the epoch; say so where that is not after the same samples."""
    state, position = saved.rank["loaders"], saved.rank_zero["loaders"]["train"][0][POSITION_KEY]
    loader, has_limit = loaders[0], isinstance(trainer.limit_train_batches, int)  # the same on any number of ranks
    before, ranks = position["shares"], num_shares(loader)
    if before == ranks == 1 and not _is_stream(loader):  # each rank reads all samples
        return state if scale is None else _with_other_batches(state, scale)
    has_same_order = type(loader.sampler) is DistributedSampler and type(loader.batch_sampler) is BatchSampler
    is_all = len(loaders) == 1 and scale is None and not has_limit and trainer.limit_train_batches == 1.0
    is_same_place = before > 1 < ranks and position["batches"] * before % ranks == 0
    if not (has_same_order and is_all and is_same_place):
        rank_zero_warn(
            f"AutoResume: the samples of this epoch were shared out among {saved.world_size} ranks, and are now among "
            f"{trainer.world_size}: the run goes on at about the same position, and some samples of this epoch come "
            "twice or not at all. To see each once, resume with as many ranks as before."
        )
    return _with_other_batches(state, (scale or 1.0) * (1.0 if has_limit else ranks / before))


def _is_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _refuse_other_streams(loader: Any, num_workers: int, saved: SavedState, trainer: Trainer) -> None:
    for what, before, now in (
        ("ranks", saved.world_size, trainer.world_size),
        ("workers", max(1, num_workers), max(1, loader.num_workers)),
    ):
        if _is_stream(loader) and before != now:
            raise MisconfigurationException(
                f"AutoResume: the run stopped in the middle of an epoch that {before} {what}, not {now} read, and only "
                f"the {type(loader.dataset).__name__} knows how it shares its samples out among them. Resume with the "
                "old number until the epoch's end, at which it can change (AutoResume saves there with "
                "every_n_epochs=1), or go on with on_change='new': some samples of this epoch then come twice or not "
                "at all."
            )
