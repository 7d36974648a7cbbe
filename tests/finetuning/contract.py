"""What the callbacks of fine-tuning promise."""

from tests.finetuning.cases_lora import CASE as LORA

CASES = (LORA,)
