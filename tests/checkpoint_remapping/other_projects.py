"""One network in the words, the order and the layout of several projects: names, sizes and values alone.

Each tensor has a role, which is the same in all projects, so that what is right is known tensor by tensor.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_tricks import load_weights
from lightning_tricks.checkpoint_remapping import CheckpointError
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from tests.checkpoint_remapping.models import module_of

Shapes = dict[str, tuple[int, ...]]  # of a layer's tensors, by their own names
HIDDEN, LAYERS, SIZE, VOCABULARY = 32, 3, 8, 50  # SIZE is that of a head
RIGHT, REFUSED, WRONG = "right", "refused", "WRONG"
_FUSED = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "gate_up": ("gate", "up")}

# Networks: the parts by their roles, a list of the same part of each layer; and the names that projects have for them
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {}


def _add(architecture: str, parts: dict[str, Any], **projects: str) -> None:
    """Enter a network.

    Args:
        architecture: Its name.
        parts: Its parts.
        **projects: Roles and their names, with commas or lines between them; `{i}` is the number of the layer, `{n}`
            the one after it, and `{r}` the number counted from the end. What follows a slash stands before all names
            after it. After a tilde, a role has the layout of its elements.
    """
    ARCHITECTURES[architecture] = parts, projects


def _linear(inputs: int = HIDDEN, outputs: int = HIDDEN, bias: bool = True) -> Shapes:
    return {"weight": (outputs, inputs), "bias": (outputs,)} if bias else {"weight": (outputs, inputs)}


def _conv(inputs: int, outputs: int, *size: int, bias: bool = True) -> Shapes:
    return {"weight": (outputs, inputs, *(size or (3, 3)))} | ({"bias": (outputs,)} if bias else {})


def _norm(size: int = HIDDEN) -> Shapes:
    return {"weight": (size,), "bias": (size,)}


def _batch_norm(size: int) -> Shapes:
    return _norm(size) | {"running_mean": (size,), "running_var": (size,), "num_batches_tracked": ()}


def _each(part: Shapes) -> list[Shapes]:
    return [part] * LAYERS


def _attention(prefix: str = "", bias: bool = True) -> dict[str, Any]:
    return {f"{prefix}{role}": _each(_linear(bias=bias)) for role in "qkvo"}


# Llama and its kin, CLIP and Whisper, whose names are converted into each other's


def _decoder(key_heads: int = 4) -> dict[str, Any]:
    sizes = {"q": HIDDEN, "k": key_heads * SIZE, "v": key_heads * SIZE, "o": HIDDEN, "gate": 48, "up": 48}
    rms, of_head = {"weight": (HIDDEN,)}, {"weight": (SIZE,)}
    return {role: _each(_linear(HIDDEN, size, False)) for role, size in sizes.items()} | {
        "down": _each(_linear(48, HIDDEN, False)), "embed": _linear(HIDDEN, VOCABULARY, False), "norm": rms,
        "head": _linear(HIDDEN, VOCABULARY, False), "norm1": _each(rms), "norm2": _each(rms),
        "norm_q": _each(of_head), "norm_k": _each(of_head),
    }  # fmt: skip


_HF = """
    embed model.embed_tokens,/model.layers.{i}. q self_attn.q_proj,k self_attn.k_proj,v self_attn.v_proj
    o self_attn.o_proj,gate mlp.gate_proj,up mlp.up_proj,down mlp.down_proj
    norm1 input_layernorm,norm2 post_attention_layernorm,/ norm model.norm,head lm_head
"""
_META = """
    embed tok_embeddings,/layers.{i}.attention. q~neighbors wq,k~neighbors wk,v wv,o wo
    /layers.{i}. gate feed_forward.w1,down feed_forward.w2,up feed_forward.w3,norm1 attention_norm,norm2 ffn_norm
    / norm norm,head output
