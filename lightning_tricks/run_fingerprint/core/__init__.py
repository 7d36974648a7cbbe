"""The pure core: fingerprints of tensors, records of them, and their comparison; no Lightning."""
