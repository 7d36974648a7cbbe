"""What the meta-learner of a stacking ensemble sees: columns of the members' outputs, and the inputs beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_tricks.ensembles.core.combination import at_least_single

CLASSIFIER_METHODS = ("auto", "predict_proba", "decision_function", "predict")
REGRESSOR_METHODS = ("auto", "predict")


def classifier_features(logits: Tensor, method: str = "auto") -> Tensor:
    """Return the columns of a classifier's members.

    Args:
        logits: Outputs of the members, (n, B, C).
        method: "predict_proba" (and "auto") for probabilities, of which the first column is left out in binary
            problems; "decision_function" for logits, or their difference in binary problems; "predict" for the index
            of the most probable class.

    Returns:
        The columns of one member after another, (B, n x columns), in single precision at least.

    Source: scikit-learn's `StackingClassifier`.

    Examples:
        >>> classifier_features(torch.tensor([[[0.0, 0.0]], [[0.0, 50.0]]])).tolist()
        [[0.5, 1.0]]
    """
    logits = at_least_single(logits)
    is_binary = logits.shape[-1] == 2
    if method == "predict":
        columns = logits.argmax(-1, keepdim=True).to(logits.dtype)
    elif method == "decision_function":
        columns = logits[..., 1:] - logits[..., :1] if is_binary else logits
    else:
        columns = logits.softmax(-1)[..., 1:] if is_binary else logits.softmax(-1)
    return member_columns(columns)


def member_columns(columns: Tensor) -> Tensor:
    """Return the columns of members, (n, B, columns), beside each other: (B, n x columns).

    Examples:
        >>> member_columns(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """
    return at_least_single(columns).transpose(0, 1).flatten(1)


def append_inputs(features: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return the features (B, F) with each row's inputs, flattened, after them."""
    return torch.cat([features, *(x.reshape(len(features), -1).to(features.dtype) for x in inputs)], 1)
