"""The pure core: conversions of images, and which samples are worth a look; no Lightning."""
