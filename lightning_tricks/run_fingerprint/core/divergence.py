"""The first difference of two runs, and how it is described."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_tricks.run_fingerprint.core.record import IncompleteResume


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first difference of two runs.

    Attributes:
        step: How many optimizer steps were done when the batch began.
        epoch: The batch's epoch.
        batch_idx: The batch's index in the epoch; -1 for the initial weights of the runs.
        rank: The rank on which the difference was recorded.
        kind: "start" (the weights before the first batch), "data", "forward", "gradient" or "update".
        layer: The first layer whose output differs, or the first parameter or part of the batch that does, or "loss";
            None where the runs were recorded with `detail="step"`. Of gradients, which are computed from the loss on,
            it is the one nearest to the loss.
        call: 1 if the layer differs at its first call within the batch, 2 at its second, ...
        num_differing: How many values differ of those that were computed together with it.
        num_compared: How many values were computed together with it.
        last_equal_layer: For "forward" by layer: the layer that ran before it, whose output is equal, or None.
        missing_in: The run that lacks the value, "A" or "B", or "".
        last_equal_step: The last equal step, if the steps between it and this one were not recorded, or None.
    """

    step: int
    epoch: int
    batch_idx: int
    rank: int
    kind: str
    layer: str | None = None
    call: int = 1
    num_differing: int = 1
    num_compared: int = 1
    last_equal_layer: str | None = None
    missing_in: str = ""
    last_equal_step: int | None = None

    def __str__(self) -> str:
        place = "before the first batch" if self.batch_idx < 0 else f"in epoch {self.epoch}, batch {self.batch_idx}"
        of_rank = f" on rank {self.rank}" if self.rank else ""
        share = f" ({self.num_differing} of {self.num_compared} differ)" if self.num_compared > 1 else ""
        verdict = (_VERDICTS if self.layer is None else _VERDICTS_BY_LAYER)[self.kind].format(self.layer)
        time = f" at call {self.call} within the batch" if self.call > 1 else ""
        lines = [f"The runs diverge at step {self.step}, {place}{of_rank}: {self.kind}. {verdict}{time}{share}."]
        if self.missing_in:
            lines.append(f"Run {self.missing_in} has no such value.")
        if self.last_equal_layer is not None:
            lines.append(f"The output of the layer that ran before it, {self.last_equal_layer}, is equal.")
        if self.last_equal_step is None:
            lines.append(_CAUSES[self.kind])
        else:
            lines.append(
                f"They diverged after step {self.last_equal_step}: every_n_train_steps=1 records the steps in between."
            )
        if self.layer is None and self.kind != "data":
            lines.append('Record with detail="layer" to learn in which layer.')
        return "\n".join(lines)


_VERDICTS = {
    "start": "The weights differ",
    "data": "The batch differs",
    "forward": "The loss differs",
    "gradient": "The gradients differ",
    "update": "The weights differ after the update",
}
_VERDICTS_BY_LAYER = {
    "start": "{} differs",
    "data": "Part {} of the batch differs",
    "forward": "The output of {} differs",
    "gradient": "The gradient of {} differs",
    "update": "{} differs after the update",
}
_CAUSES = {
    "start": "Look at the seed, at what is created before it is set, and at the checkpoint that was loaded.",
    "data": "Look at the order of samples, at augmentation, and at the seeds of workers.",
    "forward": "Batch and weights were equal: look at dropout and other random numbers, at kernels that are not "
    "deterministic, and at what changes weights between steps.",
    "gradient": "Batch and forward pass were equal: look at kernels whose backward is not deterministic.",
    "update": "The gradients were equal: look at the optimizer's state, the learning rate, and what changes weights.",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison of two runs.

    Attributes:
        divergence: The first difference, or None.
        equal_batches: How many batches are equal before it, over all ranks.
        longer_run: The run that has more steps than the other, "A" or "B", or "".
        incomplete_resumes: The resumes before the first difference that could not restore everything, each with the
            name of its run, "A" or "B".
    """

    divergence: Divergence | None
    equal_batches: int
    longer_run: str = ""
    incomplete_resumes: tuple[tuple[str, IncompleteResume], ...] = ()

    def __str__(self) -> str:
        equal = f"{self.equal_batches:,} {'batch is' if self.equal_batches == 1 else 'batches are'} equal"
        if self.divergence is not None:
            return "\n".join(
                [str(self.divergence), *map(_describe_resume, self.incomplete_resumes), f"{equal} before it."]
            )
        more = f" Run {self.longer_run} has more steps." if self.longer_run else ""
        return "\n".join(
            [f"No difference: {equal}, bit for bit.{more}", *map(_describe_resume, self.incomplete_resumes)]
        )


def _describe_resume(resumed: tuple[str, IncompleteResume]) -> str:
    run, resume = resumed
    return f"{run} was resumed at step {resume.step}, where this was not restored: {', '.join(resume.not_restored)}."