"""
_TORCHTUNE = """
    embed tok_embeddings,/layers.{i}. q~neighbors attn.q_proj,k~neighbors attn.k_proj,v attn.v_proj
    o attn.output_proj,gate mlp.w1,down mlp.w2,up mlp.w3,norm1 sa_norm,norm2 mlp_norm,/ norm norm,head output
"""
_LIT_GPT = """
    head lm_head,embed transformer.wte,/transformer.h.{i}. norm1 norm_1,qkv attn.qkv,o attn.proj
    norm2 norm_2,gate mlp.fc_1,up mlp.fc_2,down mlp.proj,/ norm transformer.ln_f
"""
_INTERNLM2 = """
    embed model.tok_embeddings,/model.layers.{i}. qkv~heads attention.wqkv,o attention.wo,gate feed_forward.w1
    up feed_forward.w3,down feed_forward.w2,norm1 attention_norm,norm2 ffn_norm,/ norm model.norm,head output
"""
_BAICHUAN = _HF.replace("q self_attn.q_proj,k self_attn.k_proj,v self_attn.v_proj", "qkv self_attn.W_pack")
_PHI3 = _BAICHUAN.replace("W_pack", "qkv_proj").replace("gate mlp.gate_proj,up mlp.up_proj", "gate_up mlp.gate_up_proj")
_QWEN = """
    embed transformer.wte,/transformer.h.{i}. norm1 ln_1,qkv attn.c_attn,o attn.c_proj,norm2 ln_2
    up mlp.w1,gate mlp.w2,down mlp.c_proj,/ norm transformer.ln_f,head lm_head
"""  # the gate is w2 here
_BY_HEADS = _LIT_GPT.replace("qkv attn.qkv", "qkv~heads attn.attn")
_add(
    "Llama", _decoder(), HF=_HF, Meta=_META, torchtune=_TORCHTUNE, lit_gpt=_LIT_GPT, lit_gpt_by_heads=_BY_HEADS,
    Baichuan=_BAICHUAN, InternLM2=_INTERNLM2, Phi3=_PHI3, Qwen=_QWEN,
)  # fmt: skip
_add("Llama with shared keys", _decoder(2), HF=_HF, Meta=_META, lit_gpt_by_heads=_BY_HEADS)
_add(
    "Qwen3", _decoder(2), HF=_HF.replace("gate ", "norm_q self_attn.q_norm,norm_k self_attn.k_norm,gate "),
    lit_gpt=_LIT_GPT.replace("o attn", "norm_q attn.norm_q,norm_k attn.norm_k,o attn"),
)  # fmt: skip


def _tower(prefix: str, **more: Any) -> dict[str, Any]:
    layers = {"norm1": _norm(), "wide": _linear(HIDDEN, 64), "narrow": _linear(64, HIDDEN), "norm2": _norm()}
    tower = {f"{prefix}{role}": _each(part) for role, part in layers.items()} | _attention(prefix)
    return tower | {f"{prefix}{role}": part for role, part in more.items()}


_CLIP = _tower(
    "i", cls={"": (HIDDEN,)}, pos={"": (17, HIDDEN)}, patches=_conv(3, HIDDEN, 4, 4, bias=False), first=_norm(),
    last=_norm(), proj={"": (24, HIDDEN)},
) | _tower(
    "t", words={"weight": (VOCABULARY, HIDDEN)}, pos={"": (12, HIDDEN)}, last=_norm(), proj={"": (24, HIDDEN)},
    scale={"": ()},
)  # fmt: skip
_HF_LAYER = (
    "{t}k self_attn.k_proj,{t}v self_attn.v_proj,{t}q self_attn.q_proj,{t}o self_attn.out_proj,{t}norm1 layer_norm1,"
    "{t}wide mlp.fc1,{t}narrow mlp.fc2,{t}norm2 layer_norm2"
)
_OPENAI_LAYER = (
    "{t}qkv attn.in_proj_,{t}o attn.out_proj,{t}norm1 ln_1,{t}wide mlp.c_fc,{t}narrow mlp.c_proj,{t}norm2 ln_2"
)
_HF_IMAGES = f"""
    icls vision_model.embeddings.class_embedding,ipatches vision_model.embeddings.patch_embedding
    ipos vision_model.embeddings.position_embedding.weight,ifirst vision_model.pre_layrnorm
    /vision_model.encoder.layers.{{i}}. {_HF_LAYER.format(t="i")},/ ilast vision_model.post_layernorm
    iproj visual_projection.weight
