"""Run the package as Windows and macOS would: without what they lack, and by their rules for files.

`python -X utf8=0 -X warn_default_encoding -m tests.architecture.other_systems FOLDER` forks a process for each system.
In it, the modules of the package find stand-ins for `os`, `sys`, `signal` and others; all other modules find the real
ones. An audit hook applies the rules for files to everybody who works in FOLDER. The package's modules are imported,
and its callbacks keep promises of the contract.
"""

from __future__ import annotations

import io
import os
import pickle
import pkgutil
import sys
import traceback
import warnings
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.architecture.system_rules import MACOS, WINDOWS, System, become


def run(system: System, folder: Path) -> None:
    """Import everything, and let every callback keep its promises."""
    warnings.filterwarnings("error", category=EncodingWarning, module=r"lightning_tricks\b")
    package = import_module("lightning_tricks")
    for module in pkgutil.walk_packages(package.__path__, "lightning_tricks."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    from tests.contract.cases import CASES
    from tests.contract.checks import every_stage_alone, resume_anywhere, safe_state
    from tests.contract.lab import Lab

    checks = (resume_anywhere, every_stage_alone) if system is WINDOWS else (safe_state,)
    for name, case in CASES.items():
        case.callback(**{key: value for key, value in case.arguments.items() if case.requires(key)})
        made = case.make()
        assert type(pickle.loads(pickle.dumps(made))) is case.callback, name  # as each spawned process gets it
        for check in checks:
            place = folder / f"{name}-{check.__name__}"
            place.mkdir()
            os.chdir(place)
            check(case, Lab(place, case.net))
    commands(folder)
    streams(folder)
    if system is WINDOWS:
        spawned_workers(folder)


def commands(folder: Path) -> None:
    """Run the commands whose output tells of the machine, into a pipe with the encoding of Windows."""
    from lightning_tricks.cli import main

    for words in (["env"], ["--help"], ["schedule", "--help"], ["fingerprint", "--help"], ["ckpt", "--help"]):
        with io.TextIOWrapper(io.BytesIO(), encoding="cp1252") as pipe, redirect_stdout(pipe):
            with suppress(SystemExit):  # by `--help`
                assert main(words) in (0, None)
            pipe.flush()
            assert pipe.buffer.getvalue()


def streams(folder: Path) -> None:
    """Read a checkpoint from a stream."""
    import torch
    from lightning.pytorch import Trainer

    from lightning_tricks import TricksMixin
    from tests.small import QUIET, Net, loader

    class Mine(TricksMixin, Net):
        pass

    trainer = Trainer(max_steps=1, **QUIET)
    trainer.fit(Mine(), loader())
    trainer.save_checkpoint(folder / "mine.ckpt")
    loaded = Mine.load_from_checkpoint(folder / "mine.ckpt")
    assert torch.equal(loaded.net[0].weight, trainer.lightning_module.net[0].weight)


class Noisy:
    """Random pixels from the worker that reads them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        import torch

        return index / 40 + torch.rand(64), index % 10


def spawned_workers(folder: Path) -> None:
    """Stop and resume with a worker that is spawned, as all are there; the whole run has a forked one."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_tricks import AutoResume
    from lightning_tricks.seeding import isolated_rng
    from tests.contract.checks import Interrupts
    from tests.small import QUIET, Net, same

    def fit(place, method, seed, *callbacks):
        with isolated_rng(seed=0):
            net = Net()
        options = {"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True}
        with isolated_rng(seed=seed):
            trainer = Trainer(callbacks=[AutoResume(folder / place), *callbacks], max_epochs=2, **QUIET)
            trainer.fit(net, DataLoader(Noisy(), multiprocessing_context=method, **options))
        return net.state_dict()

    whole = fit("whole", "fork", 0)
    with suppress(SystemExit):
        fit("stopped", "spawn", 0, Interrupts(13))
    assert same(fit("stopped", "spawn", 5), whole)


def main(folder: Path) -> int:
    """Run on both systems at once; return how many failed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import lightning.pytorch  # noqa: F401
    import torch
    import torchmetrics  # noqa: F401

    torch.set_num_threads(1)
    torch.zeros((), requires_grad=True).backward()
    children = []
    for system in (WINDOWS, MACOS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                (folder / system.platform).mkdir()
                become(system, folder / system.platform)
                run(system, folder / system.platform)
                code = 0
            except BaseException:
                os.write(2, f"on {system.platform}:\n{traceback.format_exc()}".encode())
            finally:
                os._exit(code)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
