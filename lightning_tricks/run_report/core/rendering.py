"""`render` fills a template of `run_report/templates/` with values, `write_page` writes the page."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.files import atomic_write, open_file
from lightning_tricks._shared.text import counted, format_seconds, format_time, list_names
from lightning_tricks.run_report.core.record import RunReportError

if TYPE_CHECKING:
    from jinja2 import Environment

_PAGE_MARK = "lightning_tricks.run_report"  # stands in the head of each page


def render(template: str, title: str, **values: Any) -> str:
    """Return a whole page.

    Args:
        template: The name of the template.
        title: The title of the page.
        **values: The values that it shows.
    """
    return _environment().get_template(template).render(title=title, page_mark=_PAGE_MARK, **values)


def write_page(path: Path, page: str) -> None:
    """Write a page, atomically; a file that is not a page of a report is not replaced.

    Raises:
        OSError: If it cannot be written.
        RunReportError: If the path is another file.
    """
    if path.exists():
        with open_file(path) as stream:
            if _PAGE_MARK.encode() not in stream.read(2000):
                raise RunReportError(f"{path} is not a page of a report, so it is not overwritten: give another path.")
    with atomic_write(path) as staged:
        staged.write_text(page, encoding="utf-8", errors="replace")  # a path may have what UTF-8 lacks


@cache
def _environment() -> Environment:
    """Return what loads the templates: each text is escaped in each of them, and a value that is missing is an error.

    A template takes no attribute of a value that begins with an underscore, and changes none.
    """
    from jinja2 import PackageLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from markupsafe import Markup

    environment = ImmutableSandboxedEnvironment(
        loader=PackageLoader("lightning_tricks.run_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": lambda name: Markup("_<wbr>").join(name.split("_")),  # after each underscore, in a narrow column
        "names": list_names,
        "plural": counted,
        "seconds": format_seconds,
        "thousands": "{:,}".format,
        "time": format_time,
    }
    return environment