"""
_OPENAI_IMAGES = f"""
    /VISUAL icls class_embedding,ipos positional_embedding,iproj~transposed proj,ipatches conv1,ifirst ln_pre
    /VISUALtransformer.resblocks.{{i}}. {_OPENAI_LAYER.format(t="i")},/VISUAL ilast ln_post
"""
_add(
    "CLIP",
    _CLIP,
    HF=f"tscale logit_scale,twords text_model.embeddings.token_embedding,tpos text_model.embeddings.position_embedding."
    f"weight,/text_model.encoder.layers.{{i}}. {_HF_LAYER.format(t='t')},/ tlast text_model.final_layer_norm,"
    f"{_HF_IMAGES},tproj text_projection.weight",
    OpenAI=f"tpos positional_embedding,tproj~transposed text_projection,tscale logit_scale,"
    f"{_OPENAI_IMAGES.replace('VISUAL', 'visual.')},/transformer.resblocks.{{i}}. {_OPENAI_LAYER.format(t='t')},"
    f"/ twords token_embedding,tlast ln_final",
)
_add("CLIP's images", _CLIP, HF=_HF_IMAGES, OpenAI=_OPENAI_IMAGES.replace("VISUAL", ""))

_WHISPER_LAYER = "/{side}.blocks.{{i}}. {s}q attn.query,{s}k attn.key,{s}v attn.value,{s}o attn.out,{s}norm1 attn_ln"
_WHISPER_REST = "{s}wide mlp.0,{s}narrow mlp.2,{s}norm2 mlp_ln"
_HF_WHISPER = _HF_LAYER.replace("layer_norm1", "self_attn_layer_norm").replace("layer_norm2", "final_layer_norm")
_add(
    "Whisper",
    _tower("e", pos={"": (10, HIDDEN)}, last=_norm(), conv1=_conv(8, HIDDEN, 3), conv2=_conv(HIDDEN, HIDDEN, 3))
    | _tower("d", pos={"": (12, HIDDEN)}, last=_norm(), words={"weight": (VOCABULARY, HIDDEN)})
    | {f"{side}k": _each(_linear(bias=False)) for side in "edc"}
    | {f"c{role}": _each(_linear()) for role in "qvo"}
    | {"cnorm": _each(_norm())},
    HF=f"""
        econv1 model.encoder.conv1,econv2 model.encoder.conv2,epos model.encoder.embed_positions.weight
        /model.encoder.layers.{{i}}. {_HF_WHISPER.format(t="e").replace("mlp.", "")},/ elast model.encoder.layer_norm
        dwords model.decoder.embed_tokens,dpos model.decoder.embed_positions.weight
        /model.decoder.layers.{{i}}. {_HF_WHISPER.format(t="d").replace("mlp.", "")}
        ck encoder_attn.k_proj,cv encoder_attn.v_proj,cq encoder_attn.q_proj,co encoder_attn.out_proj
        cnorm encoder_attn_layer_norm,/ dlast model.decoder.layer_norm,dwords proj_out
    """,
    OpenAI=f"""
        epos encoder.positional_embedding,econv1 encoder.conv1,econv2 encoder.conv2
        {_WHISPER_LAYER.format(s="e", side="encoder")},{_WHISPER_REST.format(s="e")},/ elast encoder.ln_post
        dpos decoder.positional_embedding,dwords decoder.token_embedding
        {_WHISPER_LAYER.format(s="d", side="decoder")}
        cq cross_attn.query,ck cross_attn.key,cv cross_attn.value,co cross_attn.out,cnorm cross_attn_ln
        {_WHISPER_REST.format(s="d")},/ dlast decoder.ln
    """,
)

# Residual networks, and two or more of a kind side by side: what tells them apart is not in their sizes

_RESIDUAL = {
    "stem": _conv(3, 16), "norm1": _each(_batch_norm(16)), "conv1": _each(_conv(16, 16, bias=False)),
    "norm2": _each(_batch_norm(16)), "conv2": _each(_conv(16, 16, bias=False)), "last": _batch_norm(16),
    "head": _linear(16, 5),
}  # fmt: skip
_add(
    "ResNet, normed before",
    _RESIDUAL,
    norm_first="stem conv1,/layer{n}. norm1 bn1,conv1 conv1,norm2 bn2,conv2 conv2,/ last bn,head fc",
    conv_first="stem stem,/blocks.{i}. conv1 conv1,conv2 conv2,norm1 bn1,norm2 bn2,/ last norm,head head",
    numbers="stem net.0,/net.{n}. norm1 0,conv1 2,norm2 3,conv2 5,/ last net.4,head net.7",
)
_add(
    "ResNet, normed behind",
    _RESIDUAL,
    torchvision="stem conv1,last bn1,/layer1.{i}. conv1 conv1,norm1 bn1,conv2 conv2,norm2 bn2,/ head fc",
    second_first="head head,/body.{i}. conv2 conv2,conv1 conv1,norm2 bn2,norm1 bn1,/ stem stem,last stem_bn",
    words="stem entry.filter,last entry.scale,/unit.{i}. conv1 first.filter,norm1 first.scale,conv2 second.filter,"
    "norm2 second.scale,/ head scores",
)
_add(
    "feature pyramid, laterals of their own sizes",
    {"stem": _conv(3, 8), "down": [_conv(8, 12), _conv(12, 20)]}
    | {f"lateral{i}": _conv(size, 16, 1, 1) for i, size in enumerate((8, 12, 20))}
    | {f"smooth{i}": _conv(16, 16) for i in range(3)},
    from_the_coarsest="stem conv1,down layer{n},smooth2 smooth1,smooth1 smooth2,smooth0 smooth3,lateral2 latlayer1,"
    "lateral1 latlayer2,lateral0 latlayer3",
    lists="stem stem,down body.{i},lateral0 lateral_convs.0,lateral1 lateral_convs.1,lateral2 lateral_convs.2,"
    "smooth0 fpn_convs.0,smooth1 fpn_convs.1,smooth2 fpn_convs.2",
)
_add(
    "two convolutions of each block",
    {"stem": _conv(3, 16), "first": _each(_conv(16, 16)), "second": _each(_conv(16, 16))},
    lists="stem conv_pre,first convs1.{i},second convs2.{i}",
    blocks="stem stem,/layers.{i}. first conv1,second conv2",
    other_lists="stem pre,second conv2.{i},first conv1.{i}",
)
_add(
    "decoders of one word",
    {"stem": _conv(3, 16), "down": _each(_conv(16, 16)), "down_norm": _each(_batch_norm(16)), "middle": _conv(16, 16),
     "up": _each(_conv(32, 16)), "up_norm": _each(_batch_norm(16)), "head": _conv(16, 3, 1, 1)},
    rising="stem conv_in,/enc{n}. down conv,down_norm norm,/ middle mid,/dec{n}. up conv,up_norm norm,/ head conv_out",
    falling="stem inc,/encoder{n}. down c,down_norm n,/ middle bottom,/dec{r}. up c,up_norm n,/ head outc",
    lists="stem s,/encoder.{i}. down 0,down_norm 1,/ middle m,/decoder.{i}. up 0,up_norm 1,/ head h",
)  # fmt: skip
_add(
    "twins in lists",
    {f"{twin}{i}": _linear(*size) for twin in "ab" for i, size in enumerate(((HIDDEN, 16), (16, 16), (16, 1)), 1)},
    by_layer="a1 layers.0.0,b1 layers.0.1,a2 layers.1.0,b2 layers.1.1,a3 layers.2.0,b3 layers.2.1",
    by_twin="a1 nets.0.0,a2 nets.0.1,a3 nets.0.2,b1 nets.1.0,b2 nets.1.1,b3 nets.1.2",
    words="a1 q1.fc1,a2 q1.fc2,a3 q1.fc3,b1 q2.fc1,b2 q2.fc2,b3 q2.fc3",
)
_add(
    "convolutions of rows and columns",
    {"stem": _conv(3, 16), "rows": _each(_conv(16, 16, 1, 7)), "columns": _each(_conv(16, 16, 7, 1)),
     "head": _linear(16, 5)},
    rows_first="stem stem,/b.{i}. rows conv_1,columns conv_2,/ head fc",
    columns_first="stem inp,/m.{i}. columns conv_1,rows conv_2,/ head out",
)  # fmt: skip
_add(
    "depth from the levels of a trunk",
    {"trunk": [_conv(*sizes) for sizes in ((3, 8), (8, 12), (12, 16), (16, 20))], "blocks": [_conv(20, 20)] * 6,
     "lateral": [_conv(size, 8, 1, 1) for size in (8, 12, 16, 20)], "one": [_conv(8, 8)] * 4,
     "two": [_conv(8, 8)] * 4, "out": _conv(8, 1, 1, 1)},
    coarsest_first="trunk body.levels.{i},blocks body.blocks.{i},out head,lateral reassemble.{i},"
                   "/decoder.blocks.{i}. one conv1,two conv2",
    finest_first="trunk body.levels.{i},blocks body.blocks.{i},out head,lateral neck.reassemble.{i},"
                 "/neck.fusion_stage.layers.{r}. one conv1,two conv2",
)  # fmt: skip

# Transformers and others, in whose blocks some layers have one size

_BLOCK = _attention() | _attention("c") | {"stem": _linear(), "head": _linear(HIDDEN, 5)} | {
    "norm1": _each(_norm()), "cnorm": _each(_norm()), "norm3": _each(_norm()), "norm": _norm(),
    "wide": _each(_linear(HIDDEN, 64)), "narrow": _each(_linear(64, HIDDEN)),
}  # fmt: skip
_add(
    "gated feed-forward",
    {"norms": _each(_norm()), "gate": _each(_linear(HIDDEN, 48, False)), "up": _each(_linear(HIDDEN, 48, False)),
     "down": _each(_linear(48, HIDDEN, False))},
    proj="/layers.{i}. norms norm,gate gate_proj,up up_proj,down down_proj",
    wi="/layers.{i}. norms norm,gate wi_0,up wi_1,down wo",
    w123="/layers.{i}. norms norm,gate w1,down w2,up w3",
    fc="/h.{i}. norms norm,gate fc_1,up fc_2,down proj",
    Qwen="/h.{i}. norms norm,gate w2,up w1,down c_proj",
    up_first="/h.{i}. norms norm,up fc1,gate fc_gate,down fc2",
)  # fmt: skip
_add(
    "cross-attention",
    _attention(bias=False) | {"norms": _each(_norm()), "o": _each(_linear()), "context": _linear()},
    to_q="context context,/layers.{i}. norms norm,q to_q,k to_k,v to_v,o to_out.0",
    words="context memory,/h.{i}. v values,k keys,q queries,o unify,norms ln",
    kv="context context,/b.{i}. norms norm,q to_q,kv to_kv,o to_out",
    theta="context g,/nl.{i}. q theta,k phi,v g,o W,norms norm",
)
_LINEAR = "wide mlp.linear1,narrow mlp.linear2,q attn.query,k attn.key,v attn.value,o attn.out_proj"
_add(
    "norms before and behind",
    _BLOCK | {role: _each(_norm()) for role in ("before_attn", "after_attn", "before_mlp", "after_mlp")},
    in_order="stem stem,head head,/blocks.{i}. wide mlp.fc1,narrow mlp.fc2,q attn.q,k attn.k,v attn.v,o attn.proj,"
    "before_attn norm1,after_attn norm2,before_mlp norm3,after_mlp norm4",
    behind_first=f"stem stem,head head,/layers.{{i}}. {_LINEAR},after_attn norm1,after_mlp norm2,"
    "before_attn pre_norm1,before_mlp pre_norm2",
    gemma=f"stem stem,head head,/layers.{{i}}. {_LINEAR},before_attn input_layernorm,after_attn "
    "post_attention_layernorm,before_mlp pre_feedforward_layernorm,after_mlp post_feedforward_layernorm",
)
_add(
    "norms of a block that attends twice",
    _BLOCK,
    in_order="stem stem,head head,/blocks.{i}. wide mlp.fc1,narrow mlp.fc2,q attn.q,k attn.k,v attn.v,o attn.proj,"
    "cq cross_attn.q,ck cross_attn.k,cv cross_attn.v,co cross_attn.proj,norm1 norm1,cnorm norm2,norm3 norm3",
    added=f"stem stem,head head,/layers.{{i}}. {_LINEAR},cq cross_attn.query,ck cross_attn.key,cv cross_attn.value,"
    "co cross_attn.out_proj,norm1 ln_1,norm3 ln_2,cnorm ln_3",
)
_add(
    "BERT",
    _BLOCK,
    fairseq="/sentence_encoder.layers.{i}. k self_attn.k_proj,v self_attn.v_proj,q self_attn.q_proj,"
    "o self_attn.out_proj,norm1 self_attn_layer_norm,wide fc1,narrow fc2,norm3 final_layer_norm",
    XLM="/attentions.{i}. q q_lin,k k_lin,v v_lin,o out_lin,/ norm1 layer_norm1.{i},/ffns.{i}. wide lin1,narrow lin2,"
    "/ norm3 layer_norm2.{i}",
    codertimo="/transformer_blocks.{i}. q attention.linear_layers.0,k attention.linear_layers.1,"
    "v attention.linear_layers.2,o attention.output_linear,wide feed_forward.w_1,narrow feed_forward.w_2,"
    "norm1 input_sublayer.norm,norm3 output_sublayer.norm",
)
_add(
    "ViT encoder",
    _BLOCK,
    timm="/blocks.{i}. norm1 norm1,qkv attn.qkv,o attn.proj,norm3 norm2,wide mlp.fc1,narrow mlp.fc2,/ norm norm",
    norm2_before_norm1="/blocks.{i}. norm3 norm2,norm1 norm1,wide mlp.fc1,narrow mlp.fc2,o attn.proj,v attn.v,"
    "k attn.k,q attn.q,/ norm norm",
    lucidrains="/layers.{i}. norm1 0.fn.norm,qkv 0.fn.to_qkv,o 0.fn.to_out.0,norm3 1.fn.norm,wide 1.fn.net.0,"
    "narrow 1.fn.net.3,/ norm norm",
    annotated="/layers.{i}. q self_attn.linears.0,k self_attn.linears.1,v self_attn.linears.2,o self_attn.linears.3,"
    "wide feed_forward.w_1,narrow feed_forward.w_2,norm1 sublayer.0.norm,norm3 sublayer.1.norm,/ norm norm",
)
_add(
    "blocks of diffusion",
    _BLOCK,
    diffusers="/transformer_blocks.{i}. norm1 norm1,q attn1.to_q,k attn1.to_k,v attn1.to_v,o attn1.to_out.0,"
    "cnorm norm2,cq attn2.to_q,ck attn2.to_k,cv attn2.to_v,co attn2.to_out.0,norm3 norm3,wide ff.net.0,narrow ff.net.2",
    CompVis="/transformer_blocks.{i}. q attn1.to_q,k attn1.to_k,v attn1.to_v,o attn1.to_out.0,wide ff.net.0,"
    "narrow ff.net.2,cq attn2.to_q,ck attn2.to_k,cv attn2.to_v,co attn2.to_out.0,norm1 norm1,cnorm norm2,norm3 norm3",
)

# What a project saves, and what becomes of it in another


class Pair(NamedTuple):
    """Who wrote the file, and whose model it is loaded into."""

    architecture: str
    origin: str
    target: str

    def __str__(self) -> str:
        return f"{self.architecture}: {self.origin} -> {self.target}"


PAIRS = [Pair(name, *two) for name, (_, of) in ARCHITECTURES.items() for two in itertools.permutations(of, 2)]
CONTAINERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "as registered": dict,
    "sorted": lambda state: dict(sorted(state.items())),  # as in a .safetensors
    "shuffled": lambda state: dict(random.Random(0).sample([*state.items()], len(state))),
    "model.": lambda state: {f"model.{name}": tensor for name, tensor in state.items()},
}


@cache
def _value(role: str, number: int, leaf: str, shape: tuple[int, ...]) -> torch.Tensor:
    if leaf == "num_batches_tracked":
        return torch.tensor(5)
    return torch.rand(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{role} {number} {leaf}".encode())))


def _layers(parts: dict[str, Any], role: str) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of a part of each layer by their own names."""
    role, _, layout = role.partition("~")
    side = role[: -len(fused)] if (fused := next((name for name in _FUSED if role.endswith(name)), "")) else ""
    if role not in parts and fused:
        layers = zip(*(_layers(parts, f"{side}{each}") for each in _FUSED[fused]), strict=True)
        return [{leaf: _joined([part[leaf] for part in layer], layout) for leaf in layer[0]} for layer in layers]
    several = parts[role] if isinstance(parts[role], list) else [parts[role]]
    return [
        {leaf: _laid_out(_value(role, i, leaf, shape), layout) for leaf, shape in part.items()}
        for i, part in enumerate(several)
    ]


