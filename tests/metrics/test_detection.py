"""detection_metrics: pycocotools over all images is the reference, whatever the batches, ranks and precisions."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_tricks import MetricsMonitor
from lightning_tricks.metrics import MetricsError, MetricSuite, preset
from tests.metrics.tables import numbers, trainer

pytest.importorskip("pycocotools", reason="the extra 'detection' is not installed")

from lightning_tricks.metrics import detection_metrics
from tests.small import cases

pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")

NAMES = ["cat", "dog", "cow"]


def table(images=11, ties=False, masks=False, seed=0):
    """Images with 0 to 4 objects of the first two classes, found by halves, and a false one of the third."""
    generator = torch.Generator().manual_seed(seed)
    preds, target = [], []
    for image in range(images):
        count = image % 5
        corner = torch.rand(count, 2, generator=generator) * 60
        boxes = torch.cat([corner, corner + 8 + torch.rand(count, 2, generator=generator) * 120], 1)
        labels = torch.randint(0, 2, (count,), generator=generator)
        found = boxes + torch.randn(count, 4, generator=generator) * 3
        found = torch.cat([found, torch.tensor([[0.0, 0.0, 20.0, 20.0]])])
        scores = torch.rand(count + 1, generator=generator)
        if ties:
            scores = (scores * 2).round() / 2
        guessed = torch.cat([labels, torch.tensor([2 if image == 3 else 0])])
        preds.append({"boxes": found, "scores": scores, "labels": guessed})
        crowd = (torch.arange(count) == 3).long()
        target.append({"boxes": boxes, "labels": labels, "iscrowd": crowd, "image_id": image, "name": f"{image}.jpg"})
        if masks:
            for each in (preds[-1], target[-1]):
                each["masks"] = _masks(each.pop("boxes"))
    return preds, target


def _masks(boxes, size=200):
    rows = torch.arange(size)
    left, top, right, bottom = (boxes[:, side, None] for side in range(4))
    columns, lines = (rows >= left) & (rows < right), (rows >= top) & (rows < bottom)
    return lines[:, :, None] & columns[:, None, :]


def coco(preds, target, kind="bbox"):
    import numpy as np
    from pycocotools import mask as rle
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def shape(item, number):
        if kind == "bbox":
            x, y, right, bottom = item["boxes"][number].tolist()
            return {"bbox": [x, y, right - x, bottom - y], "area": (right - x) * (bottom - y)}
        code = rle.encode(np.asfortranarray(item["masks"][number].numpy().astype(np.uint8)))
        return {"segmentation": code, "area": float(rle.area(code))}

    def table_of(items, more):
        part, annotations = COCO(), []
        for image, item in enumerate(items):
            for number, label in enumerate(item["labels"].tolist()):
                place = {"id": len(annotations) + 1, "image_id": image, "category_id": label}
                annotations.append({**place, **shape(item, number), **more(item, number)})
        images = [{"id": image, "height": 200, "width": 200} for image in range(len(items))]
        part.dataset = {"images": images, "annotations": annotations, "categories": [{"id": n} for n in range(3)]}
        part.createIndex()
        return part

    truth = table_of(target, lambda item, number: {"iscrowd": int(item["iscrowd"][number])})
    found = table_of(preds, lambda item, number: {"iscrowd": 0, "score": float(item["scores"][number])})
    names = "map map_50 map_75 map_small map_medium map_large mar_1 mar_10 mar_100 mar_small mar_medium mar_large"
    result = {}
    for label in (None, 0, 1, 2):
        engine = COCOeval(truth, found, kind)
        engine.params.catIds = [0, 1, 2] if label is None else [label]
        engine.evaluate()
        engine.accumulate()
        engine.summarize()
        values = dict(zip(names.split(), engine.stats, strict=True))
        wanted = values if label is None else {f"{name}_{NAMES[label]}": values[name] for name in ("map", "mar_100")}
        result |= {name: value if value >= 0 else float("nan") for name, value in wanted.items()}
    return result


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_values_are_those_of_pycocotools(kind, batch, capsys):
    preds, target = table(masks=kind == "segm")
    suite = MetricSuite(detection_metrics(3, iou_type=kind), NAMES)
    for start in range(0, len(preds), batch):
        suite.update(preds=preds[start : start + batch], target=target[start : start + batch])
    ours = numbers(suite.compute())
    assert ours == pytest.approx(coco(preds, target, kind), abs=1e-6, nan_ok=True)
    assert 0.1 < ours["map"] < 0.9
    assert ours["map_cow"] != ours["map_cow"]  # the class has no object
    state = suite.state_dict()
    again = MetricSuite(detection_metrics(3, iou_type=kind), NAMES)
    again.load([state])
    assert numbers(again.compute()) == pytest.approx(ours, nan_ok=True)


def test_box_formats_averages_alone_and_no_images():
    preds, target = table()
    made = MetricSuite(detection_metrics(3))
    made.update(preds=preds, target=target)
    values = numbers(made.compute())
    assert len(values) == 12
    for parts in (preds, target):
        for item in parts:
            boxes = item["boxes"]
            item["boxes"] = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    other = MetricSuite(preset(task="detection", num_classes=3, box_format="xywh"))
    other.update(preds=preds, target=target)
    assert numbers(other.compute()) == pytest.approx(values, abs=1e-6, nan_ok=True)
    other.reset()
    other.update(preds=[], target=[])
    assert all(value != value for value in numbers(other.compute()).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    preds, target = table()
    halves = [{**item, "boxes": item["boxes"].to(dtype), "scores": item["scores"].to(dtype)} for item in preds]
    suite = MetricSuite(detection_metrics(3), NAMES)
    suite.update(preds=halves, target=target)
    floats = [{**item, "boxes": item["boxes"].float(), "scores": item["scores"].float()} for item in halves]
    again = MetricSuite(detection_metrics(3), NAMES)
    again.update(preds=floats, target=target)
    assert numbers(suite.compute()) == pytest.approx(numbers(again.compute()), nan_ok=True)


@cases(
    "change, words",
    (lambda preds, target: preds[4].pop("scores"), "scores"),
    (lambda preds, target: preds.pop(), "same length"),
    (lambda preds, target: target[4].update(labels=torch.tensor([0, 1, 2, 3])), "labels must be 0 to 2, got 3"),
    (lambda preds, target: preds[4].update(labels=torch.tensor([-1, 0, 0, 0, 0])), "labels must be 0 to 2, got -1"),
    (lambda preds, target: preds[4]["boxes"].mul_(torch.nan), "20 numbers of boxes and scores are NaN"),
    (lambda preds, target: target[4].update(boxes=target[4]["boxes"].flip(1)), 'give the preset box_format="xywh"'),
)
def test_a_first_batch_that_does_not_fit_is_refused(change, words):
    preds, target = table()
    change(preds, target)
    with pytest.raises(ValueError, match=words):
        MetricSuite(detection_metrics(3)).update(preds=preds, target=target)


@cases("change", lambda m: m.float(), lambda m: m[:, None], lambda m: m.long(), lambda m: m[:, ::2, ::2])
def test_masks_of_another_kind_are_refused(change):
    preds, target = table(masks=True)
    preds = [{**item, "masks": change(item["masks"])} for item in preds]
    with pytest.raises(ValueError, match=r"masks must be bool or uint8 of shape \(M, H, W\), .*give \(masks > 0.5\)"):
        MetricSuite(detection_metrics(3, iou_type="segm")).update(preds=preds, target=target)


def test_later_numbers_that_are_nan_make_all_values_nan():
    preds, target = table()
    suite = MetricSuite(detection_metrics(3))
    suite.update(preds=preds[:5], target=target[:5])
    state = suite.state_dict()
    suite.update(preds=[{**preds[4], "boxes": preds[4]["boxes"] * torch.nan}], target=target[4:5])
    assert suite.num_invalid() == 20
    assert all(value.isnan() for value in suite.compute().values())
    suite.load([state])
    assert not suite.compute()["map"].isnan()


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_classes must be a whole number >= 1, got 0"):
        detection_metrics(0)
    with pytest.raises(ValueError, match="box_format must be"):
        detection_metrics(3, box_format="yxyx")
    with pytest.raises(ValueError, match="class_names has 2 names, but the metric 'map' has 3 classes"):
        MetricsMonitor(detection_metrics(3), class_names=["a", "b"])


class _Detects(LightningModule):
    ties = False

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def step(self, batch, batch_idx):
        preds, target = table(ties=self.ties)
        images = [int(number) for number in batch]
        loss = self.net(batch[:, None].float()).mean()
        return {"loss": loss, "preds": [preds[n] for n in images], "target": [target[n] for n in images]}

    training_step = validation_step = step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _monitor(**arguments):
    return MetricsMonitor(detection_metrics(3), class_names=NAMES, best={"val/map_50": "max"}, **arguments)


def _loader(images=11):
    return DataLoader(torch.arange(images), 2)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("images", [1, 11])
def test_ranks_measure_what_one_process_does(images, ties, tmp_path, monkeypatch):
    monkeypatch.setattr(_Detects, "ties", ties)

    class Keeps(MetricsMonitor):
        def on_validation_epoch_end(self, trainer, pl_module):
            super().on_validation_epoch_end(trainer, pl_module)
            torch.save(numbers(trainer.callback_metrics), tmp_path / f"{trainer.world_size}.pt")

    for options in ({}, {"strategy": "ddp_fork", "devices": 2}):
        monitor = Keeps(detection_metrics(3), class_names=NAMES)
        trainer(monitor, **options).validate(_Detects(), _loader(images), verbose=False)
    alone, ranks = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    alone.pop("val/loss"), ranks.pop("val/loss")  # a mean over the batch
    assert ranks == pytest.approx(alone, nan_ok=True, abs=1e-7)
    if images > 1 and not ties:
        preds, target = table()
        assert alone == pytest.approx({f"val/{k}": v for k, v in coco(preds, target).items()}, nan_ok=True, abs=1e-6)


def test_loggers_get_the_main_values_and_the_table_those_of_classes(capsys):
    monitor = _monitor(verbose=True)
    fitter = trainer(monitor, max_epochs=1)
    fitter.fit(_Detects(), _loader(), _loader())
    printed = capsys.readouterr().out
    assert "cow" in printed
    assert "mar_100" in printed
    assert {key for key in fitter.logged_metrics if "map" in key or "mar" in key} == {
        f"{stage}/{name}" for stage in ("train", "val") for name in ("map", "map_50")
    }
    assert monitor.best["val/map_50"][0] == pytest.approx(fitter.callback_metrics["val/map_50"].item())


def test_a_step_that_returns_something_else_is_named():
    class Wrong(_Detects):
        def validation_step(self, batch, batch_idx):
            return {"preds": torch.zeros(2, 4), "target": torch.zeros(2, 4)}

    with pytest.raises(MetricsError, match=r"first batch of val: .*Sequence"):
        trainer(_monitor()).validate(Wrong(), _loader(), verbose=False)
