"""The contract: what every callback of the collection is held to, one function for each promise."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_tricks import AutoResume
from lightning_tricks.seeding import isolated_rng
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting, attributes, identical_copies, traces, traces_on_trainer
from tests.small import EvaluatedNet, HostReads, Net, loader, same

_BOUND_BY_LIGHTNING = ("log", "log_dict")  # an argument of this name, or a property's, is stored with an underscore
_LARGEST_PICKLE = 16_384
_READS_OF_BARE_EPOCH: dict[tuple[Any, ...], int] = {}

Check = Callable[..., None]


def promised_if(condition: Callable[..., bool]) -> Callable[[Check], Check]:
    """Limit a check to the cases (and settings) for which `condition` holds."""

    def mark(check: Check) -> Check:
        check.promised_if = condition
        return check

    return mark


def is_promised(check: Check, *case_and_setting: Any) -> bool:
    return getattr(check, "promised_if", lambda *_: True)(*case_and_setting)


def signature(case: Case, lab: Lab) -> None:
    """Every argument is named, annotated, and stored under its own name."""
    parameters = inspect.signature(case.callback).parameters.values()
    for parameter in parameters:
        assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
        assert parameter.annotation is not parameter.empty, f"{parameter.name} is not annotated"
    given = {p.name: p.default for p in parameters if p.default is not p.empty} | dict(case.arguments)
    assert case.arguments.keys() <= {p.name for p in parameters}
    before = pickle.dumps(dict(case.arguments))
    assert_stores(case.callback(**case.arguments), given)
    assert pickle.dumps(dict(case.arguments)) == before, "an argument was changed"


def assert_stores(callback: Any, given: dict[str, Any]) -> None:
    for name, value in given.items():
        taken = name in _BOUND_BY_LIGHTNING or isinstance(getattr(type(callback), name, None), property)
        stored = vars(callback).get(f"_{name}" if taken else name, "nothing")
        assert stored == value, f"{name}={value!r} is stored as {stored!r}"


def yaml_round_trip(case: Case, lab: Lab) -> None:
    """LightningCLI builds it from YAML, and what it saves builds the same again."""
    path = f"{case.callback.__module__}.{case.callback.__qualname__}"
    trainer = {"callbacks": [{"class_path": path, "init_args": dict(case.arguments)}], "logger": False}
    file = lab.folder / "config.yaml"
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    for _ in range(2):
        with patch.object(sys, "argv", ["train.py", "--config", str(file)]):
            cli = LightningCLI(Net, run=False, save_config_callback=None, seed_everything_default=False)
        (callback,) = (c for c in cli.trainer.callbacks if type(c) is case.callback)
        assert_stores(callback, dict(case.arguments))
        cli.parser.save(cli.config, file, overwrite=True)


def works(case: Case, lab: Lab, setting: Setting) -> None:
    """It does its work in a setting, or refuses in words before training starts."""
    if setting.name in case.refuses:
        # of a rank in another process the second comes, with the words of the first
        with pytest.raises((MisconfigurationException, ProcessRaisedException), match=case.refuses[setting.name]):
            lab.fit([case.make()], setting)
        return
    case.verify(lab, setting)


@promised_if(lambda case, setting: case.neutral is not None and setting.name not in case.refuses)
def neutral_is_absence(case: Case, lab: Lab, setting: Setting) -> None:
    """At its neutral setting a run is bit-identical to one without it."""
    assert_same_run(lab.fit([case.make_neutral()], setting), lab.fit_bare(setting))


@promised_if(lambda case: case.kind == "observer")
def observer_changes_nothing(case: Case, lab: Lab) -> None:
    """A callback that only looks leaves weights, optimizer, random state, modes and hooks as they are."""
    net = {"dropout": 0.2}
    assert_same_run(lab.fit([case.make()], net=net), lab.fit_bare(**net))
    with_it, without = identical_copies(EvaluatedNet, **lab.net, **net)
    assert_same_run(lab.fit([case.make()], module=with_it), lab.fit([], module=without))

    with_it, without = identical_copies(_Breaking, **lab.net)
    for module, callbacks in ((with_it, [case.make()]), (without, [])):
        with pytest.raises(ZeroDivisionError):
            lab.fit(callbacks, module=module)
    assert same(dict(with_it.state_dict()), dict(without.state_dict())), "an exception left the weights changed"
    assert traces(with_it) == traces(without), "an exception left a trace"


def assert_same_run(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right) > 0
    for with_it, without in zip(left, right, strict=True):
        for what in ("weights", "optimizers", "rng", "traces"):
            assert same(getattr(with_it, what), getattr(without, what)), f"{what} differ"


@promised_if(lambda case, setting: setting.ranks > 1 and not setting.sharded and setting.name not in case.refuses)
def ranks_agree(case: Case, lab: Lab, setting: Setting) -> None:
    """All ranks end with the same weights."""
    ranks = lab.fit([case.make()], setting)
    assert len(ranks) == setting.ranks
    assert all(same(rank.weights, ranks[0].weights) for rank in ranks)


def resume(case: Case, lab: Lab) -> None:
    """Stopped after an epoch and resumed, weights, optimizer and its own attributes are those of one long run."""
    whole, first, second = case.make(), case.make(), case.make()
    (long,) = lab.fit([whole])
    checkpoint = lab.folder / "one_epoch.ckpt"
    lab.fit([first], max_epochs=1, save_to=checkpoint)
    (resumed,) = lab.fit([second], ckpt_path=checkpoint)
    for what in ("weights", "optimizers"):
        assert same(getattr(resumed, what), getattr(long, what)), f"{what} differ after a resume"
    left, right = ({k: v for k, v in attributes(c).items() if k not in case.of_one_fit} for c in (second, whole))
    assert same(left, right), f"{left} is not {right}"


def resume_anywhere(case: Case, lab: Lab) -> None:
    """Stopped in the middle of an epoch and resumed by AutoResume, all is as in one long run, random numbers too."""
    whole, first, second = case.make(), case.make(), case.make()
    dropout = {"dropout": 0.2}
    (long,) = lab.fit([whole], net=dropout)
    with pytest.raises(SystemExit):
        lab.fit([first, *_guard(case, first, lab), Interrupts(13)], net=dropout)
    if case.writes_to:
        setattr(second, case.writes_to, getattr(first, case.writes_to))
    (resumed,) = lab.fit([second, *_guard(case, second, lab)], net=dropout, start=5)
    for what in ("weights", "optimizers", "metrics", "rng"):
        assert same(getattr(resumed, what), getattr(long, what)), f"{what} differ after a resume"
    assert resumed.steps == long.steps[13:], "it did not resume where it was stopped"
    ignored = (*case.of_one_fit, case.writes_to)
    left, right = ({k: v for k, v in attributes(c).items() if k not in ignored} for c in (second, whole))
    assert same(left, right), f"{left} is not {right}"


def _guard(case: Case, callback: Any, lab: Lab) -> list[Any]:
    return [] if isinstance(callback, AutoResume) else [AutoResume(lab.folder / "guard")]


class Interrupts(Callback):
    """Sends the process a real signal in its n-th step, counted from its start."""

    training_arguments = ()  # it is there once

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        # counted by the Trainer: what is saved with the callback, a resumed run would count on
        vars(trainer)["steps_of_this_start"] = vars(trainer).get("steps_of_this_start", 0) + 1
        if vars(trainer)["steps_of_this_start"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def safe_state(case: Case, lab: Lab) -> None:
    """A checkpoint with its state loads with `weights_only=True` and holds that state."""
    callback = case.make()
    lab.fit([callback], save_to=lab.folder / "state.ckpt")
    states = torch.load(lab.folder / "state.ckpt", weights_only=True)["callbacks"]
    state = callback.state_dict()
    assert same(states.get(callback.state_key, {}), state)


def pickles_small(case: Case, lab: Lab) -> None:
    """After a fit it pickles without the model, and the copy works."""
    callback = case.make()
    module = Net(hidden=256, **lab.net)
    lab.fit([callback], module=module)
    data = pickle.dumps(callback)
    assert len(pickle.dumps(module.state_dict())) > 4 * _LARGEST_PICKLE
    assert len(data) < _LARGEST_PICKLE, f"{len(data)} bytes"
    copy = pickle.loads(data)
    assert same(attributes(copy), attributes(callback))
    assert_same_fit(case, lab, copy, *_fresh_fit(lab, case))


def fits_twice(case: Case, lab: Lab) -> None:
    """One instance fits a second model as a fresh one would, also after a fit that broke off."""
    used = case.make()
    lab.fit([used])
    fresh = _fresh_fit(lab, case)
    assert_same_fit(case, lab, used, *fresh)

    with pytest.raises(ZeroDivisionError):
        lab.fit([used], module=_Breaking(**lab.net))
    assert_same_fit(case, lab, used, *fresh)


class _Breaking(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def _fresh_fit(lab: Lab, case: Case) -> tuple[Any, Any]:
    """Return a callback that fitted once, and the facts of that fit."""
    fresh = case.make()
    (once,) = lab.fit([fresh])
    return fresh, once


def assert_same_fit(case: Case, lab: Lab, used: Any, fresh: Any, once: Any) -> None:
    (again,) = lab.fit([used])
    assert_same_run([again], [once])
    left, right = ({k: v for k, v in c.state_dict().items() if k not in case.state_of_one_fit} for c in (used, fresh))
    assert same(left, right), f"{left} is not {right}"
    assert again.metrics == once.metrics


def several_instances(case: Case, lab: Lab) -> None:
    """A second instance is refused in words, or has a state of its own."""
    if case.instances == 1:
        # a stateful one is refused by Lightning already, when the Trainer is made
        with pytest.raises((MisconfigurationException, RuntimeError), match=case.callback.__name__):
            lab.fit([case.make(), case.make()])
        return
    two = [case.make(), case.make(**case.second) if case.second else case.callback()]
    assert two[0].state_key != two[1].state_key
    lab.fit(two)


def no_host_reads(case: Case, lab: Lab) -> None:
    """It reads no value back to the host in any step of a later epoch, beyond what the bare Trainer reads."""
    for net in ({}, {"optimization": "fused"}, {"optimization": "manual"}):
        if net.get("optimization") in case.refuses:
            continue
        with_it, without = _reads_of_second_epoch(lab, case, net), _reads_of_bare_epoch(lab, net)
        if case.looks_between_epochs:  # then more steps cost no more reads
            with_it -= _reads_of_second_epoch(lab, case, net, limit_train_batches=0.5)
            without -= _reads_of_bare_epoch(lab, net, limit_train_batches=0.5)
        assert with_it <= without, f"{with_it} host reads with it, {without} without ({net})"


def _reads_of_bare_epoch(lab: Lab, net: dict[str, Any], **options: Any) -> int:
    key = (*lab.net.items(), *net.items(), *options.items())
    if key not in _READS_OF_BARE_EPOCH:
        _READS_OF_BARE_EPOCH[key] = _reads_of_second_epoch(lab, None, net, **options)
    return _READS_OF_BARE_EPOCH[key]


def _reads_of_second_epoch(lab: Lab, case: Case | None, net: dict[str, Any], **options: Any) -> int:
    counts = []
    for epochs in (1, 2):
        options |= {"probe": False, "log_every_n_steps": 1, "max_epochs": epochs}
        with HostReads() as reads:
            lab.fit([case.make_idle()] if case else [], net=net, **options)
        counts.append(reads.count)
    return counts[1] - counts[0]


@promised_if(lambda case: case.kind != "structural")
def leaves_module_alone(case: Case, lab: Lab) -> None:
    """After a fit no part of the module has an attribute, a hook or a buffer that it would not have had without it."""
    module, bare = Net(**lab.net), Net(**lab.net)
    lab.fit([case.make()], module=module)
    lab.fit([], module=bare)
    assert traces(module) == traces(bare)
    assert module.state_dict().keys() == bare.state_dict().keys()


def every_stage_alone(case: Case, lab: Lab) -> None:
    """Validate, test and predict run alone with it, in inference mode and without it, and give what they would."""
    for stage in ("validate", "test", "predict"):
        bare, traces_of_bare = lab.run(stage, [])
        for inference_mode in (True, False):
            result, left = lab.run(stage, [case.make()], inference_mode=inference_mode)
            assert _within(bare, result) or not case.starts_equal, f"{stage} gives {result} instead of {bare}"
            assert _without_added(case, left, traces_of_bare) == _without_added(case, traces_of_bare), "a trace is left"


def short_runs(case: Case, lab: Lab) -> None:
    """Short runs, by which people try whether all works, end without an error."""
    one_batch = {"limit_train_batches": 1, "limit_val_batches": 0}
    for options in ({"fast_dev_run": True}, {"max_epochs": 1, **one_batch}, {"max_epochs": -1, "max_steps": 1}):
        trainer = Trainer(callbacks=[case.make()], **{**lab.quiet, **options})
        with isolated_rng(seed=0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which may say that a schedule is longer
            trainer.fit(EvaluatedNet(**lab.net), loader(), loader())
        assert trainer.global_step == 1


def _without_added(case: Case, found: dict[str, Any], bare: dict[str, Any] | None = None) -> dict[str, Any]:
    """Leave out what a structural callback is there for: other modules, and which parameters are trained."""
    if case.kind != "structural":
        return found
    kept = {name: what for name, what in found.items() if name in (bare or found) and not name.startswith("parameter ")}
    return {name: (what[0], what[3]) if _is_of_module(what) else what for name, what in kept.items()}


def _is_of_module(what: Any) -> bool:
    """Whether a trace is that of a module: its mode, its attributes, its buffers and its hooks."""
    return isinstance(what, tuple) and len(what) == 4


def stages_in_turn(case: Case, lab: Lab) -> None:
    """One Trainer validates, fits, validates, tests and predicts with it, and each gives what it would."""
    results: dict[bool, list[Any]] = {}
    for with_it in (True, False):
        (module, _), callbacks = identical_copies(EvaluatedNet, **lab.net), [case.make()] if with_it else []
        trainer = Trainer(callbacks=callbacks, max_epochs=1, **{**lab.quiet, "num_sanity_val_steps": 2})
        data = {"dataloaders": loader(), "verbose": False}
        results[with_it] = [trainer.validate(module, **data), trainer.fit(module, loader(), loader())]
        results[with_it] += [trainer.validate(module, **data), trainer.test(module, **data)]
        results[with_it] += [trainer.predict(module, loader()), trainer.validate(module, **data)]
    if case.kind == "observer":
        assert all(map(_within, results[False], results[True])), f"{results[True]} instead of {results[False]}"


def _within(bare: Any, result: Any) -> bool:
    """Whether a stage's result is the bare Trainer's, but for values that a callback logs as well."""
    if isinstance(bare, list) and bare and isinstance(bare[0], dict):
        result = [
            {name: more[name] for name in values if name in more} for values, more in zip(bare, result, strict=True)
        ]
    return same(bare, result)


def trainer_as_it_was(case: Case, lab: Lab, other: Case | None = None) -> None:
    """After a fit with it, beside any other callback, the Trainer is as it was; also after one that broke off."""
    for module in (Net, _Breaking):
        with_them, without = (
            _traces_of_fit(lab, module(**lab.net), callbacks)
            for callbacks in ([case.make(), *([other.make()] if other else [])], [])
        )
        assert with_them == without, _differences(with_them, without)


def _traces_of_fit(lab: Lab, module: Net, callbacks: list[Any]) -> dict[str, Any]:
    trainer = Trainer(callbacks=callbacks, max_epochs=1, limit_train_batches=4, **lab.quiet)
    threads = threading.active_count()
    try:
        trainer.fit(module, loader())
    except ZeroDivisionError:
        assert isinstance(module, _Breaking)
    return {**traces_on_trainer(trainer), "new threads": threading.active_count() - threads}


def _differences(left: dict[str, Any], right: dict[str, Any]) -> str:
    return "; ".join(
        f"{key}: {left.get(key)} / {right.get(key)}" for key in {**left, **right} if left.get(key) != right.get(key)
    )


def names_no_file(case: Case, lab: Lab) -> None:
    """Made of arguments that came out of a checkpoint, it writes nothing, wherever they say."""
    named = re.compile("path|dir|file|folder")
    unlisted = {name for name in inspect.signature(case.callback).parameters if named.search(name)}
    assert unlisted <= set(case.callback.path_arguments), f"{unlisted} are not in path_arguments"
    if any(map(case.requires, case.callback.path_arguments)):
        return  # a checkpoint does not bring it at all
    empty = lab.folder / "empty"
    empty.mkdir()
    paths = case.callback.path_arguments
    callback = case.callback(**{name: value for name, value in case.arguments.items() if name not in paths})
    with patch.object(lab, "folder", lab.folder / "facts"):
        before = os.getcwd()  # noqa: PTH109
        os.chdir(empty)
        try:
            lab.fit([callback])
        finally:
            os.chdir(before)
    assert not list(empty.iterdir()), f"it wrote {list(empty.iterdir())}"


def writes_to_no_address(case: Case, lab: Lab) -> None:
    """An address never becomes the name of a local folder: arguments refuse it in words, and others' places are left.

    The Trainer, its loggers and checkpoints may be at an address.
    """
    for name in case.callback.path_arguments:
        for text in ("s3://bucket/run.csv", "file:///run.csv", "simplecache::s3://bucket/run.csv"):
            for given in (text, Path(text)):
                arguments = {**case.arguments, name: given}
                if name in case.opens_addresses and isinstance(given, str):
                    case.callback(**arguments)
                    continue
                words = (
                    rf"^{name} must be the path of .*, got {re.escape(repr(str(given)))}, which is an address\. \w+ "
                )
                with pytest.raises(ValueError, match=words):
                    case.callback(**arguments)
    root = f"memory://{uuid4().hex}"
    for epochs in (1, 2):
        lab.fit(
            [case.make()],
            module=EvaluatedNet(**lab.net),
            max_epochs=epochs,
            default_root_dir=root,
            logger=CSVLogger(root, name="logs", version=epochs),
            log_every_n_steps=5,
            enable_checkpointing=epochs == 2,
            save_to=f"{root}/one_epoch.ckpt" if epochs == 1 else None,
            ckpt_path=f"{root}/one_epoch.ckpt" if epochs == 2 else None,
        )
    assert not [file for file in Path().iterdir() if ":" in file.name], "an address became a folder"


CHECKS = (
    signature,
    yaml_round_trip,
    observer_changes_nothing,
    resume,
    resume_anywhere,
    safe_state,
    pickles_small,
    fits_twice,
    several_instances,
    no_host_reads,
    leaves_module_alone,
    every_stage_alone,
    stages_in_turn,
    short_runs,
    trainer_as_it_was,
    names_no_file,
    writes_to_no_address,
)
CHECKS_IN_SETTINGS = (works, neutral_is_absence, ranks_agree)
