"""The pure core: what a model is made of, for any training loop; no Lightning."""
