"""The pure core: the band of usual values, and copies of what training changes; no Lightning."""
