"""The same networks under the names of several projects, each pair with equal outputs."""

from tests.checkpoint_remapping.other_projects import encoders, language
from tests.checkpoint_remapping.other_projects.wording import Architecture

ARCHITECTURES: dict[str, Architecture] = {**language.ARCHITECTURES, **encoders.ARCHITECTURES}
