"""A VAE and a UNet as CompVis names them, and as diffusers does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.checkpoint_remapping.other_projects.wording import Architecture, attention, values

CHANNELS, LEVELS, BLOCKS, GROUPS = (16, 32, 32), 3, 2, 4


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, 1e-6)


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2)


class Named(nn.Module):
    """Modules under names, in their order, and what is computed with them."""

    def __init__(self, compute: Any, **modules: nn.Module | None) -> None:
        super().__init__()
        self.compute = compute
        for name, module in modules.items():
            if module is not None:
                self.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        return self.compute(self, *inputs)


def _res_block(inputs: int, outputs: int, shortcut: str, time: str = "") -> nn.Module:
    """Return a residual block, whose 1x1 convolution has a name that differs between the projects."""

    def compute(block: Any, x: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        y = block.conv1(F.silu(block.norm1(x)))
        if embedded is not None:
            y = y + getattr(block, time)(F.silu(embedded))[..., None, None]
        y = block.conv2(F.silu(block.norm2(y)))
        return (getattr(block, shortcut)(x) if hasattr(block, shortcut) else x) + y

    return Named(
        compute,
        norm1=_group_norm(inputs),
        conv1=_conv(inputs, outputs),
        **({time: nn.Linear(WIDTH, outputs)} if time else {}),
        norm2=_group_norm(outputs),
        conv2=_conv(outputs, outputs),
        **({shortcut: _conv(inputs, outputs, 1)} if inputs != outputs else {}),
    )


WIDTH = 64


def _compvis_attention(channels: int) -> nn.Module:
    def compute(block: Any, x: torch.Tensor) -> torch.Tensor:
        y = block.norm(x)
        query, key, value = (part(y).flatten(2).mT for part in (block.q, block.k, block.v))
        return x + block.proj_out(attention(query, key, value, heads=1).mT.unflatten(2, x.shape[2:]))

    convs = {name: _conv(channels, channels, 1) for name in ("q", "k", "v", "proj_out")}
    return Named(compute, norm=_group_norm(channels), **convs)


def _diffusers_attention(channels: int, old: bool) -> nn.Module:
    names = ("query", "key", "value", "proj_attn") if old else ("to_q", "to_k", "to_v", "to_out")

    def compute(block: Any, x: torch.Tensor) -> torch.Tensor:
        y = block.group_norm(x).flatten(2).mT
        parts = [getattr(block, name) for name in names]
        last = parts[3] if old else parts[3][0]
        mixed = last(attention(*(part(y) for part in parts[:3]), heads=1))
        return x + mixed.mT.unflatten(2, x.shape[2:])

    maps: list[nn.Module] = [nn.Linear(channels, channels) for _ in range(4)]
    if not old:
        maps[3] = nn.ModuleList([maps[3]])
    return Named(compute, group_norm=_group_norm(channels), **dict(zip(names, maps, strict=True)))


def _down(x: torch.Tensor, conv: nn.Conv2d) -> torch.Tensor:
    return F.conv2d(F.pad(x, (0, 1, 0, 1)), conv.weight, conv.bias, 2)


def _up(x: torch.Tensor, conv: nn.Module) -> torch.Tensor:
    return conv(F.interpolate(x, scale_factor=2.0))


def _compvis_encoder() -> nn.Module:
    levels = []
    for level, outputs in enumerate(CHANNELS):
        inputs = CHANNELS[max(level - 1, 0)]
        blocks = [_res_block(inputs if n == 0 else outputs, outputs, "nin_shortcut") for n in range(BLOCKS)]
        down = Named(_down_compvis, conv=_conv(outputs, outputs)) if level < LEVELS - 1 else None
        levels.append(Named(None, block=nn.ModuleList(blocks), attn=nn.ModuleList(), downsample=down))

    def compute(encoder: Any, x: torch.Tensor) -> torch.Tensor:
        x = encoder.conv_in(x)
        for level in encoder.down:
            for block in level.block:
                x = block(x)
            x = level.downsample(x) if hasattr(level, "downsample") else x
        x = encoder.mid.block_2(encoder.mid.attn_1(encoder.mid.block_1(x)))
        return encoder.conv_out(F.silu(encoder.norm_out(x)))

    return Named(
        compute,
        conv_in=_conv(3, CHANNELS[0]),
        down=nn.ModuleList(levels),
        mid=_compvis_middle(),
        norm_out=_group_norm(CHANNELS[-1]),
        conv_out=_conv(CHANNELS[-1], 8),
    )


def _down_compvis(module: Any, x: torch.Tensor) -> torch.Tensor:
    return _down(x, module.conv)


def _up_named(module: Any, x: torch.Tensor) -> torch.Tensor:
    return _up(x, module.conv)


def _compvis_middle() -> nn.Module:
    last = CHANNELS[-1]
    return Named(
        None,
        block_1=_res_block(last, last, "nin_shortcut"),
        attn_1=_compvis_attention(last),
        block_2=_res_block(last, last, "nin_shortcut"),
    )


def _compvis_decoder() -> nn.Module:
    """Levels count from the finest: `up.2` comes first."""
    levels: list[nn.Module] = []
    inputs = CHANNELS[-1]
    for level in reversed(range(LEVELS)):
        outputs = CHANNELS[level]
        blocks = [_res_block(inputs if n == 0 else outputs, outputs, "nin_shortcut") for n in range(BLOCKS + 1)]
        up = Named(_up_named, conv=_conv(outputs, outputs)) if level else None
        levels.insert(0, Named(None, block=nn.ModuleList(blocks), attn=nn.ModuleList(), upsample=up))
        inputs = outputs

    def compute(decoder: Any, z: torch.Tensor) -> torch.Tensor:
        x = decoder.conv_in(z)
        x = decoder.mid.block_2(decoder.mid.attn_1(decoder.mid.block_1(x)))
        for level in reversed(decoder.up):
            for block in level.block:
                x = block(x)
            x = level.upsample(x) if hasattr(level, "upsample") else x
        return decoder.conv_out(F.silu(decoder.norm_out(x)))

    return Named(
        compute,
        conv_in=_conv(4, CHANNELS[-1]),
        mid=_compvis_middle(),
        up=nn.ModuleList(levels),
        norm_out=_group_norm(CHANNELS[0]),
        conv_out=_conv(CHANNELS[0], 3),
    )


def _reconstruct(vae: Any, images: torch.Tensor) -> torch.Tensor:
    moments = vae.quant_conv(vae.encoder(images))
    return torch.cat([moments.flatten(), vae.decoder(vae.post_quant_conv(moments[:, :4])).flatten()])


def compvis_vae() -> nn.Module:
    return Named(
        _reconstruct,
        encoder=_compvis_encoder(),
        decoder=_compvis_decoder(),
        quant_conv=_conv(8, 8, 1),
        post_quant_conv=_conv(4, 4, 1),
    )


def _diffusers_middle(old: bool) -> nn.Module:
    last = CHANNELS[-1]
    blocks = nn.ModuleList(_res_block(last, last, "conv_shortcut") for _ in range(2))
    return Named(_through_middle, attentions=nn.ModuleList([_diffusers_attention(last, old)]), resnets=blocks)


def _through_middle(middle: Any, x: torch.Tensor) -> torch.Tensor:
    return middle.resnets[1](middle.attentions[0](middle.resnets[0](x)))


def _diffusers_encoder(old: bool) -> nn.Module:
    levels = []
    for level, outputs in enumerate(CHANNELS):
        inputs = CHANNELS[max(level - 1, 0)]
        blocks = nn.ModuleList(
            _res_block(inputs if n == 0 else outputs, outputs, "conv_shortcut") for n in range(BLOCKS)
        )
        down = nn.ModuleList([Named(_down_compvis, conv=_conv(outputs, outputs))]) if level < LEVELS - 1 else None
        levels.append(Named(None, resnets=blocks, downsamplers=down))

    def compute(encoder: Any, x: torch.Tensor) -> torch.Tensor:
        x = encoder.conv_in(x)
        for level in encoder.down_blocks:
            for block in (*level.resnets, *getattr(level, "downsamplers", ())):
                x = block(x)
        return encoder.conv_out(F.silu(encoder.conv_norm_out(encoder.mid_block(x))))

    return Named(
        compute,
        conv_in=_conv(3, CHANNELS[0]),
        down_blocks=nn.ModuleList(levels),
        mid_block=_diffusers_middle(old),
        conv_norm_out=_group_norm(CHANNELS[-1]),
        conv_out=_conv(CHANNELS[-1], 8),
    )


def _diffusers_decoder(old: bool) -> nn.Module:
    levels = []
    inputs = CHANNELS[-1]
    for level, outputs in enumerate(reversed(CHANNELS)):
        blocks = nn.ModuleList(
            _res_block(inputs if n == 0 else outputs, outputs, "conv_shortcut") for n in range(BLOCKS + 1)
        )
        up = nn.ModuleList([Named(_up_named, conv=_conv(outputs, outputs))]) if level < LEVELS - 1 else None
        levels.append(Named(None, resnets=blocks, upsamplers=up))
        inputs = outputs

    def compute(decoder: Any, z: torch.Tensor) -> torch.Tensor:
        x = decoder.mid_block(decoder.conv_in(z))
        for level in decoder.up_blocks:
            for block in (*level.resnets, *getattr(level, "upsamplers", ())):
                x = block(x)
        return decoder.conv_out(F.silu(decoder.conv_norm_out(x)))

    return Named(
        compute,
        conv_in=_conv(4, CHANNELS[-1]),
        up_blocks=nn.ModuleList(levels),
        mid_block=_diffusers_middle(old),
        conv_norm_out=_group_norm(CHANNELS[0]),
        conv_out=_conv(CHANNELS[0], 3),
    )


def diffusers_vae(old: bool = False) -> nn.Module:
    return Named(
        _reconstruct,
        encoder=_diffusers_encoder(old),
        decoder=_diffusers_decoder(old),
        quant_conv=_conv(8, 8, 1),
        post_quant_conv=_conv(4, 4, 1),
    )


# The UNet: blocks in `input_blocks`, `middle_block` and `output_blocks`, numbered through


def _compvis_res_block(inputs: int, outputs: int) -> nn.Module:
    def compute(block: Any, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        y = block.in_layers(x) + block.emb_layers(embedded)[..., None, None]
        return (block.skip_connection(x) if hasattr(block, "skip_connection") else x) + block.out_layers(y)

    return Named(
        compute,
        in_layers=nn.Sequential(_group_norm(inputs), nn.SiLU(), _conv(inputs, outputs)),
        emb_layers=nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, outputs)),
        out_layers=nn.Sequential(_group_norm(outputs), nn.SiLU(), nn.Dropout(0.0), _conv(outputs, outputs)),
        skip_connection=_conv(inputs, outputs, 1) if inputs != outputs else None,
    )


def _attention_block(channels: int, first: str) -> nn.Module:
    """Return attention to the pixels and to the text, and the gated feed-forward between or behind them."""

    def attend(block: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return block.to_out[0](attention(block.to_q(x), block.to_k(memory), block.to_v(memory), heads=2))

    def make_attention(memory: int) -> nn.Module:
        maps = {name: nn.Linear(size, channels, False) for name, size in
                (("to_q", channels), ("to_k", memory), ("to_v", memory))}  # fmt: skip
        return Named(attend, **maps, to_out=nn.Sequential(nn.Linear(channels, channels)))

    def gate(module: Any, x: torch.Tensor) -> torch.Tensor:
        value, gate = module.proj(x).chunk(2, -1)
        return value * F.gelu(gate)

    net = nn.Sequential(
        Named(gate, proj=nn.Linear(channels, 4 * channels)), nn.Dropout(0.0), nn.Linear(2 * channels, channels)
    )
    parts = {
        "attn1": make_attention(channels),
        "attn2": make_attention(channels),
        "ff": Named(lambda module, x: module.net(x), net=net),
        **{f"norm{n}": nn.LayerNorm(channels) for n in (1, 2, 3)},
    }
    order = ("attn1", "ff", "attn2", "norm1", "norm2", "norm3")
    if first == "norm1":
        order = ("norm1", "attn1", "norm2", "attn2", "norm3", "ff")

    def compute(block: Any, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        normed = block.norm1(x)
        x = x + block.attn1(normed, normed)
        x = x + block.attn2(block.norm2(x), context)
        return x + block.ff(block.norm3(x))

    return Named(compute, **{name: parts[name] for name in order})


def _spatial_transformer(channels: int, first: str) -> nn.Module:
    def compute(block: Any, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        y = block.proj_in(block.norm(x)).flatten(2).mT
        for inner in block.transformer_blocks:
            y = inner(y, context[..., : y.shape[-1]])
        return x + block.proj_out(y.mT.unflatten(2, x.shape[2:]))

    return Named(
        compute,
        norm=_group_norm(channels),
        proj_in=_conv(channels, channels, 1),
        transformer_blocks=nn.ModuleList([_attention_block(channels, first)]),
        proj_out=_conv(channels, channels, 1),
    )


def _plan() -> Iterator[tuple[str, int, int, int]]:
    """Yield the blocks of the way down and up: kind, level, inputs, outputs."""
    channels = [CHANNELS[0]]
    now = CHANNELS[0]
    for level, outputs in enumerate(CHANNELS):
        for _ in range(BLOCKS):
            yield "down", level, now, outputs
            now = outputs
            channels.append(now)
        if level < LEVELS - 1:
            yield "downsample", level, now, now
            channels.append(now)
    for level in reversed(range(LEVELS)):
        for n in range(BLOCKS + 1):
            yield "up", level, now + channels.pop(), CHANNELS[level]
            now = CHANNELS[level]
            if n == BLOCKS and level:
                yield "upsample", level, now, now


def _time_and_context(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, CHANNELS[0], generator=generator), torch.randn(batch, 5, 32, generator=generator)


def compvis_unet() -> nn.Module:
    first = CHANNELS[0]
    inputs = [nn.ModuleList([_conv(4, first)])]
    outputs: list[nn.ModuleList] = []
    for kind, level, size, wanted in _plan():
        attends = [_spatial_transformer(wanted, "attn1")] if level < LEVELS - 1 else []
        if kind in ("down", "up"):
            blocks = nn.ModuleList([_compvis_res_block(size, wanted), *attends])
            (inputs if kind == "down" else outputs).append(blocks)
        elif kind == "downsample":
            inputs.append(nn.ModuleList([Named(lambda module, x: module.op(x), op=_conv(size, size, 3, 2))]))
        else:
            outputs[-1].append(Named(_up_named, conv=_conv(size, size)))
    last = CHANNELS[-1]
    middle = [_compvis_res_block(last, last), _spatial_transformer(last, "attn1"), _compvis_res_block(last, last)]
    return Named(
        _compvis_denoise,
        time_embed=nn.Sequential(nn.Linear(first, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)),
        input_blocks=nn.ModuleList(inputs),
        middle_block=nn.ModuleList(middle),
        output_blocks=nn.ModuleList(outputs),
        out=nn.Sequential(_group_norm(first), nn.SiLU(), _conv(first, 4)),
    )


def _run(blocks: Any, x: torch.Tensor, embedded: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        names = dict(block.named_children())
        if "in_layers" in names or "norm1" in names:
            x = block(x, embedded)
        elif "transformer_blocks" in names:
            x = block(x, context)
        else:
            x = block(x)
    return x


def _compvis_denoise(unet: Any, x: torch.Tensor) -> torch.Tensor:
    time, context = _time_and_context(len(x))
    embedded = unet.time_embed(time)
    skips = []
    for blocks in unet.input_blocks:
        x = _run(blocks, x, embedded, context)
        skips.append(x)
    x = _run(unet.middle_block, x, embedded, context)
    for blocks in unet.output_blocks:
        x = _run(blocks, torch.cat([x, skips.pop()], 1), embedded, context)
    return unet.out(x)


def diffusers_unet() -> nn.Module:
    first, last = CHANNELS[0], CHANNELS[-1]
    downs = [{"attentions": [], "resnets": [], "downsamplers": []} for _ in range(LEVELS)]
    ups = [{"attentions": [], "resnets": [], "upsamplers": []} for _ in range(LEVELS)]
    for kind, level, size, wanted in _plan():
        block = downs[level] if kind.startswith("down") else ups[LEVELS - 1 - level]
        if kind in ("down", "up"):
            block["resnets"].append(_res_block(size, wanted, "conv_shortcut", "time_emb_proj"))
            if level < LEVELS - 1:
                block["attentions"].append(_spatial_transformer(wanted, "norm1"))
        else:
            up = kind == "upsample"
            resize = Named(_up_named if up else _strided, conv=_conv(size, size, 3, 1 if up else 2))
            block[f"{kind}rs"].append(resize)
    middle = {
        "attentions": [_spatial_transformer(last, "norm1")],
        "resnets": [_res_block(last, last, "conv_shortcut", "time_emb_proj") for _ in range(2)],
    }
    lists = [
        [Named(None, **{name: nn.ModuleList(parts) for name, parts in block.items() if parts}) for block in side]
        for side in (downs, ups, [middle])
    ]
    return Named(
        _diffusers_denoise,
        conv_in=_conv(4, first),
        time_embedding=Named(
            lambda module, x: module.linear_2(F.silu(module.linear_1(x))),
            linear_1=nn.Linear(first, WIDTH),
            linear_2=nn.Linear(WIDTH, WIDTH),
        ),
        down_blocks=nn.ModuleList(lists[0]),
        up_blocks=nn.ModuleList(lists[1]),
        mid_block=lists[2][0],
        conv_norm_out=_group_norm(first),
        conv_out=_conv(first, 4),
    )


def _strided(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.conv(x)


def _diffusers_denoise(unet: Any, x: torch.Tensor) -> torch.Tensor:
    time, context = _time_and_context(len(x))
    embedded = unet.time_embedding(time)
    x = unet.conv_in(x)
    skips = [x]
    for level in unet.down_blocks:
        for n, block in enumerate(level.resnets):
            x = block(x, embedded)
            x = level.attentions[n](x, context) if hasattr(level, "attentions") else x
            skips.append(x)
        for block in getattr(level, "downsamplers", ()):
            x = block(x)
            skips.append(x)
    x = unet.mid_block.resnets[0](x, embedded)
    x = unet.mid_block.resnets[1](unet.mid_block.attentions[0](x, context), embedded)
    for level in unet.up_blocks:
        for n, block in enumerate(level.resnets):
            x = block(torch.cat([x, skips.pop()], 1), embedded)
            x = level.attentions[n](x, context) if hasattr(level, "attentions") else x
        for block in getattr(level, "upsamplers", ()):
            x = block(x)
    return unet.conv_out(F.silu(unet.conv_norm_out(x)))


ARCHITECTURES = {
    "VAE": Architecture(
        values(1, 3, 16, 16),
        {"CompVis": compvis_vae, "diffusers": diffusers_vae, "diffusers of 2022": partial(diffusers_vae, True)},
    ),
    "UNet": Architecture(values(1, 4, 16, 16), {"CompVis": compvis_unet, "diffusers": diffusers_unet}),
}
