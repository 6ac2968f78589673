"""What GPUs send each other in a step, and how long that takes at the links' own rates. No torch.

Gradients are summed over all ranks in the format in which they are kept: rings inside a node, then one ring over the
nodes that shares their network. Results of Muon are gathered in its working format. A compiled backward pass hands over
all gradients at its end, so a step waits for the exchange of the matrices' gradients, and in the records' scripts for
the tables', too. Ours travel while Muon works (`parallel.embedding_sync`).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from paceline.lab.plan.work import Setting, Work, gradient_bytes, moved_of, orthogonal_shapes
from paceline.parallel.memory_model import halo_tokens
from paceline.settings.spec import DTYPE_BYTES

BUCKET_BYTES = 25 * 2**20  # what is exchanged at once
HOP_S = 5e-6  # latency of one hop; an exchange takes two for each doubling of the ranks
EXPOSED_UNCOMPILED = 0.3  # of an exchange beside uncompiled passes, gradients or shards, the share that outlasts them
EXPOSED_BESIDE_MUON = 0.5  # share of an exchange that outlasts the work on Muon's matrices beside it. Not measured


class Exchange(NamedTuple):
    size: int  # bytes over which all ranks agree
    crossings: int  # of each link: 2 for a sum, 1 for a gather
    exposed: float  # share that a step waits for


def exchanges(at: Setting) -> Iterator[Exchange]:
    if at.cluster.gpus > 1:
        yield from _of_shards(at) if at.config.parallel.fsdp else _of_replicas(at)
        lookups = [kind for kind in moved_of(at) if kind.rule.gradient == "rows"]
        sent = sum(kind.count * (8 + kind.shape[1] * kind.element_bytes) for kind in lookups)  # of a token
        if sent:
            yield Exchange(at.tokens * at.cluster.gpus * sent, 1, 1.0)
    if (parts := at.config.parallel.context_parallel) > 1:  # keys and values of a halo to the right, gradients back
        m, halo = at.config.model, halo_tokens(at.config.model, at.config.batch, parts) * at.share.sequences
        halo_bytes = halo * sum(s.k_width + s.v_width for s in m.attending) * DTYPE_BYTES[m.precision.compute]
        yield Exchange(halo_bytes, 2, 1.0)


def _of_shards(at: Setting) -> Iterator[Exchange]:
    """Every micro-batch gathers blocks twice and tables once; gradients are dealt out once, and the rows of Muon's
    matrices go to one rank each and come back."""
    blocks, tables, times = gradient_bytes(at), gradient_bytes(at, tables=True), at.tokens // at.micro_tokens
    yield Exchange(times * (2 * blocks + tables), 1, EXPOSED_UNCOMPILED)
    yield Exchange(blocks + tables, 1, EXPOSED_UNCOMPILED)
    if results := _result_bytes(at):
        matrices = sum(kind.nbytes for kind in moved_of(at) if kind.rule.orthogonal)
        yield Exchange((matrices + results) // at.cluster.gpus, 1, EXPOSED_BESIDE_MUON)


def _of_replicas(at: Setting) -> Iterator[Exchange]:
    tables, results = gradient_bytes(at, tables=True), _result_bytes(at)
    after_backward = 1.0 if at.compiled else EXPOSED_UNCOMPILED
    beside_muon = EXPOSED_BESIDE_MUON if at.profile == "fast" and results else after_backward
    yield Exchange(gradient_bytes(at), 2, after_backward)
    yield Exchange(tables, 2, beside_muon)
    if results and at.shares_matrices:
        yield Exchange(results, 1, EXPOSED_BESIDE_MUON)
    if at.config.parallel.zero1:
        yield Exchange(tables, 1, EXPOSED_BESIDE_MUON)


def _result_bytes(at: Setting) -> int:
    """Of Muon's iterations, in all."""
    weights = sum(rows * columns * count for (rows, columns), count in orthogonal_shapes(at.config).items())
    return DTYPE_BYTES[at.config.optim.muon.ns_dtype] * weights


def sent_bytes(at: Setting) -> float:
    """By one GPU in a step."""
    return (at.cluster.gpus - 1) / at.cluster.gpus * sum(e.crossings * e.size for e in exchanges(at))


def exchange(at: Setting, *, exposed: bool) -> list[Work]:
    """All of the traffic, or the part that a step waits for."""
    cluster, nodes, work = at.cluster, at.cluster.nodes, list[Work]()
    inside = min(cluster.gpus, cluster.gpus_per_node)
    for each in exchanges(at):
        crossings = each.crossings * (each.exposed if exposed else 1.0)
        on_links = (inside - 1) / inside * each.size / (cluster.kind.link_gb_s * 1e9)
        between = (nodes - 1) / nodes * each.size / (cluster.node_gb_s * 1e9)
        hops = math.ceil(each.size / BUCKET_BYTES) * math.log2(cluster.gpus) * HOP_S
        work.append(Work("communication", "link", crossings * (on_links + between)))
        work.append(Work("communication", "fixed", crossings * hops))
    return work
