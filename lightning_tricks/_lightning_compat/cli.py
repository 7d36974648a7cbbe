"""What LightningCLI reads from a checkpoint."""

from __future__ import annotations

from lightning_tricks._lightning_compat.flavor import LightningCLI


class ConfigurationOnlyCLI(LightningCLI):
    """A LightningCLI that takes no class and no argument from the file that `--ckpt_path` names.

    Newer versions of Lightning replace the configured model by what the hyper-parameters of the checkpoint describe,
    and import the class that these name. A Lightning without this method does not do that.
    """

    def _parse_ckpt_path(self) -> None:
        """Keep the configuration as the caller gave it."""
