"""Images: conversions between tensors, PIL images and arrays, grids, and the most confident mistakes in the loggers.

When to use it: to look at the inputs of a model and at its predictions.

Common mistakes: `(tensor * 255).byte()` truncates, so after a normalization and its inverse many pixels are 1 too low;
`torch.from_numpy` refuses an array with negative strides (`array[::-1]`); a normalized image, floats from 0 to 255, a
palette or a 16-bit image become noise without an error. These functions raise an error that names the wrong type, shape
or range, and the remedy.

Other conversions are one call of torch each and have no wrapper: `tensor.float()`, `tensor.long()`, `tensor.cpu()`,
`tensor.cuda()`, `tensor.type_as(other)`, `torch.from_numpy(array)` and `tensor.numpy()` (both share memory). Do not use
`torch.Tensor(array)`: it always makes floats.

Caveats: PIL images of mode "I" and "F" do not define which value is white, and are refused. Arrays are
(H, W, C), even with one channel.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.images.callback import ImageLogger as ImageLogger
    from lightning_tricks.images.functional import denormalize as denormalize
    from lightning_tricks.images.functional import image_grid as image_grid
    from lightning_tricks.images.functional import overlay_boxes as overlay_boxes
    from lightning_tricks.images.functional import overlay_masks as overlay_masks
    from lightning_tricks.images.functional import to_numpy as to_numpy
    from lightning_tricks.images.functional import to_pil as to_pil
    from lightning_tricks.images.functional import to_tensor as to_tensor
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
