"""What a model consists of, written once: its parameters and its matrix products. No torch.

The modules register exactly the parameters that are declared here, and `model/ops.py` fills them as declared. Parameter
counts, optimizer groups, FLOPs, the memory model, the planner and the benchmark's shapes are derived from `describe`.
A part gives names relative to its module; `describe` puts the module's path before them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from paceline.settings.model import (
    GATE_INPUTS,
    MIX_SCALE,
    MIX_WIDTH,
    SMEAR_INPUTS,
    AttentionLayer,
    DType,
    LayerConfig,
    MixConfig,
    ModelConfig,
)

Group = Literal[
    "matrices", "embeddings", "value_embeddings", "ngrams", "lm_head", "scalars", "vectors", "gates", "mixes"
]
"""Parameters that the optimizer treats alike. A new kind of parameter may have a group of its own."""
WorkClass = Literal["mlp", "attention_projections", "head_and_loss"]
"""Where a product's time is counted."""
DTYPE_BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Init:
    """How a parameter starts: N(0, std), U(±bound), or these values, one for all or one each."""

    kind: Literal["normal", "uniform", "values"]
    bound: float = 0.0
    std: float = 1.0
    values: tuple[float, ...] = ()


GPT2_STD = 0.02
NORMAL, GPT2, SMALL = Init("normal"), Init("normal", std=GPT2_STD), Init("normal", std=0.005)
RESIDUAL_START, NGRAM_START = math.sqrt(1.1), 0.05
ZEROS, ONES = Init("values", values=(0.0,)), Init("values", values=(1.0,))


def uniform(fan_in: int) -> Init:
    """The start of a linear layer."""
    return Init("uniform", bound=1.0 / math.sqrt(fan_in))


