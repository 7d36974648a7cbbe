"""The list of weights that recurrent layers give to torch's kernels."""

from __future__ import annotations

from typing import Any

from lightning_tricks._torch_compat.guards import needs_private, set_private
from lightning_tricks._torch_compat.modules import registered_tensor


@needs_private("LoRA of recurrent layers")
def use_registered_weights(rnn: Any) -> None:
    """Fill the list that a recurrent layer gives to torch's kernels with its parameters.

    The layer itself replaces them in its next forward pass if its class computes other weights.
    """
    set_private(rnn, _flat_weights=[registered_tensor(rnn, name) for name in rnn._flat_weights_names])


@needs_private("LoRA of recurrent layers")
def base_state(rnn: Any) -> dict[str, Any]:
    """Return the state of a recurrent layer for pickle and deepcopy, without the weak references to its weights."""
    return {name: value for name, value in vars(rnn).items() if name != "_flat_weight_refs"}
