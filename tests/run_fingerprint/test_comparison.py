"""Where two records diverge, and how that is reported."""

import numpy as np
import pytest

from lightning_tricks.run_fingerprint import FingerprintRecordError, compare
from lightning_tricks.run_fingerprint.core.record import Column, FingerprintRecord, RecordHeader
from tests.small import cases

COLUMNS = (
    Column("data", "0"),
    Column("forward", "conv"),
    Column("forward", "fc"),
    Column("loss"),
    Column("gradient", "conv.weight"),
    Column("gradient", "fc.weight"),
    Column("weights", "conv.weight"),
    Column("weights", "fc.weight"),
)


def record(steps=range(5), changed=(), columns=COLUMNS, start=True, epochs_of=100, **header):
    """A run whose values differ at (step, column) in `changed`, and in all that follows in time."""
    rows, poisoned = [], False
    for step in ([-1] if start else []) + list(steps):
        values, first = [], next(iter(steps), 0) if step < 0 else step
        for column in columns:
            poisoned = poisoned or (step, column) in changed
            values.append(0 if step < 0 and column.kind != "weights" else 1000 * (first - (step < 0)) + 7 + poisoned)
        rows.append([first, first // epochs_of, -1 if step < 0 else first % epochs_of, *values])
    return [FingerprintRecord(RecordHeader(**{"detail": "layer", **header}), [(columns, np.array(rows, np.int64))])]


def test_equal_runs_have_no_difference():
    comparison = compare(record(), record())
    assert (comparison.divergence, comparison.equal_batches, comparison.longer_run) == (None, 5, "")
    assert str(comparison) == "No difference: 5 batches are equal, bit for bit."
    longer = compare(record(), record(range(9)))
    assert (longer.divergence, longer.equal_batches, longer.longer_run) == (None, 5, "B")
    assert str(longer).endswith("Run B has more steps.")


@cases(
    "column, kind, layer, words",
    (Column("data", "0"), "data", "0", "data. Part 0 of the batch differs."),
    (Column("forward", "conv"), "forward", "conv", "forward. The output of conv differs (2 of 2 differ)."),
    (Column("forward", "fc"), "forward", "fc", "The output of the layer that ran before it, conv, is equal."),
    (Column("loss"), "forward", "loss", "forward. The output of loss differs."),
    (Column("gradient", "fc.weight"), "gradient", "fc.weight", "gradient of fc.weight differs (1 of 2 differ)."),
    (Column("gradient", "conv.weight"), "gradient", "fc.weight", "(2 of 2 differ)"),
    (Column("weights", "fc.weight"), "update", "fc.weight", "fc.weight differs after the update (1 of 2 differ)."),
)
def test_the_first_difference_is_named(column, kind, layer, words):
    """What a step makes later differs as well; of gradients the one nearest to the loss is the first that was made."""
    comparison = compare(record(), record(changed={(3, column)}))
    found = comparison.divergence
    assert (found.step, found.epoch, found.batch_idx, found.kind, found.layer) == (3, 0, 3, kind, layer)
    assert words in str(comparison)
    assert str(comparison).startswith("The runs diverge at step 3, in epoch 0, batch 3: ")
    assert str(comparison).endswith("3 batches are equal before it.")


def test_weights_that_differ_before_the_first_batch():
    comparison = compare(record(), record(changed={(-1, COLUMNS[-2])}))
    found = comparison.divergence
    assert (found.kind, found.layer, comparison.equal_batches) == ("start", "conv.weight", 0)
    assert "before the first batch: start. conv.weight differs (2 of 2 differ)." in str(comparison)


def test_without_layers_the_remedy_is_named():
    columns = tuple(Column(kind) for kind in ("data", "loss", "gradient", "weights"))
    run_a = record(columns=columns, detail="step")
    for column, kind, words in zip(
        columns,
        ("data", "forward", "gradient", "update"),
        ("The batch differs.", "The loss differs.", "The gradients differ.", "The weights differ after the update."),
        strict=True,
    ):
        divergence = compare(run_a, record(columns=columns, changed={(2, column)}, detail="step")).divergence
        assert (divergence.kind, divergence.layer) == (kind, None)
        assert words in str(divergence)
        assert ('detail="layer" to find the layer' in str(divergence)) == (kind != "data")


def test_a_run_that_began_later_is_compared_from_there():
    whole = record(range(9))
    assert compare(whole, record(range(3, 9))).equal_batches == compare(record(range(3, 9)), whole).equal_batches == 6
    divergence = compare(whole, record(range(3, 9), changed={(-1, COLUMNS[-1])})).divergence
    assert (divergence.step, divergence.kind, divergence.layer) == (3, "start", "fc.weight")


def test_runs_of_which_not_every_step_was_recorded():
    columns = COLUMNS
    every, third = record(range(12)), record(range(0, 12, 3), every_n_train_steps=3)
    assert compare(every, third).equal_batches == 4
    divergence = compare(every, record(range(0, 12, 3), changed={(6, columns[0])}, every_n_train_steps=3)).divergence
    assert (divergence.step, divergence.last_equal_step) == (6, 3)
    assert "They diverged after step 3: every_n_train_steps=1 records the steps in between." in str(divergence)
    assert compare(every, record(range(1, 12, 3), every_n_train_steps=3)).equal_batches == 4
    third, changed = (record(range(0, 12, 3), changed=at, every_n_train_steps=3) for at in ((), {(0, columns[0])}))
    divergence = compare(third, changed).divergence
    assert (divergence.step, divergence.last_equal_step) == (0, None), "no step lies between the start and the first"


def test_epochs_of_other_lengths_diverge_where_the_numbers_do():
    found = compare(record(range(12), epochs_of=10), record(range(12), epochs_of=8)).divergence
    assert (found.step, found.epoch, found.batch_idx, found.kind, found.missing_in) == (8, 0, 8, "data", "B")
    assert "Run B has no such value." in str(found)


def test_what_only_one_run_has_is_a_difference():
    table = record()[0].blocks[0][1].copy()
    table[3, 3 + 5] = 0
    found = compare(record(), [FingerprintRecord(RecordHeader(detail="layer"), [(COLUMNS, table)])]).divergence
    assert (found.step, found.kind, found.layer, found.missing_in) == (2, "gradient", "fc.weight", "B")


def test_the_first_of_several_ranks_is_named():
    def ranks(*changed):
        return [record(changed=each, rank=rank, world_size=2)[0] for rank, each in enumerate(changed)]

    divergence = compare(ranks((), ()), ranks({(3, COLUMNS[0])}, {(2, COLUMNS[4])})).divergence
    assert (divergence.rank, divergence.step, divergence.kind) == (1, 2, "gradient")
    divergence = compare(ranks((), ()), ranks({(2, COLUMNS[4])}, {(2, COLUMNS[0])})).divergence
    assert (divergence.rank, divergence.kind) == (1, "data"), (
        "gradients are shared: the data of the other rank came first"
    )
    assert " on rank 1: data." in str(divergence)


def test_calls_are_told_apart():
    columns = (Column("forward", "cell"), Column("forward", "cell", 2), Column("forward", "cell", 3), Column("loss"))
    divergence = compare(record(columns=columns), record(columns=columns, changed={(1, columns[1])})).divergence
    assert (divergence.layer, divergence.call) == ("cell", 2)
    assert "The output of cell differs at call 2 within the batch (2 of 3 differ)." in str(divergence)


def test_what_cannot_be_compared_is_refused():
    for run_a, run_b, words in (
        (record(), record(detail="step"), "A has detail='layer' and B has detail='step'"),
        (record(), record(world_size=2) * 2, "A has world_size=1 and B has world_size=2"),
        (record(world_size=2) * 2, record(), "A has world_size=2 and B has world_size=1"),
        (record(version=1), record(), "A has version=1 and B has version=2: .* same version of lightning_tricks"),
        (record(), record(range(7, 9)), "no batch in common: A has steps 0 to 4, B has steps 7 to 8"),
        (record(), record(range(0)), "B has none"),
    ):
        with pytest.raises(FingerprintRecordError, match=words):
            compare(run_a, run_b)
