"""The training tricks that everybody copies into Lightning code, each correct, free and one line long."""

TYPE_CHECKING = False  # as type checkers take it: `typing` would be most of what importing the package costs
if TYPE_CHECKING:
    __all__: list[str]

    from lightning_tricks._version import __version__ as __version__
    from lightning_tricks.auto_resume import AutoResume as AutoResume
    from lightning_tricks.calibration import CalibratedClassifier as CalibratedClassifier
    from lightning_tricks.calibration import Calibration as Calibration
    from lightning_tricks.calibration import calibrate as calibrate
    from lightning_tricks.checkpoint_remapping import CheckpointRemapping as CheckpointRemapping
    from lightning_tricks.checkpoint_remapping import align as align
    from lightning_tricks.checkpoint_remapping import load_weights as load_weights
    from lightning_tricks.checkpoint_remapping import read_checkpoint as read_checkpoint
    from lightning_tricks.checkpoint_remapping import remap_keys as remap_keys
    from lightning_tricks.checkpoint_remapping import replace_head as replace_head
    from lightning_tricks.checkpoint_remapping import save_weights as save_weights
    from lightning_tricks.conformal import ConformalClassifier as ConformalClassifier
    from lightning_tricks.conformal import ConformalRegressor as ConformalRegressor
    from lightning_tricks.devices import CudaMemory as CudaMemory
    from lightning_tricks.devices import DeviceMonitor as DeviceMonitor
    from lightning_tricks.devices import NvtxRanges as NvtxRanges
    from lightning_tricks.devices import limit_memory as limit_memory
    from lightning_tricks.devices import list_gpus as list_gpus
    from lightning_tricks.devices import memory_report as memory_report
    from lightning_tricks.devices import select_gpus as select_gpus
    from lightning_tricks.ensembles import AdversarialTrainingClassifier as AdversarialTrainingClassifier
    from lightning_tricks.ensembles import AdversarialTrainingRegressor as AdversarialTrainingRegressor
    from lightning_tricks.ensembles import BaggingClassifier as BaggingClassifier
    from lightning_tricks.ensembles import BaggingRegressor as BaggingRegressor
    from lightning_tricks.ensembles import FastGeometricClassifier as FastGeometricClassifier
    from lightning_tricks.ensembles import FastGeometricRegressor as FastGeometricRegressor
    from lightning_tricks.ensembles import FusionClassifier as FusionClassifier
    from lightning_tricks.ensembles import FusionRegressor as FusionRegressor
    from lightning_tricks.ensembles import GradientBoostingClassifier as GradientBoostingClassifier
    from lightning_tricks.ensembles import GradientBoostingRegressor as GradientBoostingRegressor
    from lightning_tricks.ensembles import NeuralForestClassifier as NeuralForestClassifier
    from lightning_tricks.ensembles import NeuralForestRegressor as NeuralForestRegressor
    from lightning_tricks.ensembles import SnapshotEnsembleClassifier as SnapshotEnsembleClassifier
    from lightning_tricks.ensembles import SnapshotEnsembleRegressor as SnapshotEnsembleRegressor
    from lightning_tricks.ensembles import SoftGradientBoostingClassifier as SoftGradientBoostingClassifier
    from lightning_tricks.ensembles import SoftGradientBoostingRegressor as SoftGradientBoostingRegressor
    from lightning_tricks.ensembles import StackingClassifier as StackingClassifier
    from lightning_tricks.ensembles import StackingRegressor as StackingRegressor
    from lightning_tricks.ensembles import VotingClassifier as VotingClassifier
    from lightning_tricks.ensembles import VotingRegressor as VotingRegressor
    from lightning_tricks.ensembles import cross_validate as cross_validate
    from lightning_tricks.finetuning import Adapters as Adapters
    from lightning_tricks.finetuning import GradualUnfreezing as GradualUnfreezing
    from lightning_tricks.finetuning import LoRA as LoRA
    from lightning_tricks.finetuning import PrefixTuning as PrefixTuning
    from lightning_tricks.finetuning import TrainableCheckpoint as TrainableCheckpoint
    from lightning_tricks.flops import FlopsReport as FlopsReport
    from lightning_tricks.flops import count_flops as count_flops
    from lightning_tricks.gradient_clipping import AGC as AGC
    from lightning_tricks.gradient_clipping import ClipValue as ClipValue
    from lightning_tricks.gradient_clipping import GradientClipping as GradientClipping
    from lightning_tricks.gradient_clipping import PercentileClip as PercentileClip
    from lightning_tricks.gradient_clipping import ZScoreClip as ZScoreClip
    from lightning_tricks.gradient_clipping import adaptive_clip_grad_ as adaptive_clip_grad_
    from lightning_tricks.gradient_clipping import clip_grad_norm_ as clip_grad_norm_
    from lightning_tricks.gradient_clipping import clip_grad_value_ as clip_grad_value_
    from lightning_tricks.hang_watch import HangWatch as HangWatch
    from lightning_tricks.images import ImageLogger as ImageLogger
    from lightning_tricks.images import denormalize as denormalize
    from lightning_tricks.images import image_grid as image_grid
    from lightning_tricks.images import overlay_masks as overlay_masks
    from lightning_tricks.images import to_numpy as to_numpy
    from lightning_tricks.images import to_pil as to_pil
    from lightning_tricks.images import to_tensor as to_tensor
    from lightning_tricks.lr_schedules import OptimizerSpec as OptimizerSpec
    from lightning_tricks.lr_schedules import ScheduleSpec as ScheduleSpec
    from lightning_tricks.metrics import MetricsMonitor as MetricsMonitor
    from lightning_tricks.metrics import MetricSuite as MetricSuite
    from lightning_tricks.metrics import binary_metrics as binary_metrics
    from lightning_tricks.metrics import calibration_metrics as calibration_metrics
    from lightning_tricks.metrics import detection_metrics as detection_metrics
    from lightning_tricks.metrics import multiclass_metrics as multiclass_metrics
    from lightning_tricks.metrics import multilabel_metrics as multilabel_metrics
    from lightning_tricks.metrics import ood_metrics as ood_metrics
    from lightning_tricks.metrics import regression_metrics as regression_metrics
    from lightning_tricks.metrics import retrieval_metrics as retrieval_metrics
    from lightning_tricks.metrics import segmentation_metrics as segmentation_metrics
    from lightning_tricks.microbatching import Microbatching as Microbatching
    from lightning_tricks.mixin import TricksMixin as TricksMixin
    from lightning_tricks.model_report import ModelReport as ModelReport
    from lightning_tricks.model_report import summarize_model as summarize_model
    from lightning_tricks.predictions import PredictionWriter as PredictionWriter
    from lightning_tricks.restore_best import RestoreBest as RestoreBest
    from lightning_tricks.run_fingerprint import RunFingerprint as RunFingerprint
    from lightning_tricks.run_fingerprint import assert_reproducible as assert_reproducible
    from lightning_tricks.run_report import RunReport as RunReport
    from lightning_tricks.seeding import SeedEverything as SeedEverything
    from lightning_tricks.seeding import capture_rng_state as capture_rng_state
    from lightning_tricks.seeding import isolated_rng as isolated_rng
    from lightning_tricks.seeding import restore_rng_state as restore_rng_state
    from lightning_tricks.seeding import seed_everything as seed_everything
    from lightning_tricks.spike_guard import SpikeGuard as SpikeGuard
    from lightning_tricks.tricks import Tricks as Tricks
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
