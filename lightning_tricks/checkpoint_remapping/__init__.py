"""Load weights from any checkpoint format, matching renamed layers, without running code of the file.

When to use it: the weights come from elsewhere. Their names start with `module.` or `_orig_mod.` or belong to another
project, the file is a .safetensors or a pickled module or comes from the internet, or the model has a new head.

Unlike `torch.load` and `load_state_dict(strict=False)`, it reads pickles as data, with an interpreter that imports and
calls nothing, whatever environment variables say; it finds the mapping between the names of torchvision, timm and
Hugging Face, or raises an error if the mapping is ambiguous; and it raises an error if nothing, or not everything, was
loaded. Tensors are mapped from the file: loading needs no memory beyond the model's own.

Caveats: matching by structure assumes that file and model have the same architecture; what the forward pass computes
between the layers, such as another epsilon, is not in the weights (`max_output_difference` compares outputs). With
`assign=True` or a model on the meta device, tensors stay mapped from the file: never write to that file. A resumed fit
restores only plain values.

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
    from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint as Checkpoint
    from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Placeholder as Placeholder
    from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint as read_checkpoint
    from lightning_tricks.checkpoint_remapping.core.files.saving import save_weights as save_weights
    from lightning_tricks.checkpoint_remapping.core.head_replacement import replace_head as replace_head
    from lightning_tricks.checkpoint_remapping.core.loading import LoadReport as LoadReport
    from lightning_tricks.checkpoint_remapping.core.loading import load_weights as load_weights
    from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment as Alignment
    from lightning_tricks.checkpoint_remapping.core.matching.alignment_search import align as align
    from lightning_tricks.checkpoint_remapping.core.output_comparison import (
        max_output_difference as max_output_difference,
    )
    from lightning_tricks.checkpoint_remapping.core.remapping import remap_keys as remap_keys
    from lightning_tricks.checkpoint_remapping.core.rules import RemapRule as RemapRule
    from lightning_tricks.checkpoint_remapping.core.rules import read_rules as read_rules
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
