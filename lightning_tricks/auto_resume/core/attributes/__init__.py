"""Attributes of objects that no state dict holds: found, saved as plain data, compared and restored."""
