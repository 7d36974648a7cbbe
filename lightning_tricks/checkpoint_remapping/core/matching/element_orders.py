"""Orders of the elements in the weights of attention, in which projects differ where names and shapes may agree."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from lightning_tricks._shared.text import list_names

# Rotary embeddings rotate pairs of elements: neighbors, or the elements of two halves of a head
NEIGHBORS, HALVES = "rotary pairs of neighbors", "rotary halves of each head"
_BY_HEADS, _BY_PARTS = "query, key and value head by head", "query, key and value one after another"
_BY_GROUPS = "query, key and value by groups of heads, or one after another"
# Layers whose weights have a special order, so that equal shapes do not mean equal weights, and the usual one
_SPECIAL = {
    _BY_HEADS: (r"(^|\.)(query_key_value|attn\.attn)$", _BY_PARTS),
    _BY_GROUPS: (r"(^|\.)wqkv$", _BY_PARTS),
    NEIGHBORS: (r"(^|\.)w[qk]$", HALVES),
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
    return next((order for order, (pattern, _) in _SPECIAL.items() if re.search(pattern, path)), "")


def orders_differ(source: str, target: str, certain: bool = False) -> bool:
    """Whether two names say that the elements are in different orders; certainly so, or where there are rotations."""
    one, other = map(_order_of_tensor, (source, target))
    return one != other and not (certain and NEIGHBORS in (one, other))


def _order_of_tensor(name: str) -> str:
    return element_order(re.sub(r"[._](weight|bias)$", "", name))


def describe_orders(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the sentence about the first of some pairs of names whose orders differ; empty if there is none."""
    for source, target in pairs:
        one, other = map(_order_of_tensor, (source, target))
        if one != other:
            usual = _SPECIAL[one or other][1]
            rotary = "if the model has rotary embeddings, " * (NEIGHBORS in (one, other))  # names alone do not say it
            one, other = one or usual, other or usual
            return f"{rotary}{source} has {one}, {target} has {other}: {remedy(one, other)}"
    return ""


def describe_fused(names: Iterable[str]) -> str:
    """Return the sentence about a tensor that is not made of query, key and value one after another; empty if none."""
    orders = {name: _order_of_tensor(name) for name in names}
    fused = [name for name, order in orders.items() if order in (_BY_HEADS, _BY_GROUPS)]
    return f"{fused[0]} has {orders[fused[0]]}: {remedy(orders[fused[0]], 'of parts')}" if fused else ""


def remedy(source: str, target: str) -> str:
    """Return what to do where a file has one order and a model another."""
    formula = _FORMULAS.get((source, target))
    how = f", here w = {formula} for each such tensor w of the file, with its number of heads" if formula else ""
    return (
        f"a rename or a split is not enough. Reorder the elements first, as the script of the model's project does{how}"
    )


def describe_families(family: str, source: str, target: str, names: Iterable[str]) -> str:
    """Return the sentence about the names of one architecture in two projects that keep elements in two orders."""
    return (
        f"the names are those of {family} in two projects: the file has {source}, the model {target} in "
        f"{list_names(names)} and those like it: {remedy(source, target)}; then take each by a rule."
    )
