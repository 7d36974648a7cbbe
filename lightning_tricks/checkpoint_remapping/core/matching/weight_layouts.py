"""Layouts of weights that differ between projects: fused query, key and value, and transposed matrices."""

from __future__ import annotations

import re
from collections import defaultdict

from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Layer, layers_by_parent
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import words_of

_POSITIONS = re.compile(r"(^|[._])(pos(itions?|itional)?_?(emb|embed|embeds|embedding|embeddings)?|wpe)$")
_PARTS = ("query", "key", "value")
_FUSED = "fused query, key and value"


def fuse_query_key_value(layers: list[Layer], others: list[Layer]) -> None:
    """Replace the query, key and value of each attention by one layer if the other model has them in one."""
    if not any(_FUSED in words_of(layer.path) for layer in others):
        return
    if any(_FUSED in words_of(layer.path) for layer in layers) or _separate_triples(others):
        return
    for parent, parts in _separate_triples(layers).items():
        first = parts[0]
        fused = Layer(f"{parent}.qkv", first.position)
        for leaf, (_, shape) in first.tensors.items():
            names = tuple(name for part in parts for name in part.tensors[leaf][0])
            fused.tensors[leaf] = names, (3 * shape[0], *shape[1:])
        layers[layers.index(first)] = fused
        for part in parts[1:]:
            layers.remove(part)


def _separate_triples(layers: list[Layer]) -> dict[str, list[Layer]]:
    siblings: dict[str, dict[str, Layer]] = defaultdict(dict)
    for layer in layers:
        parent, _, name = layer.path.rpartition(".")
        said = [part for part in _PARTS if part in words_of(name)]
        if len(said) == 1:
            siblings[parent][said[0]] = layer
    return {
        parent: [parts[name] for name in _PARTS]
        for parent, parts in siblings.items()
        if len(parts) == 3 and len({part.sizes for part in parts.values()}) == 1
    }


def unify_positions(layers: list[Layer], others: list[Layer]) -> None:
    """Take an nn.Embedding of positions for a parameter, if that is what the other model has."""
    if not any(list(layer.tensors) == [""] and _POSITIONS.search(layer.path) for layer in others):
        return
    for layer in layers:
        if list(layer.tensors) == ["weight"] and _POSITIONS.search(layer.path):
            layer.tensors[""] = layer.tensors.pop("weight")


def name_gates(layers: list[Layer]) -> None:
    """Call w1 a gate where w2 leads back: w1 and w3 are then gate and input of a gated layer, as in Meta's Llama."""
    for family in layers_by_parent(layers).values():
        named = {layer.name: layer for layer in family}
        w1, w2, w3 = map(named.get, ("w1", "w2", "w3"))
        if w1 and w2 and w3:
            wide, back, other = ([size for tensor, size in layer.sizes if tensor == "weight"] for layer in (w1, w2, w3))
            if wide == other != back and back == [size[::-1] for size in wide]:
                w1.said, w3.said = frozenset({"gate"}), frozenset({"up"})


def _says_its_layout(layer: Layer) -> bool:
    weight, bias = layer.tensors["weight"][1], layer.tensors["bias"][1]
    return len(set(weight)) == 2 and bias in (weight[:1], weight[1:])


def mark_transposed(layers: list[Layer]) -> None:
    """Mark the layers whose weight is (in, out), as of Hugging Face's Conv1D.

    The length of the bias shows it where a matrix is oblong; square matrices follow the others of their block.
    """
    blocks: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        if [len(size) for _, size in layer.sizes] == [1, 2]:  # bias, weight
            blocks[re.split(r"(?<=\d)\.(?!.*\d\.)", layer.path)[0]].append(layer)
    for block in blocks.values():
        oblong = [layer for layer in block if _says_its_layout(layer)]
        if not oblong or not all(layer.tensors["weight"][1][1:] == layer.tensors["bias"][1] for layer in oblong):
            continue
        for layer in block:
            layer.transposed = True
            del layer.sizes
