"""Dry runs of a model: on a copy, without data where possible, and without side effects."""
