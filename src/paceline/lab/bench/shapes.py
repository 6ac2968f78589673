"""The products of matrices that one training step consists of, and its arithmetic. No torch."""

from collections import Counter
from dataclasses import dataclass

from paceline.metrics.flops import mean_flops_per_token
from paceline.train.config import RunConfig


@dataclass(frozen=True)
class Product:
    """(rows, depth) times (depth, columns), `calls` times a step."""

    name: str
    kind: str
    """`forward`, `grad input` or `grad weight`."""
    rows: int
    depth: int
    columns: int
    calls: int

    @property
    def flops(self) -> int:
        """Of one call."""
        return 2 * self.rows * self.depth * self.columns


def products_of(config: RunConfig) -> list[Product]:
    """Every product with a weight, those of equal shape as one. The head counts once, however it is cut."""
    tokens = config.batch.micro_sequences * config.batch.sequence_tokens
    micro_batches = config.batch.tokens // tokens
    found = []
    for (name, out, into), count in _weights(config).items():
        calls = count * micro_batches
        found.append(Product(name, "forward", tokens, into, out, calls))
        found.append(Product(name, "grad input", tokens, out, into, calls))
        found.append(Product(name, "grad weight", out, tokens, into, calls))
    return found


def _weights(config: RunConfig) -> Counter[tuple[str, int, int]]:
    """(name, out, in) of every weight matrix to their number."""
    m = config.model
    attentions = m.num_layers - len(m.attentionless)
    weights: Counter[tuple[str, int, int]] = Counter()
    if m.qkv == "fused":
        weights["qkv", m.width + 2 * m.kv_width, m.width] = attentions
    elif m.kv_width == m.width:
        weights["q, k, v", m.width, m.width] = 3 * attentions
    else:
        weights["q", m.width, m.width] = attentions
        weights["k, v", m.kv_width, m.width] = 2 * attentions
    weights["attention output", m.width, m.width] = attentions
    weights["mlp up", m.mlp_width, m.width] = m.num_layers
    weights["mlp down", m.width, m.mlp_width] = m.num_layers
    weights["head", m.head_rows, m.width] = 1
    return weights


def mean_step_flops(config: RunConfig) -> float:
    """The model's arithmetic of one step, averaged over the schedule. Attention counts every key that the window lets
    through, as if no document ended."""
    length = config.batch.sequence_tokens
    return mean_flops_per_token(config.model, sequence_tokens=length, steps=config.steps) * config.batch.tokens
