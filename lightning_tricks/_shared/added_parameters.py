"""Parameters that were added to a pretrained model, and checkpoints that hold only what was trained."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

RECORD_KEY = "trainable_checkpoint"  # the entry of a checkpoint that describes the tensors that were left out

# An empty tensor of this name is among the weights, so that whoever loads them without the base reads the remedy in the
# error of `load_state_dict`. It has no dots: it is not a name of a submodule.
NOTE = (
    "(this file holds only the trained tensors: load it with TrainableCheckpoint among the Trainer's callbacks, or "
    "with load_trainable)"
)


class AddedParameters(nn.Module):
    """The base of modules that hold parameters which were added to a pretrained model."""


def added_modules(model: nn.Module) -> Iterator[tuple[str, AddedParameters]]:
    """Yield the modules with added parameters and their qualified names; a shared one comes once."""
    for name, module in model.named_modules():
        if isinstance(module, AddedParameters):
            yield name, module


def added_names(model: nn.Module) -> set[str]:
    """Return the names in a model's state dict that belong to added parameters, also repeated names of shared ones."""
    modules = [(name, part) for name, part in model.named_modules(remove_duplicate=False) if name]
    return _names_within(model, [name for name, part in modules if isinstance(part, AddedParameters)])


def names_added_by_peft(model: nn.Module) -> set[str]:
    """Return the names in a model's state dict that belong to the adapters of the peft library, which is not loaded."""
    layers = [(name, part) for name, part in model.named_modules(remove_duplicate=False) if _is_peft_layer(part)]
    parts = [(f"{name}." if name else "", child) for name, layer in layers for child, _ in layer.named_children()]
    return _names_within(model, [f"{front}{child}" for front, child in parts if child != "base_layer"])


def _names_within(model: nn.Module, modules: list[str]) -> set[str]:
    prefixes = tuple(f"{name}." for name in modules)
    return {name for name in model.state_dict(keep_vars=True) if name.startswith(prefixes)} if prefixes else set()


def _is_peft_layer(module: nn.Module) -> bool:
    bases = ((base.__module__.partition(".")[0], base.__name__) for base in type(module).__mro__)
    return ("peft", "BaseTunerLayer") in bases
