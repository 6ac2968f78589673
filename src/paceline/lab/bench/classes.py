"""Which part of a step a kernel belongs to. No torch.

Compiled code has no ranges inside its graphs, so a kernel is known by three things: the phase in which it was launched
(ranges that the benchmark puts around data and optimizer), the shapes of the operation that launched it, and its name,
in which the compiler lists what it fused. Kernels of our own carry their class as the first word of their name.
"""

import itertools
import re
from typing import NamedTuple

CLASSES = ("head_and_loss", "mlp", "attention_projections", "attention", "norms_and_mixes",
           "optimizer", "data", "other", "idle")  # fmt: skip
"""In the order in which they are shown. `other`: embeddings and their gradients, sums of gradients, casts of weights.
`idle`: nothing runs on the device; on a CPU, Python between operations."""

BY_NAME = (
    ("head_and_loss", r"^_?head_loss"),
    ("mlp", r"^_?mlp"),
    ("optimizer", r"^_?(muon|newton_schulz|adam)"),
    ("attention", r"^_?attention"),
    ("norms_and_mixes", r"^_?(norm|heads)"),
    ("attention", r"flex_attention|flash|fmha|scaled_dot_product|sdpa"),
    ("other", r"embedding_\w*backward|EmbeddingBackward|index_put"),
    ("attention", r"cumsum|sort"),  # document numbers and block lists
)
"""(class, pattern): certain by name alone; the first match counts. The first five are kernels of our own."""

MATMUL = r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm)\b|gemm|nvjet|cutlass|triton_(tem|mm|bmm)|cublas"
"""Names of operations and kernels that are products of matrices."""

BY_FUSED_NAME = (
    ("head_and_loss", r"log_softmax|logsumexp|nll_loss|cross_entropy|tanh"),
    ("mlp", r"relu|gelu|threshold"),
    ("norms_and_mixes", r"rms_norm|rsqrt|pow|mean"),
)
"""The same for names that list several operations, asked after the shapes."""
Shapes = tuple[tuple[int, ...], ...]


class Sizes(NamedTuple):
    tokens: int  # of one micro-batch
    sequence_tokens: int
    lm_head_rows: int
    mlp_width: int


class Work(NamedTuple):
    """A kernel on the device or, on a CPU, an operation."""

    name: str
    operation: str = ""  # what launched it, as the framework calls it; empty where that is not known
    shapes: Shapes = ()  # of that operation's tensors
    phase: str = ""  # `optimizer` or `data`; empty in forward and backward
    seconds: float = 0.0  # that it alone is charged with, all profiled steps together


def class_of(work: Work, sizes: Sizes) -> str:
    """One of CLASSES except `idle`."""
    if work.phase:
        return work.phase
    names = f"{work.name}\n{work.operation}"
    return (
        _match(BY_NAME, names)
        or (_of_product(work.shapes, sizes) if re.search(MATMUL, names, re.MULTILINE) else None)
        or _of_elements(work.shapes, sizes)
        or _match(BY_FUSED_NAME, names)
        or ("norms_and_mixes" if _sees_tokens(work.shapes, sizes) else "other")
    )


def _match(table: tuple[tuple[str, str], ...], names: str) -> str | None:
    return next((kind for kind, pattern in table if re.search(pattern, names, re.MULTILINE)), None)


def _of_product(shapes: Shapes, sizes: Sizes) -> str | None:
    """By the weight's two sides: what is left of (M, K, N) without the tokens, which may be as many as the rows of the
    head. Chunks of tokens leave all three."""
    pairs = [(a, b) for a, b in itertools.pairwise(shapes) if len(a) >= 2 and len(b) >= 2]
    sides = next(([a[-2], a[-1], b[-1]] for a, b in pairs if a[-1] == b[-2]), None)
    if sides is None:
        return None
    if sizes.tokens in sides:
        sides.remove(sizes.tokens)
    if sizes.lm_head_rows in sides:
        return "head_and_loss"
    return "mlp" if sizes.mlp_width in sides else "attention_projections"


def _of_elements(shapes: Shapes, sizes: Sizes) -> str | None:
    """Logits and hidden units are known by their last side; an MLP's weight has it too, but no tokens before it."""
    for shape in shapes:
        if len(shape) >= 2 and shape[-1] == sizes.lm_head_rows:
            return "head_and_loss"
        if len(shape) >= 2 and shape[-1] == sizes.mlp_width and _sees_tokens((shape[:-1],), sizes):
            return "mlp"
    return None


def _sees_tokens(shapes: Shapes, sizes: Sizes) -> bool:
    return any(sizes.tokens in shape or sizes.sequence_tokens in shape for shape in shapes)
