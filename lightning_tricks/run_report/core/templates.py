"""`render` fills a template of `run_report/templates/` with values."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.text import counted, list_names
from lightning_tricks.run_report.core.numbers import format_seconds, format_time
from lightning_tricks.run_report.core.record_file import PAGE_MARK

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, title: str, **values: Any) -> str:
    """Return a whole page.

    Args:
        template: The name of the template.
        title: The title of the page.
        **values: The values that it shows.
    """
    return _environment().get_template(template).render(title=title, page_mark=PAGE_MARK, **values)


@cache
def _environment() -> Environment:
    """Return what loads the templates: each text is escaped in each of them, and a value that is missing is an error.

    A template takes no attribute of a value that begins with an underscore, and changes none.
    """
    from jinja2 import PackageLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        loader=PackageLoader("lightning_tricks.run_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "names": list_names,
        "plural": counted,
        "seconds": format_seconds,
        "thousands": "{:,}".format,
        "time": format_time,
    }
    return environment


def _breakable(name: str) -> Markup:
    """Return a name that a narrow column may break after each underscore."""
    from markupsafe import Markup

    return Markup("_<wbr>").join(name.split("_"))
