"""Show a model: its parameters one by one, its layers, the memory that it takes, and a picture of its graph.

When to use it: once at the start of a project or a run, to see whether weights are initialized as they should be,
which of them train and get a gradient, and what takes the memory.

What it does that printing the model does not: means and standard deviations of all parameters in one read, gradient
norms where there are gradients, measured memory of weights, gradients and optimizer state; torchinfo's summary and
torchviz's graph are made on a copy, so that modes, buffers and random numbers stay as they are (torchinfo flips frozen
BatchNorms, torchviz updates running statistics).

Caveats: torchinfo's FLOPs are left out, since it misses attention (`count_flops` does not). The extra `reports`
installs torchinfo and torchviz; for SVG and PNG the program `dot` of graphviz has to be there, for DOT source nothing.

Sources: torchinfo, torchviz (`make_dot`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.model_report.callback import ModelReport as ModelReport
    from lightning_tricks.model_report.core.report_summary import ModelMemory as ModelMemory
    from lightning_tricks.model_report.core.report_summary import ModelReportSummary as ModelReportSummary
    from lightning_tricks.model_report.core.report_summary import ParameterRow as ParameterRow
    from lightning_tricks.model_report.core.summarize_model import summarize_model as summarize_model

    __all__ = ["ModelMemory", "ModelReport", "ModelReportSummary", "ParameterRow", "summarize_model"]
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "callback": ("ModelReport",),
            "core.summarize_model": ("summarize_model",),
            "core.report_summary": ("ModelMemory", "ModelReportSummary", "ParameterRow"),
        },
    )
