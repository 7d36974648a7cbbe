"""Saved positions of training loaders, where the run goes on with other batches, ranks or workers.

On another number of ranks, the rest of the epoch is shared out anew, so that each sample of the epoch is read once. Of
one order of all samples, torch's DistributedSampler gives rank r of R what lies at r, r + R, r + 2R and so on. After k
batches of B samples on each rank, the first k * B * R samples of that order were read, whoever read them; what follows
is shared out in the same way. The order is not saved: it is drawn again, and is the run's own if the indices that rank
zero had in it have the digest that was saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_tricks._lightning_compat.flavor import MisconfigurationException, Trainer, rank_zero_warn
from lightning_tricks._shared.rng import isolated_rng, kept_generators
from lightning_tricks.auto_resume.core.data.foreign_loader import is_foreign
from lightning_tricks.auto_resume.core.data.loader_objects import OrderDigest
from lightning_tricks.auto_resume.core.data.rng_state import restore_snapshot
from lightning_tricks.auto_resume.core.data.tracked_loader import LEFT_KEY, MOVED_KEY, POSITION_KEY, num_shares
from lightning_tricks.auto_resume.parts import SavedState, Settings

_KNOWN_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)  # whose order can be drawn again
_ORIGIN_KEYS = ("created", "started", "order", "batches", "shares")  # of the position that tells how to draw the order


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
    if saved.world_size_changed and state.get("foreign"):
        foreign = [loader for loader in loaders if is_foreign(loader)]
        pairs = zip(foreign, state["foreign"], strict=False)
        state = {**state, "foreign": [_on_other_ranks(*pair, saved, settings, trainer) for pair in pairs]}
    positions = [position for one in of_first["train"] if (position := one[POSITION_KEY]) is not None]
    is_tracked = len(positions) == len(loaders)
    if is_tracked and any(position["batches"] and not position["at_end"] for position in positions):
        for loader, one in zip(loaders, of_first["train"], strict=True):
            if settings.on_change != "new":
                _refuse_other_streams(loader, one["n_workers"], saved, trainer)
        if saved.world_size_changed or positions[0]["rest"]:
            return _shared_out(loaders, state, of_first, scale or 1.0, trainer)
    elif is_tracked and saved.world_size_changed and any(position["batches"] for position in positions):
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


def _moved(position: Mapping[str, Any], batches: int, **changed: Any) -> dict[str, Any]:
    """Return a position after so many batches of another loader, with which there is nothing to compare."""
    none = {"order": "", "first": "", "ended": False}
    return {**position, **none, MOVED_KEY: True, "batches": batches, **changed}


def _with_other_batches(state: Mapping[str, Any], scale: float) -> Mapping[str, Any]:
    """Continue after the samples that were seen; what is less than one batch of them comes once more."""
    return _with_positions(state, lambda _, own: _moved(own, int(own["batches"] / scale)))


def _shared_out(
    loaders: Sequence[Any], state: Mapping[str, Any], of_first: Mapping[str, Any], scale: float, trainer: Trainer
) -> Mapping[str, Any]:
    """Continue with this rank's share of what no rank has read; at about the same position where that cannot be."""
    loader, position = loaders[0], of_first["train"][0][POSITION_KEY]
    before, ranks = position["shares"], num_shares(loader)
    if before == ranks == 1 and not (_is_stream(loader) or position["rest"]):  # each rank reads all samples
        return state if scale == 1.0 else _with_other_batches(state, scale)
    why = _why_not_shared_out(loaders, trainer)
    if not why:
        rest = EpochRest.after(position, batch_size=round(loader.batch_size / scale), epoch=int(of_first["epoch"]))
        left = rest.batches(loader, getattr(loader.sampler, "rank", 0), ranks)
        if left is not None and len(left) <= len(loader):
            done = len(loader) - len(left)
            follows = {"at_end": not left, "rest": rest.as_dict(done), LEFT_KEY: left}
            return _with_positions(state, lambda _, own: _moved(own, done, **follows))
        why = "its order cannot be reproduced" if left is None else "the sampler now yields another number of samples"
    rank_zero_warn(
        f"AutoResume: the rest of the epoch cannot be redistributed among the ranks, as {why}: some samples are "
        "repeated or skipped. To read each sample once, use DataLoader(shuffle=True) and seed_everything, or resume "
        "with as many ranks as before."
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
        return (
            f"limit_train_batches={trainer.limit_train_batches} leaves out different batches for each number of ranks"
        )
    batches, sampler = loaders[0].batch_sampler, loaders[0].sampler
    if type(batches) is not BatchSampler or batches.sampler is not sampler:
        return f"a {type(batches).__name__} chooses its batches"
    if type(sampler) not in _KNOWN_SAMPLERS:
        return f"a {type(sampler).__name__} chooses its samples"
    return ""


def _is_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _refuse_other_streams(loader: Any, num_workers: int, saved: SavedState, trainer: Trainer) -> None:
    for what, before, now in (
        ("ranks", saved.world_size, trainer.world_size),
        ("workers", max(1, num_workers), max(1, loader.num_workers)),
    ):
        if _is_stream(loader) and before != now:
            raise _other_stream(what, before, now, loader.dataset)


def _other_stream(what: str, before: int, now: int, reader: Any) -> MisconfigurationException:
    return MisconfigurationException(
        f"AutoResume: the run stopped in the middle of an epoch that it read with {before} {what}, not {now}, and only "
        f"the {type(reader).__name__} knows how it divides its samples among them. Resume with the old number and "
        "change it at the end of an epoch (AutoResume saves there with every_n_epochs=1), or continue with "
        "on_change='new', which repeats or skips some samples of this epoch."
    )


def _on_other_ranks(
    loader: Any, position: Mapping[str, Any] | None, saved: SavedState, settings: Settings, trainer: Trainer
) -> Mapping[str, Any] | None:
    """Return the position of a loader that is not tracked, on another number of ranks; None for the start."""
    if position is None or (position["state"] is None and position["before"] is None):
        return position
    if getattr(loader, "checks_ranks", False):  # it refuses by itself the states of ranks that had other samples
        before = position["before"] and {**position["before"], "gave": ""}
        return {**position, "gave": "", "before": before}
    if settings.on_change != "new" and not position["left"]:
        raise _other_stream("ranks", saved.world_size, trainer.world_size, loader)
    rank_zero_warn(
        f"AutoResume: the state of the {type(loader).__name__} is that of {saved.world_size} ranks and is not "
        "restored: it begins as in a new run."
    )
    return None


@dataclass(frozen=True)
class EpochRest:
    """What is left of an epoch in which the number of ranks has changed; its fields are a format.

    Attributes:
        origin: Of rank zero's position when the number first changed, what tells how to draw the order again; with the
            "batch_size" and the "epoch" of then.
        offset: Samples of that order that were read before the number changed last.
        done: The batches that a loader's rest begins after: as many as it has more than the rest needs.
    """

    origin: Mapping[str, Any]
    offset: int
    done: int

    @classmethod
    def after(cls, position: Mapping[str, Any], *, batch_size: int, epoch: int) -> EpochRest:
        """Return what is left after the position of rank zero, in an epoch with batches of this size."""
        rest = cls(**position["rest"]) if position["rest"] else None
        if rest is None:
            known = {key: position[key] for key in _ORIGIN_KEYS}
            rest = cls({**known, "batch_size": batch_size, "epoch": epoch}, 0, 0)
        read = (int(position["batches"]) - rest.done) * batch_size * position["shares"]
        return cls(rest.origin, rest.offset + read, 0)

    def batches(self, loader: DataLoader[Any], rank: int, ranks: int) -> list[list[int]] | None:
        """Return the indices of the batches that a rank still has; None where the order cannot be drawn again.

        All ranks have equally many: as with DistributedSampler, samples are repeated to that end, or left out if its
        `drop_last` is set.
        """
        order = next((order for order in _orders(loader, self.origin) if _explains(order, self.origin)), None)
        if order is None or loader.batch_size is None:
            return None
        rest, size = order[self.offset :], loader.batch_size
        drops = loader.sampler.drop_last if isinstance(loader.sampler, DistributedSampler) else False
        each = len(rest) // ranks if drops else -(-len(rest) // ranks)
        own = [rest[index % len(rest)] for index in range(rank, each * ranks, ranks)]
        batches = [own[start : start + size] for start in range(0, each, size)]
        return batches[:-1] if batches and loader.drop_last and len(batches[-1]) < size else batches

    def as_dict(self, done: int) -> dict[str, Any]:
        """Return the rest as plain values, for a loader that counts so many batches before it."""
        return {**asdict(self), "done": done}


def _orders(loader: DataLoader[Any], origin: Mapping[str, Any]) -> Iterator[Sequence[int]]:
    """Yield the orders in which samplers may have given the samples in the origin's epoch."""
    data, sampler = loader.dataset, loader.sampler
    indices = range(len(data))  # type: ignore[arg-type]  # a stream is not shared out
    yield indices
    seed = getattr(sampler, "seed", int(os.environ.get("PL_GLOBAL_SEED", 0)))  # as the Trainer's is
    distributed: DistributedSampler[int] = DistributedSampler(indices, 1, 0, seed=seed)  # type: ignore[arg-type]
    distributed.set_epoch(origin["epoch"])
    yield list(distributed)
    shuffled = RandomSampler(indices, generator=getattr(sampler, "generator", loader.generator))
    for drawn in range(2):  # the iterator of a loader draws a seed for its workers, and then asks the sampler
        with isolated_rng(), kept_generators(loader):
            restore_snapshot(origin["started"] or origin["created"], loader)
            for _ in range(drawn):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            order = list(shuffled)
        yield order


def _explains(order: Sequence[int], origin: Mapping[str, Any]) -> bool:
    """Whether the batches that rank zero has read are the first ones of its share of an order."""
    digest, size = OrderDigest(), origin["batch_size"]
    own = order[:: origin["shares"]]
    for batch in range(origin["batches"]):
        digest.add(list(own[batch * size : (batch + 1) * size]))
    return bool(origin["order"]) and digest.digest(origin["batches"]) == origin["order"]
