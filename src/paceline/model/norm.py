"""RMS norm without parameters: ρ(x) = x / sqrt(mean(x²) + ε) over the last axis, in fp32, returned in x's dtype.

ε is always an argument. A framework default once depended on the input's dtype, and the records depend on that number.
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.size(-1),), eps=eps).to(x.dtype)
