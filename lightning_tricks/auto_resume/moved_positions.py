"""Saved positions of training loaders, where the run goes on with other batches, ranks or workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from lightning_tricks._lightning_compat.flavor import MisconfigurationException, Trainer, rank_zero_warn
from lightning_tricks.auto_resume.core.data.epoch_rest import EpochRest, share_of, why_not_shared_out
from lightning_tricks.auto_resume.core.data.tracked_loader import (
    POSITION_KEY,
    continued_by,
    moved,
)
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
    if is_tracked and any(position["batches"] and not position["at_end"] for position in positions):
        for loader, one in zip(loaders, of_first["train"], strict=True):
            if settings.on_change != "new":
                _refuse_other_streams(loader, one["n_workers"], saved, trainer)
        if saved.world_size_changed or positions[0].get("rest"):
            return _shared_out(loaders, state, of_first, scale or 1.0, trainer)
    elif is_tracked and saved.world_size_changed and any(position["batches"] for position in positions):
        lengths = [None if _is_stream(loader) else len(loader) for loader in loaders]  # of the epoch, which is over
        return _with_positions(state, lambda index, own: moved(own, lengths[index] or own["batches"]))
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


def _with_other_batches(state: Mapping[str, Any], scale: float) -> Mapping[str, Any]:
    """Continue after the samples that were seen; what is less than one batch of them comes once more."""
    return _with_positions(state, lambda _, own: moved(own, int(own["batches"] / scale)))


def _shared_out(
    loaders: Sequence[Any], state: Mapping[str, Any], of_first: Mapping[str, Any], scale: float, trainer: Trainer
) -> Mapping[str, Any]:
    """Continue with this rank's share of what no rank has read; at about the same position where that cannot be."""
    loader, position = loaders[0], of_first["train"][0][POSITION_KEY]
    before, (rank, ranks) = position.get("shares", 1), share_of(loader)
    if before == ranks == 1 and not (_is_stream(loader) or position.get("rest")):  # each rank reads all samples
        return state if scale == 1.0 else _with_other_batches(state, scale)
    why = _why_not_shared_out(loaders, trainer)
    if not why:
        rest = EpochRest.after(position, batch_size=round(loader.batch_size / scale), epoch=int(of_first["epoch"]))
        left = rest.batches(loader, rank, ranks)
        if left is not None and len(left) <= len(loader):
            return _with_positions(state, lambda _, own: continued_by(own, left, rest, len(loader)))
        why = "its order cannot be drawn again" if left is None else "the sampler gives another number of samples"
    rank_zero_warn(
        f"AutoResume: what is left of the epoch cannot be shared out anew, as {why}: some of its samples come twice or "
        "not at all. To see each once, use DataLoader(shuffle=True) and seed_everything, or resume with as many ranks "
        "as before."
    )
    has_limit = isinstance(trainer.limit_train_batches, int)  # which is the same on any number of ranks
    return _with_other_batches(state, scale if has_limit else scale * ranks / before)


def _why_not_shared_out(loaders: Sequence[Any], trainer: Trainer) -> str:
    """Return why what is left of an epoch cannot be shared out anew; empty where it may be possible."""
    if len(loaders) != 1:
        return "there are several training loaders"
    if _is_stream(loaders[0]):
        return f"only the {type(loaders[0].dataset).__name__} knows its order"
    if isinstance(trainer.limit_train_batches, int) or trainer.limit_train_batches != 1.0:
        return f"limit_train_batches={trainer.limit_train_batches} leaves out others on each number of ranks"
    return why_not_shared_out(loaders[0])


def _is_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _refuse_other_streams(loader: Any, num_workers: int, saved: SavedState, trainer: Trainer) -> None:
    if not _is_stream(loader):
        return
    changed = [
        f"{before} {what}, not {now}"
        for what, before, now in (
            ("ranks", saved.world_size, trainer.world_size),
            ("workers", max(1, num_workers), max(1, loader.num_workers)),
        )
        if before != now
    ]
    if changed:
        raise MisconfigurationException(
            f"AutoResume: the run stopped in the middle of an epoch that {' and '.join(changed)} read, and only the "
            f"{type(loader.dataset).__name__} knows how it shares its samples out among them. Resume with the old "
            "number until the epoch's end, at which it can change (AutoResume saves there with every_n_epochs=1), or "
            "go on with on_change='new': some samples of this epoch then come twice or not at all."
        )
