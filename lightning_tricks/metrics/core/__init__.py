"""The pure core: metrics with shared states, their names and their plots; no Lightning."""
