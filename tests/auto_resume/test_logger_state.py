"""Rows of loggers, taken back to where they were at a save, and what was logged before a fit."""

import csv
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_tricks import AutoResume, seed_everything
from lightning_tricks.auto_resume.logger_state import CsvRows, LoggerState
from tests.auto_resume.curves import scalars
from tests.contract.checks import Interrupts
from tests.small import QUIET, Net, loader


def write_rows(path, header, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8), st.data())
@settings(max_examples=30)
def test_rows_are_those_of_the_save(tmp_path_factory, growth, data):
    """Rows are added between saves, and columns, with which the file is written anew; a kill may end that."""
    folder = tmp_path_factory.mktemp("rows")
    path, rows, header, records = folder / "metrics.csv", [], ["step"], []
    copying = CsvRows(folder / "copy")
    for added, wider in growth:
        if wider:
            header = [*header, f"column {len(header)}"]
        rows += [dict.fromkeys(header, f'{len(rows) + i}, "two\nlines"') for i in range(added)]
        write_rows(path, header, rows)
        records.append((copying.update(path), [dict(row) for row in rows]))
    count, wanted = data.draw(st.sampled_from(records))
    assert count == len(wanted)
    harm = data.draw(st.sampled_from(("none", "gone", "cut", "copy gone")))
    if harm in ("gone", "copy gone"):
        (path if harm == "gone" else folder / "copy").unlink()
    elif harm == "cut":
        os.truncate(path, 3)
    assert CsvRows(folder / "copy").restore(path, count) == ""
    left = list(csv.DictReader(path.read_text().splitlines(keepends=True))) if path.exists() else []
    assert [{name: value for name, value in row.items() if value} for row in left] == wanted


def test_lost_rows_are_reported(tmp_path):
    path, copying = tmp_path / "metrics.csv", CsvRows(tmp_path / "copy")
    write_rows(path, ["step"], [{"step": 1}, {"step": 2}])
    assert copying.update(path) == 2
    os.truncate(path, 9)
    (tmp_path / "copy").unlink()
    assert copying.restore(path, 2) == f"{path} has 1 of the 2 rows that were logged before the save."
    assert CsvRows(tmp_path / "none").update(tmp_path / "none.csv") == 0
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is a pipe, not a file"):
        copying.update(tmp_path / "pipe")


def test_event_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "version_0" / "both_a").mkdir(parents=True)
    names = (
        "events.out.tfevents.1.host.7.0",
        "both_a/events.out.tfevents.1.host.7.1",
        "events.out.tfevents.1.host.8.0",
    )
    folder = tmp_path / "version_0"
    for name in names:
        (folder / name).write_bytes(b"12345")
    logger = TensorBoardLogger(tmp_path, name="", version=0)
    state = LoggerState([logger], tmp_path, [{"host": "host", "pid": 7}])
    (record,) = records = state.records()
    assert record["files"] == {names[0]: 5, names[1]: 5}
    for name in (*names, "events.out.tfevents.2.host.7.0", "events.out.tfevents.2.host.9.0"):
        with (folder / name).open("ab") as file:
            file.write(b"67")
    state.restore(records)
    left = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*.host.*")}
    assert left == {names[0]: 5, names[1]: 5, names[2]: 7, "events.out.tfevents.2.host.9.0": 2}
    os.truncate(folder / names[0], 2)
    with pytest.warns(UserWarning, match=f"{folder} lacks values that were logged before the save, in {names[0]}."):
        state.restore(records)


@pytest.mark.filterwarnings("ignore:Experiment logs directory", "ignore:.*does not have many workers")
@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("version", [None, "", "run7"])
@pytest.mark.parametrize("step", [3, 7])
def test_what_is_validated_before_the_fit_is_logged_once(tmp_path, kind, version, step):
    """Before the first save and after it; it leaves no version of its own, and the rows of the fit stay."""

    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.training_step(batch, batch_idx)["loss"])

        def on_train_batch_start(self, batch, batch_idx):
            self.log("number", float(self.trainer.global_step))

    def script(folder, *callbacks):
        seed_everything(1, verbose=False)
        logger, module = kind(folder, version=version), Validated()
        trainer = Trainer(max_epochs=2, callbacks=[*callbacks], **{**QUIET, "logger": logger, "log_every_n_steps": 1})
        trainer.validate(module, loader(), verbose=False)
        trainer.fit(module, loader(shuffle=True), loader())

    script(tmp_path / "whole")
    for _ in range(2):
        with pytest.raises(SystemExit):
            script(tmp_path / "killed", Interrupts(step), AutoResume(tmp_path / "runs", every_n_train_steps=5))
    script(tmp_path / "killed", AutoResume(tmp_path / "runs", every_n_train_steps=5))
    found, name = [], "version_0" if version is None else version
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        logs = folder / "lightning_logs"
        assert not name or [path.name for path in logs.iterdir()] == [name]
        if kind is CSVLogger:
            found.append((logs / name / "metrics.csv").read_text())
        else:  # it reads files of one second in no certain order
            found.append({tag: sorted(rows) for tag, rows in scalars(logs / name).items()})
    assert found[0] == found[1]
