"""Load the weights of any file into any model that has a place for them; never silently wrong, never running its code.

When to use it: weights from somewhere else. A `module.` or `_orig_mod.` in the names, another project's names, a
safetensors file, a pickled module, a new head, a file from the internet.

What it does that `torch.load` and `load_state_dict(strict=False)` do not: it reads pickles as data, with an
interpreter that imports and calls nothing, whatever the environment says; it finds the mapping between the names of
torchvision, timm and Hugging Face by itself, or refuses where two would do; and it raises where nothing, or not
everything, was loaded. Tensors are mapped from the file: a model and its weights take the memory of the model alone.

Caveats: layers that are matched by structure are those of one architecture; what the forward pass does between them,
such as another epsilon, is not in the weights (`verify` compares outputs). Tensors of `assign=True`, and those of a
model on the meta device, stay mapped from the file: write a new file beside it, never into it. A resumed fit restores
plain values alone.

Sources: the formats of torch.save and safetensors; PEP 307 and Python's `pickletools`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.checkpoint_remapping.alignment import Alignment as Alignment
    from lightning_tricks.checkpoint_remapping.alignment import align as align
    from lightning_tricks.checkpoint_remapping.callback import CheckpointRemapping as CheckpointRemapping
    from lightning_tricks.checkpoint_remapping.errors import AmbiguousAlignmentError as AmbiguousAlignmentError
    from lightning_tricks.checkpoint_remapping.errors import CheckpointError as CheckpointError
    from lightning_tricks.checkpoint_remapping.errors import MissingCheckpointError as MissingCheckpointError
    from lightning_tricks.checkpoint_remapping.errors import NotACheckpointError as NotACheckpointError
    from lightning_tricks.checkpoint_remapping.errors import NothingLoadedError as NothingLoadedError
    from lightning_tricks.checkpoint_remapping.errors import UnsafeCheckpointError as UnsafeCheckpointError
    from lightning_tricks.checkpoint_remapping.functional import LoadReport as LoadReport
    from lightning_tricks.checkpoint_remapping.functional import load_weights as load_weights
    from lightning_tricks.checkpoint_remapping.functional import verify as verify
    from lightning_tricks.checkpoint_remapping.heads import replace_head as replace_head
    from lightning_tricks.checkpoint_remapping.reading import Checkpoint as Checkpoint
    from lightning_tricks.checkpoint_remapping.reading import read_checkpoint as read_checkpoint
    from lightning_tricks.checkpoint_remapping.rules import Rule as Rule
    from lightning_tricks.checkpoint_remapping.rules import read_rules as read_rules
    from lightning_tricks.checkpoint_remapping.rules import remap_keys as remap_keys
    from lightning_tricks.checkpoint_remapping.saving import save_weights as save_weights
    from lightning_tricks.checkpoint_remapping.values import Placeholder as Placeholder

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
        "Rule",
        "UnsafeCheckpointError",
        "align",
        "load_weights",
        "read_checkpoint",
        "read_rules",
        "remap_keys",
        "replace_head",
        "save_weights",
        "verify",
    ]
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "alignment": ("Alignment", "align"),
            "callback": ("CheckpointRemapping",),
            "errors": (
                "AmbiguousAlignmentError",
                "CheckpointError",
                "MissingCheckpointError",
                "NotACheckpointError",
                "NothingLoadedError",
                "UnsafeCheckpointError",
            ),
            "functional": ("LoadReport", "load_weights", "verify"),
            "heads": ("replace_head",),
            "reading": ("Checkpoint", "read_checkpoint"),
            "rules": ("Rule", "read_rules", "remap_keys"),
            "saving": ("save_weights",),
            "values": ("Placeholder",),
        },
    )
