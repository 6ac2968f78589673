"""Names of number formats in configs, as torch spells them."""

import torch

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    return TORCH_DTYPES[name]
