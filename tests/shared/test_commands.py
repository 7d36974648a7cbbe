"""What every command does with wrong arguments, work that fails, a closed pipe, Ctrl+C, --json and in a shell."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_tricks import RunReport
from lightning_tricks.auto_resume import CheckpointFolder
from lightning_tricks.cli import _STAGES, main
from lightning_tricks.hang_watch.functional import RankRecord
from lightning_tricks.seeding import isolated_seeding
from tests.architecture.persisted_names import actions_of, command_actions, subcommands
from tests.devices.fake_nvml import FakeGpu, FakeNvml
from tests.run_fingerprint.test_callback import at_step, draw, record
from tests.shared.test_console import unread
from tests.small import QUIET, Net, cases, loader

_ALIGNED = 'w.pt torch.nn:Linear --arguments {"in_features":2,"out_features":1}'
# command -> arguments that it does not take, some with which its work fails, the status then, and some that succeed
_COMMANDS = {
    "ckpt show": ("", "none.pt", 1, "w.pt"),
    "ckpt align": ("w.pt torch.nn", "w.pt torch.nn:Nothing", 1, _ALIGNED),
    "ckpt remap": ("w.pt -o out.pt", "w.pt -r none.yaml -o out.pt", 1, "w.pt -r rules.yaml -o out.pt"),
    "env": ("--json=1", None, 1, ""),
    "fingerprint diff": ("a", "a b", 2, None),
    "fingerprint ranks": ("", "none", 2, None),
    "flops": ("torch.nn:Identity --input 3 --depth -1", "torch.nn:Linear --input 3", 1, "torch.nn:Identity --input 3"),
    "gpus": ("--prefer cool", "", 1, ""),
    "hang": ("", "none", 1, None),
    "report": ("", "none", 1, None),
    "resume fetch": ("", "none copy", 1, None),
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


def _parsers():
    return {parser.prog.removeprefix("lightning-tricks").strip(): parser for parser, _ in command_actions()}


def _has_commands(parser):
    return any(map(subcommands, actions_of(parser)))


def test_the_table_has_every_command():
    leaves = {name for name, parser in _parsers().items() if not _has_commands(parser)}
    assert leaves - set(_STAGES) == set(_COMMANDS)


def test_a_command_that_has_commands_shows_them_and_succeeds(capsys):
    groups = {name: parser for name, parser in _parsers().items() if _has_commands(parser)}
    assert {"", "ckpt", "fingerprint", "resume"} <= groups.keys()
    for name, parser in groups.items():
        assert main(name.split()) == 0
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == (parser.format_help(), "")
    with unread():
        assert _stopped([]) == 141


@pytest.mark.parametrize("command", _COMMANDS)
def test_wrong_arguments_are_told_beside_the_usage(command, capsys):
    assert _stopped([*command.split(), *_COMMANDS[command][0].split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: lightning-tricks {command}")
    assert f"lightning-tricks {command}: error: " in error


@pytest.mark.parametrize("given", ["", "ckpt", *(f"{name} {row[3]}" for name, row in _COMMANDS.items() if row[3])])
def test_an_unknown_option_is_told_beside_the_usage_of_its_command(given, capsys):
    assert _stopped([*given.split(), "--unknown=3"]) == 2
    usage, _, error = capsys.readouterr().err.partition("\nlightning-tricks")
    command = max((name for name in _parsers() if f"{given} ".startswith(f"{name} ") or not name), key=len)
    assert f"{usage}\n" == _parsers()[command].format_usage()
    assert error == f"{' ' * bool(command)}{command}: error: unrecognized arguments: --unknown=3\n"


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


@pytest.mark.parametrize("given", ["fingerprint diff a b", "schedule --total 9 --plot none/a.png"])
def test_an_error_of_the_system_is_told_without_its_number(given, capsys):
    assert _stopped(given.split()) in (1, 2)
    assert capsys.readouterr().err.endswith(
        f": error: {given.split()[-1].replace('b', 'a')}: No such file or directory\n"
    )


def test_an_error_of_several_lines_is_told_in_one(capsys):
    Path("failing.py").write_text('def model():\n    raise RuntimeError("it fails\\nfor a reason")\n')
    assert _stopped(["flops", "failing:model", "--input", "3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lightning-tricks flops: error: ")
    assert error.endswith("it fails for a reason\n")


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
    torch.save({f"layers.{i}.weight": torch.zeros(1) for i in range(3000)}, "w.pt")  # more than a pipe holds
    command = [sys.executable, "-m", "lightning_tricks", "ckpt", "show", "w.pt"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # else Python itself overlooks that half of a text was written
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout.readline().startswith(b"w.pt: state_dict, 3,000 tensors")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signal to one process")
def test_ctrl_c_ends_a_command_without_a_traceback():
    Path("slow.py").write_text("import sys, time\ndef model():\n    print('now', flush=True)\n    time.sleep(600)\n")
    command = [sys.executable, "-m", "lightning_tricks", "flops", "slow:model", "--input", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
    assert process.returncode == 130, "128 + SIGINT"


# --json

_CHECKPOINT = "file epoch batches step finished bytes written"
# command -> arguments, and keys that its JSON must keep; those of values in lists are as if there were no list
_JSON = {
    "hang": ("hang", {"": "findings", "ranks": "rank world_size batches frames"}),
    "report": ("report", {"": "sort left_out", "runs": "run module status epochs steps started seconds metrics"}),
    "env": ("", {"": "collect_env", "packages": "lightning_tricks"}),
    "fingerprint diff": (
        "a.jsonl b.jsonl",
        {
            "": "equal_batches longer_run incomplete_resumes",
            "divergence": "step epoch batch_idx rank kind layer call num_differing num_compared missing_in "
            "last_equal_layer last_equal_step",
        },
    ),
    "fingerprint ranks": ("two.jsonl", {"": "two.jsonl", "two.jsonl": "found compared"}),
    "flops": ("torch.nn:Identity --input 3", {"": "macs flops other_flops params", "rows": "name kind macs flops"}),
    "gpus": ("", {"": "index memory_used"}),
    "resume fetch": ("sent copy", {"": "folder state mirror", "checkpoints": _CHECKPOINT}),
    "resume status": (
        "run",
        {"": "folder state epoch max_epochs step max_steps pid host time damaged mirror", "checkpoints": _CHECKPOINT},
    ),
    "resume verify": ("run", {"": "file problem"}),
    "schedule": ("--total 10 --plot plot.png", {"": "kind total lr peak", "rows": "step factor lr"}),
}


def _keys(value, place=""):
    if isinstance(value, list):
        for part in value:
            yield from _keys(part, place)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield place, key
            yield from _keys(part, f"{place}.{key}".lstrip("."))


class _Unknown:
    def __reduce__(self):
        return _Unknown, ()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    with isolated_seeding():
        record(folder / "a.jsonl")
        record(folder / "b.jsonl", [at_step(5, draw)])
        record(folder / "two.jsonl", accelerator="cpu", devices=2, strategy="ddp_fork")
    return folder


@pytest.fixture
def more_files(recorded):
    weights = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}
    torch.save({"state_dict": weights, "epoch": 3, "best": math.inf, "cache": _Unknown()}, "w.pt")
    torch.save({"weight": torch.full((1, 2), math.nan), "bias": torch.zeros(3)}, "nan.pt")
    for path in recorded.iterdir():
        shutil.copy(path, path.name)
    Trainer(callbacks=[RunReport("report")], **QUIET, max_epochs=1).fit(Net(), loader())
    Path("hang").mkdir()
    watching = RankRecord(Path("hang"), 3600.0, {"rank": 0, "world_size": 1, "timeout": 3600.0})
    watching.move("on_train_start")
    kept = Path("hang/rank0.hang").read_bytes()
    watching.close()  # which removes it
    Path("hang").mkdir(exist_ok=True)
    Path("hang/rank0.hang").write_bytes(kept)
    folder = CheckpointFolder("run")
    folder.prepare()
    saved = folder.save({"auto_resume": {}}, epoch=0, step=1, batches=1, finished=False)
    shutil.copytree("run", "sent")
    shutil.copytree(folder.private / saved.file, folder.private / "000009-epoch=1-step=9")


@pytest.mark.parametrize("command", [name for name in _COMMANDS if not name.startswith("ckpt")])
def test_json_is_all_that_a_listing_prints(command, more_files, capsys):
    arguments, keys = _JSON[command]
    with FakeNvml([FakeGpu()]):
        assert main([*command.split(), *arguments.split(), "--json"]) in (0, 1)
    captured = capsys.readouterr()
    value = json.loads(captured.out, parse_constant=pytest.fail)
    assert captured.err == ""
    assert {(place, key) for place, names in keys.items() for key in names.split()} <= {*_keys(value)}


def test_json_has_the_values(more_files, capsys):
    def values(*arguments):
        main([*arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    whole, damaged = values("resume", "verify", "run")
    assert whole["problem"] is None
    assert damaged["problem"] == "manifest.json is damaged", "it is that of another one"
    rows = values("schedule", "--total", "10", "--lr", "0.5", "--kind", "constant")["rows"]
    assert [(row["step"], row["factor"], row["lr"]) for row in rows] == [(step, 1.0, 0.5) for step in range(11)]
    assert values("fingerprint", "diff", "a.jsonl", "b.jsonl")["divergence"]["step"] == 5
    assert values("fingerprint", "diff", "a.jsonl", "a.jsonl")["divergence"] is None


# Completion


def _printed_completion(shell, capsys):
    assert _stopped(["--print-completion", shell]) == 0
    return capsys.readouterr().out


_COMPLETE = """
source completion.bash
read -ra COMP_WORDS <<< "$1"
[[ $1 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$(complete -p lightning-tricks | sed -E 's/.*-F ([^ ]+).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@cases(
    "line, proposed",
    ("lightning-tricks f", {"fit", "fingerprint", "flops"}),
    ("lightning-tricks ckpt ", {"show", "align", "remap"}),
    ("lightning-tricks ckpt show --", {"--help", "--key"}),
    ("lightning-tricks ckpt show w", {"w.pt"}),
    ("lightning-tricks ckpt align --rules ru", {"rules.yaml"}),
    ("lightning-tricks resume status ", {"folder"}),
    ("lightning-tricks flops --backend ", {"torch", "thop"}),
    ("lightning-tricks --print-completion ", {"bash", "fish", "zsh"}),
)
def test_bash_completes(line, proposed, capsys):
    Path("completion.bash").write_text(_printed_completion("bash", capsys))
    Path("folder").mkdir()
    done = subprocess.run(["bash", "-c", _COMPLETE, "bash", line], capture_output=True, text=True)
    assert done.stderr == ""
    assert {*done.stdout.split()} == proposed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_option(shell, capsys):
    script = _printed_completion(shell, capsys)
    for parser, action in command_actions():
        for word in (parser.prog.split()[-1], *(option.lstrip("-") for option in action.option_strings)):
            assert word in script


def test_completion_without_its_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert _stopped(["--print-completion", "bash"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "lightning-tricks: error: Completion needs shtab, from the extra 'completion': pip install "
    )
    assert len(error.splitlines()) == 1
