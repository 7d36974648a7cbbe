"""The states of module and optimizers under `ModelParallelStrategy`, as other strategies give and take them."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import ModelParallelStrategy, Strategy
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._shared.files import MAIN_FILE
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.shards import put_shards, take_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping


def is_sharding(strategy: Strategy) -> bool:
    """Whether each rank holds its part of the parameters, as DTensors."""
    return isinstance(strategy, ModelParallelStrategy)


@contextmanager
def plain_states(strategy: Strategy) -> Iterator[None]:
    """Let a strategy give the states of module and optimizers as they give them themselves, with DTensors in them."""

    def module_state() -> dict[str, Any]:
        return Strategy.lightning_module_state_dict(strategy)

    def optimizer_state(optimizer: Any) -> dict[str, Any]:
        return Strategy.optimizer_state(strategy, optimizer)

    # ModelParallelStrategy gathers whole states on the CPU of rank zero, or renames what is in them; each rank saves
    # its own parts here, and none has to hold the whole.
    methods = {"lightning_module_state_dict": module_state, "optimizer_state": optimizer_state}
    with overriding(strategy, **(methods if is_sharding(strategy) else {})):
        yield


@contextmanager
def restored_before_setup(strategy: Strategy) -> Iterator[Callable[[], None]]:
    """Let the Trainer restore a checkpoint with plain states when it does so under other strategies.

    It restores hooks and loops then, the weights once the strategy has given them memory, and the optimizers after the
    hooks of the fit's start. What is yielded undoes that, for a checkpoint that the strategy has to read itself.
    """
    if not is_sharding(strategy):
        yield lambda: None
        return
    # It restores all of a checkpoint after its setup (`restore_checkpoint_after_setup`), behind `on_fit_start`, and
    # from a path alone (`load_checkpoint`): hooks would come in another order than under other strategies.
    own_class: Any = type(strategy)
    waiting: list[Callable[[], None]] = []

    class PlainStates(own_class):  # type: ignore[misc]  # the only way to override properties of one object
        restore_checkpoint_after_setup = False
        lightning_restore_optimizer = True

        def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            # Parameters may be on the meta device until `setup` gives them memory, and optimizers are made right after
            # that.
            waiting.append(lambda: Strategy.load_model_state_dict(self, checkpoint, strict))

        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
            Strategy.load_optimizer_state_dict(self, checkpoint)

        def setup_optimizers(self, trainer: Any) -> None:
            while waiting:
                waiting.pop()()
            own_class.setup_optimizers(self, trainer)  # the class may be undone by then

    def undo() -> None:
        if type(strategy) is PlainStates:
            strategy.__class__ = own_class

    PlainStates.__name__, PlainStates.__qualname__ = own_class.__name__, own_class.__qualname__
    strategy.__class__ = PlainStates
    try:
        yield undo
    finally:
        undo()


def move_shards(strategy: Strategy, checkpoint: dict[str, Any]) -> None:
    """Move DTensors beside the weights of a checkpoint to where the strategy writes them as shards into its folder."""
    untyped: Any = strategy
    if is_sharding(strategy) and untyped._save_distributed_checkpoint:
        weights, states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        # Each of the states is written as shards, whatever it holds, and as many are read as there are optimizers.
        others, shards = take_shards(checkpoint, untyped.model, f"optimizer_{len(states)}.")
        checkpoint |= {**others, "state_dict": weights, "optimizer_states": [*states, *([shards] if shards else [])]}


@contextmanager
def shards_beside_weights(strategy: Strategy) -> Iterator[None]:
    """Let a strategy write and read DTensors anywhere in a checkpoint that is a folder, not of its weights alone."""
    if not is_sharding(strategy):
        yield
        return
    untyped: Any = strategy
    save, load = strategy.save_checkpoint, strategy.load_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        move_shards(strategy, checkpoint)
        save(checkpoint, *args, **kwargs)

    def load_checkpoint(path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        folder, checkpoint = Path(strategy.broadcast(path)), load(path, *args, **kwargs)
        return put_shards(checkpoint, folder, untyped.model) if folder.is_dir() else checkpoint

    with overriding(strategy, save_checkpoint=save_checkpoint, load_checkpoint=load_checkpoint):
        yield


@contextmanager
def partial_shards_loaded(
    strategy: Strategy, left_out: Callable[[Mapping[str, Any]], Collection[str]]
) -> Iterator[None]:
    """Let a strategy load checkpoints of shards that lack weights, which it would refuse.

    Args:
        strategy: The strategy.
        left_out: Returns the names of the weights that a checkpoint lacks, without the prefixes of `torch.compile`. The
            module keeps those that it has.
    """
    if not is_sharding(strategy):
        yield
        return
    # It loads shards into `get_model_state_dict(model)` and then with `strict` (fabric/strategies/model_parallel.py,
    # `_load_checkpoint`): a name that the shards lack is an error in either.
    load_whole = strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        import torch

        path = Path(strategy.broadcast(checkpoint_path))
        names: Collection[str] = ()
        if path.is_dir():
            checkpoint: dict[str, Any] = torch.load(
                path / MAIN_FILE, map_location="cpu", weights_only=kwargs.get("weights_only")
            )
            # Shards lie beside this file: which weights they lack is known of what a callback noted in it.
            names = left_out({"state_dict": {}, **checkpoint})
        if not names:
            return load_whole(checkpoint_path, *args, **kwargs)
        checkpoint["state_dict"] = _load_but(names, strategy, path)
        return checkpoint

    with overriding(strategy, load_checkpoint=load_checkpoint):
        yield


def _load_but(names: Collection[str], strategy: Any, path: Path) -> dict[str, Any]:
    """Load shards of the optimizers' states and of weights other than those that are named; return the weights."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as states

    engine: Any = checkpoint
    model, optimizers = strategy.model, {f"optimizer_{number}": one for number, one in enumerate(strategy.optimizers)}
    whole = states.get_model_state_dict(model).items()
    weights = {name: value for name, value in whole if strip_compile_prefix(name) not in names}
    engine.load({"state_dict": weights}, checkpoint_id=path)
    # Not strict, for the weights that are left out; those of the file were looked for by name, and a missing one is an
    # error of `load`.
    model.load_state_dict(weights, strict=False)
    for key, optimizer in optimizers.items():
        part = {key: states.get_optimizer_state_dict(model, optimizer)}
        engine.load(part, checkpoint_id=path)
        states.set_optimizer_state_dict(model, optimizer, optim_state_dict=part[key])
    return weights
