"""Encoders, and encoders with decoders, of transformers, of torch and under the names of other projects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.bert.modeling_bert import BertEncoder
from transformers.models.detr.modeling_detr import DetrDecoder, DetrEncoder
from transformers.models.distilbert.modeling_distilbert import Transformer as DistilBertEncoder
from transformers.models.electra.modeling_electra import ElectraEncoder
from transformers.models.marian.modeling_marian import MarianDecoderLayer, MarianEncoderLayer
from transformers.models.mbart.modeling_mbart import MBartDecoderLayer, MBartEncoderLayer
from transformers.models.roberta.modeling_roberta import RobertaEncoder

from tests.checkpoint_remapping.other_projects.wording import (
    HEADS,
    HIDDEN,
    LAYERS,
    Architecture,
    attention,
    layer_norms,
    linear,
    token_ids,
    values,
    worded,
)

WIDTH = 2 * HIDDEN


class Multihead(nn.MultiheadAttention):
    """torch's attention, called as other attentions are."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HEADS, batch_first=True)


def _parts(eps: float = 1e-12, width: int = WIDTH) -> dict[str, Any]:
    """Return every part of an encoder and of a decoder, for all of the ways to fuse them."""
    own = {"q": linear(), "k": linear(), "v": linear(), "qkv": linear(HIDDEN, 3 * HIDDEN), "o": linear()}
    own |= {"norm1": layer_norms(eps=eps), "mha": [Multihead() for _ in range(LAYERS)]}
    cross = {f"cross_{role}": parts for role, parts in _cross_parts(eps).items()}
    rest = {"wide": linear(HIDDEN, width), "narrow": linear(width, HIDDEN), "norm3": layer_norms(eps=eps)}
    ends = {"norm": nn.LayerNorm(HIDDEN, eps), "first_norm": nn.LayerNorm(HIDDEN, eps)}
    return own | cross | rest | ends


def _cross_parts(eps: float) -> dict[str, Any]:
    kv = linear(HIDDEN, 2 * HIDDEN)
    norms = {"norm": layer_norms(eps=eps), "mha": [Multihead() for _ in range(LAYERS)]}
    return {"q": linear(), "k": linear(), "v": linear(), "kv": kv, "o": linear(), **norms}


def _attend(part: SimpleNamespace, i: int, x: torch.Tensor, memory: torch.Tensor, cross: str, causal: bool) -> Any:
    def own(role: str) -> Any:
        return getattr(part, cross + role, None)

    if own("mha"):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
        return own("mha")[i](x, memory, memory, attn_mask=mask, need_weights=False)[0]
    if own("qkv"):
        query, key, value = own("qkv")[i](x).chunk(3, -1)
    elif own("kv"):
        query, (key, value) = own("q")[i](x), own("kv")[i](memory).chunk(2, -1)
    else:
        query, key, value = own("q")[i](x), own("k")[i](memory), own("v")[i](memory)
    return own("o")[i](attention(query, key, value, causal))


def _transform(
    part: SimpleNamespace, x: torch.Tensor, activation: Any = F.gelu, norm_first: bool = False, causal: bool = False
) -> torch.Tensor:
    """Compute what an encoder does, or a decoder, where the parts have a cross-attention to the first inputs."""
    memory = x.flip(1) if hasattr(part, "cross_o") or hasattr(part, "cross_mha") else None

    def add(x: torch.Tensor, norm: nn.Module, what: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return x + what(norm(x)) if norm_first else norm(x + what(x))

    for i in range(LAYERS):
        x = add(x, part.norm1[i], lambda x: _attend(part, i, x, x, "", causal))  # noqa: B023
        if memory is not None:
            x = add(x, part.cross_norm[i], lambda x: _attend(part, i, x, memory, "cross_", False))  # noqa: B023
        x = add(x, part.norm3[i], lambda x: part.narrow[i](activation(part.wide[i](x))))  # noqa: B023
    return part.norm(x) if hasattr(part, "norm") else x


class Layers(nn.Module):
    """Layers of a decoder or an encoder of transformers, in a model that calls them."""

    def __init__(self, layer: type[nn.Module], config: Any, decodes: bool, norm: bool) -> None:
        super().__init__()
        make = partial(layer, config)
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        if norm:
            self.layer_norm = nn.LayerNorm(HIDDEN)
        self.decodes = decodes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x.flip(1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, mask, memory) if self.decodes else layer(x, None)
            x = x[0] if isinstance(x, tuple) else x
        return self.layer_norm(x) if hasattr(self, "layer_norm") else x


def _torch_encoder(activation: str = "gelu", eps: float = 1e-12, norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        HIDDEN, HEADS, WIDTH, activation=activation, batch_first=True, layer_norm_eps=eps, norm_first=norm_first
    )
    norm = nn.LayerNorm(HIDDEN, eps) if norm_first else None
    return nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)


