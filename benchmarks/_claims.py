"""What `docs/benchmarks.md` shows of each benchmark: a claim, and the figures behind it.

A figure is found in `benchmarks/results.json` by two names: the case and the contestant of a ratio, or the row and the
column of another table. `{0}` in a heading is the first of its figures; `{lowest}` and `{highest}` are the extremes of
its ratios.
"""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """What was measured, and the two names of its figure."""

    text: str
    row: str
    column: str


class Claim(NamedTuple):
    """A heading, the script that measured it, and its figures."""

    heading: str
    script: str
    figures: tuple[Figure, ...]


def _claim(script: str, heading: str, *figures: tuple[str, str, str]) -> Claim:
    """Return a claim whose figures have a text, a row and a column each."""
    return Claim(heading, script, tuple(Figure(*each) for each in figures))


_SMALL, _DIGITS = "2,000 small parameters", "fit DigitsMLP, 10 members"
_STEPS, _EPOCH = "steps, 2 ms", "an epoch with its checkpoint, 2 ms"
_FIRST = "the first epoch, with reports and all that starts a fit, 2 ms"
_MEMORY, _DATA = "peak memory / the weights'", "a save, hidden 64, a dataset of 3,000 tensors"
_SAVE, _SAVES = "a save of 100 MB", "119 steps with 2 saves of 100 MB"
_LAST = "the last save of 104 MB and the end of the fit"
_PARAMETERS = "ResNet-18 with LoRA and TrainableCheckpoint / all weights"
_CPU_TIME, _MONITOR = "CPU time of a fit, {} hidden units, over a fit without", "DeviceMonitor()"
_METRICS, _FORWARD = "perceptron, batch 32, 313 steps", "{}, relative to a forward pass"
_PREDICTIONS, _WEIGHTS = "2,000 batches of 8 rows of 10 scores", "ResNet-18's weights, over reading them"
_DETAIL = 'detail="{}"'
_COUNTED = "4 batches of 16, accumulated by their targets"
_CNN, _NET = "8 convolutional nets", "8 perceptrons, 784-512-512-10"

