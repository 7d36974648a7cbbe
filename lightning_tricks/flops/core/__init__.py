"""The pure core: counting the operators of a model, for any training loop; no Lightning."""