def _torch_decoder(activation: str, norm_first: bool = False, norm: bool = False) -> nn.Module:
    layer = nn.TransformerDecoderLayer(
        HIDDEN, HEADS, WIDTH, activation=activation, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerDecoder(layer, LAYERS, nn.LayerNorm(HIDDEN) if norm else None)


def _decoded(model: nn.Module, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
    return model(x, x.flip(1), mask)


def _hidden(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).last_hidden_state


_BERT_CONFIG = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "attn_implementation": "eager",
}
_DISTIL_CONFIG = transformers.DistilBertConfig(
    dim=HIDDEN, n_heads=HEADS, n_layers=LAYERS, hidden_dim=WIDTH, attn_implementation="eager"
)
_BART_CONFIG = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDTH,
    "decoder_ffn_dim": WIDTH,
    "activation_function": "gelu",
    "attn_implementation": "eager",
}

BERT = """
    q encoder.layer.{i}.attention.self.query
    k encoder.layer.{i}.attention.self.key
    v encoder.layer.{i}.attention.self.value
    o encoder.layer.{i}.attention.output.dense
    norm1 encoder.layer.{i}.attention.output.LayerNorm
    wide encoder.layer.{i}.intermediate.dense
    narrow encoder.layer.{i}.output.dense
    norm3 encoder.layer.{i}.output.LayerNorm
"""
FAIRSEQ = """
    k sentence_encoder.layers.{i}.self_attn.k_proj
    v sentence_encoder.layers.{i}.self_attn.v_proj
    q sentence_encoder.layers.{i}.self_attn.q_proj
    o sentence_encoder.layers.{i}.self_attn.out_proj
    norm1 sentence_encoder.layers.{i}.self_attn_layer_norm
    wide sentence_encoder.layers.{i}.fc1
    narrow sentence_encoder.layers.{i}.fc2
    norm3 sentence_encoder.layers.{i}.final_layer_norm
"""
XLM = """
    q attentions.{i}.q_lin
    k attentions.{i}.k_lin
    v attentions.{i}.v_lin
    o attentions.{i}.out_lin
    norm1 layer_norm1.{i}
    wide ffns.{i}.lin1
    narrow ffns.{i}.lin2
    norm3 layer_norm2.{i}
"""
# The feed-forward and its norm are registered before the attention
CODERTIMO = """
    q transformer_blocks.{i}.attention.linear_layers.0
    k transformer_blocks.{i}.attention.linear_layers.1
    v transformer_blocks.{i}.attention.linear_layers.2
    o transformer_blocks.{i}.attention.output_linear
    wide transformer_blocks.{i}.feed_forward.w_1
    narrow transformer_blocks.{i}.feed_forward.w_2
    norm1 transformer_blocks.{i}.input_sublayer.norm
    norm3 transformer_blocks.{i}.output_sublayer.norm
"""
ANNOTATED = """
    q layers.{i}.self_attn.linears.0
    k layers.{i}.self_attn.linears.1
    v layers.{i}.self_attn.linears.2
    o layers.{i}.self_attn.linears.3
    wide layers.{i}.feed_forward.w_1
    narrow layers.{i}.feed_forward.w_2
    norm1 layers.{i}.sublayer.0.norm
    norm3 layers.{i}.sublayer.1.norm
    norm norm
"""
XFORMER = """
    norm1 layers.{i}.0.fn.norm
    qkv layers.{i}.0.fn.to_qkv
    o layers.{i}.0.fn.to_out.0
    norm3 layers.{i}.1.fn.norm
    wide layers.{i}.1.fn.net.0
    narrow layers.{i}.1.fn.net.3
    norm norm
"""
TIMM = """
    norm1 blocks.{i}.norm1
    qkv blocks.{i}.attn.qkv
    o blocks.{i}.attn.proj
    norm3 blocks.{i}.norm2
    wide blocks.{i}.mlp.fc1
    narrow blocks.{i}.mlp.fc2
    norm norm
"""
SWAPPED = """
    norm3 blocks.{i}.norm2
    norm1 blocks.{i}.norm1
    wide blocks.{i}.mlp.fc1
    narrow blocks.{i}.mlp.fc2
    o blocks.{i}.attn.proj
    v blocks.{i}.attn.v
    k blocks.{i}.attn.k
    q blocks.{i}.attn.q
    norm norm
"""
HF_VIT = """
    q encoder.layer.{i}.attention.attention.query
    k encoder.layer.{i}.attention.attention.key
    v encoder.layer.{i}.attention.attention.value
    o encoder.layer.{i}.attention.output.dense
    wide encoder.layer.{i}.intermediate.dense
    narrow encoder.layer.{i}.output.dense
    norm1 encoder.layer.{i}.layernorm_before
    norm3 encoder.layer.{i}.layernorm_after
    norm layernorm
"""
WAV2VEC2 = """
    k encoder.layers.{i}.attention.k_proj
    v encoder.layers.{i}.attention.v_proj
    q encoder.layers.{i}.attention.q_proj
    o encoder.layers.{i}.attention.out_proj
    norm1 encoder.layers.{i}.layer_norm
    wide encoder.layers.{i}.feed_forward.intermediate_dense
    narrow encoder.layers.{i}.feed_forward.output_dense
    norm3 encoder.layers.{i}.final_layer_norm
"""
OPT = """
    norm decoder.final_layer_norm
    k decoder.layers.{i}.self_attn.k_proj
    v decoder.layers.{i}.self_attn.v_proj
    q decoder.layers.{i}.self_attn.q_proj
    o decoder.layers.{i}.self_attn.out_proj
    norm1 decoder.layers.{i}.self_attn_layer_norm
    wide decoder.layers.{i}.fc1
    narrow decoder.layers.{i}.fc2
    norm3 decoder.layers.{i}.final_layer_norm
"""
METASEQ = """
    qkv decoder.layers.{i}.self_attn.qkv_proj
    o decoder.layers.{i}.self_attn.out_proj
    norm1 decoder.layers.{i}.self_attn_layer_norm
    wide decoder.layers.{i}.fc1
    narrow decoder.layers.{i}.fc2
    norm3 decoder.layers.{i}.final_layer_norm
    norm decoder.layer_norm
"""
BART = """
    k layers.{i}.self_attn.k_proj
    v layers.{i}.self_attn.v_proj
    q layers.{i}.self_attn.q_proj
    o layers.{i}.self_attn.out_proj
    norm1 layers.{i}.self_attn_layer_norm
    cross_k layers.{i}.encoder_attn.k_proj
    cross_v layers.{i}.encoder_attn.v_proj
    cross_q layers.{i}.encoder_attn.q_proj
    cross_o layers.{i}.encoder_attn.out_proj
    cross_norm layers.{i}.encoder_attn_layer_norm
    wide layers.{i}.fc1
    narrow layers.{i}.fc2
    norm3 layers.{i}.final_layer_norm
"""
ANNOTATED_DECODER = """
    q decoder.layers.{i}.self_attn.linears.0
    k decoder.layers.{i}.self_attn.linears.1
    v decoder.layers.{i}.self_attn.linears.2
    o decoder.layers.{i}.self_attn.linears.3
    cross_q decoder.layers.{i}.src_attn.linears.0
    cross_k decoder.layers.{i}.src_attn.linears.1
    cross_v decoder.layers.{i}.src_attn.linears.2
    cross_o decoder.layers.{i}.src_attn.linears.3
    wide decoder.layers.{i}.feed_forward.w_1
    narrow decoder.layers.{i}.feed_forward.w_2
    norm1 decoder.layers.{i}.sublayer.0.norm
    cross_norm decoder.layers.{i}.sublayer.1.norm
    norm3 decoder.layers.{i}.sublayer.2.norm
"""
WHISPER_STYLE = """
    q blocks.{i}.attn.query
    k blocks.{i}.attn.key
    v blocks.{i}.attn.value
    o blocks.{i}.attn.out
    norm1 blocks.{i}.attn_ln
    cross_q blocks.{i}.cross_attn.query
    cross_k blocks.{i}.cross_attn.key
    cross_v blocks.{i}.cross_attn.value
    cross_o blocks.{i}.cross_attn.out
    cross_norm blocks.{i}.cross_attn_ln
    wide blocks.{i}.mlp.0
    narrow blocks.{i}.mlp.2
    norm3 blocks.{i}.mlp_ln
    norm ln
"""
# norm2 is that of the feed-forward, and norm3 that of the cross-attention
LATE_CROSS = """
    norm1 blocks.{i}.norm1
    qkv blocks.{i}.attn.qkv
    o blocks.{i}.attn.proj
    norm3 blocks.{i}.norm2
    cross_norm blocks.{i}.norm3
    cross_q blocks.{i}.cross.q
    cross_kv blocks.{i}.cross.kv
    cross_o blocks.{i}.cross.proj
    wide blocks.{i}.mlp.fc1
    narrow blocks.{i}.mlp.fc2
"""
DIFFUSERS_BLOCK = """
    norm1 transformer_blocks.{i}.norm1
    q transformer_blocks.{i}.attn1.to_q
    k transformer_blocks.{i}.attn1.to_k
    v transformer_blocks.{i}.attn1.to_v
    o transformer_blocks.{i}.attn1.to_out.0
    cross_norm transformer_blocks.{i}.norm2
    cross_q transformer_blocks.{i}.attn2.to_q
    cross_k transformer_blocks.{i}.attn2.to_k
    cross_v transformer_blocks.{i}.attn2.to_v
    cross_o transformer_blocks.{i}.attn2.to_out.0
    norm3 transformer_blocks.{i}.norm3
    wide transformer_blocks.{i}.ff.net.0
    narrow transformer_blocks.{i}.ff.net.2
"""
# CompVis registers the feed-forward between the attentions, and the norms last
COMPVIS_BLOCK = """
    q transformer_blocks.{i}.attn1.to_q
    k transformer_blocks.{i}.attn1.to_k
    v transformer_blocks.{i}.attn1.to_v
    o transformer_blocks.{i}.attn1.to_out.0
    wide transformer_blocks.{i}.ff.net.0
    narrow transformer_blocks.{i}.ff.net.2
    cross_q transformer_blocks.{i}.attn2.to_q
    cross_k transformer_blocks.{i}.attn2.to_k
    cross_v transformer_blocks.{i}.attn2.to_v
    cross_o transformer_blocks.{i}.attn2.to_out.0
    norm1 transformer_blocks.{i}.norm1
    cross_norm transformer_blocks.{i}.norm2
    norm3 transformer_blocks.{i}.norm3
"""


