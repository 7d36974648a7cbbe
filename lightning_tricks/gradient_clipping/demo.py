"""The part of the demo that shows GradientClipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import Trainer

_MAX_NORM = 2.0


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that GradientClipping fills in the demo."""
    return {"gradient_clipping": {"max_norm": _MAX_NORM, "log_layers": True}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return what was clipped in a fit, as label -> text; `history` holds the logged values of each step."""
    before = _finite("grad_norm/pre_clip", history)  # a step that overflowed in fp16 was skipped, not clipped
    after = _finite("grad_norm/post_clip", history)
    clipped = sum(norm > _MAX_NORM for norm in before)
    return {
        "clipped steps": f"{clipped} of {len(before)} ({clipped / len(before):.1%})",
        "gradient norm before": f"median {median(before):.2f}, largest {max(before):.2f}",
        "gradient norm after": f"median {median(after):.2f}, largest {max(after):.2f}",
    }


def _finite(key: str, history: Sequence[Mapping[str, float]]) -> list[float]:
    return [step[key] for step in history if isfinite(step.get(key, nan))]
