"""What LightningCLI reads from a checkpoint."""

from __future__ import annotations

from lightning_tricks._lightning_compat.flavor import LightningCLI


class ConfigurationOnlyCLI(LightningCLI):
    """A LightningCLI that takes no class and no argument from the file that `--ckpt_path` names.

    Since 2.5.5 (#21116) Lightning replaces the configured model by what the hyper-parameters of the checkpoint
    describe, and imports the class that these name. An older one has no such method.
    """

    def _parse_ckpt_path(self) -> None:
        """Keep the configuration as the caller gave it."""
