"""What every command does with arguments that are wrong, with work that fails, and where nobody reads its output."""

import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from lightning_tricks.cli import _STAGES, main
from lightning_tricks.devices.testing import FakeGpu, FakeNvml
from tests.architecture.persisted_names import actions_of, command_actions, subcommands
from tests.shared.test_console import unread

_ALIGNED = 'w.pt torch.nn:Linear --arguments {"in_features":2,"out_features":1}'
# command -> arguments that it does not take, some with which its work fails, the status then, and some that succeed
_COMMANDS = {
    "demo": ("--seed -1", "--out w.pt", 1, None),
    "ckpt show": ("w.pt --depth 0", "none.pt", 1, "w.pt"),
    "ckpt diff": ("w.pt", "w.pt none.pt", 2, "w.pt w.pt"),
    "ckpt align": ("w.pt torch.nn", "w.pt torch.nn:Nothing", 1, _ALIGNED),
    "ckpt remap": ("w.pt -o out.pt", "w.pt -r none.yaml -o out.pt", 1, "w.pt -r rules.yaml -o out.pt"),
    "env": ("--json=1", None, 1, ""),
    "fingerprint diff": ("a", "a b", 2, None),
    "flops": ("torch.nn:Identity --input 3 --depth -1", "torch.nn:Linear --input 3", 1, "torch.nn:Identity --input 3"),
    "gpus": ("--prefer cool", "--query index", 1, "--csv"),
    "report": ("", "none", 1, None),
    "resume status": ("", "none", 1, None),
    "resume verify": ("", "none", 2, None),
    "schedule": ("--total 0", "--total 9 --plot none/a.png", 1, "--total 9"),
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}, "w.pt")
    Path("rules.yaml").write_text("- {source: weight, target: kernel}\n")


def _stopped(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code


def test_the_table_has_every_command():
    leaves = {
        parser.prog.removeprefix("lightning-tricks ")
        for parser, _ in command_actions()
        if not any(map(subcommands, actions_of(parser)))
    }
    assert leaves - set(_STAGES) == set(_COMMANDS)


@pytest.mark.parametrize("command", _COMMANDS)
def test_wrong_arguments_are_told_beside_the_usage(command, capsys):
    assert _stopped([*command.split(), *_COMMANDS[command][0].split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: lightning-tricks {command}")
    assert f"lightning-tricks {command}: error: " in error


@pytest.mark.parametrize("command", [name for name, row in _COMMANDS.items() if row[1] is not None])
def test_work_that_fails_is_one_sentence_without_the_usage(command, capsys):
    nvml = FakeNvml([FakeGpu()])
    nvml.fails = {"nvmlDeviceGetCount": "UNKNOWN"}
    _, failing, status, _ = _COMMANDS[command]
    with nvml:
        assert _stopped([*command.split(), *failing.split()]) == status
    error = capsys.readouterr().err
    assert error.startswith(f"lightning-tricks {command}: error: ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", [name for name, row in _COMMANDS.items() if row[3] is not None])
def test_a_command_ends_in_peace_where_nobody_reads(command, capsys):
    arguments = [*command.split(), *_COMMANDS[command][3].split()]
    with FakeNvml([FakeGpu()]):
        with unread():
            assert _stopped(arguments) == 141, "128 + SIGPIPE"
        with redirect_stdout(None):  # as by `>&-`
            assert main(arguments) == 0
    assert not capsys.readouterr().err


def test_a_file_of_many_tensors_is_shown_to_who_stops_reading():
    torch.save({f"layers.{i}.weight": torch.zeros(1) for i in range(1200)}, "w.pt")  # more than a pipe holds
    command = [sys.executable, "-m", "lightning_tricks", "ckpt", "show", "w.pt"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # else Python itself overlooks that half of a text was written
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout.readline().startswith(b"w.pt: state_dict, 1200 tensors")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
