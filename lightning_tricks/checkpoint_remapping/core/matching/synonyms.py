"""Words that different projects use for the same part of a model."""

from __future__ import annotations

import re
from functools import lru_cache

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
_SAME_WORDS = {
    "bn": "norm",
    "ln": "norm",
    "layernorm": "norm",
    "batchnorm": "norm",
    "groupnorm": "norm",
    "normalization": "norm",
    "convolution": "conv",
    "conv2d": "conv",
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
    word = part.rstrip("0123456789")
    return _SAME_WORDS.get(part) or _SAME_WORDS.get(word, word) + part[len(word) :]


@lru_cache(maxsize=65536)
def is_computed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one that the model computes for itself."""
    return bool(_COMPUTED_BUFFERS.search(name) or (len(shape) > 1 and _CAUSAL_MASKS.search(name)))
