"""Callbacks for PyTorch Lightning: long, preemptible, multi-GPU runs that resume exactly and measure correctly."""

TYPE_CHECKING = False  # as type checkers take it: `typing` would be most of what importing the package costs
if TYPE_CHECKING:
    from lightning_tricks._version import __version__ as __version__
    from lightning_tricks.auto_resume import AutoResume as AutoResume
    from lightning_tricks.calibration import calibrate as calibrate
    from lightning_tricks.checkpoint_remapping import CheckpointRemapping as CheckpointRemapping
    from lightning_tricks.checkpoint_remapping import load_weights as load_weights
    from lightning_tricks.checkpoint_remapping import read_checkpoint as read_checkpoint
    from lightning_tricks.checkpoint_remapping import replace_head as replace_head
    from lightning_tricks.checkpoint_remapping import save_weights as save_weights
    from lightning_tricks.devices import CudaMemory as CudaMemory
    from lightning_tricks.devices import DeviceMonitor as DeviceMonitor
    from lightning_tricks.devices import NvtxRanges as NvtxRanges
    from lightning_tricks.devices import list_gpus as list_gpus
    from lightning_tricks.devices import select_gpus as select_gpus
    from lightning_tricks.end_together import EndTogether as EndTogether
    from lightning_tricks.finetuning import Adapters as Adapters
    from lightning_tricks.finetuning import GradualUnfreezing as GradualUnfreezing
    from lightning_tricks.finetuning import LoRA as LoRA
    from lightning_tricks.finetuning import PrefixTuning as PrefixTuning
    from lightning_tricks.finetuning import TrainableCheckpoint as TrainableCheckpoint
    from lightning_tricks.flops import FlopsReport as FlopsReport
    from lightning_tricks.flops import count_flops as count_flops
    from lightning_tricks.gradient_clipping import GradientClipping as GradientClipping
    from lightning_tricks.hang_watch import HangWatch as HangWatch
    from lightning_tricks.images import ImageLogger as ImageLogger
    from lightning_tricks.lr_schedules import OptimizerSpec as OptimizerSpec
    from lightning_tricks.lr_schedules import ScheduleSpec as ScheduleSpec
    from lightning_tricks.metrics import MetricsMonitor as MetricsMonitor
    from lightning_tricks.microbatching import Microbatching as Microbatching
    from lightning_tricks.mixin import TricksMixin as TricksMixin
    from lightning_tricks.model_report import ModelReport as ModelReport
    from lightning_tricks.moving_average import ExponentialMovingAverage as ExponentialMovingAverage
    from lightning_tricks.predictions import PredictionWriter as PredictionWriter
    from lightning_tricks.restore_best import RestoreBest as RestoreBest
    from lightning_tricks.run_fingerprint import RunFingerprint as RunFingerprint
    from lightning_tricks.run_report import RunReport as RunReport
    from lightning_tricks.seeding import SeedEverything as SeedEverything
    from lightning_tricks.seeding import seed_everything as seed_everything
    from lightning_tricks.spike_guard import SpikeGuard as SpikeGuard
    from lightning_tricks.tricks import Tricks as Tricks
    from lightning_tricks.validate_first import ValidateFirst as ValidateFirst
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