@dataclass(frozen=True, kw_only=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    group: str
    dtype: DType
    init: Init
    parts: tuple[int, ...] = ()
    """Rows of each of the matrices that are stacked in this one; none: it is one matrix."""
    rounded: bool = False
    """Its start is rounded through bf16."""
    gradient: Literal["dense", "rows", "either"] = "dense"
    """`rows`: only the rows that a step looked up, with their indices. `either`: as its rule asks."""
    table: bool = False
    """It has a row for each token id, place or hash."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of the matrices in it."""
        return [(rows, self.shape[1]) for rows in self.parts or self.shape[:1]]


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of every token with a weight matrix (out, in)."""

    name: str
    outputs: int
    inputs: int
    counted_as: WorkClass

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True)
class Part:
    """What one module declares."""

    parameters: tuple[Parameter, ...] = ()
    products: tuple[Product, ...] = ()


def embeddings(config: ModelConfig) -> Part:
    starts = {"normal": NORMAL, "uniform": uniform(config.width), "gpt2": GPT2, "small": SMALL}
    start, value_start = starts[config.embedding_init], Init("normal", std=config.value_init_std)
    token = _table(config, "token", config.width, "embeddings", start, dense=config.tied_lm_head)
    widths, in_chunks = config.value_table_widths, config.value_storage == "chunks"
    tables = {f"values.{table}": width for table, width in widths.items()}
    if widths and in_chunks:
        tables = {"value_chunks": sum(widths.values())}
    values = [_table(config, name, n, "value_embeddings", value_start, dense=in_chunks) for name, n in tables.items()]
    ngrams = [
        replace(token, name=f"ngrams.{n}", shape=(rows, config.width), group="ngrams", init=ZEROS, gradient="either")
        for n, rows in config.ngrams.tables.items()
    ]
    smear = [_scalars(config, "smear", (0.0,)), _gate("smear_gate", 1, SMEAR_INPUTS)] if config.smear else []
    rows = replace(token, name="position", shape=(config.rotary.max_tokens, config.width), init=GPT2, gradient="dense")
    return Part((token, *([rows] if config.positions == "learned" else []), *values, *ngrams, *smear))


def attention(config: ModelConfig, shape: AttentionLayer) -> Part:
    width, of_one = config.width, (config.qk_matrix_heads or shape.num_heads) * shape.qk_dim
    rows = {"query": shape.q_width, "key": shape.k_width, "value": shape.v_width}
    parts = {name: (n,) if name == "value" or n <= of_one else (of_one,) * (n // of_one) for name, n in rows.items()}
    if config.qkv == "fused":
        joined = tuple(n for each in parts.values() for n in each)
        projections = [_matrix(config, "qkv", sum(joined), width, parts=joined)]
    else:
        cut = {name: each if len(each) > 1 else () for name, each in parts.items()}
        projections = [_matrix(config, name, n, width, parts=cut[name]) for name, n in rows.items()]
    output = _output(config, "output", width, shape.out_width, starts=config.attention_output_starts)
    mix = [_scalars(config, "value_mix", (0.5,) * config.value_lambdas)] if config.value_path != "plain" else []
    if config.value_gates:
        mix = [] if shape.value_table is None else [_gate("value_gate", shape.kv_heads, 2 * GATE_INPUTS)]
    mix += [_scalars(config, "output_scale", (1.0,))] if config.residual_scales else []
    matrices = [*projections, output]
    products = tuple(_product(matrix, "attention_projections") for matrix in matrices)
    return Part((*matrices, *_biases(config, matrices), *mix), products)


def mlp(config: ModelConfig, layer: LayerConfig) -> Part:
    ways_in = [_matrix(config, name, layer.mlp_width, config.width) for name in ("gate", "up")[not config.gated :]]
    matrices = [*ways_in, _output(config, "down", config.width, layer.mlp_width)]
    scale = [_scalars(config, "output_scale", (1.0,))] if config.residual_scales else []
    products = tuple(_product(matrix, "mlp") for matrix in matrices)
    return Part((*matrices, *_biases(config, matrices), *scale), products)


def norm(config: ModelConfig) -> Part:
    """A norm on the residual stream."""
    names = {"weight": ONES} if config.norm != "rms" else {}
    names |= {"bias": ZEROS} if config.norm == "layer" and config.biases else {}
    return Part(tuple(_vector(name, config.width, init) for name, init in names.items()))


def block(config: ModelConfig, layer: LayerConfig) -> Part:
    """What a block has besides its sub-layers."""
    kept = (RESIDUAL_START,) * (1 + (layer.mlp_width > 0))
    starts: dict[str, tuple[float, ...]] = {"x0_mix": (1.0, 0.0)} if config.x0_mix else {}
    starts |= {"residual_scales": kept} if config.residual_scales else {}
    starts |= {"x0_gate": (0.0,)} if layer.x0_gate else {}
    starts |= {"ngram_gate": (NGRAM_START,)} if layer.ngram_gate else {}
    return Part(tuple(_scalars(config, name, start) for name, start in starts.items()))


def trunk(config: ModelConfig) -> Part:
    """What the model has besides embeddings and blocks."""
    skips = [_scalars(config, "skip_weights", (1.0,) * (config.num_layers // 2))] if config.unet_skips else []
    skips += [_scalars(config, "skip_gate", (-1.5,))] if config.skip is not None else []
    skips += [_scalars(config, "backout", (0.5,))] if config.backout_layer is not None else []
    skips += [_scalars(config, "ngram_gate", (NGRAM_START,))] if config.ngrams.tables else []
    head = _matrix(config, "head", config.lm_head_rows, config.width)
    starts = {"zeros": ZEROS, "uniform": uniform(config.width), "gpt2": GPT2}
    head = replace(head, init=starts[config.lm_head_init])
    heads = () if config.tied_lm_head else (replace(head, group="lm_head", table=True),)
    return Part((*skips, *heads), (_product(head, "head_and_loss"),))


def mix(config: ModelConfig, at: MixConfig) -> Part:
    """The network of a mix: its second matrix starts at 0, so that the weights start as stated."""
    hidden = replace(_gate("hidden", MIX_WIDTH, config.width), init=uniform(config.width), group="mixes")
    weights = replace(_gate("weights", len(at.sources), MIX_WIDTH), group="mixes")
    starts = Init("values", values=tuple(start / MIX_SCALE for start in at.starts))
    bias = Parameter(name="bias", shape=(len(at.sources),), group="mixes", dtype="fp32", init=starts)
    return Part((hidden, weights, bias), tuple(_product(each, "mlp") for each in (hidden, weights)))


def _table(config: ModelConfig, name: str, width: int, group: Group, init: Init, *, dense: bool) -> Parameter:
    """A row for each token id. A gradient is `dense` where a table is also multiplied with, or looked up in pieces."""
    gradient: Literal["dense", "either"] = "dense" if dense else "either"
    shape, dtype = (config.embedding_rows, width), config.precision.embeddings
    return Parameter(name=name, shape=shape, group=group, dtype=dtype, init=init, gradient=gradient, table=True)


def _matrix(config: ModelConfig, name: str, rows: int, columns: int, *, parts: tuple[int, ...] = ()) -> Parameter:
    """An fp32 weight (out, in) that Muon may move."""
    half = Init("uniform", bound=0.5 * math.sqrt(3 / config.width))  # a standard deviation of 0.5/sqrt(width)
    return Parameter(
        name=name,
        shape=(rows, columns),
        group="matrices",
        dtype="fp32",
        init={"gpt2": GPT2, "uniform": uniform(columns), "half": half}[config.matrix_init],
        parts=parts,
        rounded=config.precision.round_matrices_at_init,
    )


def _output(config: ModelConfig, name: str, rows: int, columns: int, *, starts: bool = False) -> Parameter:
    """The matrix at the end of a branch; `starts`: not at 0, whatever the others do."""
    matrix = _matrix(config, name, rows, columns)
    if config.zero_init_outputs and not starts:
        return replace(matrix, init=ZEROS)
    small = Init("normal", std=GPT2_STD / math.sqrt(2 * config.num_layers))
    return replace(matrix, init=small) if config.matrix_init == "gpt2" else matrix


def _biases(config: ModelConfig, matrices: Sequence[Parameter]) -> list[Parameter]:
    return [_vector(f"{each.name}_bias", each.shape[0], ZEROS) for each in matrices] if config.biases else []


def _vector(name: str, width: int, init: Init) -> Parameter:
    return Parameter(name=name, shape=(width,), group="vectors", dtype="fp32", init=init)


def _gate(name: str, outputs: int, inputs: int) -> Parameter:
    """A small matrix, in fp32, that starts at 0 and is not Muon's."""
    return Parameter(name=name, shape=(outputs, inputs), group="gates", dtype="fp32", init=ZEROS)


def _scalars(config: ModelConfig, name: str, start: tuple[float, ...]) -> Parameter:
    init, dtype = Init("values", values=start), config.precision.scalars
    return Parameter(name=name, shape=(len(start),), group="scalars", dtype=dtype, init=init)


def _product(matrix: Parameter, counted_as: WorkClass) -> Product:
    outputs, inputs = matrix.shape
    return Product(name=matrix.name, outputs=outputs, inputs=inputs, counted_as=counted_as)


@dataclass(frozen=True)
class Description:
    """A whole model. Names are those of `GPT.named_parameters`, in their order."""

    parameters: tuple[Parameter, ...]
    products: tuple[Product, ...]

    @cached_property
    def kinds(self) -> Counter[tuple[str, tuple[int, ...], DType]]:
        """(group, shape, format) of the parameters, to their number: a deep model has few kinds."""
        return Counter((parameter.group, parameter.shape, parameter.dtype) for parameter in self.parameters)

    @property
    def groups(self) -> set[str]:
        return {group for group, _, _ in self.kinds}

    @cached_property
    def tables(self) -> set[str]:
        """Groups of tables: most of the bytes, and nothing of a block."""
        return {parameter.group for parameter in self.parameters if parameter.table}

    def numel(self, *groups: str) -> int:
        """Parameters of these groups; of all, if none is named."""
        return sum(numel for numel, _ in self._sizes(groups))

    def nbytes(self, *groups: str) -> int:
        return sum(numel * DTYPE_BYTES[dtype] for numel, dtype in self._sizes(groups))

    def _sizes(self, groups: tuple[str, ...]) -> Iterator[tuple[int, DType]]:
        """Parameters and format of each kind."""
        for (group, shape, dtype), count in self.kinds.items():
            if group in groups or not groups:
                yield count * math.prod(shape), dtype

    def product_weights(self, *classes: WorkClass) -> int:
        """Weights that a token is multiplied with, of these classes of work or of all."""
        return sum(p.weights for p in self.products if p.counted_as in classes or not classes)


@lru_cache(maxsize=64)
def describe(config: ModelConfig) -> Description:
    parts = [("", trunk(config)), ("embeddings.", embeddings(config))]
    parts += [(f"mixes.{at.before}.", mix(config, at)) for at in config.mixes]
    for layer in config.layers:
        path = f"blocks.{layer.index}."
        parts.append((path, block(config, layer)))
        if layer.attention is not None:
            parts.append((f"{path}attention_norm.", norm(config)))
            parts.append((f"{path}attention.", attention(config, layer.attention)))
        if layer.mlp_width:
            parts.append((f"{path}mlp_norm.", norm(config)))
            parts.append((f"{path}mlp.", mlp(config, layer)))
    parts.append(("final_norm.", norm(config)))
    parameters = tuple(replace(each, name=path + each.name) for path, part in parts for each in part.parameters)
    name, count = Counter(each.name for each in parameters).most_common(1)[0]
    if count > 1:
        groups = ", ".join(repr(each.group) for each in parameters if each.name == name)
        raise ValueError(f"settings/spec.py declares parameter {name} {count} times, in groups {groups}")
    products = tuple(replace(each, name=path + each.name) for path, part in parts for each in part.products)
    return Description(parameters, products)
