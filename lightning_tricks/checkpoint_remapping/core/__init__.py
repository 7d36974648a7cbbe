"""The pure core: reading files of weights, matching them to a model, loading them; no Lightning."""
