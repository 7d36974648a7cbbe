"""Transformers by closed formulas: self-attention, tied heads, labels, activation checkpointing, mixture of experts."""

import pytest
import torch

from lightning_tricks import count_flops

transformers = pytest.importorskip("transformers")

WIDTH, INNER, WORDS, LAYERS, HEADS = 64, 128, 100, 2, 4
BATCH, LENGTH = 2, 10
TOKENS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
ROWS = BATCH * LENGTH
ATTENTION = 4 * WIDTH**2 * ROWS + 2 * BATCH * LENGTH**2 * WIDTH  # four projections; scores and values


def test_bert():
    config = transformers.BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        vocab_size=WORDS,
    )
    model = transformers.BertForSequenceClassification(config)
    macs = LAYERS * (ATTENTION + 2 * WIDTH * INNER * ROWS) + BATCH * (WIDTH**2 + 2 * WIDTH)
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "labels": torch.tensor([0, 1])}
    for inputs in (TOKENS, {"input_ids": TOKENS}, batch, transformers.BatchEncoding(batch)):
        assert count_flops(model, inputs).macs == macs
    assert count_flops(model.train(), batch, backward=True).train_step_flops == 6 * macs
    fused = count_flops(model.eval(), batch, backward=True)  # without dropout: it computes the scores again
    assert fused.train_step_flops == 6 * macs + 2 * LAYERS * BATCH * LENGTH**2 * WIDTH
    assert not fused.notes


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_llama_with_activation_checkpointing(attention):
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        intermediate_size=INNER,
        vocab_size=WORDS,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(config)
    layer = ATTENTION - WIDTH**2 * ROWS + 3 * WIDTH * INNER * ROWS  # keys and values are half as wide
    head = WIDTH * WORDS * ROWS
    batch = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
    plain = count_flops(model, batch, backward=True)
    rotary = plain.macs - LAYERS * layer - head  # the angles: positions by frequencies
    assert 0 <= rotary <= BATCH * LENGTH * WIDTH
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    saved = count_flops(model.train(), batch, backward=True)
    assert saved.macs == plain.macs
    again = saved.train_step_flops - plain.train_step_flops
    assert again == 2 * LAYERS * (layer - WIDTH * INNER * ROWS), "the layers run once more, up to their last projection"
