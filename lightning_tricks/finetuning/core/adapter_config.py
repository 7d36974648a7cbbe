"""The `adapter_config.json` of an adapter, as the peft library writes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from lightning_tricks._shared.checks import check_count, check_dropout, check_number
from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.patterns import check_repeats
from lightning_tricks._shared.read_budget import Budget, parse_json

_DOUBLES_OUT_PROJ = Version("0.21.99")  # the last version of peft that is known to do it
_LARGEST_CONFIG = 4 << 20  # bytes
_LARGEST_ALPHA = 1e9
_INITIAL_VALUES = (None, True, False, "gaussian", "orthogonal", "eva")  # the others change the weights of the base
# What says where a file comes from, which layers it is for, which the names of its tensors say as well, or how it was
# initialized, or is read only beside a setting that is refused
_WITHOUT_EFFECT = frozenset(
    [
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "fan_in_fan_out",
        "init_lora_weights",
        "eva_config",
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
        "ensure_weight_tying",
    ]
)
_USED = frozenset(
    ["r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "modules_to_save", "bias"]
)


@dataclass(frozen=True)
class AdapterConfig:
    """What of an `adapter_config.json` decides about the outputs of a model, and how training goes on.

    Attributes:
        alpha: The scale of layers without one of their own.
        alphas: Regular expression over names of layers, as peft reads it -> scale.
        use_rslora: Whether a scale is divided by the square root of the rank.
        dropout: The dropout of the inputs of the changes.
        modules_to_save: The ends of names of modules that are stored whole.
        by_peft: Whether peft wrote the file.
        is_old: Whether its peft adds the change of the `out_proj` of an `nn.MultiheadAttention` that is wrapped as a
            whole twice (huggingface/peft#3774).
    """

    alpha: float
    alphas: Mapping[str, float]
    use_rslora: bool
    dropout: float
    modules_to_save: Sequence[str]
    is_old: bool
    by_peft: bool = True

    def alpha_of(self, layer: str) -> float:
        """Return the scale of a layer, before it is divided by its rank."""
        found = (alpha for text, alpha in self.alphas.items() if re.match(rf"(.*\.)?({text})$", layer))
        return next(found, self.alpha)


def pattern_for(layer: str) -> str:
    """Return the key of a layer in `rank_pattern` and `alpha_pattern`, which no other layer's name matches."""
    return f"^{re.escape(layer)}"


def targets_for(layers: Sequence[str], others: Sequence[str]) -> str | list[str]:
    """Return `target_modules` for some layers of a model; a list, unless the names of other modules end like theirs."""
    ends = tuple(f".{layer}" for layer in layers)
    chosen = set(layers)
    if any(other.endswith(ends) and other not in chosen for other in others):
        return "|".join(map(re.escape, layers))
    return list(layers)


def values_and_patterns(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most frequent value of some layers, and the keys of `rank_pattern` and the like for the others."""
    ((usual, _),) = Counter(values.values()).most_common(1)
    return usual, {pattern_for(layer): value for layer, value in values.items() if value != usual}


def read_config(path: Path) -> AdapterConfig:
    """Read the file.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If it is corrupt or too large, or has a setting that only peft has.
    """
    with open_file(path) as file:
        data = file.read(_LARGEST_CONFIG + 1)
    if len(data) > _LARGEST_CONFIG:
        raise ValueError(f"it is larger than {_LARGEST_CONFIG >> 20} MiB.")
    return _checked(parse_json(data, Budget(len(data))))


def _is_old(version: object) -> bool:
    """Whether a version of peft doubles the change of `out_proj`; the first ones did not write their version."""
    try:
        return version is None or Version(str(version)) <= _DOUBLES_OUT_PROJ
    except InvalidVersion:
        raise ValueError(f"peft_version must be a version, got {version!r:.60}.") from None


def _checked(config: Any) -> AdapterConfig:
    if not isinstance(config, dict):
        raise ValueError(f"a mapping is needed, got {type(config).__name__}.")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"peft_type must be 'LORA', got {kind!r}: the adapters of other methods are those of peft, which "
            "PeftAdapters adds to a model."
        )
    if (initial := config.get("init_lora_weights")) not in _INITIAL_VALUES:
        raise ValueError(
            f"init_lora_weights={initial!r} has changed the weights of the base: save the adapter with "
            "save_pretrained(folder, path_initial_model_for_weight_conversion=...) of peft."
        )
    unknown = [name for name, value in config.items() if name not in _WITHOUT_EFFECT | _USED and value]
    unknown += ["bias"] * (config.get("bias", "none") != "none")
    if unknown:
        raise ValueError(
            f"{', '.join(f'{name}={config[name]!r:.60}' for name in unknown)}: LoRA of this package has no such "
            f"setting, and without it the outputs would differ. Load the adapter with peft."
        )
    alphas = _mapping(config, "alpha_pattern")
    for text in alphas:
        check_repeats(text)
        _compile(text)
    check_count("r", config.get("r"))
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise ValueError(f"modules_to_save must be a list of names, got {saved!r:.60}.")
    return AdapterConfig(
        check_number("lora_alpha", config.get("lora_alpha"), above=0, at_most=_LARGEST_ALPHA),
        {
            text: check_number(f"alpha_pattern[{text!r}]", alpha, above=0, at_most=_LARGEST_ALPHA)
            for text, alpha in alphas.items()
        },
        bool(config.get("use_rslora")),
        check_dropout("lora_dropout", config.get("lora_dropout", 0.0)),
        saved,
        _is_old(config.get("peft_version")),
    )


def _mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping, got {type(value).__name__}.")
    return value


def _compile(text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"alpha_pattern: {text!r} is not a regular expression: {error}.") from error
