"""The pure core: gradient norms, clipping, thresholds and skipped steps, for any training loop; no Lightning."""
