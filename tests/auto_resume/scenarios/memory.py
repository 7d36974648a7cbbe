"""What modules remember from step to step, outside of parameters."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.auto_resume.scenarios.frame import Job, Net, scenario


class Queued(Net):
    """Compares each batch with those before, which it keeps in a buffer that grows."""

    persistent, most = True, 40

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 8), persistent=self.persistent)

    def loss(self, batch: Any) -> torch.Tensor:
        code = self.body(batch[0])
        loss = nn.functional.cross_entropy(self.head(code), batch[1])
        if self.trainer.training:
            if len(self.queue):
                loss = loss + 0.1 * (code @ self.queue.T).logsumexp(1).mean()
            self.queue = torch.cat([self.queue, code.detach()])[-self.most :]
        return loss


@scenario()  # of two forked ranks Lightning cannot take such a buffer back
def queue_that_grows(job: Job) -> None:
    job.seed()
    job.fit(Queued())


@scenario()
def queue_that_grows_and_is_not_saved(job: Job) -> None:
    class Unsaved(Queued):
        persistent = False

    job.seed()
    job.fit(Unsaved())


@scenario(ranks=(1, 2))
def buffer_bound_anew(job: Job) -> None:
    class Centered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3), persistent=False)
            self.register_buffer("first", None)

        def loss(self, batch: Any) -> torch.Tensor:
            scores = self(batch[0])
            if self.trainer.training:
                self.center = 0.9 * self.center + 0.1 * scores.detach().mean(0)
                if self.first is None:
                    self.first = scores.detach().mean(0)
                scores = scores - self.center + 0.1 * self.first
            return nn.functional.cross_entropy(scores, batch[1])

    job.seed()
    job.fit(Centered())


@scenario(ranks=(1, 2))
def outputs_gathered(job: Job) -> None:
    class Gathers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[torch.Tensor] = []
            self.by_class: dict[int, list[float]] = defaultdict(list)
            self.recent: deque[float] = deque(maxlen=5)
            self.val_outputs: list[dict[str, torch.Tensor]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.outputs.append(loss.detach())
            self.by_class[int(batch[1][0])].append(float(loss))
            self.recent.append(float(loss))
            return {"loss": loss * (1 + 0.01 * sum(self.recent))}

        def on_train_epoch_end(self) -> None:
            self.log("gathered", torch.stack(self.outputs).median())
            for label in sorted(self.by_class):
                self.log(f"class/{label}", sum(self.by_class[label]))
            self.outputs.clear()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_outputs.append({"loss": self.loss(batch)})

        def on_validation_epoch_end(self) -> None:
            self.log("val_mean", torch.stack([one["loss"] for one in self.val_outputs]).mean())
            self.val_outputs = []

    job.seed()
    job.fit(Gathers())


class Replay:
    """Keeps samples, and gives some of them again."""

    def __init__(self, size: int) -> None:
        self.kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=size)

    def push(self, batch: Any) -> None:
        self.kept.extend(zip(*batch, strict=True))

    def draw(self, count: int) -> list[torch.Tensor]:
        chosen = random.sample(list(self.kept), min(count, len(self.kept)))
        return [torch.stack(part) for part in zip(*chosen, strict=True)]


@scenario()
def replay_buffer(job: Job) -> None:
    class Replays(Net):
        def __init__(self) -> None:
            super().__init__()
            self.replay = Replay(20)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.replay.push(batch)
            return super().training_step(self.replay.draw(6), batch_idx)

    job.seed()
    job.fit(Replays())


@scenario()
def generators_of_the_module(job: Job) -> None:
    class Draws(Net):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.Generator().manual_seed(1)
            self.chance, self.numbers = random.Random(2), np.random.default_rng(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0] + 0.1 * torch.randn(batch[0].shape, generator=self.noise)
            x = x * (1 + 0.1 * self.chance.random()) + 0.1 * float(self.numbers.normal())
            return super().training_step([x, batch[1]], batch_idx)

    job.seed()
    job.fit(Draws())


@scenario()
def teacher_in_a_list(job: Job) -> None:
    class Taught(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = [copy.deepcopy(self.body)]  # in no state dict, as nobody wants to save it

        def loss(self, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                wanted = self.teacher[0](batch[0])
            return super().loss(batch) + 0.1 * (self.body(batch[0]) - wanted).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                pairs = zip(self.teacher[0].parameters(), self.body.parameters(), strict=True)
                for own, other in pairs:
                    own.lerp_(other, 0.1)

    job.seed()
    job.fit(Taught())


@scenario()
def optimizer_of_the_module(job: Job) -> None:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.own = torch.optim.Adam([self.scale], lr=0.05)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

        def on_train_batch_end(self, *_: Any) -> None:
            self.own.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.05)

        def on_after_backward(self) -> None:
            self.scale.grad = self.scale.grad.clamp(-1, 1)

        def on_train_batch_start(self, *_: Any) -> None:
            self.own.zero_grad()

    job.seed()
    job.fit(Own())


@scenario()
def difficulty_by_loss(job: Job) -> None:
    class Adapts(Net):
        difficulty, seen = 0.1, 0
        losses: torch.Tensor | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += len(batch[0])
            x = batch[0] + self.difficulty * torch.randn_like(batch[0])
            loss = super().training_step([x, batch[1]], batch_idx)
            own = loss.detach().reshape(1)
            self.losses = own if self.losses is None else torch.cat([self.losses, own])
            if self.losses[-3:].mean() < self.losses.mean():
                self.difficulty *= 1.2
            self.log("difficulty", self.difficulty)
            return loss

    job.seed()
    job.fit(Adapts())
