"""CLIP and Whisper: of transformers, and as OpenAI wrote them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.checkpoint_remapping.other_projects.wording import (
    HEADS,
    HIDDEN,
    LAYERS,
    Architecture,
    Worded,
    attention,
    layer_norms,
    linear,
    values,
)

WIDTH, VOCABULARY, PROJECTION = 2 * HIDDEN, 50, 24


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


class OpenAIBlock(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.ln_1 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(HIDDEN, WIDTH), "c_proj": nn.Linear(WIDTH, HIDDEN)})
        self.ln_2 = nn.LayerNorm(HIDDEN)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp["c_proj"](_quick_gelu(self.mlp["c_fc"](self.ln_2(x))))


def _blocks(causal: bool) -> nn.Module:
    transformer = nn.Module()
    transformer.resblocks = nn.Sequential(*(OpenAIBlock(causal) for _ in range(LAYERS)))
    return transformer


class OpenAIVision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(HIDDEN))
        self.positional_embedding = nn.Parameter(torch.zeros(17, HIDDEN))
        self.proj = nn.Parameter(torch.zeros(HIDDEN, PROJECTION))
        self.conv1 = nn.Conv2d(3, HIDDEN, 4, 4, bias=False)
        self.ln_pre = nn.LayerNorm(HIDDEN)
        self.transformer = _blocks(causal=False)
        self.ln_post = nn.LayerNorm(HIDDEN)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.conv1(images).flatten(2).mT
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1) + self.positional_embedding
        return self.ln_post(self.transformer.resblocks(self.ln_pre(x))[:, 0]) @ self.proj


class OpenAIClip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.zeros(12, HIDDEN))
        self.text_projection = nn.Parameter(torch.zeros(HIDDEN, PROJECTION))
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.visual = OpenAIVision()
        self.transformer = _blocks(causal=True)
        self.token_embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.ln_final = nn.LayerNorm(HIDDEN)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        ids = _ids()
        x = self.token_embedding(ids) + self.positional_embedding[: ids.shape[1]]
        x = self.ln_final(self.transformer.resblocks(x))
        text = x[torch.arange(len(x)), ids.argmax(-1)] @ self.text_projection
        text, image = F.normalize(text, dim=-1), F.normalize(self.visual(images), dim=-1)
        return torch.cat([text.flatten(), image.flatten(), (self.logit_scale.exp() * text @ image.T).flatten()])


def _ids() -> torch.Tensor:
    ids = torch.randint(3, VOCABULARY - 1, (2, 7), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = VOCABULARY - 1  # the end of a text, which has the highest number
    return ids


_TOWER = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_act": "quick_gelu",
}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 12, "eos_token_id": VOCABULARY - 1}


def _clip() -> nn.Module:
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=_TOWER | _TEXT,
            vision_config=_TOWER | {"image_size": 16, "patch_size": 4},
            projection_dim=PROJECTION,
        )
    )


def _clip_outputs(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    found = model(input_ids=_ids(), pixel_values=images)
    return torch.cat([found.text_embeds.flatten(), found.image_embeds.flatten(), found.logits_per_text.flatten()])


def _vision() -> nn.Module:
    config = transformers.CLIPVisionConfig(**_TOWER, image_size=16, patch_size=4, projection_dim=PROJECTION)
    return transformers.CLIPVisionModelWithProjection(config)


def _whisper_parts() -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side in ("", "d_", "c_"):
        sides |= {f"{side}{role}": linear(bias=role != "k") for role in ("q", "k", "v", "o")}
        sides |= {f"{side}norm1": layer_norms(), f"{side}norm2": layer_norms(), f"{side}norm": nn.LayerNorm(HIDDEN)}
        sides |= {f"{side}wide": linear(HIDDEN, WIDTH), f"{side}narrow": linear(WIDTH, HIDDEN)}
    return sides | {
        "conv1": nn.Conv1d(8, HIDDEN, 3, padding=1),
        "conv2": nn.Conv1d(HIDDEN, HIDDEN, 3, 2, 1),
        "positions": torch.zeros(10, HIDDEN),
        "d_positions": nn.Parameter(torch.zeros(12, HIDDEN)),
        "embed": nn.Embedding(VOCABULARY, HIDDEN),
    }


def _whisper(part: SimpleNamespace, mel: torch.Tensor) -> torch.Tensor:
    def attend(i: int, x: torch.Tensor, memory: torch.Tensor, side: str, causal: bool = False) -> torch.Tensor:
        q, k, v, o = (getattr(part, f"{side}{role}")[i] for role in ("q", "k", "v", "o"))
        return o(attention(q(x), k(memory), v(memory), causal))

    x = F.gelu(part.conv2(F.gelu(part.conv1(mel)))).mT + part.positions
    ids = _ids()
    y = part.embed(ids) + part.d_positions[: ids.shape[1]]
    for i in range(LAYERS):
        normed = part.norm1[i](x)
        x = x + attend(i, normed, normed, "")
        x = x + part.narrow[i](F.gelu(part.wide[i](part.norm2[i](x))))
    x = part.norm(x)
    for i in range(LAYERS):
        normed = part.d_norm1[i](y)
        y = y + attend(i, normed, normed, "d_", causal=True)
        y = y + attend(i, part.c_norm1[i](y), x, "c_")
        y = y + part.d_narrow[i](F.gelu(part.d_wide[i](part.d_norm2[i](y))))
    return part.d_norm(y) @ part.embed.weight.T


_WHISPER_BLOCK = """
    {s}q {side}.blocks.{{i}}.attn.query
    {s}k {side}.blocks.{{i}}.attn.key
    {s}v {side}.blocks.{{i}}.attn.value
    {s}o {side}.blocks.{{i}}.attn.out
    {s}norm1 {side}.blocks.{{i}}.attn_ln"""
_WHISPER_REST = """
    {s}wide {side}.blocks.{{i}}.mlp.0
    {s}narrow {side}.blocks.{{i}}.mlp.2
    {s}norm2 {side}.blocks.{{i}}.mlp_ln"""
OPENAI_WHISPER = (
    "    positions encoder.positional_embedding\n    conv1 encoder.conv1\n    conv2 encoder.conv2"
    + (_WHISPER_BLOCK + _WHISPER_REST).format(s="", side="encoder")
    + "\n    norm encoder.ln_post\n    d_positions decoder.positional_embedding\n    embed decoder.token_embedding"
    + _WHISPER_BLOCK.format(s="d_", side="decoder")
    + _WHISPER_BLOCK.format(s="c_", side="decoder").replace("attn", "cross_attn")
    + _WHISPER_REST.format(s="d_", side="decoder")
    + "\n    d_norm decoder.ln"
)


def _hugging_face_whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=WIDTH, decoder_ffn_dim=WIDTH,
        max_source_positions=10, max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _transcribed(model: nn.Module, mel: torch.Tensor) -> torch.Tensor:
    return model(input_features=mel, decoder_input_ids=_ids()).logits


ARCHITECTURES = {
    "CLIP": Architecture(values(2, 3, 16, 16), {"HF": _clip, "OpenAI": OpenAIClip}, {"HF": _clip_outputs}),
    "CLIP's images": Architecture(
        values(2, 3, 16, 16), {"HF": _vision, "OpenAI": OpenAIVision}, {"HF": lambda model, x: model(x).image_embeds}
    ),
    "Whisper": Architecture(
        values(2, 8, 20),
        {"HF": _hugging_face_whisper, "OpenAI": partial(lambda: Worded(_whisper_parts(), OPENAI_WHISPER, _whisper))},
        {"HF": _transcribed},
    ),
}
