"""The pure core: schedules, their descriptions and parameter groups, for any training loop; no Lightning."""
