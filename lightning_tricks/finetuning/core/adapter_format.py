"""The two files of an adapter, as the peft library writes them."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_count, check_number, check_path, did_you_mean
from lightning_tricks._shared.files import atomic_write, open_file
from lightning_tricks._shared.patterns import check_repeats
from lightning_tricks._shared.read_budget import Budget, parse_json
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.lora_layers import transposed_linear

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
_WRITER = "lightning_tricks"
_DOUBLES_OUT_PROJ = Version("0.21.99")  # the last version of peft that is known to do it
_LARGEST_CONFIG = 4 << 20  # bytes
_LARGEST_ALPHA = 1e9
_MATRIX = re.compile(r"^(?:(.+)\.)?lora_(?:embedding_)?([AB])(?:\.(\w+))?$")
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
        doubles_out_proj: Whether the adapter was trained by a peft that adds the change of the `out_proj` of an
            `nn.MultiheadAttention` twice (huggingface/peft#3774).
    """

    alpha: float
    alphas: Mapping[str, float]
    use_rslora: bool
    dropout: float
    modules_to_save: Sequence[str]
    doubles_out_proj: bool = False

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


def names_of_matrices(layer: str, module: nn.Module, weight: str, is_out_proj: bool) -> tuple[str, str]:
    """Return the names of A and B of a layer's weight: those of peft, where it has any for such a layer."""
    if is_out_proj:  # of an nn.MultiheadAttention, which peft wraps
        layer = ".base_layer.".join(layer.rpartition(".")[::2])
    front = f"{PREFIX}{layer}." if layer else PREFIX
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return f"{front}lora_embedding_A", f"{front}lora_embedding_B"
    if isinstance(module, nn.MultiheadAttention) and weight == "in_proj_weight":
        weight = "weight"
    return f"{front}lora_A.{weight}", f"{front}lora_B.{weight}"


def parse_names(
    tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[dict[tuple[str, str], dict[str, Tensor]], dict[str, Tensor], set[str]]:
    """Sort the tensors of a file by what they are.

    Args:
        tensors: The tensors of a file by name.
        modules: The modules of the model by qualified name.

    Returns:
        (layer, weight) -> `{"A": ..., "B": ...}`; further tensors by their names in the model; and those of their
        names that belong to the base of a layer.

    Raises:
        ValueError: If a name does not begin as peft's do, or a layer has one of the two matrices.
    """
    changes: dict[tuple[str, str], dict[str, Tensor]] = {}
    values: dict[str, Tensor] = {}
    frozen: set[str] = set()
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise ValueError(f"the name {name!r} does not begin with {PREFIX!r}, as those of peft's LoRA do.")
        inner = name.removeprefix(PREFIX)
        found = _MATRIX.match(inner)
        if found is None:
            plain = inner if _owner(inner) in modules else inner.replace(".base_layer.", ".")
            values[plain] = tensor
            frozen |= {plain} if plain != inner else set()
            continue
        layer, matrix, weight = found[1] or "", found[2], found[3] or "weight"
        if layer not in modules:
            layer = layer.replace(".base_layer.", ".")
        if weight == "weight" and isinstance(modules.get(layer), nn.MultiheadAttention):
            weight = "in_proj_weight"
        changes.setdefault((layer, weight), {})[matrix] = tensor
    halves = [
        f"{'.'.join(place)}: lora_{'B' if 'A' in pair else 'A'}" for place, pair in changes.items() if len(pair) < 2
    ]
    if halves:
        raise ValueError(f"one of the matrices A and B is missing: {list_names(halves)}.")
    return changes, values, frozen


def is_transposed(module: nn.Module) -> bool:
    """Whether the first dimension of a module's weight is that of its inputs."""
    conv1d = transposed_linear()
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or (conv1d is not None and isinstance(module, conv1d))


def write_adapter(folder: str | os.PathLike[str], tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write both files, each of them atomically."""
    from safetensors.torch import save_file

    path = Path(check_path("folder", folder, "a folder"))
    path.mkdir(parents=True, exist_ok=True)
    with atomic_write(path / WEIGHTS_FILE) as staged:
        save_file(tensors, staged, metadata={"format": "pt", "writer": _WRITER})
    with atomic_write(path / CONFIG_FILE) as staged:
        staged.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def read_adapter(folder: str | os.PathLike[str]) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Read both files.

    Raises:
        FileNotFoundError: If the folder or one of the files is missing.
        ValueError: If a file is corrupt, or the adapter is of a kind that only peft has.
    """
    path = Path(check_path("folder", folder, "a folder"))
    if not path.is_dir():
        raise FileNotFoundError(
            f"folder={os.fspath(folder)!r} is no folder. Adapters are not downloaded: "
            "huggingface_hub.snapshot_download(...) returns a folder."
        )
    files = sorted(entry.name for entry in path.iterdir())
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if name not in files]
    if missing:
        raise FileNotFoundError(f"{path} has no {' and no '.join(missing)}, only {list_names(files)}.{_remedy(files)}")
    tensors, writer = _read_tensors(path / WEIGHTS_FILE)
    try:
        config = _checked(_read_config(path / CONFIG_FILE))
        return (replace(config, doubles_out_proj=False) if writer == _WRITER else config), tensors
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path / CONFIG_FILE}: {error}") from error


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _remedy(files: Sequence[str]) -> str:
    if "adapter_model.bin" in files:
        return (
            " adapter_model.bin is a pickle, which is not read: load it with peft, and call "
            "save_pretrained(folder, safe_serialization=True)."
        )
    return ""


def _read_config(path: Path) -> Any:
    with open_file(path) as file:
        data = file.read(_LARGEST_CONFIG + 1)
    if len(data) > _LARGEST_CONFIG:
        raise ValueError(f"it is larger than {_LARGEST_CONFIG >> 20} MiB.")
    return parse_json(data, Budget(len(data)))


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors of a file, and who wrote it."""
    from safetensors import SafetensorError, safe_open

    open_file(path).close()  # which refuses what is no file
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get("writer")  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}): copy it again.") from error


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
    known = _WITHOUT_EFFECT | _USED
    unknown = [name for name, value in config.items() if name not in known and value]
    unknown += ["bias"] * (config.get("bias", "none") != "none")
    if unknown:
        hint = did_you_mean(unknown[0], known) if len(unknown) == 1 else ""
        raise ValueError(
            f"{', '.join(f'{name}={config[name]!r:.60}' for name in unknown)}: LoRA of this package has no such "
            f"setting, and without it the outputs would differ. Load the adapter with peft.{hint}"
        )
    alphas = _mapping(config, "alpha_pattern")
    for text in alphas:
        check_repeats(text)
        _compile(text)
    check_count("r", config.get("r"))
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise ValueError(f"modules_to_save must be a list of names, got {saved!r:.60}.")
    if not 0 <= (dropout := check_number("lora_dropout", config.get("lora_dropout", 0.0))) < 1:
        raise ValueError(f"lora_dropout must be a number >= 0 and < 1, got {dropout!r}.")
    return AdapterConfig(
        check_number("lora_alpha", config.get("lora_alpha"), above=0, at_most=_LARGEST_ALPHA),
        {
            text: check_number(f"alpha_pattern[{text!r}]", alpha, above=0, at_most=_LARGEST_ALPHA)
            for text, alpha in alphas.items()
        },
        bool(config.get("use_rslora")),
        dropout,
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
