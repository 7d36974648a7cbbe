"""The two files of an adapter, as the peft library writes them, and which layers of a model peft knows.

They are read and written here, and never by peft, for what peft would lose: changes of recurrent layers, of parts of an
attention and of convolutions with groups, for which it has no layers; weights that several layers share, which it
adapts apart; and the promise that loading unpickles nothing and downloads nothing. It would also have to be injected
into a copy of the model, as the changes of this package lie in weights and not in modules around them.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_count, check_fraction, check_number, check_path
from lightning_tricks._shared.files import atomic_write, open_file
from lightning_tricks._shared.patterns import as_patterns, check_repeats
from lightning_tricks._shared.read_budget import Budget, parse_json
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core.class_extension import class_below
from lightning_tricks.finetuning.core.lora_layers import LowRank, changes_of

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
Place = tuple[str, str]  # the qualified name of a layer, and the name of its weight

_WRITER = "lightning_tricks"
_MATRIX = re.compile(r"^(?:(.+)\.)?lora_(?:embedding_)?([AB])(?:\.(\w+))?$")
_DOUBLES_OUT_PROJ = Version("0.21.99")  # the last version of peft that is known to do it
_LARGEST_CONFIG = 4 << 20  # bytes
_LARGEST_ALPHA = 1e9
PLAIN = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_INITIAL_VALUES = (None, True, False, "gaussian", "orthogonal", "eva")  # the others change the weights of the base
# What says where a file comes from, which layers it is for, which the names of its tensors say as well, or how it was
# initialized, or is read only beside a setting that is refused
_WITHOUT_EFFECT = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "runtime_config", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
    "init_lora_weights", "eva_config", "megatron_core", "qalora_group_size", "loftq_config", "ensure_weight_tying",
}  # fmt: skip
_USED = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "modules_to_save", "bias"}


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an `adapter_config.json` that determine a model's outputs and how training continues.

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
    by_peft: bool

    def alpha_of(self, layer: str) -> float:
        """Return the scale of a layer, before it is divided by its rank."""
        found = (alpha for text, alpha in self.alphas.items() if re.match(rf"(.*\.)?({text})$", layer))
        return next(found, self.alpha)


def read_adapter(folder: str | os.PathLike[str]) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Read both files.

    Raises:
        FileNotFoundError: If the folder or one of the files is missing.
        ValueError: If a file is corrupt or too large, or the adapter has a setting that only peft has.
    """
    path = Path(check_path("folder", folder, "a folder"))
    if not path.is_dir():
        raise FileNotFoundError(
            f"folder={os.fspath(folder)!r} is not a folder. Adapters are not downloaded: "
            "huggingface_hub.snapshot_download(...) returns a folder."
        )
    files = sorted(entry.name for entry in path.iterdir())
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if name not in files]
    if missing:
        remedy = (
            " adapter_model.bin is a pickle, which is not read: load it with peft, and call "
            "save_pretrained(folder, safe_serialization=True)."
        )
        raise FileNotFoundError(
            f"{path} has no {' and no '.join(missing)}, only {list_names(files)}."
            f"{remedy if 'adapter_model.bin' in files else ''}"
        )
    tensors, writer = _read_tensors(path / WEIGHTS_FILE)
    try:
        return _read_config(path / CONFIG_FILE, by_peft=writer != _WRITER), tensors
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path / CONFIG_FILE}: {error}") from error


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors of a file, and who wrote it."""
    from safetensors import SafetensorError, safe_open

    open_file(path).close()  # which refuses anything but a regular file
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get("writer")  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}): copy it again.") from error


def _read_config(path: Path, *, by_peft: bool) -> AdapterConfig:
    with open_file(path) as file:
        data = file.read(_LARGEST_CONFIG + 1)
    if len(data) > _LARGEST_CONFIG:
        raise ValueError(f"it is larger than {_LARGEST_CONFIG >> 20} MiB.")
    config = parse_json(data, Budget(len(data)))
    if not isinstance(config, dict):
        raise ValueError(f"a mapping is needed, got {type(config).__name__}.")
    _refuse_other_methods(config)
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict):
        raise ValueError(f"alpha_pattern must be a mapping, got {type(alphas).__name__}.")
    for text in alphas:
        check_repeats(text)
        as_patterns("alpha_pattern", f"re:{text}")
    check_count("r", config.get("r"))
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise ValueError(f"modules_to_save must be a list of names, got {saved!r:.60}.")
    version = config.get("peft_version")
    try:
        is_old = version is None or Version(str(version)) <= _DOUBLES_OUT_PROJ  # the first ones did not write it
    except InvalidVersion:
        raise ValueError(f"peft_version must be a version, got {version!r:.60}.") from None
    return AdapterConfig(
        _check_alpha("lora_alpha", config.get("lora_alpha")),
        {text: _check_alpha(f"alpha_pattern[{text!r}]", alpha) for text, alpha in alphas.items()},
        bool(config.get("use_rslora")),
        check_fraction("lora_dropout", config.get("lora_dropout", 0.0)),
        saved,
        is_old,
        by_peft,
    )


def _refuse_other_methods(config: Mapping[str, Any]) -> None:
    """Refuse an adapter of another method, or with settings by which the outputs differ from those of LoRA."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"peft_type must be 'LORA', got {kind!r}: load the adapters of other methods with peft, "
            "PeftModel.from_pretrained(model, folder)."
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


