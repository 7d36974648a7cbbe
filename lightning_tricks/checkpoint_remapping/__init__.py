"""Load the weights of any file into any model that has a place for them; never silently wrong, never running its code.

When to use it: weights from somewhere else. A `module.` or `_orig_mod.` in the names, another project's names, a
safetensors file, a pickled module, a new head, a file from the internet.

What it does that `torch.load` and `load_state_dict(strict=False)` do not: it reads pickles as data, with an
interpreter that imports and calls nothing, whatever the environment says; it finds the mapping between the names of
torchvision, timm and Hugging Face by itself, or refuses where two would do; and it raises where nothing, or not
everything, was loaded. Tensors are mapped from the file: a model and its weights take the memory of the model alone.

Caveats: layers that are matched by structure are those of one architecture; what the forward pass does between them,
such as another epsilon, is not in the weights (`max_output_difference` compares outputs). Tensors of `assign=True`, and
those of a model on the meta device, stay mapped from the file: write a new file beside it, never into it. A resumed
fit restores plain values alone.

Sources: the formats of torch.save and safetensors; PEP 307 and Python's `pickletools`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.checkpoint_remapping.callback import CheckpointRemapping as CheckpointRemapping
    from lightning_tricks.checkpoint_remapping.core.errors import AmbiguousAlignmentError as AmbiguousAlignmentError
    from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError as CheckpointError
    from lightning_tricks.checkpoint_remapping.core.errors import MissingCheckpointError as MissingCheckpointError
    from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError as NotACheckpointError
    from lightning_tricks.checkpoint_remapping.core.errors import NothingLoadedError as NothingLoadedError
    from lightning_tricks.checkpoint_remapping.core.errors import UnsafeCheckpointError as UnsafeCheckpointError
    from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Placeholder as Placeholder
    from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint as Checkpoint
    from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint as read_checkpoint
    from lightning_tricks.checkpoint_remapping.core.files.saving import save_weights as save_weights
    from lightning_tricks.checkpoint_remapping.core.head_replacement import replace_head as replace_head
    from lightning_tricks.checkpoint_remapping.core.loading import LoadReport as LoadReport
    from lightning_tricks.checkpoint_remapping.core.loading import load_weights as load_weights
    from lightning_tricks.checkpoint_remapping.core.loading import max_output_difference as max_output_difference
    from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment as Alignment
    from lightning_tricks.checkpoint_remapping.core.matching.alignment import align as align
    from lightning_tricks.checkpoint_remapping.core.rules import RemapRule as RemapRule
    from lightning_tricks.checkpoint_remapping.core.rules import read_rules as read_rules
    from lightning_tricks.checkpoint_remapping.core.rules import remap_keys as remap_keys

    __all__ = [
        "Alignment",
        "AmbiguousAlignmentError",
        "Checkpoint",
        "CheckpointError",
        "CheckpointRemapping",
        "LoadReport",
        "MissingCheckpointError",
        "NotACheckpointError",
        "NothingLoadedError",
        "Placeholder",
        "RemapRule",
        "UnsafeCheckpointError",
        "align",
        "load_weights",
        "max_output_difference",
        "read_checkpoint",
        "read_rules",
        "remap_keys",
        "replace_head",
        "save_weights",
    ]
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "core.matching.alignment": ("Alignment", "align"),
            "callback": ("CheckpointRemapping",),
            "core.errors": (
                "AmbiguousAlignmentError",
                "CheckpointError",
                "MissingCheckpointError",
                "NotACheckpointError",
                "NothingLoadedError",
                "UnsafeCheckpointError",
            ),
            "core.loading": ("LoadReport", "load_weights", "max_output_difference"),
            "core.head_replacement": ("replace_head",),
            "core.files.reading": ("Checkpoint", "read_checkpoint"),
            "core.rules": ("RemapRule", "read_rules", "remap_keys"),
            "core.files.saving": ("save_weights",),
            "core.files.pickle_values": ("Placeholder",),
        },
    )
