"""The moments at which a Trainer fetches a batch from its loaders, which no hook marks."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, overriding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer


@contextmanager
def observe_fetches(
    trainer: Trainer, started: Callable[[str], None], ended: Callable[[str], None], trick: str
) -> Iterator[None]:
    """Call functions right before and after a batch is fetched from the loaders, until the context is left.

    Both are called with the stage: "train", "val", "test" or "predict". `ended` is also called if fetching raises, and
    where the loaders are exhausted.

    Args:
        trainer: The Trainer; it must not have started an epoch yet.
        started: Called before a batch is fetched.
        ended: Called after a batch was fetched.
        trick: The name of the trick, for the error if Lightning has changed.
    """
    with ExitStack() as stack:
        with needs_private(trick):
            epoch: Any = trainer.fit_loop.epoch_loop
            loops = (
                ("train", epoch),
                ("val", epoch.val_loop),
                ("val", trainer.validate_loop),
                ("test", trainer.test_loop),
                ("predict", trainer.predict_loop),
            )
            for stage, loop in loops:
                methods = _reporting(loop, stage, started, ended)
                stack.enter_context(overriding(loop, **methods))
        yield


@contextmanager
def observe_iterators(
    trainer: Trainer, started: Callable[[str], None], ended: Callable[[str], None], trick: str
) -> Iterator[None]:
    """Call functions right before and after the loaders' iterator for an epoch of a fit is made.

    That is where worker processes start. A batch may be fetched in advance meanwhile. For the very first epoch it may
    happen earlier, with nothing between the two calls. Arguments are those of `observe_fetches`.
    """
    with ExitStack() as stack:
        with needs_private(trick):
            epoch: Any = trainer.fit_loop.epoch_loop
            for stage, loop, name in (("train", epoch, "on_run_start"), ("val", epoch.val_loop, "reset")):
                stack.enter_context(overriding(loop, **{name: _calling(getattr(loop, name), stage, started, ended)}))
        yield


def _calling(
    plain: Callable[..., Any], stage: str, started: Callable[[str], None], ended: Callable[[str], None]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        started(stage)
        try:
            return plain(*args)
        finally:
            ended(stage)

    return call


def _reporting(
    loop: Any, stage: str, started: Callable[[str], None], ended: Callable[[str], None]
) -> dict[str, Callable[[], None]]:
    plain_before, plain_after = loop._on_before_fetch, loop._on_after_fetch

    def on_before_fetch() -> None:
        plain_before()
        started(stage)

    def on_after_fetch() -> None:
        ended(stage)
        plain_after()

    return {"_on_before_fetch": on_before_fetch, "_on_after_fetch": on_after_fetch}
