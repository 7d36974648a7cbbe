"""What the callbacks of fine-tuning promise."""

from tests.finetuning.cases_lora import CASE as LORA
from tests.finetuning.cases_trainable_checkpoint import CASE as TRAINABLE_CHECKPOINT

CASES = (LORA, TRAINABLE_CHECKPOINT)
