"""Find the first step, and the layer, at which two runs that should be equal diverge.

When to use it: the same script gives a different result the second time, on another machine, after an update, or after
a resume; or you want a test that asserts that it does not.

Unlike a sum or a norm, a fingerprint depends on the order of elements and on every bit. It is computed on the device of
the tensors, and nothing is copied to the host before a block of steps is complete.

Caveats: equal means bit-identical. Runs with different numbers of ranks, devices, precisions or library versions
diverge at the first step, although nothing is wrong. On a GPU, equal runs need
`torch.use_deterministic_algorithms`.

Source: the mixing is that of MurmurHash3's finalizer (Austin Appleby, public domain).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.run_fingerprint.callback import RunFingerprint as RunFingerprint
    from lightning_tricks.run_fingerprint.callback import assert_reproducible as assert_reproducible
    from lightning_tricks.run_fingerprint.core.comparison import Comparison as Comparison
    from lightning_tricks.run_fingerprint.core.comparison import Divergence as Divergence
    from lightning_tricks.run_fingerprint.core.comparison import compare as compare
    from lightning_tricks.run_fingerprint.core.fingerprint import fingerprint as fingerprint
    from lightning_tricks.run_fingerprint.core.record import FingerprintRecordError as FingerprintRecordError
    from lightning_tricks.run_fingerprint.core.record import read_ranks as read_ranks
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
