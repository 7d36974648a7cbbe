"""The pure core of fine-tuning: freezing, LoRA, adapters, prefixes, and the weights that training changed."""