def _plain_cross(names: str, q: str, k: str, v: str, o: str) -> str:
    """Return the names of an attention in other words."""
    for old, new in (("to_q", q), ("to_k", k), ("to_v", v), ("to_out.0", o)):
        names = names.replace(old, new)
    return names


def _sides(names: dict[str, str], eps: float = 1e-5, width: int = WIDTH, **how: Any) -> dict[str, Any]:
    return worded(partial(_parts, eps, width), partial(_transform, **how), **names)


def _bart_family(name: str, encoder: Any, decoder: Any, norm_first: bool) -> dict[str, Architecture]:
    """Return the encoder and the decoder of a family in the manner of BART, beside those of torch."""
    config = getattr(transformers, f"{name}Config")(**_BART_CONFIG)
    how = {"norm_first": norm_first}
    norm = "norm layer_norm" if norm_first else ""
    whisper_style = WHISPER_STYLE if norm_first else WHISPER_STYLE.replace("    norm ln\n", "")
    decoders = {"HF 4": BART + norm, "Whisper's words": whisper_style, "annotated": ANNOTATED_DECODER + norm}
    decoders |= {} if norm_first else {"late cross": LATE_CROSS}
    return {
        f"{name} encoder": Architecture(
            values(2, 7, HIDDEN),
            {
                "HF": lambda: Layers(encoder, config, False, norm_first),
                "torch": partial(_torch_encoder, "gelu", 1e-5, norm_first),
                **_sides({"fairseq": FAIRSEQ + norm}, **how),
            },
        ),
        f"{name} decoder": Architecture(
            values(2, 7, HIDDEN),
            {
                "HF": lambda: Layers(decoder, config, True, norm_first),
                "torch": partial(_torch_decoder, "gelu", norm_first, norm_first),
                **_sides(decoders, causal=True, **how),
            },
            {"torch": _decoded},
        ),
    }