def _check_alpha(name: str, alpha: object) -> float:
    return check_number(name, alpha, above=0, at_most=_LARGEST_ALPHA)


def write_adapter(folder: str | os.PathLike[str], tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write both files, each of them atomically."""
    from safetensors.torch import save_file

    path = Path(check_path("folder", folder, "a folder"))
    path.mkdir(parents=True, exist_ok=True)
    with atomic_write(path / WEIGHTS_FILE) as staged:
        save_file(tensors, staged, metadata={"format": "pt", "writer": _WRITER})
    with atomic_write(path / CONFIG_FILE) as staged:
        staged.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def names_of_matrices(layer: str, module: nn.Module, weight: str, is_wrapped: bool) -> tuple[str, str]:
    """Return the names of A and B of a layer's weight: those of peft, where it has any for such a layer."""
    if is_wrapped:  # the out_proj of an nn.MultiheadAttention
        layer = ".base_layer.".join(layer.rpartition(".")[::2])
    front = f"{PREFIX}{layer}." if layer else PREFIX
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return f"{front}lora_embedding_A", f"{front}lora_embedding_B"
    if isinstance(module, nn.MultiheadAttention) and weight == "in_proj_weight":
        weight = "weight"
    return f"{front}lora_A.{weight}", f"{front}lora_B.{weight}"


def parse_names(
    tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[dict[Place, dict[str, Tensor]], dict[str, Tensor], set[str]]:
    """Divide the tensors of a file into changes and others.

    Args:
        tensors: The tensors of a file by name.
        modules: The modules of the model by qualified name.

    Returns:
        (layer, weight) -> `{"A": ..., "B": ...}`; further tensors by their names in the model; and those of their
        names that belong to the base of a layer.

    Raises:
        ValueError: If a name does not begin as peft's do, or a layer has one of the two matrices, or two changes.
    """
    changes: dict[Place, dict[str, Tensor]] = {}
    values: dict[str, Tensor] = {}
    frozen: set[str] = set()
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise ValueError(f"the name {name!r} does not begin with {PREFIX!r}, as those of peft's LoRA do.")
        inner = name.removeprefix(PREFIX)
        found = _MATRIX.match(inner)
        if found is None:
            plain = inner if inner.rpartition(".")[0] in modules else inner.replace(".base_layer.", ".")
            values[plain] = tensor
            frozen |= {plain} if plain != inner else set()
            continue
        layer, matrix, weight = found[1] or "", found[2], found[3] or "weight"
        if layer not in modules:
            layer = layer.replace(".base_layer.", ".")
        if weight == "weight" and isinstance(modules.get(layer), nn.MultiheadAttention):
            weight = "in_proj_weight"
        pair = changes.setdefault((layer, weight), {})
        if matrix in pair:
            raise ValueError(
                f"it changes {layer}.{weight} twice: as a layer, and as a part of the attention around it. The outputs "
                "of peft before merge_and_unload differ from those after it: load it with peft."
            )
        pair[matrix] = tensor
    halves = [
        f"{'.'.join(place)}: lora_{'B' if 'A' in pair else 'A'}" for place, pair in changes.items() if len(pair) < 2
    ]
    if halves:
        raise ValueError(f"one of the matrices A and B is missing: {list_names(halves)}.")
    return changes, values, frozen


def changed_weights(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Place, LowRank]]:
    """Yield the changed weights of a model; a weight that layers share comes once for each."""
    for name, module in modules.items():
        for weight, change in changes_of(module).items():
            yield (name, weight), change


def attention_of(layer: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the name of the `nn.MultiheadAttention` whose `out_proj` a layer is."""
    parent, _, name = layer.rpartition(".")
    return parent if name == "out_proj" and isinstance(modules.get(parent), nn.MultiheadAttention) else None


def layer_for_peft(place: Place, places: Container[Place], modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the layer that peft replaces: an attention and its `out_proj` are one, if both are changed."""
    attention = attention_of(place[0], modules)
    return attention if attention is not None and (attention, "in_proj_weight") in places else place[0]


def registered_or_computed(module: nn.Module, weight: str) -> Tensor:
    """Return the weight that a module registers, or that hooks and parametrizations compute."""
    value: Any = registered_tensor(module, weight)
    return getattr(module, weight) if value is None else value  # type: ignore[no-any-return]


def computed_otherwise(module: nn.Module) -> str | None:
    """Return the kind of a layer for which peft computes something else than a change of its weight, or None."""
    kind = class_below(module).__name__
    if _has_other_forward(module):
        return f"{kind} with a forward pass of its own"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = module.groups == 1 and module.padding_mode == "zeros" and set(module.dilation) == {1}
        return None if plain else f"{kind} with groups, dilation or padding_mode"
    return f"{kind} with max_norm" if isinstance(module, nn.Embedding) and module.max_norm is not None else None


@torch.no_grad()
def _has_other_forward(module: nn.Module) -> bool:
    """Whether a change of a layer's weight has another effect than in the class of torch that peft takes it for.

    The forward pass of a subclass is tried, in a copy with few rows: peft adds what the class would, times the
    `embed_scale` of an embedding. For a convolution it makes two of the subclass, with whatever that computes.
    """
    own, registered = class_below(module), registered_tensor(module, "weight")
    plain: Any = next((kind for kind in (nn.Linear, *PLAIN) if isinstance(module, kind)), None)
    if plain is None or registered is None or own.forward is plain.forward:
        return False
    is_lookup = plain is nn.Embedding
    if not is_lookup and plain is not nn.Linear:
        return True
    weight = (registered[:64] if is_lookup else registered).float()
    change = torch.arange(weight.numel(), device=weight.device).sin().view_as(weight)
    x = torch.arange(len(weight), device=weight.device)[:16] if is_lookup else change[:4]

    def output(kind: Any, value: Tensor) -> Any:
        layer: Any = copy.deepcopy(module, {id(registered): nn.Parameter(value)}).float().eval()
        layer.__class__ = own
        return kind.forward(layer, x)

    try:
        found, expected = (output(kind, weight + change) - output(kind, weight) for kind in (own, plain))
        if is_lookup:
            expected = expected * torch.as_tensor(getattr(module, "embed_scale", 1.0)).reshape(()).to(expected)
        return not torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    except Exception:  # of whatever kind, as the code is the user's
        return True
