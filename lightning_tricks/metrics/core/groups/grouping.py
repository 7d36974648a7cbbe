"""Which metrics share a group."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torchmetrics import Metric

from lightning_tricks.metrics.core.groups.base import MetricGroup
from lightning_tricks.metrics.core.groups.cat import CurveGroup, RetrievalGroup
from lightning_tricks.metrics.core.groups.confusion_matrix import ConfusionMatrixGroup
from lightning_tricks.metrics.core.groups.shared_state import SharedStateGroup
from lightning_tricks.metrics.core.metric_properties import state_sharing_key

_GROUPS: dict[str, type[ConfusionMatrixGroup | RetrievalGroup | CurveGroup]] = {
    "confusion matrix": ConfusionMatrixGroup,
    "retrieval": RetrievalGroup,
    "curve": CurveGroup,
}


def group_metrics(metrics: Mapping[str, Metric]) -> list[MetricGroup]:
    """Put copies of metrics, reset, into groups that share one statistic each."""
    members_by_key: dict[Any, dict[str, Metric]] = {}
    for name, metric in metrics.items():
        member = copy.deepcopy(metric)
        member.reset()
        sharing_key = state_sharing_key(metric)
        members_by_key.setdefault(("alone", name) if sharing_key is None else sharing_key, {})[name] = member
    return [_GROUPS.get(key[0], SharedStateGroup)(members) for key, members in members_by_key.items()]
