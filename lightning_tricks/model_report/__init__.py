"""Report on a model: its parameters, layers and memory, and a picture of its autograd graph.

When to use it: at the start of a project or a run, to check the initialization, to see which parameters train and get a
gradient, and to see what needs the memory.

Differences from printing the model: means and standard deviations of all parameters are read from the device at once,
gradient norms are included if there are gradients, and the memory of weights, gradients and optimizer state is
measured. torchinfo's summary and torchviz's graph are made on a copy, so modes, buffers and the random state stay
unchanged (torchinfo changes the mode of frozen BatchNorms, and torchviz updates running statistics).

Caveats: torchinfo's FLOPs are left out, because they miss attention (`count_flops` counts it). The extra `reports`
installs torchinfo and torchviz. SVG and PNG files need graphviz's program `dot`; DOT source does not.

Sources: torchinfo, torchviz (`make_dot`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.model_report.callback import ModelReport as ModelReport
    from lightning_tricks.model_report.functional import ModelMemory as ModelMemory
    from lightning_tricks.model_report.functional import ModelReportSummary as ModelReportSummary
    from lightning_tricks.model_report.functional import ParameterRow as ParameterRow
    from lightning_tricks.model_report.functional import summarize_model as summarize_model
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
