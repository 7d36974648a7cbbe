"""What names mean: words of different projects for the same part of a model, and orders of elements in weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from lightning_tricks._shared.text import list_names

# The roles of parts, with patterns of their names; matched in lower case, with every separator written as a dot
_ROLES = {
    "query": r"(^|\.)(q|query|q\.proj|q\.lin|to\.q)(\.|$)",
    "key": r"(^|\.)(k|key|k\.proj|k\.lin|to\.k)(\.|$)",
    "value": r"(^|\.)(v|value|v\.proj|v\.lin|to\.v)(\.|$)",
    "fused query, key and value": r"(qkv|in\.proj|c\.attn)(\.|$)",
    "fused key and value": r"(^|\.)(kv|kv\.proj|to\.kv)$",
    "output of the attention": (
        r"attention\.output\.dense|out\.proj|o\.proj|attn\.proj|out\.lin|attn\.c\.proj|to\.out|attention\.projection"
    ),
    "attention": r"attn|attention|mha|(^|\.)(sa|att)(\.|$)",
    "embedding of words": r"(^|\.)(word\.embeddings?|embed\.tokens|tok\.embeddings?|token\.embedding|wte)$",
    "output of words": r"(^|\.)(lm\.head|embed\.out|output\.layer)$|^output$",
    "shortcut": r"downsample|shortcut|skip|(^|\.)proj(\.\d+)?$",
    "first norm": (
        r"(norm|ln)\.?1$|norm\.before$|before\.norm$|attention\.output\.layernorm$|sa\.layer\.norm$|self\.attn\.layer\.norm(\.a)?$|"
        r"pre\.norm\.(mha|attn)\.0$|input\.layernorm$|(attention|attn)\.norm$|norm\.attn$"
    ),
    # The norms of transformers' BERT are `attention.output.LayerNorm` and `output.LayerNorm`: a second one that ends
    # alike.
    "second norm": (
        r"(norm|ln)\.?2$|norm\.after$|after\.norm$|(?<!attention\.)output\.layernorm$|output\.layer\.norm$|final\.layer\.norm(\.a)?$|"
        r"pre\.norm\.ffn\.0$|"
        r"post\.attention\.layernorm$|(ffn|ff|mlp)\.norm$"
    ),
    "third norm": r"(norm|ln)\.?[3-9]$",
    "widening layer": (r"(fc|linear|lin|pwconv)\.?1$|intermediate\.dense$|c\.fc$|mlp\.0$|expand|(^|\.)reduce$"),
    "narrowing layer": (
        r"(fc|linear|lin|pwconv)\.?2$|(?<!attention\.)output\.dense$|mlp\.c\.proj$|mlp\.3$|pwl$|project"
    ),
    # T5 since 1.1 (transformers, modeling_t5.py): `wi_0` has the activation, `wi_1` is multiplied.
    "gate": r"(^|\.)wi\.0$",
    "up": r"(^|\.)wi\.1$",
    "class token": r"(^|\.)(cls|class)",
    "distillation": r"dist",
    "mask": r"mask",
    "position": r"pos",
    "segment": r"token\.type|segment",
}
# First and second mean something only where there are two
ORDINAL_ROLES = frozenset({"first norm", "second norm", "third norm", "widening layer", "narrowing layer"})
# Words that stand for different parts in different projects, or for any part
VAGUE_WORDS = frozenset(
    """
    block blocks conv dense down fc feature features final first in input inner inputs last layer layers lin
    linear main model module modules net norm out outer output outputs post pre proj project projection res
    resnet second self seq sequential stage stages stem sub unit up w
    """.split()  # noqa: SIM905  # a list of words
)
# Of a list whose parts are computed one after another in all projects; `ups` and `heads` are counted from either end
NAMES_OF_LISTS = frozenset(
    """
    backbone block blocks body conv convs dense encoder encoders fc features group groups h layer layers lin linear main
    model module modules net network norm norms resblocks sequential stage stages transformer trunk
    """.split()  # noqa: SIM905  # a list of words
)
_SAME_WORDS = {
    "bn": "norm",
    "ln": "norm",
    "layernorm": "norm",
    "batchnorm": "norm",
    "groupnorm": "norm",
    "normalization": "norm",
    "convolution": "conv",
    "conv2d": "conv",
    "gamma": "scale",
    "lambda": "scale",
    "ls": "scale",
}

# Buffers that a model computes for itself; some versions of a model store them and some don't
_COMPUTED_BUFFERS = re.compile(
    r"(^|\.)(num_batches_tracked|relative_position_index|position_ids|attn_mask|attention_bias_idxs|relative_coords_table|inv_freq|"
    r"masked_bias|attn\.mask|rope\.freqs)$"
)
_CAUSAL_MASKS = re.compile(r"(^|\.)(attn|attention)\.bias$")  # GPT-2's; with one dimension, the bias of a layer


@lru_cache(maxsize=65536)
def words_of(path: str) -> frozenset[str]:
    """Return the words of a qualified name, and the roles that they stand for."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z]|\d+[a-z])", "_", path)  # `branch1x1` has the word of `branch_pool`
    parts = [same_word(part) for part in re.split(r"[._\-]", spaced.lower()) if part]
    text = ".".join(re.split(r"[._\-]", path.lower()))
    return frozenset({role for role, pattern in _ROLES.items() if re.search(pattern, text)} | set(parts))


