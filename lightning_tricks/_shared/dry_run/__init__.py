"""A dry run of a model: on a copy, without data where possible, and without side effects."""
