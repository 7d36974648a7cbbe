"""Report on a model: each of its parameters, its layers, its memory, and a picture of its autograd graph.

When to use it: once at the start of a project or a run, to check that weights are initialized as intended, which of
them are trained and get a gradient, and what needs the memory.

Differences to printing the model: the means and standard deviations of all parameters are read from the device at once,
gradient norms are included if there are gradients, and the memory of weights, gradients and optimizer state is
measured. torchinfo's summary and torchviz's graph are made on a copy, so that modes, buffers and the random state are
left unchanged (torchinfo changes the mode of frozen BatchNorms, and torchviz updates running statistics).

Caveats: torchinfo's FLOPs are left out, because they miss attention (`count_flops` counts it). The extra `reports`
installs torchinfo and torchviz. SVG and PNG files need graphviz's program `dot`; DOT source does not.

Sources: torchinfo, torchviz (`make_dot`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.model_report.callback import ModelReport as ModelReport
    from lightning_tricks.model_report.core.report_summary import ModelMemory as ModelMemory
    from lightning_tricks.model_report.core.report_summary import ModelReportSummary as ModelReportSummary
    from lightning_tricks.model_report.core.report_summary import ParameterRow as ParameterRow
    from lightning_tricks.model_report.core.summarize_model import summarize_model as summarize_model
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
