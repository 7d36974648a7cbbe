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

    `_orig_mod`, `_forward_module` and similar parts are removed at any depth; `module` is removed only if all names
    stay distinct.
    """
    clean = {
        name: None if name.rpartition(".")[2] in _COUNTERS else _without(name, WRAPPERS.keys() - {"module"}) or name
        for name in names
    }
    bare = {name: None if new is None else _without(new, ("module",)) or new for name, new in clean.items()}
    kept = [new for new in bare.values() if new is not None]
    return bare if len(set(kept)) == len(kept) else clean


def _without(name: str, wrappers: Iterable[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in wrappers)
