"""PredictionWriter: each sample once and in order, whatever reads them, and after kills."""

import itertools
import os
import resource
import signal
import struct
import sys
import tracemalloc
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packaging.version import Version
from torch.multiprocessing import ProcessExitedException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from lightning_tricks import AutoResume, PredictionWriter, SeedEverything
from lightning_tricks.predictions.core.parts import MergedParts
from tests.contract.processes import append_output_to, run_and_exit
from tests.predictions.runs import TWO_RANKS, Numbers, Squares, predict, rows_of, squares
from tests.small import QUIET, fork, recorded_warnings

FORMATS = ("jsonl", "npz", "pt", "parquet")
# What Lightning says of loaders that are unusual in a prediction
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        ".*shuffling enabled",
        ".*custom batch sampler",
        ".*drop_last",
        ".*does not have many workers",
        "predict returned None",
        "Total length.*zero",
    )
]


def needs_package(name):
    if name == "parquet":
        pytest.importorskip("pyarrow", reason="parquet needs the extra 'parquet'")


class Reversed(BatchSampler):
    """A user's batch sampler of uneven batches, which Lightning cannot make anew."""

    def __init__(self, count):
        self.count = count
        self.sampler = SequentialSampler(range(count))  # Lightning 2.5.0 asks for it

    def __iter__(self):
        numbers = iter(reversed(range(self.count)))
        for size in itertools.cycle([1, 3, 2]):
            if not (batch := list(itertools.islice(numbers, size))):
                return
            yield batch

    def __len__(self):
        return len(list(iter(self)))


class Reused(Reversed):
    """Yields one list, which it fills anew."""

    def __iter__(self):
        batch = []
        for other in super().__iter__():
            batch[:] = other
            yield batch


class Endless(Reversed):
    """Does not know how many batches it yields."""

    def __len__(self):
        raise TypeError


class WithSizes(Reversed):
    """Yields the size of an image beside its index."""

    def __iter__(self):
        for batch in super().__iter__():
            yield [(index, 32) for index in batch]


