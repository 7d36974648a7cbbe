"""Training scripts as strangers write them: killed and started again they end as undisturbed, or say what differs.

`make soak` kills them all in all phases; here each is killed once.
"""

import pytest

from tests.auto_resume.killing import differences, kill_at, one_in_three_with_the_oldest, resumed_at, run, warned
from tests.auto_resume.scenarios import BATCHES, SCENARIOS

ELSEWHERE = {  # where it shows more than in the middle of an epoch
    "order_set_by_epoch": "at an epoch's end",
    "body_frozen_in_the_first_epoch": "just after validation",
    "queue_that_grows": "just after validation",
    "stop_plateau_and_checkpoint": "just before validation",
    "swa_from_an_epoch": "at an epoch's start",
    "swa_annealed": "after the fit",
    "ema_by_steps_and_epochs": "after the last step",
    "trackers_of_metrics": "just before validation",
    "reloaded_each_epoch": "at an epoch's start",
    "optimizer_in_an_optimizer": "after the fit",
    "reloaded_every_other_epoch_by_the_epoch": "at an epoch's start",
    "stacking": "at an epoch's end",
}
SEVERAL = {  # (ranks, workers), where that makes a difference
    "order_set_by_epoch": (2, 2),
    "metric_of_a_callback": (2, 0),
    "swa_from_an_epoch": (2, 0),
    "sampler_with_state": (1, 2),
    "dataset_with_generator_in_workers_that_stay": (1, 2),
    "shuffle_buffer_with_generator": (1, 2),
    "order_set_by_epoch_before_workers_know_it": (1, 2),
    "data_noisy_in_the_first_epoch": (1, 2),
    "stacking": (2, 0),
    "mean_over_targets": (2, 0),
    "ranks_that_end_together": (2, 0),
}
CASES = [(name, 1, 0) for name, one in SCENARIOS.items() if one.workers[0] == 0]
CASES += [(name, *way) for name, way in SEVERAL.items()]


@pytest.mark.oldest
@pytest.mark.parametrize("case", one_in_three_with_the_oldest(*CASES), ids=lambda case: "-".join(map(str, case)))
@pytest.mark.sampled(3)
def test_a_script_resumes_exactly_or_warns(tmp_path, case):
    name, ranks, workers = case
    scenario = SCENARIOS[name]
    if not scenario.is_there:
        pytest.skip(f"needs Lightning {scenario.since}")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    options = {"ranks": ranks, "workers": workers}
    phase = ELSEWHERE.get(name, "in the middle of an epoch")
    kill = kill_at(phase, "SIGKILL", {"samples": 4 * BATCHES})
    assert run(killed, {**options, "kill": kill}, script=scenario) != 0
    assert run(killed, options, script=scenario) == 0, (killed / "output.txt").read_text()[-3000:]
    assert resumed_at(killed) or "had finished" in (killed / "output.txt").read_text()
    if scenario.warning:
        assert warned(killed, scenario.warning)
        return
    assert run(whole, {**options, "guarded": False}, script=scenario) == 0
    assert differences(killed, whole) == []
