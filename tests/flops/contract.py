"""What FlopsReport promises."""

from lightning_tricks import FlopsReport
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting

FORWARD_MACS = 4 * (64 * 16 + 16 * 10)  # of the lab's net with a batch of four
BACKWARD_MACS = 4 * (64 * 16 + 2 * 16 * 10)  # the pixels need no gradient


def verify(lab: Lab, setting: Setting, callback: type = FlopsReport) -> None:
    """However the net is trained, it logs the FLOPs of one rank's forward pass and training step."""
    for rank in lab.fit([callback(backward=True, log_totals=True)], setting)[:1]:
        assert rank.metrics["flops/forward"] == 2 * FORWARD_MACS
        assert rank.metrics["flops/train_step"] == 2 * (FORWARD_MACS + BACKWARD_MACS)
        assert rank.metrics["params/total"] == rank.metrics["params/trainable"] == 64 * 16 + 16 + 2 * 16 + 16 * 10 + 10


CASES = (
    Case(
        callback=FlopsReport,
        arguments={"backward": True, "depth": 1, "path": "flops.json", "compare": True},
        kind="observer",
        neutral={},
        of_one_fit=("count",),
        instances=1,
        verify=verify,
    ),
)
