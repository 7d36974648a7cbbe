"""Lists of modules that grew are restored to their lengths."""

import pytest
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, MetricTracker, SumMetric

from lightning_tricks.auto_resume.core.attributes.model_structure import module_list_types, restore_module_lists


def grown(metric, count):
    tracker = MetricTracker(metric, maximize=True)
    for _ in range(count):
        tracker.increment()
    return nn.ModuleDict({"tracker": tracker})


@pytest.mark.parametrize("metric", [MeanMetric(), MetricCollection([MeanMetric()])])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_tracker_has_as_many_metrics_as_it_had(metric, count):
    saved = module_list_types({"": grown(metric, 3)})
    fresh = grown(metric, count)
    restore_module_lists({"": fresh}, saved)
    assert module_list_types({"": fresh}) == saved
    assert len({id(part) for part in fresh["tracker"]}) == 4


def test_another_list_grows_by_copies_of_its_own_parts():
    saved = module_list_types({"a": nn.ModuleList([MeanMetric(), SumMetric(), MeanMetric()])})
    fresh = {"a": nn.ModuleList([MeanMetric(), SumMetric()])}
    restore_module_lists(fresh, saved)
    assert [type(part) for part in fresh["a"]] == [MeanMetric, SumMetric, MeanMetric]
    assert fresh["a"][2] is not fresh["a"][0]


@pytest.mark.parametrize("part", [nn.Linear(1, 1), SumMetric()])
def test_a_list_stays_incomplete_where_there_is_nothing_to_copy(part):
    """Parameters would be in no optimizer, and a new type has no module to copy."""
    fresh = {"": nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))}
    saved = module_list_types({"": nn.Sequential(nn.ModuleList([nn.Linear(1, 1), part]))})
    restore_module_lists(fresh, saved)
    assert len(fresh[""][0]) == 1
