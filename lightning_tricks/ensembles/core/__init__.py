"""The pure core: members, how their outputs are combined, and in which order they see samples; no Lightning."""
