"""How a step is carried out by several processes. No torch.

So far a run is one process: these fields are part of the records' diffs and take effect once there are several.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    bucket_views: bool = True
    """Gradients are views of the communication buckets, which saves one copy of them."""
    broadcast_buffers: bool = False
    """Send rank 0's buffers to all at each forward pass; ours never change, so off."""
