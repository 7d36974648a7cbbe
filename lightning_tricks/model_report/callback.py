"""`ModelReport`: the callback that reports on the model that a Trainer trains."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer, rank_zero_warn
from lightning_tricks._shared.checks import SENT_BY_AUTO_RESUME, check_count, check_path
from lightning_tricks._shared.dry_run.model_call import find_call, training_step_call
from lightning_tricks._shared.modules import describe_without_gradient, names_without_gradient
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.report_parts import Facts
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks._shared.text import describe_error, format_bytes
from lightning_tricks.model_report.functional import ModelReportSummary, summarize_call


class ModelReport(TrickCallback):
    """Report parameters, layers and memory of the model once per fit, and draw its autograd graph.

    The report is made after the first optimizer step, when gradients and optimizer state exist; means and standard
    deviations are those after that step. Layers and graph are those of the module's `forward` with its
    `example_input_array` or, without it, of its `training_step` with the current batch, which is not consumed. A line
    names the trainable parameters without a gradient. Training stays bit-identical. If TensorBoard is a logger, it gets
    the report as text.

    The report itself is a `lightning_tricks.model_report.summarize_model`. Layers and graph need the extra `reports`,
    and pictures need graphviz's `dot`; the report names what is missing.

    Args:
        dirpath: A folder for `parameters.csv`, `report.json`, `layers.txt`, `graph.dot`, `graph.svg` and `graph.png`.
            None writes no files.
        graph: Whether to make the graph: True, False, or options for torchviz's `make_dot`, such as
            `{"show_attrs": True}`.
        depth: The depth of the deepest modules in the summary of the layers, >= 1.
        verbose: Whether to print the report. None leaves that to the variable `LIGHTNING_TRICKS_VERBOSE` (1 or 0).

    Attributes:
        summary: The `ModelReportSummary` of the last fit; None before the first.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `depth` is out of range.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ModelReport("report")], accelerator="cpu", logger=False)
    """

    path_arguments = ("dirpath",)

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        graph: bool | dict[str, Any] = True,
        depth: int = 3,
        verbose: bool | None = None,
    ) -> None:
        if dirpath is not None:
            check_path("dirpath", dirpath, "a folder", remedy=SENT_BY_AUTO_RESUME)
        self.dirpath = dirpath
        self.graph = graph
        self.depth = check_count("depth", depth)
        self.verbose = verbose
        if not isinstance(graph, bool | dict):
            raise TypeError(f"graph must be True, False or a dict of options, got {graph!r} ({type(graph).__name__}).")
        self.summary: ModelReportSummary | None = None
        super().__init__()

    def _forget_run(self) -> None:
        self._awaits_step_after: int | None = None
        self._unreached: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to wait for the first optimizer step."""
        self.summary = None
        self._awaits_step_after = trainer.global_step
        self._unreached = {strip_compile_prefix(name): parameter for name, parameter in pl_module.named_parameters()}
        super().on_train_start(trainer, pl_module)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which parameters have no gradient yet; some may be frozen only for this pass."""
        self._unreached = {name: parameter for name, parameter in self._unreached.items() if parameter.grad is None}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the same after a backward pass that was run past Lightning."""
        self.on_after_backward(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report after the first optimizer step."""
        if self._awaits_step_after is not None and trainer.global_step > self._awaits_step_after:
            self._report(trainer, pl_module, batch, batch_idx)
            self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log that there is no report if there was no optimizer step."""
        if self._awaits_step_after is not None:
            self._stop()
            self.say("there was no optimizer step, so there is no report")

    def report_parts(self, trainer: Trainer) -> list[Facts]:
        """Return the totals of the report."""
        summary = self.summary
        if summary is None:
            return []
        sizes = {field.name: format_bytes(getattr(summary.memory, field.name)) for field in fields(summary.memory)}
        facts = [(name.replace("_", " "), text) for name, text in sizes.items()]
        missing = describe_without_gradient(list(summary.without_gradient), None) if summary.without_gradient else ""
        return [
            Facts(
                title="Memory of the model",
                section="cost",
                facts=facts,
                sentences=[f"Until the first step, {missing}."] if missing else [],
            )
        ]

    def _stop(self) -> None:
        self._forget_run()
        self.skip_hooks("on_after_backward", "on_before_optimizer_step", "on_train_batch_end")

    def _report(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        arguments: dict[str, Any] = {"depth": self.depth, "optimizers": trainer.optimizers}
        try:
            with trainer.precision_plugin.forward_context():
                call = find_call(pl_module) or training_step_call(pl_module, batch, batch_idx=batch_idx)
                self.summary = summarize_call(pl_module, call, graph=self.graph, **arguments)
        except Exception as error:
            rank_zero_warn(f"ModelReport leaves out layers and graph: {describe_error(error)}")
            self.summary = summarize_call(pl_module, None, **arguments)
        unreached = gather_objects(names_without_gradient(self._unreached))
        self.summary = replace(self.summary, without_gradient=tuple(_with_ranks(unreached)))
        if not trainer.is_global_zero:
            return

        self.show_table(self.summary)
        for part in self.report_parts(trainer):
            self.say("after the first step: " + ", ".join(f"{name} {size}" for name, size in part.facts))
            for sentence in part.sentences:
                self.say(sentence)
        if self.dirpath is not None:
            try:
                written = self.summary.write(self.dirpath)
            except Exception as error:  # graphviz raises errors of its own
                rank_zero_warn(
                    f"ModelReport did not write all files to dirpath={str(self.dirpath)!r}: {describe_error(error)}"
                )
            else:
                self.say(f"{', '.join(path.name for path in written)} in {self.dirpath}")
        for logger in trainer.loggers:
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_text"):
                code = "\n".join(f"    {line}" for line in str(self.summary).splitlines())  # Markdown keeps its columns
                experiment.add_text("model_report", code, trainer.global_step)


def _with_ranks(unreached: list[list[str]]) -> list[str]:
    """Merge the names of all ranks; those that are not on each rank are followed by the ranks that have them."""
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(unreached):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    return [
        name if len(some) == len(unreached) else f"{name} (rank {', '.join(map(str, some))})"
        for name, some in ranks.items()
    ]