_DETR_CONFIG = transformers.DetrConfig(
    d_model=HIDDEN,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=WIDTH,
    decoder_ffn_dim=WIDTH,
    attn_implementation="eager",
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone_config=transformers.ResNetConfig(),
)


class DetrTransformer(nn.Module):
    """Encoder and decoder of DETR, as in transformers' model."""

    def __init__(self) -> None:
        super().__init__()
        self.query_position_embeddings = nn.Embedding(5, HIDDEN)
        self.encoder = DetrEncoder(_DETR_CONFIG)
        self.decoder = DetrDecoder(_DETR_CONFIG)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.query_position_embeddings.weight[None].expand(len(x), -1, -1)
        memory = self.encoder(inputs_embeds=x).last_hidden_state
        return self.decoder(
            inputs_embeds=torch.zeros_like(queries),
            encoder_hidden_states=memory,
            object_queries_position_embeddings=queries,
        ).last_hidden_state


class OriginalDetr(nn.Module):
    """DETR under its own names: torch's attentions, `linear1`, `linear2`, and a norm after each."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.encoder = _torch_encoder("relu", 1e-5)
        self.transformer.decoder = _torch_decoder("relu", norm=True)
        self.query_embed = nn.Embedding(5, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.transformer.encoder(x)
        queries = self.query_embed.weight[None].expand(len(x), -1, -1)
        y = torch.zeros_like(queries)
        for layer in self.transformer.decoder.layers:
            y = layer.norm1(y + layer.self_attn(y + queries, y + queries, y)[0])
            y = layer.norm2(y + layer.multihead_attn(y + queries, memory, memory)[0])
            y = layer.norm3(y + layer.linear2(F.relu(layer.linear1(y))))
        return self.transformer.decoder.norm(y)


class T5Norm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(HIDDEN, 1e-6)


def _t5_parts() -> dict[str, Any]:
    norms = {f"{side}norm{n}": [T5Norm() for _ in range(LAYERS)] for side in ("", "d_") for n in (1, 2, 3)}
    roles = [f"{side}{role}" for side in ("", "d_", "c_") for role in ("q", "k", "v", "o")]
    feed_forward = {f"{side}{role}": linear(HIDDEN, WIDTH, False) for side in ("", "d_") for role in ("gate", "up")}
    narrow = {f"{side}down": linear(WIDTH, HIDDEN, False) for side in ("", "d_")}
    ends = {"embed": nn.Embedding(50, HIDDEN), "norm": T5Norm(), "d_norm": T5Norm()}
    bias = {"bias": nn.Embedding(32, HEADS), "d_bias": nn.Embedding(32, HEADS)}
    return norms | {role: linear(bias=False) for role in roles} | feed_forward | narrow | ends | bias


def _relative(embedding: nn.Embedding, length: int, causal: bool) -> torch.Tensor:
    """Return T5's bias of the logits, whose buckets are single distances in short texts."""
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    buckets = (-distance).clamp(min=0) if causal else distance.abs() + (distance > 0) * 16
    bias = embedding(buckets).permute(2, 0, 1)
    return bias.masked_fill(distance > 0, -torch.inf) if causal else bias


