"""What GradientClipping promises."""

import math

from lightning_tricks import GradientClipping
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting

_MAX_NORM = 0.5


def verify(lab: Lab, setting: Setting, callback: type = GradientClipping) -> None:
    """Each step's gradient has the norm of the reference implementation, cut at `max_norm`, and the log says so."""
    bare = lab.fit_bare(setting)
    clipped = lab.fit([callback(_MAX_NORM, log="all")], setting)
    assert len(clipped) == setting.ranks
    for rank, bare_rank in zip(clipped, bare, strict=True):
        assert len(rank.steps) == len(bare_rank.steps) > 0 or setting.closures_vary
        # nothing touched the gradient before: the first norm is the bare run's
        assert math.isclose(rank.steps[0].before, bare_rank.steps[0].before, rel_tol=1e-6)
        assert any(step.before > _MAX_NORM for step in rank.steps)
        for step in rank.steps:
            assert math.isclose(step.after, min(step.before, _MAX_NORM), rel_tol=setting.tolerance), step
        _check_log(rank, setting.tolerance)


def _check_log(rank, tolerance: float) -> None:
    optimizers = sorted({step.optimizer for step in rank.steps})
    for optimizer in optimizers:
        steps = [step for step in rank.steps if step.optimizer == optimizer]
        prefix = "grad_norm" if len(optimizers) == 1 else f"grad_norm/{optimizer}"
        expected = {
            "pre_clip": steps[-1].before,
            "post_clip": steps[-1].after,
            "clipped_fraction": sum(step.before > _MAX_NORM for step in steps) / len(steps),
        }
        for name, value in expected.items():
            assert math.isclose(rank.metrics[f"{prefix}/{name}"], value, rel_tol=tolerance), (name, value, rank.metrics)


CASES = (
    Case(
        callback=GradientClipping,
        arguments={
            "max_norm": _MAX_NORM,
            "norm_type": 3.0,
            "groups": {"net.0.*": 0.2},
            "log_norm": "all",
            "log_layers": True,
        },
        kind="changer",
        neutral={"max_norm": math.inf},
        instances=1,
        waits={"step": 1, "on_fit_end": 1, "teardown": 1},
        verify=verify,
    ),
)
