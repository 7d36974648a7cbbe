"""The pure core: conversions of images, grids, and the ranking of samples; no Lightning."""
