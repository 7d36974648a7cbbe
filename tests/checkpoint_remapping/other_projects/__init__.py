"""The same networks under the names of several projects, each pair with equal outputs."""

from tests.checkpoint_remapping.other_projects import encoders, language, misleading, multimodal, small
from tests.checkpoint_remapping.other_projects.wording import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    name: architecture
    for topic in (language, encoders, multimodal, small, misleading)
    for name, architecture in topic.ARCHITECTURES.items()
}
