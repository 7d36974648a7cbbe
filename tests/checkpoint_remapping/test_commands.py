"""`lightning-tricks ckpt`."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_tricks import read_checkpoint
from lightning_tricks.checkpoint_remapping import read_rules
from lightning_tricks.cli import main
from tests.small import cases

NET = "torchvision.models:resnet18"


def run(capsys, *arguments):
    status = main(["ckpt", *map(str, arguments)])
    return status, capsys.readouterr().out


@pytest.fixture
def resnet():
    from torchvision.models import resnet18

    return resnet18()


def test_show(capsys, resnet):
    hyper_parameters = {"lr": 0.1, "root": Path("data")}
    torch.save(
        {"pytorch-lightning_version": "2.6.0", "state_dict": resnet.state_dict(), "hyper_parameters": hyper_parameters},
        "w.ckpt",
    )
    status, text = run(capsys, "show", "w.ckpt")
    assert status == 0
    assert "w.ckpt: lightning under state_dict, 122 tensors, 11.7 M numbers, 44.63 MiB" in text
    assert "  conv1.weight  64x3x7x7  float32  36.75 KiB" in text
    assert "bn1.num_batches_tracked  scalar  int64  8 B" in text
    assert "hyper_parameters.root: pathlib." in text
    assert "pytorch-lightning_version: '2.6.0'" in text


def test_show_refuses_and_runs_nothing(capsys):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch pwned",)

    torch.save({"model": {"w": torch.ones(1)}, "x": Evil()}, "w.pt")
    with pytest.raises(SystemExit) as exit_:
        main(["ckpt", "show", "w.pt"])
    assert exit_.value.code == 1
    assert "error: w.pt is a pickle that asks to call" in capsys.readouterr().err
    assert not Path("pwned").exists()


def test_align_and_remap(capsys, resnet):
    torch.save(nn.DataParallel(resnet).state_dict(), "w.pt")
    status, text = run(capsys, "align", "w.pt", NET, "-o", "rules.yaml")
    assert status == 0
    assert "122/122 tensors" in text
    assert read_rules("rules.yaml") == ["wrappers"]
    for out in ("clean.safetensors", "clean.pt"):
        status, text = run(capsys, "remap", "w.pt", "-r", "rules.yaml", "-o", out)
        assert (status, text.strip()) == (0, f"{out}: 122 tensors, 122 renamed, 0 dropped")
        found = read_checkpoint(out).state_dict
        assert all(torch.equal(value, found[name]) for name, value in resnet.state_dict().items())
    Path("rules.yaml").write_text("- {from: nothing, to: here}\n")
    _, text = run(capsys, "remap", "w.pt", "-r", "rules.yaml", "-o", "out.pt")
    assert "matched nothing: nothing -> here" in text
    _, text = run(capsys, "align", "w.pt", NET, "--arguments", '{"num_classes": 3}')
    assert "MISMATCHED:" in text


def test_align_after_rules(capsys):
    Path("two_heads.py").write_text(
        "import torch\nfrom torch import nn\nassert torch.zeros(1).device.type == 'cpu'  # as a script has it\n"
        "def model():\n    return nn.ModuleDict({n: nn.Linear(4, 2) for n in ('mu', 'logvar')})\n"
    )
    torch.save(nn.ModuleDict({name: nn.Linear(4, 2) for name in ("foo", "bar")}).state_dict(), "w.pt")
    Path("rules.yaml").write_text("- {from: foo, to: logvar}\n")
    status, text = run(capsys, "align", "w.pt", "two_heads:model", "--rules", "rules.yaml", "-o", "all.yaml")
    assert status == 0
    assert "4/4 tensors" in text
    assert "a rule" in text
    run(capsys, "remap", "w.pt", "-r", "all.yaml", "-o", "clean.pt")
    clean, old = read_checkpoint("clean.pt").state_dict, read_checkpoint("w.pt").state_dict
    assert torch.equal(clean["logvar.weight"], old["foo.weight"])
    assert torch.equal(clean["mu.bias"], old["bar.bias"])


@cases(
    "arguments, words",
    (["show", "nothing.pt"], "error: nothing.pt does not exist"),
    (["align", "w.pt", "torchvision.models"], "the model must be MODULE:NAME"),
    (["align", "w.pt", NET], "error: w.pt "),
    (["remap", "w.pt", "-r", "nothing.yaml", "-o", "out.pt"], "nothing.yaml"),
    (["remap", "w.pt", "-r", "rules.yaml", "-o", "out.h5"], "path must end in .safetensors"),
)
def test_errors_are_sentences(arguments, words, capsys):
    torch.save({"a": torch.zeros(2), "b": torch.zeros(2)}, "w.pt")
    Path("rules.yaml").write_text("- wrappers\n")
    if arguments[-1] == NET:
        Path("w.pt").write_bytes(b"")
    with pytest.raises(SystemExit) as exit_:
        main(["ckpt", *arguments])
    error = capsys.readouterr().err
    assert exit_.value.code == (2 if error.startswith("usage: ") else 1)
    assert words in error
    assert not Path("out.pt").exists()
