"""The same networks under the names of several projects: by outputs, or tensor by tensor."""

from tests.checkpoint_remapping.other_projects import language, multimodal, names
from tests.checkpoint_remapping.other_projects.wording import Architecture, Named

ARCHITECTURES: dict[str, Architecture | Named] = {
    **language.ARCHITECTURES,
    **multimodal.ARCHITECTURES,
    **names.ARCHITECTURES,
}
