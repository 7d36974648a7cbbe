"""Which tensor of a file is which tensor of a model."""