# In the order of the page
CLAIMS = (
    _claim(
        "kills_side_by_side",
        "After {0} of 20 kills, AutoResume ends with the weights of the undisturbed run",
        ("AutoResume, weights", "AutoResume", "the same weights"),
        ("AutoResume, epoch means", "AutoResume", "the same epoch means"),
        ('Lightning, weights, with `ckpt_path="last"`', 'Lightning, `ckpt_path="last"`', "the same weights"),
        (
            "Composer 0.32.1 with `autoresume=True` and its sampler, weights",
            "Composer 0.32.1, `autoresume=True` and its sampler (torch 2.7.0+cu126)",
            "the same weights",
        ),
        (
            "Composer, epoch means",
            "Composer 0.32.1, `autoresume=True` and its sampler (torch 2.7.0+cu126)",
            "the same epoch means",
        ),
    ),
    _claim(
        "collection",
        "Six callbacks together take {0} times the bare Trainer's time with steps of 2 ms, {1} times with ResNet-18",
        ("steps of 2 ms", _STEPS, "all six"),
        ("steps of ResNet-18", "steps, ResNet-18", "all six"),
        ("steps of 2 ms, with RunFingerprint and SpikeGuard", _STEPS, "all six, RunFingerprint and SpikeGuard"),
        ("steps of a GAN of 3 ms, nine callbacks", "steps, GAN of 3 ms", "nine callbacks at their most"),
        ("epoch and its checkpoint, 2 ms", _EPOCH, "all six"),
        ("epoch and its checkpoint, ResNet-18", "an epoch with its checkpoint, ResNet-18", "all six"),
        ("first epoch, with reports, 2 ms", _FIRST, "all six"),
        ("steps of 2 ms, `Trainer(gradient_clip_val=1.0)`", _STEPS, "Trainer(gradient_clip_val=1.0)"),
        *(
            (f"steps of 2 ms, {name}", _STEPS, name)
            for name in (
                "GradientClipping",
                "MetricsMonitor",
                "AutoResume",
                "SeedEverything",
                "FlopsReport",
                "ModelReport",
                "RunReport",
                "RunFingerprint",
                "SpikeGuard",
                "ExponentialMovingAverage",
            )
        ),
    ),
    _claim(
        "auto_resume",
        "A small save takes {2} times ModelCheckpoint's time, a step between saves {0} times the bare Trainer's",
        ("step, 9,000 parameters", "a step, hidden 64", "with AutoResume"),
        ("step, 1.1 million parameters", "a step, hidden 1024", "with AutoResume"),
        ("save, 9,000 parameters, over ModelCheckpoint", "a save, hidden 64", "AutoResume"),
        ("the same without its flushes", "a save, hidden 64", "AutoResume, without its flushes"),
        ("save, 1.1 million parameters, over ModelCheckpoint", "a save, hidden 1024", "AutoResume"),
        ("save, a dataset that is a list of 3,000 tensors", _DATA, "AutoResume"),
        (
            "replay buffer of 50,000 tuples, over `torch.save` and `torch.load`",
            "a replay buffer of 50,000 tuples",
            "AutoResume",
        ),
        (
            "to the first step at 10 % of an epoch, over Lightning",
            "to the first step, at 10% of an epoch",
            "AutoResume",
        ),
        (
            "to the first step at 90 % of an epoch, over Lightning",
            "to the first step, at 90% of an epoch",
            "AutoResume",
        ),
    ),
    _claim(
        "asynchronous_saves",
        "Training waits {0} of ModelCheckpoint's time for an asynchronous save of 100 MB",
        ("save of 100 MB, asynchronous", _SAVE, "AutoResume, asynchronous"),
        ("save of 1 GB, asynchronous", "a save of 1000 MB", "AutoResume, asynchronous"),
        ("save of 100 MB, synchronous", _SAVE, "AutoResume"),
        ("119 steps with 2 saves, asynchronous, over no saves", _SAVES, "AutoResume, asynchronous"),
        ("119 steps with 2 saves, ModelCheckpoint, over no saves", _SAVES, "ModelCheckpoint"),
    ),
    _claim(
        "object_store",
        "Training waits {0} of ModelCheckpoint's time for a save of 104 MB to S3, {1} if it is asynchronous",
        ("save, AutoResume", "a save of 104 MB", "AutoResume"),
        ("save, AutoResume, asynchronous", "a save of 104 MB", "AutoResume, asynchronous"),
        ("last save and end of the fit, AutoResume", _LAST, "AutoResume"),
        ("last save and end of the fit, AutoResume, asynchronous", _LAST, "AutoResume, asynchronous"),
        ("requests of a save, AutoResume", "requests of a save", "AutoResume"),
        ("requests of a save, ModelCheckpoint", "requests of a save", "ModelCheckpoint"),
    ),
    _claim(
        "run_fingerprint",
        "Recording each layer takes {1} times the time of a step of ResNet-50, {3} times that of a tiny one",
        (
            "step of ResNet-50, 32 images of 224 x 224, by step",
            "a step: ResNet-50, 32 images of 224 x 224",
            _DETAIL.format("step") + ", inside",
        ),
        ("the same, by layer", "a step: ResNet-50, 32 images of 224 x 224", _DETAIL.format("layer") + ", inside"),
        ("step of 9,000 parameters, by step", "a step: 9,000 parameters, 32 vectors of 64", _DETAIL.format("step")),
        ("the same, by layer", "a step: 9,000 parameters, 32 vectors of 64", _DETAIL.format("layer")),
        ("fingerprint of weights, over their sum", _WEIGHTS, "fingerprint"),
        ("SHA-256 of weights, over their sum", _WEIGHTS, "sha256"),
    ),
    _claim(
        "gradient_clipping",
        "Clipping 2,000 small parameters takes {0} of torch's time",
        (f"function, {_SMALL}", f"function, {_SMALL}", "ours"),
        ("function, ResNet-50", "function, ResNet-50 shapes", "ours"),
        ("the same with norms of each layer", "function, ResNet-50 shapes", "ours, with per-layer norms"),
        ("AGC, ResNet-50, over plain clipping of torch", "function, ResNet-50 shapes", "ours, AGC"),
        ("AGC of timm, ResNet-50, over plain clipping of torch", "function, ResNet-50 shapes", "timm, AGC"),
        ("fit, ResNet-50, over `gradient_clip_val=1.0`", "training loop, ResNet-50 shapes", "GradientClipping(1.0)"),
        (f"fit, {_SMALL}, over `gradient_clip_val=1.0`", f"training loop, {_SMALL}", "GradientClipping(1.0)"),
        (f"skipping, {_SMALL}, over clipping", f"skip policy, {_SMALL}", 'on_nonfinite="skip"'),
    ),
    _claim(
        "spike_guard",
        "SpikeGuard takes {0} times the bare Trainer's time",
        ('`SpikeGuard("skip")`', "100 steps", 'SpikeGuard("skip")'),
        ('`monitor="grad_norm"`', "100 steps", 'SpikeGuard("skip", monitor="grad_norm")'),
        ('`SpikeGuard("rewind")`', "100 steps", 'SpikeGuard("rewind")'),
        ('`"rewind", every_n_train_steps=5`', "100 steps", 'SpikeGuard("rewind", every_n_train_steps=5)'),
    ),
    _claim(
        "spike_guard_false_alarms",
        "SpikeGuard skips {1} of {0} batches of healthy runs",
        ("batches of 168 runs", "all", "batches"),
        ("skipped by the loss", "all", "left out by loss"),
        ("skipped by the norm of the gradients", "all", "left out by norm"),
        ("losses times 10 found, batch size 8", "batch size 8", "x 10 found"),
        ("losses times 10 found, batch size 128", "batch size 128", "x 10 found"),
        ("losses times 100 found, batch size 8", "batch size 8", "x 100 found"),
        ("losses times 100 found, batch size 128", "batch size 128", "x 100 found"),
    ),
    _claim(
        "microbatching",
        "Four microbatches take {0} of the time of four accumulated batches",
        ("small steps, over 4 accumulated batches", "small steps, 4 parts", "Microbatching(16), 4 parts"),
        ("large steps, over 4 accumulated batches", "large steps, 4 parts", "Microbatching(16), 4 parts"),
        ("small steps, `count`, over 4 accumulated batches", "small steps, 4 parts", _COUNTED),
        ("large steps, `count`, over 4 accumulated batches", "large steps, 4 parts", _COUNTED),
        ("small steps, 1 part, automatic size", "small steps", "Microbatching(), 1 part"),
        ("large steps, 1 part, automatic size", "large steps", "Microbatching(), 1 part"),
        ("large steps, 1 part of 64", "large steps", "Microbatching(64), 1 part"),
        ("large steps, 4 parts", "large steps", "Microbatching(16), 4 parts"),
    ),
    _claim(
        "metrics",
        "Epochs with MetricsMonitor take {0} times as long as without metrics, {1} times if you update them yourself",
        ("MetricsMonitor, small perceptron", _METRICS, "MetricsMonitor"),
        ("`update` in the step, `compute` at the epoch's end", _METRICS, "update, compute at the epoch's end"),
        ("`update` and `log_dict` in each step", _METRICS, "update, log_dict(objects) at each step"),
        ("`log_dict(collection(preds, target))`", _METRICS, "log_dict(collection(preds, target))"),
        ("MetricsMonitor, ResNet-18", "ResNet-18, batch 8 of 64 x 64, 8 steps", "MetricsMonitor"),
    ),
    _claim(
        "devices",
        "DeviceMonitor adds {2} operators and {3} host reads to a step",
        ("CPU time, 64 hidden units", _CPU_TIME.format(64), _MONITOR),
        ("the same, Lightning's DeviceStatsMonitor", _CPU_TIME.format(64), "DeviceStatsMonitor()"),
        ("operators", "more operators in a step", _MONITOR),
        ("host reads", "more host reads in a step", _MONITOR),
    ),
    _claim(
        "end_together",
        "EndTogether takes {0} times the time with two ranks and steps of 2 ms, where it asks at each batch",
        ("a stream, asked at each batch", "two ranks, steps of 2 ms", "a stream"),
        ("stored samples, compared at the start", "two ranks, steps of 2 ms", "stored samples"),
    ),
    _claim(
        "streams",
        "A stream with a state takes {0} times as long to resume at a million samples as at 100",
        ("state, at 1,000,000 samples", "DataLoader, state", "at 1,000,000"),
        ("torchdata's StatefulDataLoader, at 1,000,000 samples", "StatefulDataLoader", "at 1,000,000"),
        ("no state, at 10,000 samples", "DataLoader, no state", "at 10,000"),
    ),
    _claim(
        "hang_watch",
        "HangWatch takes {0} times the bare Trainer's time with steps of one linear layer",
        ("300 steps of a linear layer", "300 steps of a linear layer", "HangWatch"),
    ),
    _claim(
        "flops",
        "Counting the FLOPs of ViT-B/16 takes {0} of a forward pass",
        ("ViT-B/16, `count_flops`", _FORWARD.format("vit_b_16"), "count by lightning_tricks"),
        ("ViT-B/16, thop", _FORWARD.format("vit_b_16"), "count by thop"),
        ("ViT-B/16, torch's FlopCounterMode", _FORWARD.format("vit_b_16"), "count by FlopCounterMode"),
        ("ResNet-50, `count_flops`", _FORWARD.format("resnet50"), "count by lightning_tricks"),
        ("ResNet-50, thop", _FORWARD.format("resnet50"), "count by thop"),
        ("Swin-T, `count_flops`", _FORWARD.format("swin_t"), "count by lightning_tricks"),
        ("Swin-T, thop", _FORWARD.format("swin_t"), "count by thop"),
        ("training step of ViT-B/16, over a training step", "vit_b_16, a step relative to a step", "count of a step"),
    ),
    _claim(
        "checkpoint_remapping",
        "Loading weights takes memory for {0} copy of them, `torch.load` for {2}",
        ("peak memory, `load_weights` of a .pt", _MEMORY, "load_weights of a .pt"),
        ("peak memory, `load_weights` of a .safetensors", _MEMORY, "load_weights of a .safetensors"),
        ("peak memory, `torch.load` and `load_state_dict`", _MEMORY, "torch.load and load_state_dict"),
        ("peak memory, Lightning's `load_from_checkpoint`", _MEMORY, "Lightning's load_from_checkpoint"),
        ("peak memory, safetensors' `load_model`", _MEMORY, "safetensors' load_model"),
        ("time of a .pt, over `torch.load` and `load_state_dict`", "time of a .pt", "load_weights of a .pt"),
        ("time of a .safetensors, over `load_model`", "time of a .safetensors", "load_weights of a .safetensors"),
    ),
    _claim(
        "plain_values",
        "`read_checkpoint` reads a list of a million whole numbers in {0} of the time of `torch.load`",
        ("1,000,000 whole numbers", "a list of 1,000,000 whole numbers", "read_checkpoint"),
        ("100,000 strings", "a list of 100,000 strings", "read_checkpoint"),
        ("30,000 dicts", "a list of 30,000 dicts", "read_checkpoint"),
    ),
    _claim(
        "finetuning",
        "With LoRA, a step of BERT takes {0} of peft's time, and a checkpoint of ResNet-18 {4} of the bytes",
        ("BERT, query and value, over peft", "BERT, query and value", "ours / peft"),
        ("BERT, all linear layers, over peft", "BERT, all linear layers of the blocks", "ours / peft"),
        ("GPT-2, attention, over peft", "GPT-2, attention", "ours / peft"),
        ("BERT, query and value, over training all weights", "BERT, query and value", "ours / all weights"),
        ("checkpoint of ResNet-18 with TrainableCheckpoint, over all weights", _PARAMETERS, "checkpoint, bytes"),
        ("optimizer state, over all weights", _PARAMETERS, "optimizer state, bytes"),
    ),
    _claim(
        "muon",
        "After 100 steps of a small transformer on digits, Muon with AdamW changes the test loss of AdamW alone by {0}",
        ("test loss, minus AdamW's alone", "Muon and AdamW - AdamW", "test loss"),
        ("test accuracy, %, minus AdamW's alone", "Muon and AdamW - AdamW", "test accuracy, %"),
        ("test loss, AdamW alone", "AdamW", "test loss"),
        ("an optimizer step, over both stepped by hand", "time of an optimizer step", "Muon and AdamW / by hand"),
        ("an optimizer step, over AdamW's", "time of an optimizer step", "Muon and AdamW / AdamW"),
    ),
    _claim(
        "predictions",
        "Writing small predictions takes {0} times as long as not writing them, saving each batch {1} times",
        ("PredictionWriter, small batches", _PREDICTIONS, "PredictionWriter, pt"),
        ("`torch.save` of each batch, small batches", _PREDICTIONS, "BasePredictionWriter, torch.save of each batch"),
        ("collected and saved, small batches", _PREDICTIONS, "collected, torch.cat and torch.save"),
        ("PredictionWriter, large batches", "10 batches of 1,024 rows of 512 values", "PredictionWriter, pt"),
        (
            "`torch.save` of each batch, large batches",
            "10 batches of 1,024 rows of 512 values",
            "BasePredictionWriter, torch.save of each batch",
        ),
    ),
    _claim(
        "ensembles",
        "Ten small nets train in {0} of torchensemble's time; with five LeNets the ratio is {3}",
        ("10 perceptrons on digits", _DIGITS, "VotingClassifier"),
        ("32 perceptrons on digits", "fit DigitsMLP, 32 members", "VotingClassifier"),
        ("5 large perceptrons", "fit MLP, 5 members", "VotingClassifier"),
        ("5 LeNets", "fit LeNet, 5 members", "VotingClassifier"),
        (
            "inference, 10 perceptrons, batch 1, over a loop",
            "inference DigitsMLP, 10 members, batch 1",
            "member_outputs",
        ),
        (
            "inference, 10 perceptrons, batch 500, over a loop",
            "inference DigitsMLP, 10 members, batch 500",
            "member_outputs",
        ),
    ),
    _claim(
        "ensemble_families",
        "Other ensembles of small nets take {lowest} to {highest} of torchensemble's time",
        *(
            (name, f"{_DIGITS}, {name}", f"{name}Classifier")
            for name in (
                "Bagging",
                "Fusion",
                "GradientBoosting",
                "SoftGradientBoosting",
                "FastGeometric",
                "AdversarialTraining",
                "NeuralForest",
            )
        ),
        ("SnapshotEnsemble, 5 members", "fit DigitsMLP, 5 members, SnapshotEnsemble", "SnapshotEnsembleClassifier"),
    ),
    _claim(
        "sharded_members",
        "Two ranks that share eight convolutional nets take {0} of the time of one process",
        ("convolutional nets, sharded", _CNN, "2 ranks, sharded"),
        ("convolutional nets, replicated", _CNN, "2 ranks, replicated"),
        ("perceptrons, sharded", _NET, "2 ranks, sharded"),
        ("perceptrons, replicated", _NET, "2 ranks, replicated"),
    ),
    _claim(
        "calibration",
        "Calibration reduces the ECE of SoftGradientBoosting to {2} of what it was; for one model the ratio is {0}",
        ("ECE of one model", "ece of test digits, one model", "temperature"),
        ("ECE of Voting, 5 members", "ece of test digits, Voting, 5", "temperature"),
        ("ECE of SoftGradientBoosting, 5 members", "ece of test digits, SoftGradientBoosting, 5", "temperature"),
        ("NLL of SoftGradientBoosting, 5 members", "nll of test digits, SoftGradientBoosting, 5", "temperature"),
    ),
    _claim(
        "conformal",
        "Calibrating prediction sets takes {0} times as long as a pass over the data",
        ("10,000 rows, 100 classes, LAC", "10,000 rows, 100 classes", "calibrate, lac"),
        ("10,000 rows, 100 classes, RAPS", "10,000 rows, 100 classes", "calibrate, raps"),
    ),
    _claim(
        "trusting_predictions",
        "Calibration changes the NLL of five members on noisy digits by {0}",
        (
            "NLL, VotingClassifier, calibrated minus uncalibrated",
            "VotingClassifier, calibrated - VotingClassifier",
            "NLL",
        ),
        ("the same, ECE", "VotingClassifier, calibrated - VotingClassifier", "ECE"),
        ("NLL, one member, calibrated minus uncalibrated", "one member, calibrated - one member", "NLL"),
        ("NLL, VotingClassifier minus torchensemble's", "VotingClassifier - torchensemble's VotingClassifier", "NLL"),
        (
            "NLL, both calibrated, VotingClassifier minus one member",
            "VotingClassifier, calibrated - one member, calibrated",
            "NLL",
        ),
    ),
    _claim(
        "import_time",
        "`import lightning_tricks` takes {0} times as long as an empty interpreter",
        ("`import lightning_tricks`", "start-up", "import lightning_tricks"),
        ("`import lightning`", "start-up", "import lightning"),
    ),
)
