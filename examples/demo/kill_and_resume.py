"""Train undisturbed; train in a process that is killed, and run its command again; compare the weights."""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings

import torch
from lightning.pytorch import Callback, Trainer

from lightning_tricks import Tricks
from lightning_tricks.demo import Digits, DigitsClassifier

KILLED_AFTER = 50  # of 76 steps, in the second epoch


class Watches(Callback):
    """Records the first step, and kills the process at the one that the command names."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        os.environ.setdefault("BEGAN_AT", str(trainer.global_step))  # AutoResume restores attributes and globals
        if sys.argv[2:] == [str(trainer.global_step)]:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # which on Windows is as sudden


def train(folder):
    """Train for two epochs, or resume the run in the folder."""
    torch.set_num_threads(1)  # a net as small as this gains nothing from more
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    resume = {"dirpath": folder, "every_n_train_steps": 10}
    model = DigitsClassifier(Tricks(seed_everything=42, optimizer=True, auto_resume=resume))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[Watches()], **off)
    trainer.fit(model, Digits())
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return {"steps": trainer.global_step, "began_at": os.environ.pop("BEGAN_AT"), "weights": digest.hexdigest()}


def start(*arguments):
    return subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)  # noqa: S603


def show():
    line = "{steps} steps, sha256 of the weights {weights:.16}".format_map
    print(f"\nA run of two epochs is killed by SIGKILL after {KILLED_AFTER} steps, and the same command is run again:")
    with tempfile.TemporaryDirectory() as folder:
        whole = train(f"{folder}/whole")
        print(f"  undisturbed      {line(whole)}")
        start(f"{folder}/killed", str(KILLED_AFTER))
        print(f"  killed           {KILLED_AFTER} steps")
        again = start(f"{folder}/killed")
    again.check_returncode()
    resumed = json.loads(again.stdout.splitlines()[-1])
    verdict = "equal, bit for bit" if resumed["weights"] == whole["weights"] else "other weights"
    print(f"  run again        {line(resumed)}, resumed at step {resumed['began_at']}:")
    print(f"                   {verdict}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(train(sys.argv[1])))
    else:
        show()
