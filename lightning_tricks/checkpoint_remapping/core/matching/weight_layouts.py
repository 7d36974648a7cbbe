"""Layouts of weights that differ between projects: fused query, key and value, and transposed matrices."""

from __future__ import annotations

import re
from collections import defaultdict

from lightning_tricks.checkpoint_remapping.core.matching.layers import Layer, layers_by_parent
from lightning_tricks.checkpoint_remapping.core.matching.matches import FUSED, GATED, joined_shape
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import words_of

_POSITIONS = re.compile(r"(^|[._])(pos(itions?|itional)?_?(emb|embed|embeds|embedding|embeddings)?|wpe)$")
# What projects keep in one layer, by the word for it: the parts, in their order
_FUSED = {"fused query, key and value": ("query", "key", "value"), "fused key and value": ("key", "value")}
_GATED = re.compile("gate_?up|w13")
_EXPERT = re.compile(r"(.*experts)\.(?:expert_)?(\d+)\.(\w+)")
_Made = list[tuple[Layer, list[Layer]]]  # layers that others could be in one, and these others


def unify_layouts(layers: list[Layer], others: list[Layer]) -> None:
    """Give the layers of one side the layouts that the other side has, and mark those that are transposed or gates."""
    _unify_positions(layers, others)
    _stack_experts(layers, others)
    _fuse_query_key_value(layers, others)
    _mark_transposed(layers)
    _name_gates(layers)


def _fuse_query_key_value(layers: list[Layer], others: list[Layer]) -> None:
    """Replace the query, key and value of each attention by one layer, or two of them, if the other model has one.

    The parts may differ in their number of heads. What not all of them have, such as biases, remains as it is. A fused
    convolution is left alone: some networks for diffusion have query, key and value of each head side by side in it.
    """
    for word, parts in _FUSED.items():
        own, wanted = (
            {layer.sizes for layer in side if word in words_of(layer.path) and _is_matrix(layer)}
            for side in (layers, others)
        )
        separate = {fused.sizes for fused, _ in _fusible(others, parts)}
        for fused, members in _fusible(layers, parts):
            if fused.sizes in wanted - own - separate:
                rests = [
                    Layer(part.path, part.position, {leaf: part.tensors[leaf] for leaf in part.tensors if leaf in rest})
                    for part in members
                    if (rest := part.tensors.keys() - fused.tensors.keys())
                ]
                _replace(layers, members, [fused, *rests])


def _is_matrix(layer: Layer) -> bool:
    return all(len(shape) <= 2 for _, shape in layer.tensors.values())


def _replace(layers: list[Layer], members: list[Layer], made: list[Layer]) -> None:
    position = layers.index(members[0])
    layers[position:position] = made
    for member in members:
        layers.remove(member)


def _fusible(layers: list[Layer], parts: tuple[str, ...]) -> _Made:
    """Return the layer that would hold these parts of each attention, with the layers of the parts."""
    siblings: dict[str, dict[str, Layer]] = defaultdict(dict)
    for layer in layers:
        parent, _, name = layer.path.rpartition(".")
        said = words_of(name) & {"query", "key", "value"}
        if len(said) == 1 and "weight" in layer.tensors:
            siblings[parent][min(said)] = layer
    return [
        (fused, members)
        for parent, named in siblings.items()
        if named.keys() >= {*parts} and named["key"].tensors["weight"][1] == named["value"].tensors["weight"][1]
        for members in [[named[part] for part in parts]]
        for fused in [_one_after_another(f"{parent}.qkv", members)]
        if "weight" in fused.tensors
    ]


def _one_after_another(path: str, members: list[Layer]) -> Layer:
    """Return the layer that holds the tensors that all members have, along their first dimension."""
    fused = Layer(path, members[0].position, taken_for=FUSED)
    for leaf in members[0].tensors:
        tensors = [part.tensors[leaf] for part in members if leaf in part.tensors]
        if len(tensors) == len(members) and len({shape[1:] for _, shape in tensors}) == 1:
            fused.parts[leaf] = [shape for _, shape in tensors]
            names = tuple(name for names, _ in tensors for name in names)
            fused.tensors[leaf] = names, joined_shape(fused.parts[leaf])
    return fused