def same_word(part: str) -> str:
    """Return the word that all projects' spellings of a part of a name stand for."""
    # `bn1` is a norm, `conv2d` a convolution of its own name.
    word = part.rstrip("0123456789")
    return _SAME_WORDS.get(part) or _SAME_WORDS.get(word, word) + part[len(word) :]


@lru_cache(maxsize=65536)
def is_computed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one that the model computes for itself."""
    # Versions of one model differ in them: transformers registers `inv_freq` with persistent=False, older files have
    # it.
    return bool(_COMPUTED_BUFFERS.search(name) or (len(shape) > 1 and _CAUSAL_MASKS.search(name)))


# Orders of the elements in the weights of attention, in which projects differ where names and shapes may agree


class _Special(NamedTuple):
    """A pattern of the paths of layers with a special order of their elements, the usual order, and what it is of."""

    pattern: str
    usual: str
    is_fused: bool = False
    is_rotary: bool = False


# Rotary embeddings rotate pairs of elements: neighbors, or the elements of two halves of a head
NEIGHBORS, HALVES = "rotary pairs of neighbors", "rotary halves of each head"
_BY_HEADS, _BY_PARTS = "query, key and value head by head", "query, key and value one after another"
_BY_GROUPS = "query, key and value by groups of heads, or one after another"
# Layers whose weights have a special order, so that equal shapes do not mean equal weights, and the usual one
_SPECIAL = {
    # GPT-NeoX and BLOOM of transformers view the output as heads of three (modeling_gpt_neox.py, `forward`), and so did
    # LitGPT before #1013: split in thirds, it loads, and is wrong.
    _BY_HEADS: _Special(r"(^|\.)(query_key_value|attn\.attn)$", _BY_PARTS, is_fused=True),
    # InternLM2 keeps the queries of a group with their key and value; gpt-fast has one after another under the same
    # name.
    _BY_GROUPS: _Special(r"(^|\.)wqkv$", _BY_PARTS, is_fused=True),
    # Meta's Llama rotates pairs (2i, 2i + 1), transformers (i, i + d/2): transformers #25199.
    NEIGHBORS: _Special(r"(^|\.)w[qk]$", HALVES, is_rotary=True),
}
_FORMULAS = {
    (NEIGHBORS, HALVES): "w.view(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)",
    (HALVES, NEIGHBORS): "w.view(heads, 2, -1, *w.shape[1:]).transpose(1, 2).reshape(w.shape)",
    (_BY_HEADS, _BY_PARTS): "w.view(heads, 3, -1, *w.shape[1:]).transpose(0, 1).reshape(w.shape)",
    (_BY_PARTS, _BY_HEADS): "w.view(3, heads, -1, *w.shape[1:]).transpose(0, 1).reshape(w.shape)",
}


@lru_cache(maxsize=65536)
def element_order(path: str) -> str:
    """Return the special order of the elements of a layer's weights; empty for the usual one."""
    return next((order for order, special in _SPECIAL.items() if re.search(special.pattern, path)), "")


def orders_differ(source: str, target: str, certain: bool = False) -> bool:
    """Whether two names say that the elements are in different orders; certainly so, or where there are rotations."""
    one, other = map(_order_of_tensor, (source, target))
    return one != other and not (certain and _is_rotary(one, other))


def _is_rotary(*orders: str) -> bool:
    return any(order and _SPECIAL[order].is_rotary for order in orders)


def _order_of_tensor(name: str) -> str:
    return element_order(re.sub(r"[._](weight|bias)$", "", name))


def describe_orders(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the sentence about the first of some pairs of names whose orders differ; empty if there is none."""
    for source, target in pairs:
        one, other = map(_order_of_tensor, (source, target))
        if one != other:
            usual = _SPECIAL[one or other].usual
            # names alone do not say whether the model is
            rotary = "if the model has rotary embeddings, " if _is_rotary(one, other) else ""
            one, other = one or usual, other or usual
            return f"{rotary}{source} has {one}, {target} has {other}: {remedy(one, other)}"
    return ""


def describe_fused(names: Iterable[str]) -> str:
    """Return the sentence about a tensor that is not made of query, key and value one after another; empty if none."""
    orders = {name: _order_of_tensor(name) for name in names}
    fused = [name for name, order in orders.items() if order and _SPECIAL[order].is_fused]
    return f"{fused[0]} has {orders[fused[0]]}: {remedy(orders[fused[0]], 'of parts')}" if fused else ""


def remedy(source: str, target: str) -> str:
    """Return what to do if a file has one order and a model another."""
    formula = _FORMULAS.get((source, target))
    how = f", here w = {formula} for each such tensor w of the file, with its number of heads" if formula else ""
    return (
        f"a rename or a split is not enough. Reorder the elements first, as the script of the model's project does{how}"
    )


def describe_families(family: str, source: str, target: str, names: Iterable[str]) -> str:
    """Return the sentence about the names of one architecture in two projects that keep elements in two orders."""
    return (
        f"the names are those of {family} in two projects: the file has {source}, the model {target} in "
        f"{list_names(names)} and those like it: {remedy(source, target)}; then match each with a rule."
    )
