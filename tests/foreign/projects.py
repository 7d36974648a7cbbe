"""LightningModules that others publish, each built and given small data in a few lines: name -> `Project`.

A script takes a `Job` of tests/styles/frame.py, whose `fit` adds the callbacks. Nothing is downloaded while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.styles.frame import BATCHES, Job

SAMPLES = 4 * BATCHES
SCRIPTS: dict[str, Project] = {}


@dataclass(frozen=True)
class Project:
    """A script that trains a module of a project.

    Args:
        script: The script.
        package: The project's name on the package index, with the version that was last seen to work.
        needs: What the project imports, and does not ask for.
        other_import: Whether its modules are of `pytorch_lightning`.
        note: What explains its row in the table.
    """

    script: Callable[[Any], None]
    package: str
    needs: tuple[str, ...] = ()
    other_import: bool = False
    note: str = ""


def of(
    package: str, *needs: str, other_import: bool = False, note: str = ""
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def enter(script: Callable[[Any], None]) -> Callable[[Any], None]:
        SCRIPTS[script.__name__] = Project(script, package, needs, other_import, note)
        return script

    return enter


class Samples(Dataset):
    """As many samples as an epoch takes, each made from its index."""

    def __init__(self, make: Callable[[torch.Generator], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(torch.Generator().manual_seed(index))


def loader(make: Callable[[torch.Generator], Any], **arguments: Any) -> DataLoader[Any]:
    return DataLoader(Samples(make), **{"batch_size": 4, "shuffle": True, **arguments})


def image(generator: torch.Generator, side: int = 32) -> torch.Tensor:
    return torch.rand(3, side, side, generator=generator)


# Lightning itself


@of("lightning")
def boring_model(job: Job) -> None:
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    job.fit(BoringModel(), datamodule=BoringDataModule())


@of("lightning")
def manual_optimization(job: Job) -> None:
    from lightning.pytorch.demos.boring_classes import BoringDataModuleNoLen, ManualOptimBoringModel

    job.fit(ManualOptimBoringModel(), datamodule=BoringDataModuleNoLen())


@of("lightning", "requests")
def transformer(job: Job) -> None:
    from lightning.pytorch.demos.transformer import LightningTransformer

    class NoDownload(LightningTransformer):
        def prepare_data(self) -> None:
            """Nothing: the words are made here."""

    words = loader(lambda g: tuple(torch.randint(20, (8,), generator=g) for _ in range(2)))
    job.fit(NoDownload(vocab_size=20), words)


@of("lightning", "requests")
def long_short_term_memory(job: Job) -> None:
    from lightning.pytorch.demos.lstm import LightningLSTM

    class NoDownload(LightningLSTM):
        def prepare_data(self) -> None:
            """Nothing: the words are made here."""

    words = loader(lambda g: tuple(torch.randint(20, (8,), generator=g) for _ in range(2)), drop_last=True)
    job.fit(NoDownload(vocab_size=20), words)


@of("lightning")
def stream_of_random_points(job: Job) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomIterableDatasetWithLen

    job.fit(BoringModel(), DataLoader(RandomIterableDatasetWithLen(32, 9)))


@of("lightning")
def dicts_of_random_points(job: Job) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDictDataset

    class OfDicts(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"] + 0.1 * batch["b"], batch_idx)

    job.fit(OfDicts(), DataLoader(RandomDictDataset(32, 9), shuffle=True))


# pytorch-forecasting


def _series() -> Any:
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data.examples import generate_ar_data

    frame = generate_ar_data(seasonality=10.0, timesteps=24, n_series=6, seed=42)
    frame["series"] = frame["series"].astype(str)
    frame["time_idx"] = frame["time_idx"].astype(int)
    return TimeSeriesDataSet(
        frame,
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["time_idx"],
        static_categoricals=["series"],
    )


@of("pytorch-forecasting==1.8.0")
def temporal_fusion_transformer(job: Job) -> None:
    from pytorch_forecasting import TemporalFusionTransformer

    data = _series()
    module = TemporalFusionTransformer.from_dataset(data, hidden_size=4, attention_head_size=1, log_interval=-1)
    job.fit(module, data.to_dataloader(batch_size=8), data.to_dataloader(train=False, batch_size=8))


@of("pytorch-forecasting==1.8.0")
def deep_autoregression(job: Job) -> None:
    from pytorch_forecasting import DeepAR

    data = _series()
    module = DeepAR.from_dataset(data, hidden_size=4, rnn_layers=2, log_interval=-1)
    job.fit(module, data.to_dataloader(batch_size=8), data.to_dataloader(train=False, batch_size=8))


# chemprop


@of("chemprop==2.3.1")
def message_passing(job: Job) -> None:
    from chemprop import data, models
    from chemprop import nn as parts

    molecules = ["C" * (1 + i % 6) + ("O" if i % 2 else "N") for i in range(SAMPLES)]
    points = [data.MoleculeDatapoint.from_smi(smi, np.array([i % 5.0])) for i, smi in enumerate(molecules)]
    module = models.MPNN(parts.BondMessagePassing(d_h=8), parts.MeanAggregation(), parts.RegressionFFN(input_dim=8))
    train, held_out = (data.build_dataloader(data.MoleculeDataset(points), 4, shuffle=s) for s in (True, False))
    job.fit(module, train, held_out)


# lightning-uq-box


def _uncertain(job: Job, make: Callable[[Any], Any]) -> None:
    from lightning_uq_box.datamodules import ToyHeteroscedasticDatamodule
    from lightning_uq_box.models import MLP

    data = ToyHeteroscedasticDatamodule(batch_size=20)
    job.fit(make(MLP(n_hidden=[8, 8], n_outputs=2, dropout_p=0.1)), datamodule=data)


@of("lightning-uq-box==0.2.0")
def mean_and_variance(job: Job) -> None:
    from lightning_uq_box.uq_methods import MVERegression

    _uncertain(job, lambda net: MVERegression(net, burnin_epochs=1))


@of("lightning-uq-box==0.2.0")
def variational_inference(job: Job) -> None:
    from lightning_uq_box.models import MLP
    from lightning_uq_box.uq_methods import BNN_VI_ELBO_Regression

    net = MLP(n_hidden=[8, 8], n_outputs=1)
    _uncertain(job, lambda _: BNN_VI_ELBO_Regression(net, nn.MSELoss(reduction="none"), burnin_epochs=1))


@of(
    "lightning-uq-box==0.2.0",
    note="Its on_train_start creates a folder and fails where it exists, so that no run can start twice in a place.",
)
def langevin_dynamics(job: Job) -> None:
    from lightning_uq_box.uq_methods import SGLDRegression

    _uncertain(job, lambda net: SGLDRegression(net, nn.MSELoss(), 1e-3, 0.0, 0.1, burnin_epochs=1, n_sgld_samples=1))


# torchgeo


@of("torchgeo==0.8.1", "requests")
def scene_classification(job: Job) -> None:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask(model="resnet18", weights=None, in_channels=3, num_classes=3)
    scenes = loader(lambda g: {"image": image(g), "label": torch.randint(3, (), generator=g)})
    job.fit(task, scenes, scenes)


@of("torchgeo==0.8.1", "requests")
def segmentation_of_scenes(job: Job) -> None:
    from torchgeo.trainers import SemanticSegmentationTask

    task = SemanticSegmentationTask(model="unet", backbone="resnet18", weights=None, in_channels=3, num_classes=3)
    scenes = loader(lambda g: {"image": image(g), "mask": torch.randint(3, (32, 32), generator=g)})
    job.fit(task, scenes, scenes)


@of("torchgeo==0.8.1", "requests")
def bootstrap_your_own_latent(job: Job) -> None:
    from torchgeo.trainers import BYOLTask

    job.fit(BYOLTask(model="resnet18", weights=None, in_channels=3), loader(lambda g: {"image": image(g)}))


@of("torchgeo==0.8.1", "requests")
def contrast_with_momentum(job: Job) -> None:
    from torchgeo.trainers import MoCoTask

    task = MoCoTask(model="resnet18", in_channels=3, version=2, memory_bank_size=16, size=32)
    job.fit(task, loader(lambda g: {"image": image(g)}))


# scvi-tools


@of("scvi-tools==1.4.2")
def cells(job: Job) -> None:
    import scvi
    from scvi.dataloaders import DataSplitter
    from scvi.train import TrainingPlan

    scvi.settings.seed = 1  # or it splits the cells anew in each process
    counts = scvi.data.synthetic_iid(batch_size=30, n_genes=20)
    scvi.model.SCVI.setup_anndata(counts, batch_key="batch")
    model = scvi.model.SCVI(counts, n_hidden=8, n_latent=3)
    plan = TrainingPlan(model.module, n_steps_kl_warmup=20)
    job.fit(plan, datamodule=DataSplitter(model.adata_manager, batch_size=8))


# anomalib


@of("anomalib==2.7.0")
def anomalies(job: Job) -> None:
    from anomalib.data import ImageBatch
    from anomalib.models import Ganomaly

    def batch(images: list[torch.Tensor]) -> ImageBatch:
        return ImageBatch(image=torch.stack(images))

    module = Ganomaly(batch_size=4, n_features=8, latent_vec_size=8, evaluator=False, visualizer=False)
    job.fit(module, loader(lambda g: image(g, 64), collate_fn=batch), num_sanity_val_steps=0)


# gluonts


@of("gluonts[torch]==0.17.0")
def forecast_by_deep_autoregression(job: Job) -> None:
    from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule

    sizes = {"freq": "D", "context_length": 6, "prediction_length": 3, "num_feat_dynamic_real": 1}
    more = {
        "num_feat_static_real": 1,
        "num_feat_static_cat": 1,
        "cardinality": [2],
        "lags_seq": [1, 2],
        "hidden_size": 4,
    }
    module = DeepARLightningModule(model_kwargs={**sizes, **more})

    def sample(g: torch.Generator) -> dict[str, torch.Tensor]:
        def random(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=g)

        return {
            "feat_static_cat": torch.zeros(1, dtype=torch.long),
            "feat_static_real": random(1),
            "past_time_feat": random(module.model._past_length, 1),
            "past_target": random(module.model._past_length),
            "past_observed_values": torch.ones(module.model._past_length),
            "future_time_feat": random(3, 1),
            "future_target": random(3),
            "future_observed_values": torch.ones(3),
        }

    job.fit(module, loader(sample))


# rl4co


def _tour(job: Job, model: str, arguments: dict[str, Any], reloaded: bool) -> None:
    import rl4co.models
    from rl4co.envs import TSPEnv

    sizes = {"train_data_size": 36, "val_data_size": 8, "test_data_size": 8, "batch_size": 4}
    net = {"embed_dim": 16, "num_heads": 2, "num_encoder_layers": 1, "feedforward_hidden": 8}
    env = TSPEnv(generator_params={"num_loc": 5})
    module = getattr(rl4co.models, model)(env, policy_kwargs=net, **arguments, **sizes)
    job.fit(module, reload_dataloaders_every_n_epochs=int(reloaded))


@of("rl4co==0.7.0")
def travelling_salesman(job: Job) -> None:
    _tour(job, "POMO", {}, reloaded=True)  # as the project's own Trainer does it


@of(
    "rl4co==0.7.0",
    note="At an epoch's end the module draws another data set, which its loader does not get: the project's Trainer "
    "reloads it. A resumed run trains on the new one, the run that is not stopped on the first.",
)
def travelling_salesman_without_reloading(job: Job) -> None:
    _tour(job, "POMO", {}, reloaded=False)


@of("rl4co==0.7.0")
def attention_and_a_mean_reward(job: Job) -> None:
    _tour(job, "AttentionModel", {"baseline": "exponential"}, reloaded=True)


# terratorch


@of("terratorch==1.2.11")
def regression_of_pixels(job: Job) -> None:
    from terratorch.tasks import PixelwiseRegressionTask

    arguments = {"backbone": "timm_resnet18", "backbone_pretrained": False, "decoder": "FCNDecoder"}
    task = PixelwiseRegressionTask(
        model_args={**arguments, "backbone_in_chans": 3, "decoder_channels": 8},
        model_factory="EncoderDecoderFactory",
        loss="mse",
        lr=1e-3,
    )
    scenes = loader(lambda g: {"image": image(g, 64), "mask": torch.rand(64, 64, generator=g)})
    job.fit(task, scenes)


# What is of `pytorch_lightning`


@of("neuralforecast==3.3.0", other_import=True)
def forecast_by_hierarchical_interpolation(job: Job) -> None:
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS
    from neuralforecast.utils import AirPassengersDF

    arguments = job.arguments(max_steps=2 * BATCHES)
    del arguments["max_epochs"]
    NeuralForecast([NHITS(h=4, input_size=8, mlp_units=[[8, 8]] * 3, **arguments)], "ME").fit(AirPassengersDF)


@of("darts==0.48.1", "pytorch_lightning", other_import=True)
def forecast_by_basis_expansion(job: Job) -> None:
    from darts.models import NBEATSModel
    from darts.utils.timeseries_generation import sine_timeseries

    model = NBEATSModel(8, 4, n_epochs=2, num_layers=1, layer_widths=8, batch_size=4, pl_trainer_kwargs=job.arguments())
    model.fit(sine_timeseries(length=40), val_series=sine_timeseries(length=20))


@of("pytorch-tabular==1.2.0", "requests", other_import=True)
def tables(job: Job) -> None:
    import pandas
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    arguments = job.arguments()
    callbacks = arguments.pop("callbacks")
    own = {name: arguments.pop(name) for name in ("max_epochs", "accelerator")}
    off = {"checkpoints": None, "load_best": False, "early_stopping": None, "progress_bar": "none"}
    for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        del arguments[name]
    model = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=["x"]),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="8"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=4, trainer_kwargs=arguments, **own, **off),
        verbose=False,
    )
    model.fit(pandas.DataFrame({"x": np.arange(40.0), "y": np.arange(40.0)}), callbacks=callbacks)


@of("lightly==1.5.22", other_import=True)
def redundancy_of_views(job: Job) -> None:
    from lightly.loss import BarlowTwinsLoss
    from lightly.models.modules import BarlowTwinsProjectionHead
    from pytorch_lightning import LightningModule

    class BarlowTwins(LightningModule):
        """As the examples of the project are, with a small backbone."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), nn.ReLU())
            self.projection_head = BarlowTwinsProjectionHead(16, 16, 8)
            self.criterion = BarlowTwinsLoss()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            views = (self.projection_head(self.backbone(view)) for view in batch)
            loss = self.criterion(*views)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    job.fit(BarlowTwins(), loader(lambda g: (image(g), image(g))))