def _stack_experts(layers: list[Layer], others: list[Layer]) -> None:
    """Replace the experts of a mixture by one layer for each of their matrices, if the other model has them in one.

    Three different sizes say which dimension is that of the experts, and that no matrix is transposed.
    """
    wanted = {(_GATED.search(layer.name) is not None, layer.sizes) for layer in others if list(layer.tensors) == [""]}
    for stacked, members in _stackable(layers):
        distinct = len(set(stacked.tensors[""][1])) == 3
        if distinct and (stacked.taken_for == GATED, stacked.sizes) in wanted and members[0] in layers:
            _replace(layers, members, [stacked])


def _stackable(layers: list[Layer]) -> _Made:
    """Return the layers that would hold the matrices of all experts, gates with inputs first, and those of each."""
    experts: dict[str, dict[str, dict[int, Layer]]] = defaultdict(lambda: defaultdict(dict))
    for layer in layers:
        found = _EXPERT.fullmatch(layer.path)
        if found and list(layer.tensors) == ["weight"] and len(layer.tensors["weight"][1]) == 2:
            experts[found[1]][found[3]][int(found[2])] = layer
    found_layers = []
    for path, matrices in experts.items():
        series = {
            name: [members[i] for i in range(len(members))]
            for name, members in matrices.items()
            if [*sorted(members)] == [*range(len(members))] and len({layer.sizes for layer in members.values()}) == 1
        }
        roles = {role: name for name in series for role in _gate_roles(name, [*series])}
        if {"gate", "up"} <= roles.keys() and len(series[roles["gate"]]) == len(series[roles["up"]]):
            both = [layer for pair in zip(series[roles["gate"]], series[roles["up"]], strict=True) for layer in pair]
            found_layers.append((_stacked(f"{path}.gate_up_proj", both, len(both) // 2, GATED), both))
        for name, members in series.items():
            stacked = _stacked(f"{path}.{name}", members, len(members))
            stacked.said = frozenset(role for role, other in roles.items() if other == name)
            found_layers.append((stacked, members))
    return found_layers


def _gate_roles(name: str, names: list[str]) -> list[str]:
    """Return the roles of a matrix in a gated layer: `w1`, beside `w2` and `w3`, is the gate."""
    if sorted(names) == ["w1", "w2", "w3"]:
        return [{"w1": "gate", "w2": "down", "w3": "up"}[name]]
    return [role for role in ("gate", "up", "down") if name in (role, f"{role}_proj")]


def _stacked(path: str, members: list[Layer], count: int, taken_for: str = "") -> Layer:
    """Return the layer that has the matrices of so many experts in one tensor."""
    tensors = [member.tensors["weight"] for member in members]
    rows, *rest = joined_shape([shape for _, shape in tensors])
    stacked = Layer(path, members[0].position, taken_for=taken_for)
    stacked.tensors[""] = tuple(name for names, _ in tensors for name in names), (count, rows // count, *rest)
    stacked.parts[""] = [shape for _, shape in tensors]
    return stacked


def _unify_positions(layers: list[Layer], others: list[Layer]) -> None:
    """Treat an nn.Embedding of positions as a parameter, if the other model has a parameter."""
    if not any(list(layer.tensors) == [""] and _POSITIONS.search(layer.path) for layer in others):
        return
    for layer in layers:
        if list(layer.tensors) == ["weight"] and _POSITIONS.search(layer.path):
            layer.tensors[""] = layer.tensors.pop("weight")


def _name_gates(layers: list[Layer]) -> None:
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


def _mark_transposed(layers: list[Layer]) -> None:
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
