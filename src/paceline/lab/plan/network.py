"""What GPUs send each other in a step, and how long that takes at the links' own rates. No torch.

Gradients are summed over all ranks in the format in which they are kept: rings inside a node, then one ring over the
nodes that shares their network. Results of Muon are gathered in its working format. A compiled backward pass hands over
all gradients at its end, so none of their exchange is hidden; otherwise most of it is.
"""

import math

from paceline.lab.plan.gpus import Cluster
from paceline.lab.plan.work import BYTES, Setting, Work, gradient_bytes
from paceline.metrics.flops import block_matrix_weights

BUCKET_BYTES = 25 * 2**20
"""What is exchanged at once."""
HOP_S = 5e-6
"""Latency of one hop; an exchange takes two for each doubling of the ranks."""
EXPOSED_UNCOMPILED = 0.3
"""Share of the exchange of gradients that outlasts an uncompiled backward pass."""
EXPOSED_GATHER = 0.5
"""Share of Muon's gather that is not behind the work on the next stack."""


def sent_bytes(at: Setting) -> float:
    """By one GPU in a step."""
    share = (at.cluster.gpus - 1) / at.cluster.gpus
    return 2 * share * gradient_bytes(at.config.model) + share * _gathered_bytes(at)


def exchange(at: Setting) -> list[Work]:
    """All of the traffic, hidden or not."""
    return [*_reduced(at), *_gathered(at)]


def exposed_exchange(at: Setting) -> list[Work]:
    """The part that a step waits for."""
    share = 1.0 if at.config.train.compile else EXPOSED_UNCOMPILED
    return [*_part(_reduced(at), share), *_part(_gathered(at), EXPOSED_GATHER)]


def _part(work: list[Work], share: float) -> list[Work]:
    return [Work(item.kind, item.resource, item.seconds * share) for item in work]


def _reduced(at: Setting) -> list[Work]:
    return _travel(at.cluster, gradient_bytes(at.config.model), crossings=2)


def _gathered(at: Setting) -> list[Work]:
    return _travel(at.cluster, _gathered_bytes(at), crossings=1)


def _gathered_bytes(at: Setting) -> int:
    muon = at.config.optim.matrices == "muon" and at.shares_matrices
    return BYTES[at.config.optim.muon.ns_dtype] * block_matrix_weights(at.config.model) if muon else 0


def _travel(cluster: Cluster, size: int, *, crossings: int) -> list[Work]:
    """`size` bytes summed (two crossings of each link) or gathered (one) over all ranks."""
    if cluster.gpus == 1 or not size:
        return []
    inside, nodes = min(cluster.gpus, cluster.gpus_per_node), cluster.nodes
    on_links = (inside - 1) / inside * size / (cluster.kind.link_gb_s * 1e9)
    between = (nodes - 1) / nodes * size / (cluster.node_gb_s * 1e9)
    hops = math.ceil(size / BUCKET_BYTES) * math.log2(cluster.gpus) * HOP_S
    return [
        Work("communication", "link", crossings * (on_links + between)),
        Work("communication", "fixed", crossings * hops),
    ]
