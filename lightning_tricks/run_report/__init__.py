"""One HTML page about a fit: findings, curves, and everything you need to repeat the run; two runs compared.

When to use it: for every run that you may look at again, or show to somebody without access to your logger.

Caveats: the page shows hyper-parameters and the differences to the git commit: read it before you publish it. Values
that a module sends to a logger directly, by `self.logger.log_metrics`, are not seen.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.run_report.callback import RunReport as RunReport
    from lightning_tricks.run_report.core.comparison_page import comparison_page as comparison_page
    from lightning_tricks.run_report.core.findings import find_all as find_all
    from lightning_tricks.run_report.core.page import run_page as run_page
    from lightning_tricks.run_report.core.record import Finding as Finding
    from lightning_tricks.run_report.core.record import RunRecord as RunRecord
    from lightning_tricks.run_report.core.record import RunReportError as RunReportError
    from lightning_tricks.run_report.core.record import read_record as read_record
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
