"""What SeedEverything promises."""

from lightning_tricks import SeedEverything
from tests.contract.case import Case
from tests.contract.checks import assert_same_run
from tests.contract.lab import Lab, Setting
from tests.small import same


def verify(lab: Lab, setting: Setting, callback: type = SeedEverything) -> None:
    """Wherever the random state stood before, a net that is built late and has dropout trains to the same bits."""
    net = {"built_late": True, "dropout": 0.2}
    first = lab.fit([callback(7)], setting, net=net, start=1)
    second = lab.fit([callback(7)], setting, net=net, start=2)
    other = lab.fit([callback(8)], setting, net=net, start=1)
    assert_same_run(first, second)
    assert not same(first[0].weights, other[0].weights)


CASES = (
    Case(
        callback=SeedEverything,
        arguments={"seed": 7, "workers": False, "deterministic": "warn", "benchmark": False, "per_rank": True},
        kind="changer",
        neutral=None,
        why_no_neutral="seeding is the effect: there is no seed that is as good as none",
        instances=1,
        verify=verify,
    ),
)
