"""A run that outlives its machine: checkpoints are copied to an object store, and back."""
