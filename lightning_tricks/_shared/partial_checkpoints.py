"""How a checkpoint says that it holds only the trained tensors: it loads into a model that has the others."""

from __future__ import annotations

RECORD_KEY = "trainable_checkpoint"  # the entry of a checkpoint that describes the tensors that were left out

# An empty tensor of this name is among the weights, so that whoever loads them without the base reads the remedy in the
# error of `load_state_dict`. It has no dots: it is not a name of a submodule.
NOTE = (
    "(this file holds only the trained tensors: load it with TrainableCheckpoint among the Trainer's callbacks, or "
    "with load_trainable)"
)
