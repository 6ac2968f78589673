"""What GPUs send each other in a step, and how long that takes at the links' own rates. No torch.

Gradients are summed over all ranks in the format in which they are kept: rings inside a node, then one ring over the
nodes that shares their network. Results of Muon are gathered in its working format. A compiled backward pass hands over
all gradients at its end, so a step waits for the exchange of the matrices' gradients, and in the records' scripts for
the tables', too. Ours travel while Muon works (`parallel.tables`).
"""

import math
from dataclasses import dataclass

from paceline.lab.plan.gpus import Cluster
from paceline.lab.plan.work import BYTES, Setting, Work, matrix_bytes, table_bytes
from paceline.metrics.flops import block_matrix_weights
from paceline.parallel.memory_model import halo_tokens

BUCKET_BYTES = 25 * 2**20
"""What is exchanged at once."""
HOP_S = 5e-6
"""Latency of one hop; an exchange takes two for each doubling of the ranks."""
EXPOSED_UNCOMPILED = 0.3
"""Share of an exchange beside uncompiled passes, of gradients or of the weights' shards, that outlasts them."""
EXPOSED_BESIDE_MUON = 0.5
"""Share of an exchange that outlasts the work on Muon's matrices beside it. Not measured."""


@dataclass(frozen=True)
class Exchange:
    size: int
    """Bytes over which all ranks agree."""
    crossings: int
    """Of each link: 2 for a sum, 1 for a gather."""
    exposed: float
    """Share that a step waits for."""


def exchanges(at: Setting) -> list[Exchange]:
    if at.cluster.gpus == 1:
        return []
    return [*(_of_shards(at) if at.config.parallel.fully_shard else _of_replicas(at)), *_of_slices(at)]


def _of_slices(at: Setting) -> list[Exchange]:
    """Keys and values of a halo to the right and their gradients back, in every layer, waited for."""
    m, parts = at.config.model, at.config.parallel.split_sequence
    halo = halo_tokens(m, at.config.batch, parts) * at.share.sequences
    layers = m.num_layers - len(m.attentionless)
    size = layers * halo * 2 * m.kv_width * BYTES[m.precision.compute]
    return [Exchange(size, 2, 1.0)] if parts > 1 else []


def _of_shards(at: Setting) -> list[Exchange]:
    """Every micro-batch gathers blocks twice and tables once; gradients are dealt out once, and the rows of Muon's
    matrices go to one rank each and come back."""
    m, muon, times = at.config.model, at.config.optim, at.tokens // at.micro_tokens
    found = [
        Exchange(times * (2 * matrix_bytes(m) + table_bytes(m)), 1, EXPOSED_UNCOMPILED),
        Exchange(matrix_bytes(m) + table_bytes(m), 1, EXPOSED_UNCOMPILED),
    ]
    if muon.matrices == "muon":
        results = BYTES[muon.muon.ns_dtype] * block_matrix_weights(m)
        found.append(Exchange((matrix_bytes(m) + results) // at.cluster.gpus, 1, EXPOSED_BESIDE_MUON))
    return found


def _of_replicas(at: Setting) -> list[Exchange]:
    m, muon = at.config.model, at.config.optim.matrices == "muon"
    after_backward = 1.0 if at.compiled else EXPOSED_UNCOMPILED
    beside_muon = EXPOSED_BESIDE_MUON if at.profile == "fast" and muon else after_backward
    found = [Exchange(matrix_bytes(m), 2, after_backward), Exchange(table_bytes(m), 2, beside_muon)]
    if muon and at.shares_matrices:
        results = BYTES[at.config.optim.muon.ns_dtype] * block_matrix_weights(m)
        found.append(Exchange(results, 1, EXPOSED_BESIDE_MUON))
    if at.config.parallel.shard_adam:
        found.append(Exchange(table_bytes(m), 1, EXPOSED_BESIDE_MUON))
    return found


def sent_bytes(at: Setting) -> float:
    """By one GPU in a step."""
    return (at.cluster.gpus - 1) / at.cluster.gpus * sum(e.crossings * e.size for e in exchanges(at))


def exchange(at: Setting) -> list[Work]:
    """All of the traffic, hidden or not."""
    return [work for each in exchanges(at) for work in _travel(at.cluster, each, share=1.0)]


def exposed_exchange(at: Setting) -> list[Work]:
    """The part that a step waits for."""
    return [work for each in exchanges(at) for work in _travel(at.cluster, each, share=each.exposed)]


def _travel(cluster: Cluster, each: Exchange, *, share: float) -> list[Work]:
    inside, nodes = min(cluster.gpus, cluster.gpus_per_node), cluster.nodes
    on_links = (inside - 1) / inside * each.size / (cluster.kind.link_gb_s * 1e9)
    between = (nodes - 1) / nodes * each.size / (cluster.node_gb_s * 1e9)
    hops = math.ceil(each.size / BUCKET_BYTES) * math.log2(cluster.gpus) * HOP_S
    return [
        Work("communication", "link", share * each.crossings * (on_links + between)),
        Work("communication", "fixed", share * each.crossings * hops),
    ]
