"""The Lightning that the program uses: `lightning.pytorch`, or `pytorch_lightning`, whose classes are others.

No other module imports Lightning. `lightning_name` says which one is taken; it is asked once, when the first name of a
room with a callback is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.lightning_name import FABRIC, VARIABLE, lightning_name

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as CheckpointIO
    from lightning.fabric.utilities.cloud_io import get_filesystem as get_filesystem
    from lightning.fabric.utilities.data import sized_len as sized_len
    from lightning.fabric.utilities.throughput import get_available_flops as get_available_flops
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningDataModule as LightningDataModule
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch.callbacks import BasePredictionWriter as BasePredictionWriter
    from lightning.pytorch.callbacks import BatchSizeFinder as BatchSizeFinder
    from lightning.pytorch.callbacks import Checkpoint as Checkpoint
    from lightning.pytorch.callbacks import EarlyStopping as EarlyStopping
    from lightning.pytorch.callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
    from lightning.pytorch.callbacks import LearningRateFinder as LearningRateFinder
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
    from lightning.pytorch.callbacks import ModelPruning as ModelPruning
    from lightning.pytorch.callbacks import ModelSummary as ModelSummary
    from lightning.pytorch.callbacks import ProgressBar as ProgressBar
    from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from lightning.pytorch.callbacks import ThroughputMonitor as ThroughputMonitor
    from lightning.pytorch.callbacks import Timer as Timer
    from lightning.pytorch.cli import LightningArgumentParser as LightningArgumentParser
    from lightning.pytorch.cli import LightningCLI as LightningCLI
    from lightning.pytorch.cli import SaveConfigCallback as SaveConfigCallback
    from lightning.pytorch.loggers import CSVLogger as CSVLogger
    from lightning.pytorch.loggers import Logger as Logger
    from lightning.pytorch.loggers import MLFlowLogger as MLFlowLogger
    from lightning.pytorch.loggers import TensorBoardLogger as TensorBoardLogger
    from lightning.pytorch.loggers import WandbLogger as WandbLogger
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter as ExperimentWriter
    from lightning.pytorch.plugins.environments import SLURMEnvironment as SLURMEnvironment
    from lightning.pytorch.plugins.io import TorchCheckpointIO as TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
    from lightning.pytorch.strategies import DeepSpeedStrategy as DeepSpeedStrategy
    from lightning.pytorch.strategies import FSDPStrategy as FSDPStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy as ModelParallelStrategy
    from lightning.pytorch.strategies import ParallelStrategy as ParallelStrategy
    from lightning.pytorch.strategies import Strategy as Strategy
    from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
    from lightning.pytorch.utilities import CombinedLoader as CombinedLoader
    from lightning.pytorch.utilities.exceptions import MisconfigurationException as MisconfigurationException
    from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
    from lightning.pytorch.utilities.rank_zero import rank_zero_info as rank_zero_info
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn as rank_zero_warn
    from lightning.pytorch.utilities.types import LRSchedulerConfig as LRSchedulerConfig
    from lightning.pytorch.utilities.warnings import PossibleUserWarning as PossibleUserWarning

# Two packages of the same code with classes of their own: a Trainer of one refuses callbacks and modules of the other,
# with "Expected a parent" (Lightning #17485).
LIGHTNING = lightning_name()
PACKAGE = LIGHTNING.partition(".")[0]
OTHER = next(name for name in FABRIC if name != LIGHTNING)

# Looked up when a name is used (PEP 562): some of these modules take long to import, or lack what they need.
_HOMES = {  # as above, for those that run
    "fabric.plugins": ("CheckpointIO",),
    "fabric.utilities.cloud_io": ("get_filesystem",),
    "fabric.utilities.data": ("sized_len",),
    "fabric.utilities.throughput": ("get_available_flops",),
    "pytorch": ("Callback", "LightningDataModule", "LightningModule", "Trainer"),
    "pytorch.callbacks": (
        "BasePredictionWriter",
        "BatchSizeFinder",
        "Checkpoint",
        "EarlyStopping",
        "GradientAccumulationScheduler",
        "LearningRateFinder",
        "ModelCheckpoint",
        "ModelPruning",
        "ModelSummary",
        "ProgressBar",
        "StochasticWeightAveraging",
        "ThroughputMonitor",
        "Timer",
    ),
    "pytorch.cli": ("LightningArgumentParser", "LightningCLI", "SaveConfigCallback"),
    "pytorch.loggers": ("CSVLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
    "pytorch.loggers.csv_logs": ("ExperimentWriter",),
    "pytorch.plugins.environments": ("SLURMEnvironment",),
    "pytorch.plugins.io": ("TorchCheckpointIO",),
    "pytorch.strategies": (
        "DDPStrategy",
        "DeepSpeedStrategy",
        "FSDPStrategy",
        "ModelParallelStrategy",
        "ParallelStrategy",
        "Strategy",
    ),
    "pytorch.trainer.states": ("TrainerFn",),
    "pytorch.utilities": ("CombinedLoader",),
    "pytorch.utilities.exceptions": ("MisconfigurationException",),
    "pytorch.utilities.model_helpers": ("is_overridden",),
    "pytorch.utilities.rank_zero": ("rank_zero_info", "rank_zero_warn"),
    "pytorch.utilities.types": ("LRSchedulerConfig",),
    "pytorch.utilities.warnings": ("PossibleUserWarning",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def import_lightning(path: str) -> Any:
    """Import a module of Lightning, for what is private in it: "fabric.utilities.load", "pytorch.core.saving"."""
    package, dot, rest = path.partition(".")
    return import_module({"pytorch": LIGHTNING, "fabric": FABRIC[LIGHTNING]}[package] + dot + rest)


def lightning_version() -> str:
    """Return the version of Lightning."""
    version: str = import_module(PACKAGE).__version__
    return version


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_lightning(_HOME_OF[name]), name)


def other_flavor(kind: type) -> str:
    """Return what to do where a class comes from the Lightning that was not taken; nothing where it does not."""
    if not any(f"{base.__module__}.".startswith(f"{OTHER}.") for base in kind.__mro__):
        return ""
    return (
        f"{kind.__name__} comes from `{OTHER}`, and lightning_tricks works with `{LIGHTNING}` in this process: import "
        f"`{OTHER}`, or the library that imports it, before `{LIGHTNING}` and lightning_tricks, or set "
        f"{VARIABLE}={OTHER} in the environment."
    )
