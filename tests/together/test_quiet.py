"""A console and a logger stay readable: lines and keys that the tricks add, one and all together."""

import csv

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_tricks import FlopsReport, MetricsMonitor, ModelReport, SpikeGuard
from lightning_tricks._shared.console import is_verbose
from lightning_tricks.metrics import multiclass_metrics
from tests.contract.cases import CASES
from tests.small import QUIET, cases, loader
from tests.together.everything import TogetherNet


def fit(module, train, val, callbacks, folder, capsys, lightning_log, **options):
    """Fit two epochs; return what was printed, line by line, and the keys of the logger."""
    capsys.readouterr()
    lightning_log.clear()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=CSVLogger(folder, name="logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(module, train, val)
    printed = capsys.readouterr().out.splitlines()
    said = [line for _, message in lightning_log for line in message.splitlines()]
    (file,) = folder.glob("logs/version_0/metrics.csv")
    with file.open() as rows:
        keys = set(csv.DictReader(rows).fieldnames) - {"step", "epoch"}
    return printed + said, keys


# What others than the callback's author have to say about this net and this run
NEEDED = {"Adapters": ["target_modules"], "ImageLogger": ["shape"]}
LATER = {"GradualUnfreezing": {"schedule": {0: "net.4.*", 1: "*"}}}


def at_default(name, folder):
    """A callback with the arguments alone that it requires."""
    case, needed = CASES[name], NEEDED.get(name, ())
    is_given = {key: key in needed or case.requires(key) for key in case.arguments}
    given = {key: value for key, value in case.arguments.items() if is_given[key]} | LATER.get(name, {})
    paths = {key: str(folder / given[key]) for key in case.callback.path_arguments if isinstance(given.get(key), str)}
    return case.callback(**{**given, **paths})


@pytest.mark.parametrize("name", CASES)
def test_a_callback_at_its_default_says_and_logs_little(name, tmp_path, capsys, lightning_log):
    bare, bare_keys = fit(TogetherNet(), loader(), loader(), [], tmp_path / "bare", capsys, lightning_log)
    callbacks = [at_default(name, tmp_path)]
    lines, keys = fit(TogetherNet(), loader(), loader(), callbacks, tmp_path / "own", capsys, lightning_log)
    said = [line for line in lines if line not in bare and not line.startswith("Tricks at the")]
    assert len(said) <= 3, "\n".join(said)
    asked_for = 6 if name == "MetricsMonitor" else 4  # in two stages the loss, and the main metrics of a preset
    assert len(keys - bare_keys) <= asked_for, sorted(keys - bare_keys)


def test_all_callbacks_together_say_and_log_little(tmp_path, capsys, lightning_log):
    bare, bare_keys = fit(TogetherNet(), loader(), loader(), [], tmp_path / "bare", capsys, lightning_log)
    callbacks = [at_default(name, tmp_path) for name in CASES]
    lines, keys = fit(TogetherNet(), loader(), loader(), callbacks, tmp_path / "own", capsys, lightning_log)
    assert len(lines) <= len(bare) + 25, "\n".join(lines)
    assert len(keys - bare_keys) <= 15, sorted(keys - bare_keys)


@pytest.mark.parametrize("way", ["argument", "variable"])
def test_tables_are_printed_where_that_is_asked_for(way, tmp_path, capsys, lightning_log, monkeypatch):
    if way == "variable":
        monkeypatch.setenv("LIGHTNING_TRICKS_VERBOSE", "1")
    verbose = True if way == "argument" else None
    callbacks = [FlopsReport(verbose=verbose), ModelReport(verbose=verbose)]
    lines, _ = fit(TogetherNet(), loader(), loader(), callbacks, tmp_path, capsys, lightning_log)
    assert any("MACs" in line for line in lines)
    assert any("grad norm" in line for line in lines)


@cases(
    "callback, words",
    (ModelReport(graph=False), "after the first step: weights "),  # later, more may train
    (SpikeGuard(), "not finite, or more than 8 spreads above the last 128, after 128 steps"),
    (SpikeGuard(threshold=float("inf"), monitor="grad_norm"), "a spike is a grad_norm that is not finite\n"),
    (MetricsMonitor(multiclass_metrics(10), best={"val/acc": "max"}), "best val/acc "),
)
def test_lines_say_of_what_their_numbers_are(callback, words, tmp_path, capsys, lightning_log):
    lines, _ = fit(TogetherNet(), loader(), loader(), [callback], tmp_path, capsys, lightning_log)
    assert words in "\n".join([*lines, ""])


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("LIGHTNING_TRICKS_VERBOSE", "loud")
    with pytest.raises(ValueError, match="LIGHTNING_TRICKS_VERBOSE must be 0 or 1, got 'loud'"):
        is_verbose(None)
    report = FlopsReport()
    with pytest.raises(ValueError, match="got 'loud'"):
        Trainer(callbacks=[report], max_epochs=1, **QUIET).fit(TogetherNet(), loader(), loader())
    assert report.count is None, "before anything runs"
