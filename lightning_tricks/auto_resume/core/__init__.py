"""The pure core: checkpoints on disk, attributes, data loaders, signals; no Lightning."""
