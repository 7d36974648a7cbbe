"""`load_adapter`: load LoRA from files of the peft library, after checks against the model."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import added_names
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core import injection
from lightning_tricks.finetuning.core.adapter_format import (
    AdapterConfig,
    Place,
    changed_weights,
    computed_otherwise,
    layer_for_peft,
    parse_names,
    read_adapter,
    registered_or_computed,
)
from lightning_tricks.finetuning.core.lora_injection import changes_at, describe_lora, owners_of_parameters, put_changes
from lightning_tricks.finetuning.core.lora_layers import LoRASettings, has_transposed_weight, weights_of


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> injection.InjectionReport:
    """Load LoRA from files of `save_adapter` or of the peft library, in place.

    A plain model gets LoRA with the ranks and scales in the files, and is frozen except for LoRA and everything else
    in the files. A model with LoRA of the same layers, ranks and scales gets only the values.

    Args:
        model: The model; nothing is changed if an error is raised. It must have the base weights: the files only
            contain modules that were trained in full.
        folder: The folder with `adapter_model.safetensors` and `adapter_config.json`. Nothing is downloaded.

    Returns:
        A report on the parameters that the model has now.

    Raises:
        FileNotFoundError: If the folder or a file is missing.
        ValueError: If the files belong to another model, layers or shapes, which are listed, or need a feature that
            only peft has, such as DoRA.

    Examples:
        >>> import tempfile
        >>> from lightning_tricks.finetuning import add_lora, save_adapter
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> report = add_lora(model, LoRASettings(rank=4, target_modules="0"))
        >>> plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(model, folder)
        ...     print(load_adapter(plain, folder))
        Low-rank changes (rank 4) in 1 Linear add 512 values; 512 of 5,322 values (9.62%) are trained.
    """
    config, tensors = read_adapter(folder)
    try:
        adapter = _Adapter(model, config, tensors)
        adapter.check()
        if adapter.factors and not adapter.present:
            adapter.add_changes()
    except ValueError as error:
        raise ValueError(f"{os.fspath(folder)}: {error}") from error
    return adapter.load_values()


class _Adapter:
    """An adapter that was read, and the model that it is loaded into.

    Attributes:
        modules: The modules of the model by qualified name.
        state: The tensors of the model by name, without those of LoRA.
        present: The changes that the model has already.
        pairs: The matrices A and B of each changed weight, as peft has them.
        factors: Likewise, as `LowRank.factors` returns them; of tied weights, the first has the change.
        values: The further tensors of the file, by their names in the model.
        frozen: Those of their names that belong to the base of a layer.
    """

    def __init__(self, model: nn.Module, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> None:
        self.model, self.config = model, config
        self.modules = injection.modules_by_name(model)
        self.pairs, self.values, self.frozen = parse_names(tensors, self.modules)
        for place, pair in self.pairs.items():
            if config.by_peft and config.is_old and layer_for_peft(place, self.pairs, self.modules) != place[0]:
                pair["B"] = 2 * pair["B"]
        added = added_names(model)
        self.state = {
            strip_compile_prefix(name): value
            for name, value in model.state_dict(keep_vars=True).items()
            if name not in added and isinstance(value, Tensor)
        }
        self.present = dict(changed_weights(self.modules))
        self.factors: dict[Place, tuple[Tensor, Tensor]] = {}

    def check(self) -> None:
        """Compare the adapter with the model.

        Raises:
            ValueError: If it is that of another model, or peft computes something else with it.
        """
        self._check_places()
        if self.config.by_peft:
            self._check_computed_alike()
        order = {name: number for number, name in enumerate(self.modules)}
        places = sorted(self.pairs, key=lambda place: order[place[0]])
        self.factors = {place: _factors(self.pairs[place], self.modules[place[0]]) for place in places}
        self._check_shapes()
        self._check_modules_to_save()
        self._check_shared()
        if self.config.by_peft:
            self._check_tied()
        if self.present:
            self._check_present()

    def _check_places(self) -> None:
        """Refuse files with layers that the model does not have."""
        unknown = [layer for layer, _ in self.pairs if layer not in self.modules]
        if not unknown:
            without = [
                f"{layer} ({injection.kind_of_layer(self.modules[layer])})"
                for layer, weight in self.pairs
                if weight not in weights_of(self.modules[layer])
            ]
            if without:
                raise ValueError(
                    f"{len(without)} of {len(self.pairs)} layers have no such matrix of floating-point numbers in "
                    f"{type(self.model).__name__}: {list_names(without)}. If they are quantized, load the adapter "
                    "before they are, or with peft; otherwise it is the adapter of another model."
                )
            return
        inner = [
            child
            for child, _ in self.model.named_children()
            if all(f"{child}.{layer}" in self.modules for layer in unknown)
        ]
        remedy = f" Pass {inner[0]} of the model, which has them." if inner else ""
        raise ValueError(
            f"it is the adapter of another model: {len(unknown)} of {len(self.pairs)} layers are not in "
            f"{type(self.model).__name__}: {list_names(unknown)}.{remedy}"
        )

    def _check_computed_alike(self) -> None:
        """Refuse layers for which peft computes something else than a change of their weight."""
        layers = {layer: self.modules[layer] for layer, _ in self.pairs}
        otherwise = {layer: why for layer, module in layers.items() if (why := computed_otherwise(module))}
        if otherwise:
            listed = list_names([f"{layer} ({why})" for layer, why in otherwise.items()])
            raise ValueError(
                f"peft changes the outputs of {len(otherwise)} layers by more than a change of their weights: "
                f"{listed}. Load it with peft."
            )

    def _check_shapes(self) -> None:
        """Refuse files with tensors that the model does not have, or has in another shape."""
        unknown = [name for name in self.values if name not in self.state]
        if unknown:
            raise ValueError(f"{len(unknown)} tensors are not in the model: {list_names(unknown)}.")
        owned = [
            *(self.state[name] for name in self.values),
            *(registered_or_computed(self.modules[name], own) for name, own in self.factors),
        ]
        if any(hasattr(tensor, "full_tensor") for tensor in owned):
            raise ValueError("the model is sharded already: load the adapter before sharding.")
        wrong = [
            f"{name} is {tuple(value.shape)}, and {tuple(self.state[name].shape)} in the model"
            for name, value in self.values.items()
            if value.shape != self.state[name].shape
        ]
        for (layer, weight), (left, right) in self.factors.items():
            shape = registered_or_computed(self.modules[layer], weight).shape
            if (*left.shape, *right.shape) != (shape[0], len(right), len(right), shape[1:].numel()) or not len(right):
                changed = f"{tuple(left.shape)} @ {tuple(right.shape)}"
                wrong.append(f"{layer}.{weight} is {tuple(shape)} in the model, and its change is {changed}")
        if wrong:
            raise ValueError(f"it is the adapter of another model: {len(wrong)} shapes differ: {list_names(wrong)}.")

    def _check_modules_to_save(self) -> None:
        """Refuse files with a part of a module that was trained whole."""
        for end in self.config.modules_to_save:
            named = [f"{name}." for name in self.modules if f".{name}".endswith(f".{end}")]
            owned = [[name for name in self.state if name.startswith(front)] for front in named]
            found = [names for names in owned if any(name in self.values for name in names)] or owned
            missing = [name for names in found for name in names if name not in self.values]
            if missing:
                raise ValueError(
                    f"{len(missing)} tensors of modules_to_save={end!r} are missing: {list_names(missing)}."
                )

    def _check_shared(self) -> None:
        """Refuse files in which layers that share a weight do not share its change, as the model would."""
        owners = owners_of_parameters(self.modules)
        for place, pair in self.factors.items():
            registered = registered_tensor(self.modules[place[0]], place[1])
            for layer, _, weight in owners.get(id(registered), []):
                other = (layer, weight)
                same = other in self.factors and all(map(torch.equal, pair, self.factors[other]))
                if not same:
                    raise ValueError(
                        f"it changes {place[0]} and {other[0]} differently, which share a weight in the model: load it "
                        "with peft, which changes layers, not weights."
                    )

    def _check_tied(self) -> None:
        """Refuse files with another value for a module that was trained whole than for one that is tied to it."""
        ends = tuple(f".{end}" for end in self.config.modules_to_save)
        copied = tuple(f"{name}." for name in self.modules if f".{name}".endswith(ends))  # peft trains a copy of each
        names: dict[int, list[str]] = {}
        for name, tensor in self.state.items():
            names.setdefault(id(tensor), []).append(name)
        for name in filter(lambda name: name.startswith(copied), self.values):
            for other in names[id(self.state[name])]:
                if not torch.equal(self.values[name], self.values.get(other, self.state[name].to(self.values[name]))):
                    raise ValueError(
                        f"{name} and {other} differ in it, and are one tensor in the model: untie them first "
                        "(layer.weight = nn.Parameter(layer.weight.detach().clone())), or load it with peft."
                    )

    def _check_present(self) -> None:
        """Refuse files with other layers, ranks or scales than those of a model that has LoRA."""
        missing = [".".join(place) for place in self.present if place not in self.factors]
        unexpected = [".".join(place) for place in self.factors if place not in self.present]
        if missing or unexpected:
            raise ValueError(
                f"the model has LoRA of other layers: {list_names(missing)} are not in the file, and "
                f"{list_names(unexpected)} are not in the model. merge(model) first, or build the model again."
            )
        for place, change in self.present.items():
            there = (change.rank, change.alpha, change.use_rslora)
            here = (len(self.factors[place][1]), self._alpha_of(place), self.config.use_rslora)
            if there != here:
                raise ValueError(
                    f"{place[0]} has (rank, alpha, use_rslora) = {here} in the file, and {there} in the model: "
                    "merge(model) first, or build the model again."
                )

    def _alpha_of(self, place: Place) -> float:
        return self.config.alpha_of(layer_for_peft(place, self.factors, self.modules))

    def add_changes(self) -> None:
        """Add LoRA of the layers, ranks and scales of the file.

        Raises:
            ValueError: If the file lacks weights of a layer, or a class cannot be extended; nothing is changed then.
        """
        targets = {layer: self.modules[layer] for layer, _ in self.factors}
        own = [(layer, weight) for layer in targets for weight in weights_of(self.modules[layer])]
        missing = [".".join(place) for place in own if place not in self.factors]
        if missing:
            raise ValueError(f"the matrices of {len(missing)} weights are missing: {list_names(missing)}.")
        injection.check_targets(targets)
        settings = LoRASettings(dropout=self.config.dropout, use_rslora=self.config.use_rslora)
        ranks = {place: len(right) for place, (_, right) in self.factors.items()}
        changes = changes_at(self.modules, ranks)
        injection.freeze_base(self.model)
        put_changes(changes, settings, injection.seeded_generator())
        for place, change in changed_weights(self.modules):
            change.set_alpha(self._alpha_of(place), self.config.use_rslora)

    def load_values(self) -> injection.InjectionReport:
        """Set the changes and the further tensors, and report on the model."""
        trained = [name for name in self.values if name not in self.frozen]
        for name, value in self.values.items():
            self.state[name].copy_(value)
            if not self.present and name in trained and isinstance(self.state[name], nn.Parameter):
                self.state[name].requires_grad_()
        changes = dict(changed_weights(self.modules))
        for place, (left, right) in self.factors.items():
            change = changes[place]
            change.A.copy_(left.t() if change.is_transposed else right)
            change.B.copy_(right.t() if change.is_transposed else left)
        return describe_lora(self.model, dict.fromkeys(name.rpartition(".")[0] or name for name in trained))


def _factors(pair: Mapping[str, Tensor], module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the matrices of `LowRank.factors` for A and B in the shapes of peft."""
    a, b = (pair[name].flatten(1) if pair[name].ndim > 1 else pair[name][None] for name in "AB")
    return (a.t(), b.t()) if has_transposed_weight(module) else (b, a)
