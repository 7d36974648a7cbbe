"""Files as another project would have saved a model, made of the model's own names and shapes: the truth is known."""

from __future__ import annotations

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import torch


@dataclass(frozen=True)
class Architecture:
    """What `align` sees of a model, and what it does not see.

    Attributes:
        library: Where the model comes from.
        name: Its name there.
        tensors: Its tensors on the meta device, each parameter under one name.
        kinds: The class of each module, by its qualified name.
        learned: Names of its parameters and of the statistics of its norms.
    """

    library: str
    name: str
    tensors: dict[str, torch.Tensor]
    kinds: dict[str, str]
    learned: frozenset[str]

    @cached_property
    def structure(self) -> str:
        """What is equal for models with the same names, shapes and classes."""
        shapes = [(name, tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        return hashlib.sha256(repr((shapes, self.kinds)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class File:
    """The tensors of a file.

    Attributes:
        truth: The names in the file, in its order, each with the name of the same tensor in the model.
        resized: Names in the model of tensors that have another size in the file.
    """

    truth: dict[str, str]
    resized: frozenset[str] = field(default_factory=frozenset)

    def tensors(self, model: Architecture) -> dict[str, torch.Tensor]:
        """Return the tensors, which take no memory."""
        return {name: self._tensor(model.tensors[old], old in self.resized) for name, old in self.truth.items()}

    @staticmethod
    def _tensor(own: torch.Tensor, is_resized: bool) -> torch.Tensor:
        shape = (own.shape[0] + 7, *own.shape[1:]) if is_resized else own.shape
        return torch.zeros([1] * len(shape), dtype=own.dtype).expand(shape)


class NotApplicableError(Exception):
    """A perturbation would change nothing in this model, or would give two tensors one name."""


Step = Callable[[Architecture, File, random.Random], File]
_TENSOR_NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def _split(name: str) -> tuple[str, str]:
    """Return the path of a layer and the rest of a tensor's name, which all projects share."""
    found = re.fullmatch(rf"(.*?)((?:^|[._])(?:{'|'.join(_TENSOR_NAMES)}))", name)
    return (found[1], found[2]) if found else (name, "")


def _renamed(file: File, rename: Callable[[str], str]) -> File:
    """Return a file whose layers have other paths."""
    truth = {}
    for name, old in file.truth.items():
        path, ending = _split(name)
        truth[(rename(path) if path else "") + ending] = old
    if len(truth) < len(file.truth):
        raise NotApplicableError
    return replace(file, truth=truth)


def _replaced(path: str, part: Callable[[str, str], str]) -> str:
    """Return a path with each part replaced by what `part` returns for its container and itself."""
    parts = path.split(".")
    return ".".join(part(".".join(parts[:depth]), name) for depth, name in enumerate(parts))


def _children(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the parts that follow each container's path, in order."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for path in paths:
        parts = path.split(".")
        for depth, part in enumerate(parts):
            found[".".join(parts[:depth])][part] = None
    return {container: list(parts) for container, parts in found.items()}


# Words


def _random_words(count: int, chance: random.Random) -> list[str]:
    """Return words of syllables that no word of a project contains."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(chance.choice("bdgjrvz") + chance.choice("aiu") for _ in range(3))] = None
    return list(words)


def other_words(_: Architecture, file: File, chance: random.Random) -> File:
    """Replace each word by another one wherever it stands; numbers stay."""
    words = sorted({word for name in file.truth for word in re.findall("[A-Za-z]+", _split(name)[0])})
    others = dict(zip(words, _random_words(len(words), chance), strict=True))
    return _renamed(file, lambda path: re.sub("[A-Za-z]+", lambda word: others[word[0]], path))


# Names that mean the same: a row holds those of one project, and a module that has a whole row may have another
_DIALECTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"), ("to_q", "to_k", "to_v"),
     ("q_lin", "k_lin", "v_lin"), ("query_proj", "key_proj", "value_proj"), ("wq", "wk", "wv")),
    (("norm1", "norm2"), ("ln_1", "ln_2"), ("ln1", "ln2"), ("layernorm_before", "layernorm_after"),
     ("layer_norm1", "layer_norm2"), ("input_layernorm", "post_attention_layernorm"), ("attention_norm", "ffn_norm")),
    (("fc1", "fc2"), ("linear1", "linear2"), ("lin1", "lin2"), ("c_fc", "c_proj"), ("dense_in", "dense_out"),
     ("wi", "wo"), ("dense_h_to_4h", "dense_4h_to_h")),
    (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("fc_1", "fc_2", "proj"), ("wi_0", "wi_1", "wo")),
    (("mlp", "attn"), ("ffn", "attention"), ("feed_forward", "self_attention"), ("ff", "sa"), ("mlp", "self_attn")),
    (("self_attn", "encoder_attn"), ("self_attn", "multihead_attn"), ("attn1", "attn2"), ("self_attn", "cross_attn"),
     ("sa", "ca")),
    (("out_proj",), ("o_proj",), ("to_out",), ("out_lin",)),
    (("bn",), ("norm",), ("batch_norm",), ("normalization",)),
    (("conv",), ("convolution",), ("conv2d",)),
    (("downsample",), ("shortcut",), ("skip",)),
    (("blocks",), ("layers",), ("layer",), ("h",)),
    (("stages",), ("stage",), ("levels",)),
    (("head",), ("classifier",), ("fc",)),
    (("features",), ("backbone",), ("trunk",)),
    (("patch_embed",), ("patch_embeddings",), ("conv_proj",)),
    (("pos_embed",), ("position_embeddings",), ("pos_embedding",)),
    (("embed_tokens",), ("wte",), ("tok_embeddings",), ("word_embeddings",)),
)  # fmt: skip


def synonyms(_: Architecture, file: File, chance: random.Random) -> File:
    """Replace names by those that other projects use for the same; the rest stays."""
    children = _children([_split(name)[0] for name in file.truth])
    others: dict[tuple[str, str], str] = {}
    for rows in _DIALECTS:
        chosen = chance.choice(rows)
        for container, parts in children.items():
            others |= {(container, old): new for old, new in _in_dialect(parts, rows, chosen).items()}
    if all(old == new for (_, old), new in others.items()):
        raise NotApplicableError
    return _renamed(file, lambda path: _replaced(path, lambda container, part: others.get((container, part), part)))


def _in_dialect(parts: list[str], rows: tuple[tuple[str, ...], ...], chosen: tuple[str, ...]) -> dict[str, str]:
    """Return the new names of the parts of a container by the old ones, where it has a whole row of names."""
    stems = {part.rstrip("0123456789"): part for part in parts}
    if len(chosen) == 1 and chosen[0] not in stems:  # bn1 and bn2 keep their numbers
        own = [stem for (stem,) in rows if stem in stems][:1]
        return {part: part.replace(own[0], chosen[0]) for part in parts if part.rstrip("0123456789") in own}
    row = next((row for row in rows if set(row) <= set(parts)), chosen)
    free = not set(chosen) & (set(parts) - set(row))
    return dict(zip(row, chosen, strict=True)) if free and len(chosen) > 1 else {}


def spelled_otherwise(_: Architecture, file: File, chance: random.Random) -> File:
    """Join words and numbers in another way: conv1 or conv_1 or conv.1, self_attn or selfattn, blocks.0 or blocks_0."""
    number, word, index = chance.choice(("_", ".", "")), chance.choice(("", "_")), chance.choice((".", ".", "_", ""))

    def spelled(path: str) -> str:
        path = re.sub(r"(?<=[A-Za-z])_?(?=\d)", number, path)
        path = re.sub(r"(?<=[A-Za-z])_(?=[A-Za-z])", word, path)
        return re.sub(r"(?<=[A-Za-z])\.(?=\d+(\.|$))", index, path)

    return _renamed(file, spelled)


def names_that_say_nothing(model: Architecture, file: File, chance: random.Random) -> File:
    """Call two children of one shape by names without a meaning, in either order."""
    pairs = _pairs_of_one_shape(model, file)
    if not pairs:
        raise NotApplicableError
    kind, one, other = chance.choice(sorted(pairs))
    new = chance.choice((["a", "b"], _random_words(2, chance)))
    chance.shuffle(new)
    others = dict(zip((one, other), new, strict=True))
    containers = set(pairs[kind, one, other])
    truth = {}
    for name, old in file.truth.items():
        path = _replaced(name, lambda container, part: others.get(part, part) if container in containers else part)
        truth[path] = old
    if len(truth) < len(file.truth):
        raise NotApplicableError
    return replace(file, truth=truth)


def _pairs_of_one_shape(model: Architecture, file: File) -> dict[tuple[str, str, str], list[str]]:
    """Return the containers by their kind and the names of two children whose tensors have the same shapes."""
    shapes = _shapes_inside(model, list(file.truth))
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for container, parts in _children(list(file.truth)).items():
        paths = {part: f"{container}.{part}".lstrip(".") for part in parts if not part.isdecimal()}
        modules = [part for part, path in paths.items() if path in shapes]
        for one, other in combinations(modules, 2):
            if shapes[paths[one]] == shapes[paths[other]]:
                found[model.kinds.get(container, ""), one, other].append(container)
    return found


def _shapes_inside(model: Architecture, names: list[str]) -> dict[str, list[object]]:
    """Return the names and shapes of the tensors in each module, without its own name."""
    shapes: dict[str, list[object]] = defaultdict(list)
    for name in names:
        for end in _dots(name):
            shapes[name[:end]].append((name[end:], model.tensors[name].shape))
    return shapes


def _dots(name: str) -> list[int]:
    return [dot.start() for dot in re.finditer(r"\.", name)]


# Numbers


def counted_from_elsewhere(_: Architecture, file: File, chance: random.Random) -> File:
    """Count from one instead of zero, without gaps, or both; numbers in words by themselves."""
    dense, start, in_words = chance.choice(((False, 1, 0), (True, 1, 0), (False, 1, 1), (True, 0, 1)))
    children = _children([_split(name)[0] for name in file.truth])
    ranks = {
        container: {part: rank for rank, part in enumerate(sorted(filter(str.isdecimal, parts), key=int))}
        for container, parts in children.items()
    }

    def counted(container: str, part: str) -> str:
        if part.isdecimal():
            return str((ranks[container][part] if dense else int(part)) + start)
        return re.sub(r"\d+", lambda number: str(int(number[0]) + in_words), part)

    return _renamed(file, lambda path: _replaced(path, counted))


def counted_backwards(model: Architecture, file: File, chance: random.Random) -> File:
    """Count the blocks of some lists in the other direction, as projects do behind the trunk, or where sizes show it.

    Nobody counts the blocks of a trunk from the last.
    """
    shapes = _shapes_inside(model, list(file.truth))
    sizes: dict[str, int] = defaultdict(int)
    for old in file.truth.values():
        sizes[old.partition(".")[0]] += model.tensors[old].numel()
    start = max(sizes, key=lambda part: sizes[part])
    behind = {part for part in [*sizes][[*sizes].index(start) + 1 :] if 3 * sizes[part] < sizes[start]}

    def may(blocks: list[str]) -> bool:
        ours = [*map(shapes.get, blocks)]
        filters = any(len(shape) > 2 for _, shape in ours[0] or ())
        return ours != ours[::-1] or (blocks[0].partition(".")[0] in behind and filters)

    return _counted_backwards(file, chance, may)


def _counted_backwards(file: File, chance: random.Random, may: Callable[[list[str]], bool]) -> File:
    paths = [_split(name)[0] for name in file.truth]
    children = _children(paths)
    lists: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for container, parts in children.items():
        blocks = [f"{container}.{part}" for part in parts]
        if len(parts) > 1 and all(map(str.isdecimal, parts)) and children.keys() >= {*blocks} and may(blocks):
            lists[re.sub(r"\d+", "#", container)][container] = parts
    if not lists:
        raise NotApplicableError
    chosen = lists[chance.choice(sorted(lists))]

    def counted(container: str, part: str) -> str:
        parts = chosen.get(container)
        return str(len(parts) - parts.index(part)) if parts else part

    return _renamed(file, lambda path: _replaced(path, counted))


# Order


def shuffled(file: File, seed: int = 0) -> File:
    """Return a file in another order."""
    return replace(file, truth=dict(random.Random(seed).sample(list(file.truth.items()), len(file.truth))))


# What is around


def prefixed(_: Architecture, file: File, chance: random.Random) -> File:
    """Put what a wrapper or another model adds in front of all names."""
    _check_names(file)
    prefix = chance.choice(("module.", "model.", "net.backbone.", "_orig_mod.", "module.model.", "student."))
    return replace(file, truth={prefix + name: old for name, old in file.truth.items()})


def _check_names(file: File) -> None:
    """Refuse names that are those of other tensors of the model: who reads them must believe them."""
    own = set(file.truth.values())
    if any(name in own and name != old for name, old in file.truth.items()):
        raise NotApplicableError


def without_a_part(_: Architecture, file: File, chance: random.Random) -> File:
    """Leave out one child of the model, unless it is most of it."""
    sizes = defaultdict(int)
    for old in file.truth.values():
        sizes[old.partition(".")[0]] += 1
    small = [part for part, size in sizes.items() if 2 * size < len(file.truth)]
    if not small:
        return file
    left = chance.choice(small)
    return replace(file, truth={name: old for name, old in file.truth.items() if old.partition(".")[0] != left})


def with_another_head(model: Architecture, file: File, _: random.Random) -> File:
    """Give the last matrix of the model, and its bias, another number of rows."""
    heads = [old for old in file.truth.values() if old.endswith(".weight") and model.tensors[old].dim() == 2]
    if not heads:
        return file
    bias = heads[-1].removesuffix("weight") + "bias"
    return replace(file, resized=frozenset({heads[-1], bias} & model.tensors.keys()))


PERTURBATIONS: dict[str, tuple[Step, ...]] = {
    "a prefix, a part missing, another head": (without_a_part, with_another_head, prefixed),
    "synonyms": (synonyms,),
    "spelling, counted from elsewhere": (counted_from_elsewhere, spelled_otherwise),
    "other words": (other_words,),
    "other words and spelling, counted from elsewhere": (counted_from_elsewhere, other_words, spelled_otherwise),
    "other words, counted backwards": (counted_backwards, other_words),
    "two names that say nothing": (names_that_say_nothing,),
    "all at once": (with_another_head, counted_from_elsewhere, synonyms, spelled_otherwise, prefixed),
}


def perturbed(model: Architecture, perturbation: str) -> File | None:
    """Return the file of one model, the same each time; None where there is none."""
    for attempt in range(5):
        chance = random.Random(f"{model.structure}: {perturbation}: {attempt}")
        file = File({name: name for name in model.tensors})
        try:
            for step in PERTURBATIONS[perturbation]:
                file = step(model, file, chance)
            _check_names(file)
        except NotApplicableError:
            continue
        return file
    return None