def _joined(parts: list[torch.Tensor], layout: str) -> torch.Tensor:
    if layout == "heads":  # the queries of a key, then the key and the value
        groups = len(parts[1]) // SIZE
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
    return torch.cat(parts)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "neighbors":  # of the two halves of each head
        return tensor.unflatten(0, (-1, 2, SIZE // 2)).transpose(1, 2).flatten(0, 2)
    return tensor.mT if layout else tensor


@cache
def model(architecture: str, project: str) -> nn.Module:
    parts, projects = ARCHITECTURES[architecture]
    found, prefix = {}, ""
    for entry in filter(str.strip, re.split("[,\n]", projects[project])):
        *start, role, name = entry.split()
        prefix = start[0].removeprefix("/") if start else prefix
        layers = _layers(parts, role)
        for i, tensors in enumerate(layers):
            path = (prefix + name).format(i=i, n=i + 1, r=len(layers) - 1 - i)
            for leaf, tensor in tensors.items():
                found[f"{path}{leaf}" if not leaf or path.endswith("_") else f"{path}.{leaf}"] = tensor
    built = module_of(found)
    for module in built.modules():
        if all(map(str.isdecimal, module._modules)):  # in a ModuleList numbers never step back
            module._modules = dict(sorted(module._modules.items(), key=lambda item: int(item[0])))
    return built


def unset(architecture: str, project: str) -> nn.Module:
    """Return a copy without values."""
    copy = deepcopy(model(architecture, project))
    for tensor in copy.state_dict().values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    return copy


def is_as_wanted(pair: Pair, target: nn.Module) -> bool:
    """Whether each tensor has the values of its role."""
    wanted, got = model(pair.architecture, pair.target).state_dict(), target.state_dict()
    return all(torch.equal(got[name], value) for name, value in wanted.items() if not is_computed(name, value.shape))


def outcome(pair: Pair, container: str) -> str:
    target = unset(pair.architecture, pair.target)
    try:
        load_weights(target, CONTAINERS[container](model(pair.architecture, pair.origin).state_dict()))
    except CheckpointError:
        return REFUSED
    return RIGHT if is_as_wanted(pair, target) else WRONG
