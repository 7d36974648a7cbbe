"""Predictions as columns, in parts on the disk, and in one file: usable in any loop."""
