"""Train in three processes, of which the second is killed and the third is the same command; compare the weights."""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings

from lightning.pytorch import Callback, Trainer

from lightning_tricks import Tricks
from lightning_tricks.demo import Digits, DigitsClassifier

KILLED_AFTER = 50  # of 76 steps, in the second epoch


class Watches(Callback):
    """Notes the first step, and kills the process at the one that the command names."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        os.environ.setdefault("BEGAN_AT", str(trainer.global_step))  # AutoResume would restore an attribute
        if sys.argv[2:] == [str(trainer.global_step)]:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # which on Windows is as sudden


def train(folder):
    """Train for two epochs; resume what there is in the folder."""
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
    return {"steps": trainer.global_step, "began_at": os.environ["BEGAN_AT"], "weights": digest.hexdigest()}


def start(*arguments):
    return subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)  # noqa: S603


def result(run):
    run.check_returncode()
    return json.loads(run.stdout.splitlines()[-1])


def show():
    print(f"\nA run of its own, in two epochs, is killed by SIGKILL after {KILLED_AFTER} steps:")
    line = "{steps} steps, sha256 of the weights {weights:.16}".format_map
    with tempfile.TemporaryDirectory() as folder:
        whole = result(start(f"{folder}/whole"))
        print(f"  undisturbed      {line(whole)}")
        start(f"{folder}/killed", str(KILLED_AFTER))
        print(f"  killed           {KILLED_AFTER} steps")
        resumed = result(start(f"{folder}/killed"))
    verdict = "equal, bit for bit" if resumed["weights"] == whole["weights"] else "other weights"
    print(f"  started again    {line(resumed)}, resumed at step {resumed['began_at']}: {verdict}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(train(sys.argv[1])))
    else:
        show()
