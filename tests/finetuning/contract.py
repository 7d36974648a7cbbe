"""What the callbacks of fine-tuning promise."""

from tests.finetuning.cases_adaptation import ADAPTERS, LORA, PREFIX_TUNING
from tests.finetuning.cases_gradual_unfreezing import CASE as GRADUAL_UNFREEZING
from tests.finetuning.cases_trainable_checkpoint import CASE as TRAINABLE_CHECKPOINT

CASES = (ADAPTERS, GRADUAL_UNFREEZING, LORA, PREFIX_TUNING, TRAINABLE_CHECKPOINT)
