"""The two files of an adapter, as the peft library writes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import atomic_write, open_file
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.adapter_config import AdapterConfig, read_config

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
_WRITER = "lightning_tricks"
_MATRIX = re.compile(r"^(?:(.+)\.)?lora_(?:embedding_)?([AB])(?:\.(\w+))?$")


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
) -> tuple[dict[tuple[str, str], dict[str, Tensor]], dict[str, Tensor], set[str]]:
    """Sort the tensors of a file by what they are.

    Args:
        tensors: The tensors of a file by name.
        modules: The modules of the model by qualified name.

    Returns:
        (layer, weight) -> `{"A": ..., "B": ...}`; further tensors by their names in the model; and those of their
        names that belong to the base of a layer.

    Raises:
        ValueError: If a name does not begin as peft's do, or a layer has one of the two matrices, or two changes.
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
        pair = changes.setdefault((layer, weight), {})
        if matrix in pair:
            raise ValueError(
                f"it changes {layer}.{weight} twice: as a layer, and as a part of the attention around it. The outputs "
                "of peft are other ones before merge_and_unload than after it: load it with peft."
            )
        pair[matrix] = tensor
    halves = [
        f"{'.'.join(place)}: lora_{'B' if 'A' in pair else 'A'}" for place, pair in changes.items() if len(pair) < 2
    ]
    if halves:
        raise ValueError(f"one of the matrices A and B is missing: {list_names(halves)}.")
    return changes, values, frozen


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
        config = read_config(path / CONFIG_FILE)
        return replace(config, by_peft=writer != _WRITER), tensors
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


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors of a file, and who wrote it."""
    from safetensors import SafetensorError, safe_open

    open_file(path).close()  # which refuses what is no file
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get("writer")  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}): copy it again.") from error
