"""The parts of parameter names that wrappers such as DDP and `torch.compile` add, and names without them."""

from __future__ import annotations

from collections.abc import Iterable

# What wrappers add to names, and who does; `module` alone may also be a module's own name
WRAPPERS = {
    "module": "saved from DataParallel, DistributedDataParallel or an averaged model",
    "_orig_mod": "saved from a compiled model (torch.compile)",
    "_forward_module": "saved from a model wrapped by Fabric or a strategy",
    "_fsdp_wrapped_module": "saved from FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "saved with activation checkpointing",
    "_fpw_module": "saved from FullyShardedDataParallel",
}
_COUNTERS = ("total_ops", "total_params", "n_averaged")


def strip_wrappers(names: Iterable[str]) -> dict[str, str | None]:
    """Return each name without the parts that wrappers add, None for the counters of thop and of averaged models.

    The parts are removed at any depth. `module` is removed only if all names stay distinct, and so are the others.
    """
    whole = {name: None if name.rpartition(".")[2] in _COUNTERS else name for name in names}
    clean = _distinct(
        {name: new and (_without(new, WRAPPERS.keys() - {"module"}) or new) for name, new in whole.items()}, whole
    )
    return _distinct({name: new and (_without(new, ("module",)) or new) for name, new in clean.items()}, clean)


def _distinct(shorter: dict[str, str | None], names: dict[str, str | None]) -> dict[str, str | None]:
    """Return the shorter names, unless two of them are equal."""
    kept = [new for new in shorter.values() if new is not None]
    return shorter if len(set(kept)) == len(kept) else names


def _without(name: str, wrappers: Iterable[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in wrappers)
