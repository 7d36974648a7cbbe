"""What ModelReport promises."""

import json

from lightning_tricks import ModelReport
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting


def verify(lab: Lab, setting: Setting, callback: type = ModelReport) -> None:
    """However the net is trained, the report names its parameters, with gradients and optimizer state measured."""
    folder = lab.folder / f"report of {setting.name}"
    lab.fit([callback(folder)], setting)
    report = json.loads((folder / "report.json").read_text())
    rows = {row["name"].replace("_orig_mod.", ""): row for row in report["parameters"]}
    assert [tuple(row["shape"]) for row in rows.values()] == [(16, 64), (16,), (16,), (16,), (10, 16), (10,)]
    assert all(row["grad_norm"] > 0 and row["std"] is not None for row in rows.values())
    assert rows["net.1.weight"]["mean"] > 0.5
    memory = report["memory"]
    assert memory["weights"] == memory["gradients"] > 0
    assert (memory["optimizer_state"] > 0) == (setting.net.get("optimization") != "sgd")
    assert "LayerNorm" in (folder / "layers.txt").read_text()
    assert "net.4.weight" in (folder / "graph.dot").read_text()


CASES = (
    Case(
        callback=ModelReport,
        arguments={"dirpath": "report", "graph": {"show_attrs": True}, "depth": 2},
        kind="observer",
        neutral={"graph": False},
        of_one_fit=("summary",),
        instances=1,
        waits={"on_train_batch_end": 2},
        verify=verify,
    ),
)
