"""Small models of many architectures, with random weights, for adapters that peft makes and saves."""

import torch
from torch import nn

TOKENS = torch.arange(8)[None]
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
_VOCABULARY = {"vocab_size": 17}


class Attentions(nn.Module):
    """torch's encoder, and an attention outside of it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 1)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True, bias=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        rows = self.encoder(self.embed(tokens))
        return self.head(self.cross(rows, rows, rows)[0])


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.grouped = nn.Conv2d(8, 12, 3, groups=2, padding=1)
        self.dilated = nn.Conv2d(12, 8, 3, dilation=2, padding=2)
        self.reflected = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.volume = nn.Conv3d(8, 8, (1, 3, 3))
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, images):
        features = self.reflected(self.dilated(self.grouped(self.stem(images))))
        features = self.up(self.volume(features[:, :, None])[:, :, 0])
        return self.head(self.norm(features).mean((2, 3)))


class Sequences(nn.Module):
    """Recurrent layers between linear ones and convolutions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3)
        self.depthwise = nn.Conv1d(8, 8, 3, groups=2)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, images):
        return self.mlp(self.lstm(self.depthwise(self.conv(images[:, :, 0])).transpose(1, 2))[0][:, -1])


class Embeddings(nn.Module):
    """Embeddings, one of them bounded and one tied to the last layer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(17, 8)
        self.bounded = nn.Embedding(17, 8, max_norm=100.0)
        self.bag = nn.EmbeddingBag(17, 8)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, 17, bias=False)
        self.out.weight = self.token.weight

    def forward(self, tokens):
        return self.out(self.middle(self.token(tokens) + self.bounded(tokens) + self.bag(tokens)[:, None]))


def _transformers(model, config, **settings):
    def make():
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


_GPT2 = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
_WAV2VEC = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4}

ARCHITECTURES = {  # -> how the model is made, its input
    "attentions": (Attentions, TOKENS),
    "convolutions": (Convolutions, IMAGES),
    "sequences": (Sequences, IMAGES),
    "embeddings": (Embeddings, TOKENS),
    "GPT-2": (_transformers("GPT2LMHeadModel", "GPT2Config", **_VOCABULARY, **_GPT2), TOKENS),
    "T5": (_transformers("T5EncoderModel", "T5Config", **_VOCABULARY, **_T5), TOKENS),
    "Mixtral": (
        _transformers(
            "MixtralForCausalLM", "MixtralConfig", num_key_value_heads=1, num_local_experts=2, **_VOCABULARY, **_SIZES
        ),
        TOKENS,
    ),
    "wav2vec 2": (
        _transformers("Wav2Vec2Model", "Wav2Vec2Config", num_conv_pos_embedding_groups=2, **_WAV2VEC, **_SIZES),
        torch.randn(1, 60, generator=torch.Generator().manual_seed(0)),
    ),
}


def perturb(model):
    """Give whatever is trained, and running statistics, other values."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model