class Drawn:
    """Draws in random order by its own generator."""

    def __new__(cls, count, **options):
        return DataLoader(Numbers(count), 4, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


LOADERS = {
    "in order": lambda: DataLoader(Numbers(21), 4),
    "shuffled": lambda: DataLoader(Numbers(21), 4, shuffle=True),
    "own generator": lambda: Drawn(21),
    "last batch dropped": lambda: DataLoader(Numbers(21), 4, drop_last=True),
    "workers": lambda: DataLoader(Numbers(21), 4, num_workers=2, shuffle=True),
    "batch sampler": lambda: DataLoader(Numbers(21), batch_sampler=BatchSampler(RandomSampler(range(21)), 4, True)),
    "user's batch sampler": lambda: DataLoader(Numbers(21), batch_sampler=Reversed(21)),
    "batch sampler without a length": lambda: DataLoader(Numbers(21), batch_sampler=Endless(21)),
    "list that is used again": lambda: DataLoader(Numbers(21), batch_sampler=Reused(21)),
    "subset": lambda: DataLoader(Subset(Numbers(50), range(21)), 4, shuffle=True),
    "replaced twice": lambda: DataLoader(Numbers(21), 4, sampler=[*range(21), *range(9)]),
    "distributed": lambda: DataLoader(Numbers(21), 4, sampler=DistributedSampler(Numbers(21), 1, 0)),
    "numpy's numbers": lambda: DataLoader(Numbers(21), 4, sampler=np.random.default_rng(0).permutation(21)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_each_sample_is_written_once_and_in_order(name):
    predict(PredictionWriter("out.jsonl"), loaders=LOADERS[name]())
    assert rows_of("out.jsonl") == squares()
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]


class Shares(LightningDataModule):
    """A user's distributed sampler, which repeats samples to give all ranks as many."""

    def predict_dataloader(self):
        sampler = DistributedSampler(Numbers(21), self.trainer.world_size, self.trainer.global_rank, shuffle=True)
        return DataLoader(Numbers(21), batch_size=4, sampler=sampler)


@pytest.mark.parametrize("name", ["in order", "shuffled", "workers", "user's batch sampler", "subset"])
@pytest.mark.parametrize("option", [True, False], ids=["distributed", "not distributed"])
@pytest.mark.sampled(2)
def test_two_ranks_write_what_one_writes(name, option):
    predict(PredictionWriter("out.jsonl"), loaders=LOADERS[name](), use_distributed_sampler=option, **TWO_RANKS)
    assert rows_of("out.jsonl") == squares()


@pytest.mark.trap("predictions: a distributed sampler repeats samples")
def test_what_a_distributed_sampler_repeats_is_left_out(lightning_log):
    predict(PredictionWriter("out.npz"), loaders=Shares(), **TWO_RANKS)
    assert rows_of("out.npz") == squares()


def test_samples_that_get_lost_are_counted():
    """Ranks with random numbers of their own shuffle differently, so that Lightning's sampler loses samples."""
    data = DataLoader(Numbers(21), 4, shuffle=True)
    with pytest.raises(Exception, match=r"of 21 samples to out.npz, without \d+ that were repeated. Samples are lost"):
        predict([SeedEverything(3, per_rank=True), PredictionWriter("out.npz")], Draws(), data, **TWO_RANKS)
    rows = rows_of("out.npz")
    assert 10 < len(rows) < 21
    assert all(row["square"] == row["index"] ** 2 for row in rows)


class Draws(Squares):
    def on_predict_start(self):
        torch.rand(1 + self.global_rank)

    def setup(self, stage):
        torch.manual_seed(self.global_rank)


@pytest.mark.parametrize("devices", [1, 2])
def test_loaders_are_told_apart_by_name_or_number(devices):
    options = TWO_RANKS if devices == 2 else {}
    loaders = {"b": DataLoader(Numbers(5), 4), "a": DataLoader(Numbers(9), 4, shuffle=True)}
    predict(PredictionWriter("named.npz"), loaders=loaders, **options)
    places = [*itertools.product("b", range(5)), *itertools.product("a", range(9))]
    assert [(row["loader"], row["index"]) for row in rows_of("named.npz")] == places
    predict(PredictionWriter("listed.npz"), loaders=[*loaders.values()], **options)
    numbered = [(0 if name == "b" else 1, index) for name, index in places]
    assert [(row["loader"], row["index"]) for row in rows_of("listed.npz")] == numbered
    assert all(row["square"] == row["index"] ** 2 for row in rows_of("listed.npz"))


def test_a_loader_may_be_empty_beside_another_one():
    predict(PredictionWriter("out.jsonl"), loaders=[DataLoader(Numbers(0), 4), DataLoader(Numbers(3), 4)])
    assert [(row["loader"], row["index"]) for row in rows_of("out.jsonl")] == [(1, 0), (1, 1), (1, 2)]


def test_a_combined_loader_and_nested_loaders():
    nested = CombinedLoader({"x": [DataLoader(Numbers(5), 4), DataLoader(Numbers(3), 4)]}, "sequential")
    predict(PredictionWriter("out.jsonl"), loaders=nested)
    assert [(row["loader"], row["index"]) for row in rows_of("out.jsonl")] == [
        *itertools.product([0], range(5)),
        *itertools.product([1], range(3)),
    ]


Pair = namedtuple("Pair", "low high")


def rich(values, numbers):
    """Whatever a step may return, of rows of different lengths."""
    return {
        "scores": values,
        "nested": {"half": values.half(), 3: Pair(values.bfloat16()[:, 0], values.double()[:, None])},
        "text": [f"ä{number}\n" for number in numbers],
        "number": [int(number) for number in numbers],
        "share": tuple(float(number) / 3 for number in numbers),
        "flag": numbers > 3,
        "tokens": [torch.arange(number % 3) for number in numbers],
        "boxes": [{"box": torch.full((int(number) % 2, 4), int(number)), "label": int(number)} for number in numbers],
        "plain boxes": [[[0.5, int(number)]] * (int(number) // 6 % 2) for number in numbers],
        "padded": torch.ones(len(numbers), int(numbers.max())),
        "pairs": [Pair(int(number), f"{number}") for number in numbers],
        "plain": [Pair(int(number), 0.5) for number in numbers],
        "zipped": [(f"{number}", int(number)) for number in numbers],
        "texts": [(f"{number}", "") for number in numbers],
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("devices", [1, 2])
def test_all_kinds_of_values_are_columns_in_all_formats(name, devices):
    needs_package(name)
    options = TWO_RANKS if devices == 2 else {}
    predict(PredictionWriter(f"out.{name}"), Squares(transform=rich), **options)
    rows = rows_of(f"out.{name}")
    assert len(rows) == 21
    for n, row in enumerate(rows):
        square = float(n * n)
        padded = row.pop("padded")
        assert set(padded) == {1.0}
        assert row == {
            "loader": 0,
            "index": n,
            "scores": [square] * 2,
            "nested.half": [square] * 2,
            "nested.3.low": float(torch.tensor(square).bfloat16()),
            "nested.3.high": [[square] * 2],
            "text": f"ä{n}\n",
            "number": n,
            "share": n / 3,
            "flag": n > 3,
            "tokens": [*range(n % 3)],
            "boxes.box": [[n] * 4] * (n % 2),
            "boxes.label": n,
            "plain boxes": [[0.5, n]] * (n // 6 % 2),
            "pairs.low": n,
            "pairs.high": f"{n}",
            "plain.low": n,
            "plain.high": 0.5,
            "zipped.0": f"{n}",
            "zipped.1": n,
            "texts.0": f"{n}",
            "texts.1": "",
        }


def test_a_chunk_of_parquet_may_have_tens_of_thousands_of_vectors():
    needs_package("parquet")
    count = 2**15 + 5
    module = Squares(transform=lambda values, numbers: numbers[:, None] * torch.tensor([1, 2]))
    predict(PredictionWriter("out.parquet"), module, DataLoader(Numbers(count), count))
    assert [row["prediction"] for row in rows_of("out.parquet")] == [[n, 2 * n] for n in range(count)]


@pytest.mark.parametrize("name", ["npz", "pt"])
def test_there_may_be_more_columns_than_open_files(name):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        module = Squares(transform=lambda values, numbers: {f"{number}": numbers * number for number in range(250)})
        predict(PredictionWriter(f"out.{name}"), module)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rows_of(f"out.{name}")[3]["249"] == 747


def test_dtypes_are_those_of_the_tensors():
    predict(PredictionWriter("out.npz"), Squares(transform=rich))
    arrays = np.load("out.npz")
    assert {name: str(arrays[name].dtype) for name in ("scores", "nested.half", "nested.3.low", "flag", "index")} == {
        "scores": "float32",
        "nested.half": "float16",
        "nested.3.low": "float32",
        "flag": "bool",
        "index": "int64",
    }


WRONG = {
    "0-d": (lambda v, n: v.mean(), r"'prediction' is tensor\(.*\) for the whole batch: return one value for each"),
    "number": (lambda v, n: {"loss": 0.5, "v": v}, "'loss' is 0.5 for the whole batch"),
    "string": (lambda v, n: {"a": {"name": "x"}}, "'a.name' holds 'x', a str: return tensors, or lists"),
    "None": (lambda v, n: None, "'prediction' holds None, a NoneType"),
    "fewer rows": (lambda v, n: v[1:], "'prediction' has 3 values for the 4 samples"),
    "another column": (lambda v, n: {f"v{n[0] > 3}": v}, "its columns are vTrue, and those of another batch vFalse"),
    "another rank": (
        lambda v, n: v[..., None] if n[0] > 3 else v,
        r".*\(2, 1\): only the first dimension of a value may",
    ),
    "another width": (lambda v, n: v[:, None, : 1 + (n[0] > 3)], r".*\(1, 2\): only the first dimension"),
    "text and number": (lambda v, n: ["a"] * 4 if n[0] > 3 else v[:, 0], ".*float32 .* and texts"),
    "two dtypes": (
        lambda v, n: n.to(torch.uint16) if n[0] > 3 else n,
        "'prediction' holds torch.int64 and torch.uint16: return one of them",
    ),
    "taken name": (lambda v, n: {"index": v}, "two columns are called 'index'"),
    "one name twice": (lambda v, n: {"a": {"b": v}, "a.b": v}, "two columns are called 'a.b'"),
    "nothing": (lambda v, n: {}, "there is nothing in it to write"),
    "mixed list": (lambda v, n: [1, "a", 2, 3], "'prediction' holds .*, a list"),
    "uneven names": (lambda v, n: [{"a": 1}] * 3 + [{"b": 1}], "'' has other names in one sample"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_a_column_is_refused_with_its_name_and_batch(name):
    transform, words = WRONG[name]
    with pytest.raises(MisconfigurationException, match=f"PredictionWriter cannot .* loader '0': {words}"):
        predict(PredictionWriter("out.jsonl"), Squares(transform=transform))
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_complex_numbers_are_refused_in_the_first_batch_where_a_format_lacks_them(name):
    needs_package(name)
    module = Squares(transform=lambda values, numbers: values.to(torch.complex64))
    with pytest.raises(MisconfigurationException, match=f"batch 0 .*'prediction' is complex, which {name} cannot hold"):
        predict(PredictionWriter(f"out.{name}"), module)
    predict(PredictionWriter("out.npz"), module)
    assert np.load("out.npz")["prediction"][4, 0] == 16 + 0j


@pytest.mark.parametrize("kind", [list, tuple])
def test_columns_are_chosen_by_names_and_patterns(kind):
    predict(PredictionWriter("out.jsonl", columns=kind(["nested.*", "text"])), Squares(transform=rich))
    assert [*rows_of("out.jsonl")[0]] == ["loader", "index", "nested.half", "nested.3.low", "nested.3.high", "text"]
    with pytest.raises(MisconfigurationException, match=r"'txt' of columns matches none of square, number"):
        predict(PredictionWriter("out.jsonl", columns=["txt"]))


class Stream(IterableDataset):
    def __iter__(self):
        yield from map(Numbers(10).__getitem__, [3, 1, 2, 7, 5])


class Batches:
    def __iter__(self):
        yield torch.full((3, 2), 9.0), torch.tensor([3, 1, 2])


def test_a_stream_has_running_numbers_on_one_rank_and_is_refused_on_several():
    predict(PredictionWriter("out.jsonl"), loaders=[DataLoader(Stream(), 2), Batches()])
    rows = rows_of("out.jsonl")
    assert [(row["loader"], row["index"], row["number"]) for row in rows] == [
        *((0, place, number) for place, number in enumerate([3, 1, 2, 7, 5])),
        *((1, place, number) for place, number in enumerate([3, 1, 2])),
    ]
    with pytest.raises(
        Exception,
        match=r"(?s)cannot tell which samples loader '0' reads.*whose samples have no indices, needs devices=1",
    ):
        predict(PredictionWriter("other.jsonl"), loaders=DataLoader(Stream(), 2), **TWO_RANKS)


def test_a_stream_is_predicted_anew_after_an_exception():
    writer = PredictionWriter("out.jsonl", resume=True)
    with pytest.raises(ZeroDivisionError):
        predict(writer, Squares(kill_at=7, dies_on=ZeroDivisionError), DataLoader(Stream(), 1))
    predict(writer, loaders=DataLoader(Stream(), 1))
    assert [row["number"] for row in rows_of("out.jsonl")] == [3, 1, 2, 7, 5]


def test_a_loader_whose_samples_nobody_knows_is_refused():
    with pytest.raises(MisconfigurationException, match=r"loader 'a' reads. Give a DataLoader with batch_size"):
        predict(PredictionWriter("out.jsonl"), loaders={"a": DataLoader(Numbers(4), batch_size=None, shuffle=True)})
    with pytest.raises(MisconfigurationException, match=r"'0' reads.*and in_order=True"):
        predict(PredictionWriter("out.jsonl"), loaders=DataLoader(Numbers(9), 2, num_workers=2, in_order=False))
    with pytest.raises(TypeError, match=r"needs indices, and a batch sampler yields \[\(3, 32\)\]"):
        predict(PredictionWriter("out.jsonl"), loaders=DataLoader(Numbers(4), batch_sampler=WithSizes(4)))
    with pytest.raises(TypeError, match=r"needs indices, and a batch sampler yields \[-1, -2\]"):
        predict(PredictionWriter("out.jsonl"), loaders=DataLoader([*range(2)], 2, sampler=[-1, -2]))


class Sentences(Numbers):
    """Sentences of different lengths, the longest neither first nor last."""

    def __getitem__(self, index):
        return torch.full((1 + index * 5 % 7,), float(index)), index


class Padded:
    """Pads sentences, in the order of their lengths or not, as it stands in many tutorials."""

    def __init__(self, how, keeps):
        self.how, self.keeps = how, keeps

    def __call__(self, samples):
        def length(sample):
            return len(sample[0])

        if self.how == "in its place":
            samples.sort(key=length, reverse=True)
        elif self.how == "sorted":
            samples = sorted(samples, key=length, reverse=True)
        texts, numbers = zip(*samples, strict=True)
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        kept = {"labels": torch.tensor(numbers), "lengths": [*map(len, texts)], "tuple": numbers, "nothing": None}
        return padded[:, :1].expand(-1, 2), kept[self.keeps]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("keeps", ["labels", "lengths", "tuple", "nothing"])
@pytest.mark.parametrize("how", ["sorted", "in its place", "not"])
def test_a_collate_fn_that_sorts_is_said_once(how, keeps, workers):
    loader = DataLoader(Sentences(21), 4, collate_fn=Padded(how, keeps), num_workers=workers)
    is_said = how == "in its place" or (how == "sorted" and keeps != "nothing")  # else nobody can see it
    module = Squares()
    module.predict_step = lambda batch, batch_idx: batch[0][:, 0]
    with recorded_warnings() as caught:
        predict(PredictionWriter("out.jsonl"), module, loader)
    assert sum("collate_fn of loader '0' sorts the samples" in str(one.message) for one in caught) == is_said
    assert type(loader.collate_fn) is Padded
    assert how != "not" or [row["prediction"] for row in rows_of("out.jsonl")] == [*range(21)]


class OwnOrder(DataLoader):
    """Reads on its own, not what its batch sampler yields."""

    def __iter__(self):
        yield torch.ones(2, 2), torch.tensor([3, 1])


def test_a_loader_that_does_not_use_its_batch_sampler_is_refused():
    with pytest.raises(MisconfigurationException, match="does not read what its batch sampler yields"):
        predict(PredictionWriter("out.jsonl"), loaders=OwnOrder(Numbers(4), 2))


@pytest.mark.filterwarnings("ignore:.*dataloader_iter:UserWarning")
def test_a_step_that_fetches_its_batches_is_refused():
    class Pulls(Squares):
        def predict_step(self, dataloader_iter):
            pass

    with pytest.raises(MisconfigurationException, match="without dataloader_iter"):
        predict(PredictionWriter("out.jsonl"), Pulls())


def predict_in_a_process(path, devices, kill_at=None, log=None, shuffle=False):
    """Predict 40 numbers, texts and lists in a fork, which a step may kill; return its exit status."""

    def work():
        torch.manual_seed(0)
        loaders, options = DataLoader(Numbers(40), 4, shuffle=shuffle), TWO_RANKS if devices == 2 else {}
        predict(PredictionWriter(path, resume=True), Squares(log, kill_at, None, texts_and_lists), loaders, **options)

    if devices == 2:  # they are forks of this process
        try:
            return work() or 0
        except ProcessExitedException as error:
            return error.exit_code
    if (child := os.fork()) == 0:
        append_output_to(Path("output"))
        run_and_exit(work)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize(("devices", "later"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_after_a_kill_it_goes_on_and_the_file_is_the_same(devices, later):
    assert predict_in_a_process("whole.npz", 1) == 0
    assert predict_in_a_process("out.npz", devices, 24, "first.log") != 0
    assert not Path("out.npz").exists()
    assert [*Path("out.npz.parts").glob("*.part")]
    assert predict_in_a_process("out.npz", later, None, "second.log") == 0
    assert Path("out.npz").read_bytes() == Path("whole.npz").read_bytes()
    assert not Path("out.npz.parts").exists()
    if devices == later:
        first, second = (set(Path(log).read_text().splitlines()) for log in ("first.log", "second.log"))
        assert len(first & second) <= devices, "of each rank the first batch alone is read again"
        assert len(first | second) == 10


def test_ranks_that_wait_for_each_other_leave_out_no_batch_after_a_kill():
    """Under DDP each rank may leave out its own batches; where a model is sharded, all ranks have to call it."""
    if Version(torch.__version__) < Version("2.7"):
        pytest.skip("FSDP2 of torch 2.6 needs an accelerator")

    class Sharded(Squares):
        def configure_model(self):
            pass

    def run(rank):
        options = {"strategy": ModelParallelStrategy(2, tensor_parallel_size=1), "devices": 2}
        predict(PredictionWriter("out.jsonl", resume=True), Sharded(f"{rank}.log"), **options)

    stopped(at=16)
    fork(run, 2)
    assert rows_of("out.jsonl") == squares()
    assert [len(Path(f"{rank}.log").read_text().splitlines()) for rank in range(2)] == [3, 3]


def test_a_shuffled_loader_goes_on_after_a_kill():
    assert predict_in_a_process("whole.npz", 1) == 0
    assert predict_in_a_process("out.npz", 1, 39, shuffle=True) == signal.SIGKILL
    assert predict_in_a_process("out.npz", 1, shuffle=True) == 0
    assert Path("out.npz").read_bytes() == Path("whole.npz").read_bytes()


def texts_and_lists(values, numbers):
    return {
        "text": ["ä" * int(number) for number in numbers],
        "list": [torch.arange(number % 3) for number in numbers],
        "number": numbers,
    }


def stopped(path="out.jsonl", at=12, transform=None, **options):
    """Predict until an exception; return the folder of the parts."""
    with pytest.raises(ZeroDivisionError):
        predict(PredictionWriter(path, **options), Squares(None, at, ZeroDivisionError, transform))
    return Path(f"{path}.parts")


def test_what_an_interrupted_merge_has_left_is_written_anew():
    folder = stopped("out.npz", transform=texts_and_lists)
    for number in range(3):
        (folder / f"{number}.column").write_bytes(b"\7" * 5)
    predict(PredictionWriter("out.npz", resume=True), Squares(transform=texts_and_lists))
    assert [row["list"] for row in rows_of("out.npz")] == [[*range(n % 3)] for n in range(21)]


@pytest.mark.parametrize("tail", [b"\x07", b"\xff" * 19, b"\0" * 200], ids=["a byte", "most of a row", "zeros"])
def test_a_row_that_was_cut_off_does_not_count(tail):
    (part,) = stopped().glob("*.part")
    with part.open("ab") as file:
        file.write(tail)
    predict(PredictionWriter("out.jsonl", resume=True))
    assert rows_of("out.jsonl") == squares()


@pytest.mark.parametrize("ending", ["part", "values"])
def test_a_part_may_be_cut_anywhere(ending):
    """Rows without their values do not count, nor do the values of missing rows."""
    folder = stopped(transform=texts_and_lists)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    (cut,) = folder.glob(f"*.{ending}")
    found = set()
    for size in range(0, len(files[cut]), 17):
        folder.mkdir(exist_ok=True)
        for path, content in files.items():
            path.write_bytes(content[:size] if path == cut else content)
        found.add(len(MergedParts(folder)))
        predict(PredictionWriter("out.jsonl", resume=True), Squares(transform=texts_and_lists))
        assert rows_of("out.jsonl") == [
            {"loader": 0, "index": n, "text": "ä" * n, "list": [*range(n % 3)], "number": n} for n in range(21)
        ]
    assert min(found) == 0
    assert len(found) > 5


def test_what_belongs_to_another_run_is_refused_in_words():
    folder = stopped()
    resumed = PredictionWriter("out.jsonl", resume=True)
    for name in ("weight", "counted"):
        other = Squares()
        torch.nn.init.constant_(getattr(other, name), 2)
        words = r"another run.*\(weights: \['\w+'\] before, .*Give resume=False"
        with pytest.raises(MisconfigurationException, match=words):
            predict(resumed, other)
    with pytest.raises(MisconfigurationException, match=r"\(precision: 32-true before, bf16-mixed now\)"):
        predict(resumed, precision="bf16-mixed")
    with pytest.raises(MisconfigurationException, match=r"\(samples: \{'0': 21\} before, \{'0': 22\} now\)"):
        predict(resumed, loaders=DataLoader(Numbers(22), 4))
    with pytest.raises(MisconfigurationException, match=r"limit_predict_batches: 1.0 before, 4 now"):
        predict(resumed, limit_predict_batches=4)
    with pytest.raises(MisconfigurationException, match=r"limit_predict_batches: 1.0 before, 1 now"):
        predict(resumed, limit_predict_batches=1)
    with pytest.raises(MisconfigurationException, match=r"columns: None before, .'square'. now"):
        predict(PredictionWriter("out.jsonl", resume=True, columns=["square"]))
    message = "its columns are prediction, and those of another batch square"
    with pytest.raises(MisconfigurationException, match=message):
        predict(resumed, Squares(transform=lambda values, numbers: values))
    assert len([*folder.glob("*.part")]) == 1
    content = (folder / "run.json").read_text()
    for damaged in ("", content[:50], "[]", "[" * 100_000, '{"hyperparameters": []}'):
        (folder / "run.json").write_text(damaged)
        message = r"run.json is damaged, .* Give resume=False to start again\."
        with pytest.raises(MisconfigurationException, match=message):
            predict(resumed)
    (folder / "run.json").write_text(content)
    predict(resumed)
    assert rows_of("out.jsonl") == squares()


def test_other_hyperparameters_are_named():
    """Many, such as a batch size, change no prediction, so that nothing is refused."""

    class Thresholded(Squares):
        def __init__(self, threshold, how=max):
            super().__init__(kill_at=12 if threshold == 0.5 else None, dies_on=ZeroDivisionError)
            self.save_hyperparameters()

    class Data(LightningDataModule):
        def __init__(self, words):
            super().__init__()
            self.save_hyperparameters()

        def predict_dataloader(self):
            return DataLoader(Numbers(21), batch_size=4)

    for warns in (True, False):
        with pytest.raises(ZeroDivisionError):
            predict(PredictionWriter("out.jsonl"), Thresholded(0.5), Data(["a"] * 100_000))
        words = (
            r"hyperparameters \(words: \['a', .{70,75} before, \['b', .{70,75} now, threshold: 0.5 before, 0.7 now\)"
        )
        with pytest.warns(UserWarning, match=words) if warns else nullcontext():
            predict(PredictionWriter("out.jsonl", resume=warns), Thresholded(0.7, min), Data(["b"] * 100_000))
        assert rows_of("out.jsonl") == squares()


def test_predictions_of_loaders_in_another_order_are_refused():
    loaders = {"a": DataLoader(Numbers(8), 4), "b": DataLoader(Numbers(8), 4)}
    with pytest.raises(ZeroDivisionError):
        predict(PredictionWriter("out.jsonl"), Squares(None, 7, ZeroDivisionError), loaders)
    with pytest.raises(MisconfigurationException, match=r"samples: {'a': 8, 'b': 8} before, {'b': 8, 'a': 8} now"):
        predict(PredictionWriter("out.jsonl", resume=True), loaders=dict(reversed(loaders.items())))


def test_resume_false_begins_anew():
    folder = stopped()
    (folder / "mine.txt").write_text("a file of the user")
    other = Squares()
    torch.nn.init.constant_(other.weight, 2)
    predict(PredictionWriter("out.jsonl"), other)
    assert [row["square"] for row in rows_of("out.jsonl")] == [2.0 * n * n for n in range(21)]
    assert [path.name for path in folder.iterdir()] == ["mine.txt"], "it removes its own files alone"


class Collects(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")
        self.seen = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.seen += batch_indices


def test_a_resumed_run_predicts_again_what_others_want(tmp_path):
    stopped()
    returned = predict(PredictionWriter("out.jsonl", resume=True), return_predictions=True)
    assert torch.cat([batch["number"] for batch in returned]).tolist() == [*range(21)]
    assert rows_of("out.jsonl") == squares()
    stopped()
    other = Collects()
    predict([PredictionWriter("out.jsonl", resume=True), other])
    assert other.seen == [*range(21)]


def test_limits_hold_in_a_resumed_run():
    with pytest.raises(ZeroDivisionError):
        predict(PredictionWriter("out.jsonl"), Squares(kill_at=8, dies_on=ZeroDivisionError), limit_predict_batches=4)
    predict(PredictionWriter("out.jsonl", resume=True), limit_predict_batches=4)
    assert rows_of("out.jsonl") == squares(16)


def test_one_callback_predicts_twice_and_replaces_its_file():
    writer = PredictionWriter("out.jsonl")
    trainer = Trainer(callbacks=[writer], **QUIET)
    for count in (21, 6):
        trainer.predict(Squares(), DataLoader(Numbers(count), 4), return_predictions=False)
        assert rows_of("out.jsonl") == squares(count)
    predict(writer, loaders=[DataLoader(Numbers(0), 4)])
    assert rows_of("out.jsonl") == squares(6), "nothing was predicted"


def test_memory_is_bounded():
    """It holds neither the predictions while predicting, nor the file while merging."""
    count, width = 600, 20_000  # 48 MB

    def wide(values, numbers):
        return numbers.float()[:, None].expand(-1, width)

    for name in ("pt", "npz", "jsonl"):
        width = 20_000 if name != "jsonl" else 500
        tracemalloc.start()
        predict(PredictionWriter(f"out.{name}"), Squares(transform=wide), DataLoader(Numbers(count), 4))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 24e6, f"{name}: {peak:,} bytes"
    assert (torch.load("out.pt")["prediction"][:, -1] == torch.arange(count)).all()
    assert (np.load("out.npz")["prediction"][:, 7] == np.arange(count)).all()


def test_a_part_holds_no_more_than_its_rows():
    """No batch adds a head, nor the whole memory of which a step returns a slice."""
    folder = stopped(transform=lambda values, numbers: values.repeat(1, 500)[:, 7])
    content = next(folder.glob("*.part")).read_bytes()
    rows = content[content.index(b"\n") + 1 :]
    assert rows == b"".join(struct.pack("=qf", n + 1, n * n) for n in range(12))


UNUSUAL = {
    "bool": lambda v, n: n > 3,
    "bfloat16": lambda v, n: v.bfloat16(),
    "float8": lambda v, n: v.clamp(max=100).to(torch.float8_e5m2),
    "uint8": lambda v, n: n.to(torch.uint8),
    "complex": lambda v, n: torch.complex(v, -v).conj(),
    "no values": lambda v, n: v[:, :0],
    "no values in some": lambda v, n: [torch.zeros(int(i) % 2, 0) for i in n],
    "strided": lambda v, n: v.repeat(1, 3)[:, ::2],
    "transposed": lambda v, n: torch.stack([v, -v]).transpose(0, 1),
    "needs gradient": lambda v, n: v.detach().requires_grad_(),
    "longer from batch to batch": lambda v, n: v[:, :1].expand(-1, int(n[0])),
    "lengths of two dtypes": lambda v, n: [
        torch.arange(int(i) % 3, dtype=[torch.int64, torch.half][int(n[0]) // 4 % 2]) for i in n
    ],
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("resume", [False, True])
def test_tensors_come_back_as_they_were(name, resume):
    made = [UNUSUAL[name](torch.full((1, 2), float(n * n)), torch.tensor([n])) for n in range(21)]
    expected = [row[0].resolve_conj().detach() for row in made]
    if resume:
        stopped("out.pt", transform=UNUSUAL[name])
    if "from batch to batch" in name:
        expected = [torch.full((n // 4 * 4,), float(n * n)) for n in range(21)]
    dtype = torch.half if "two dtypes" in name else expected[0].dtype
    predict(PredictionWriter("out.pt", resume=resume), Squares(transform=UNUSUAL[name]))
    written = torch.load("out.pt", weights_only=True)["prediction"]
    assert len(written) == 21
    for row, other in zip(written, expected, strict=True):
        assert row.dtype == dtype
        assert torch.equal(
            row.float() if dtype.itemsize == 1 else row, other.float() if dtype.itemsize == 1 else other.to(dtype)
        )


@pytest.mark.parametrize("format_", FORMATS)
def test_dtypes_that_differ_between_batches_are_joined_without_loss(format_):
    """Numbers that float16 cannot hold, before and after a batch of float16, and one of float64."""
    needs_package(format_)

    def mixed(values, numbers):
        dtypes = [torch.int64, torch.half, torch.int64, torch.float64, torch.bool, torch.int64]
        dtype = dtypes[int(numbers[0]) // 4 % 6]
        return numbers.double().mul(1 if dtype == torch.half else 100_001).to(dtype)

    predict(PredictionWriter(f"out.{format_}"), Squares(transform=mixed))
    expected = [n * [100_001, 1, 100_001, 100_001, 1 / n if n else 0, 100_001][n // 4 % 6] for n in range(21)]
    assert [row["prediction"] for row in rows_of(f"out.{format_}")] == expected


@pytest.mark.parametrize("format_", FORMATS)
def test_texts_may_be_empty_or_not_of_ascii(format_):
    needs_package(format_)
    texts = ["", "ä" * 50, "\n", "a\0b", "𝄞" if format_ == "parquet" else "𝄞\udc80"]
    predict(PredictionWriter(f"out.{format_}"), Squares(transform=lambda v, n: [texts[int(i) % 5] for i in n]))
    assert [row["prediction"] for row in rows_of(f"out.{format_}")] == [texts[n % 5] for n in range(21)]
    words = "npz keeps no NUL at the end of a text, as 21 of 'prediction' have: write another format"
    with pytest.warns(UserWarning, match=words) if format_ == "npz" else nullcontext():
        predict(PredictionWriter(f"out.{format_}"), Squares(transform=lambda v, n: [f"{int(i)}\0" for i in n]))
    kept = "" if format_ == "npz" else "\0"
    assert [row["prediction"] for row in rows_of(f"out.{format_}")] == [f"{n}{kept}" for n in range(21)]


def test_columns_that_are_not_wanted_need_not_fit():
    outputs = {"loss": torch.tensor(0.5), "when": object()}
    module = Squares(transform=lambda values, numbers: outputs | {"square": values[:, 0]})
    predict(PredictionWriter("out.jsonl", columns=["square"]), module)
    assert [row["square"] for row in rows_of("out.jsonl")] == [float(n * n) for n in range(21)]


def test_a_step_may_return_memory_that_it_uses_again():
    buffer = torch.zeros(4)

    def reused(values, numbers):
        buffer[: len(numbers)] = values[:, 0]
        return buffer[: len(numbers)]

    predict(PredictionWriter("out.npz"), Squares(transform=reused))
    assert np.load("out.npz")["prediction"].tolist() == [float(n * n) for n in range(21)]


def test_parts_that_get_lost_are_an_error_and_the_rest_can_be_resumed():
    """Another program with that path removes them, or a disk that nodes share does not show them yet."""

    def loses(values, numbers):
        if numbers[0] == 16:
            next(Path("out.jsonl.parts").glob("*.part")).unlink()
        return texts_and_lists(values, numbers)

    with pytest.raises(MisconfigurationException, match=r"out.jsonl.parts contains 0 of 21 predictions that were"):
        predict(PredictionWriter("out.jsonl"), Squares(transform=loses))
    predict(PredictionWriter("out.jsonl", resume=True), Squares(transform=texts_and_lists))
    assert len(rows_of("out.jsonl")) == 21


def test_a_file_that_cannot_be_written_is_refused_before_the_first_batch():
    Path("taken").mkdir()
    with pytest.raises(MisconfigurationException, match="taken: it is a directory"):
        predict(PredictionWriter("taken", format="npz"), Squares(log="log"))
    assert not Path("log").exists()
    predict(PredictionWriter(Path("new/folder/out.npz")))
    assert len(rows_of("new/folder/out.npz")) == 21


def test_a_trial_run_writes_nothing():
    predict(PredictionWriter("out.npz"), fast_dev_run=True)
    assert not [*Path().iterdir()]


def test_arguments():
    assert PredictionWriter("out", format="npz").format == "npz"
    with pytest.raises(ValueError, match="format must be one of parquet, npz, jsonl, pt, got 'csv'"):
        PredictionWriter("out.csv")
    with pytest.raises(ValueError, match="Did you mean 'jsonl'"):
        PredictionWriter("out", format="json")
    for columns in ("square", [], ()):
        with pytest.raises(TypeError, match="columns must be a list of names, or None for all, got "):
            PredictionWriter("out.npz", columns=columns)
    with pytest.raises(ValueError, match="must not be empty"):
        PredictionWriter("out.npz", columns=[""])


def test_a_missing_package_is_named_before_the_first_batch(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"PredictionWriter.*needs pyarrow, from the extra 'parquet'"):
        predict(PredictionWriter("predictions"), Squares(log="log"))
    assert not Path("log").exists()


def test_it_says_one_line(lightning_log):
    predict([PredictionWriter("out.npz"), AutoResume("runs")])
    said = [line for _, line in lightning_log if "PredictionWriter" in line]
    assert said == ["PredictionWriter: wrote the predictions of 21 of 21 samples to out.npz."]