def _t5(part: SimpleNamespace, ids: torch.Tensor) -> torch.Tensor:
    def attend(i: int, x: torch.Tensor, memory: torch.Tensor, side: str, bias: Any) -> torch.Tensor:
        maps = [getattr(part, f"{side}{role}")[i] for role in ("q", "k", "v")]
        split = [
            m(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m, y in zip(maps, (x, memory, memory), strict=True)
        ]
        mixed = F.scaled_dot_product_attention(*split, attn_mask=bias, scale=1.0)
        return getattr(part, f"{side}o")[i](mixed.transpose(1, 2).flatten(2))

    def feed_forward(i: int, x: torch.Tensor, side: str) -> torch.Tensor:
        gate = F.gelu(getattr(part, f"{side}gate")[i](x), approximate="tanh")
        return getattr(part, f"{side}down")[i](gate * getattr(part, f"{side}up")[i](x))

    x = y = part.embed(ids)
    bias = _relative(part.bias, ids.shape[1], False)
    d_bias = _relative(part.d_bias, ids.shape[1], True)
    for i in range(LAYERS):
        normed = part.norm1[i](x)
        x = x + attend(i, normed, normed, "", bias)
        x = x + feed_forward(i, part.norm2[i](x), "")
    x = part.norm(x)
    for i in range(LAYERS):
        normed = part.d_norm1[i](y)
        y = y + attend(i, normed, normed, "d_", d_bias)
        y = y + attend(i, part.d_norm2[i](y), x, "c_", None)
        y = y + feed_forward(i, part.d_norm3[i](y), "d_")
    return part.d_norm(y)


_T5_ATTENTION = """
    {s}{a}q {side}.layers.{{i}}.{attention}.query
    {s}{a}k {side}.layers.{{i}}.{attention}.key
    {s}{a}v {side}.layers.{{i}}.{attention}.value
    {s}{a}o {side}.layers.{{i}}.{attention}.out"""
T5X = (
    "    embed token_embedder\n    bias encoder.relpos_bias.rel_embedding\n"
    + "    norm1 encoder.layers.{i}.pre_attention_layer_norm"
    + _T5_ATTENTION.format(s="", a="", side="encoder", attention="attention")
    + """
    norm2 encoder.layers.{i}.pre_mlp_layer_norm
    gate encoder.layers.{i}.mlp.wi_0
    up encoder.layers.{i}.mlp.wi_1
    down encoder.layers.{i}.mlp.wo
    norm encoder.encoder_norm
    d_bias decoder.relpos_bias.rel_embedding
    d_norm1 decoder.layers.{i}.pre_self_attention_layer_norm"""
    + _T5_ATTENTION.format(s="d_", a="", side="decoder", attention="self_attention")
    + "\n    d_norm2 decoder.layers.{i}.pre_cross_attention_layer_norm"
    + _T5_ATTENTION.format(s="c_", a="", side="decoder", attention="encoder_decoder_attention")
    + """
    d_norm3 decoder.layers.{i}.pre_mlp_layer_norm
    d_gate decoder.layers.{i}.mlp.wi_0
    d_up decoder.layers.{i}.mlp.wi_1
    d_down decoder.layers.{i}.mlp.wo
    d_norm decoder.decoder_norm
"""
)
T5_WORDS = T5X.replace("wi_0", "gate_proj").replace("wi_1", "up_proj").replace("wo", "down_proj")


def _t5_hugging_face() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=50,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=32,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    return transformers.T5Model(config)


def _t5_hidden(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, decoder_input_ids=ids).last_hidden_state


ARCHITECTURES = {
    "BERT": Architecture(
        values(2, 7, HIDDEN),
        {
            "BERT": lambda: BertEncoder(transformers.BertConfig(**_BERT_CONFIG)),
            "RoBERTa": lambda: RobertaEncoder(transformers.RobertaConfig(**_BERT_CONFIG)),
            "ELECTRA": lambda: ElectraEncoder(transformers.ElectraConfig(**_BERT_CONFIG)),
            "DistilBERT": lambda: DistilBertEncoder(_DISTIL_CONFIG),
            "torch": _torch_encoder,
            **_sides({"fairseq": FAIRSEQ, "XLM": XLM, "codertimo": CODERTIMO, "Wav2Vec2": WAV2VEC2}, eps=1e-12),
        },
        dict.fromkeys(("BERT", "RoBERTa", "ELECTRA", "DistilBERT"), _hidden),
    ),
    "ViT encoder": Architecture(
        values(2, 7, HIDDEN),
        {
            "torch": partial(_torch_encoder, "gelu", 1e-5, True),
            **_sides(
                {
                    "timm": TIMM,
                    "norm2 before norm1": SWAPPED,
                    "HF": HF_VIT,
                    "lucidrains": XFORMER,
                    "annotated": ANNOTATED,
                },
                norm_first=True,
            ),
        },
    ),
    "encoder with a square feed-forward": Architecture(
        values(2, 7, HIDDEN),
        _sides({"BERT": BERT, "fairseq": FAIRSEQ, "XLM": XLM, "codertimo": CODERTIMO}, width=HIDDEN),
    ),
    "OPT": Architecture(
        values(2, 7, HIDDEN), _sides({"HF": OPT, "metaseq": METASEQ}, activation=F.relu, norm_first=True, causal=True)
    ),
    **_bart_family("Bart", BartEncoderLayer, BartDecoderLayer, False),
    **_bart_family("Marian", MarianEncoderLayer, MarianDecoderLayer, False),
    **_bart_family("MBart", MBartEncoderLayer, MBartDecoderLayer, True),
    "DETR": Architecture(values(2, 9, HIDDEN), {"HF": DetrTransformer, "original": OriginalDetr}),
    "blocks of diffusion": Architecture(
        values(2, 7, HIDDEN),
        _sides(
            {
                "diffusers": DIFFUSERS_BLOCK,
                "CompVis": COMPVIS_BLOCK,
                "q, k, v, proj": _plain_cross(DIFFUSERS_BLOCK, "q", "k", "v", "proj"),
                "words": _plain_cross(COMPVIS_BLOCK, "query", "key", "value", "output"),
            },
            norm_first=True,
        ),
    ),
    "T5": Architecture(
        token_ids(),
        {"HF": _t5_hugging_face, **worded(_t5_parts, _t5, T5X=T5X, words=T5_WORDS)},
        {"HF": _t5_hidden},
    ),
}
