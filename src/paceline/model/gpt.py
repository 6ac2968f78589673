"""The whole model: embeddings, blocks with their skips, head. Only mathematics; it knows no ranks, files or clocks.

Shape letters: B sequences, T tokens, H heads, D head width. `windows` (kinds,) int32 holds the attention window of each
kind in tokens, in the order of `ModelConfig.windows`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.kernels.row_gradients import RowGradients
from paceline.model.attention import Attend, AttentionForward, Plan, attention_plain, plan_reference
from paceline.model.block import Block, MlpForward, Skip, mlp_plain
from paceline.model.embed import Embeddings, LookUp
from paceline.model.loss import HeadLoss, Losses, LossInputs, cap_logits, head_loss, loss_term
from paceline.model.masks import document_ids
from paceline.model.ops import MakeMatMul, Norm, declare, initialise, plain_matmul, rms_norm, torch_dtype
from paceline.model.rotary import RotaryCosSin, rotary_tables
from paceline.settings import spec
from paceline.settings.model import ModelConfig

RunBlock = Callable[..., tuple[Tensor, Tensor | None]]
"""(block, and what `Block.forward` takes) -> what it returns."""


def run_plainly(block: nn.Module, *inputs: Any) -> Any:
    return block(*inputs)


def run_recomputed(
    block: nn.Module,
    x: Tensor,
    x0: Tensor,
    value_embed: Tensor | None,
    rotary: Any,
    attend: Attend,
    skip: Skip | None,
    *rest: Tensor | None,
) -> Any:
    """Keep only the block's inputs and compute it again in the backward pass (`train.recompute`).

    Costs one more forward pass of the blocks, about a third of their arithmetic. Nothing in a block draws from a
    generator, so the second pass gives the same bits. Skips are added inside blocks: what is added between two, the
    compiler would compute again with a whole block."""

    def run(x: Tensor, x0: Tensor, value_embed: Tensor | None, skip: "Skip | None") -> Any:  # quoted: not for dynamo
        return block(x, x0, value_embed, rotary, attend, skip, *rest)

    return checkpoint(run, x, x0, value_embed, skip, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True, kw_only=True)
class Seams:
    """Who computes what: back ends of the same mathematics. `run_block` may wrap every block but not change what it
    computes. The defaults are the plain twins."""

    plan: Plan = plan_reference
    attention: AttentionForward = attention_plain
    mlp: MlpForward = mlp_plain
    lm_head: HeadLoss = head_loss
    matmul: MakeMatMul = plain_matmul
    look_up: LookUp = F.embedding
    run_block: RunBlock = run_plainly


class GPT(nn.Module):
    head: nn.Parameter
    skip_weights: nn.Parameter
    skip_gate: nn.Parameter
    backout: nn.Parameter
    ngram_gate: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        *,
        end_of_text: int,
        seed: int = 0,
        seams: Seams | None = None,
        first_position: int = 0,
    ) -> None:
        """`seed` decides the initial weights. `first_position`: where in its sequence the first token stands that a
        pass is given."""
        super().__init__()
        seams = seams or Seams()
        self.config, self.end_of_text, self.first_position = config, end_of_text, first_position
        self.plan, self.loss, self.run_block = seams.plan, seams.lm_head, seams.run_block
        self.terms = tuple(loss_term(term.name) for term in config.loss_terms)
        declare(self, spec.trunk(config))
        self.embeddings = Embeddings(config, seams.look_up)
        self.mixes = nn.ModuleDict()
        if config.mixes:
            from paceline.model.mix import Mix

            self.mixes.update({str(at.before): Mix(config, at) for at in config.mixes})
        self.blocks = nn.ModuleList(
            Block(config, layer, seams.attention, seams.mlp, seams.matmul) for layer in config.layers
        )
        self.final_norm = Norm(config)
        dims = {config.head_dim, *(shape.qk_dim for shape in config.attending)}
        self.rotary_dims = sorted(dims) if config.positions == "rotary" else []
        for dim in self.rotary_dims:
            for name, table in zip(("cos", "sin"), rotary_tables(config.rotary, dim), strict=True):
                self.register_buffer(f"rotary_{name}_{dim}", table, persistent=False)
        self.bounds = config.softcap, config.softcap_shift
        self.read_later = config.read_later  # here: the compiler does not enter a cached property's lock
        self.dropout = None
        if config.dropout:
            from paceline.model.dropout import DropoutKeys

            self.dropout = DropoutKeys(config.dropout)
        self.sampler = None
        if config.candidates is not None:
            from paceline.model.sampled import CandidateSampler

            self.sampler = CandidateSampler(config.lm_head_rows)
        initialise(self, config, seed)

    def forward(self, tokens: Tensor, targets: Tensor, windows: Tensor) -> Losses:
        """`main` is the loss of every token, (B, T) fp32, or only their total, 0-D, where the head's back end gives no
        more: only its sum is well defined. `terms` are totals, in the order of `config.loss_terms`."""
        return self.losses(self.head_input(tokens, windows), tokens, targets)

    def losses(self, x: Tensor, tokens: Tensor, targets: Tensor) -> Losses:
        """From the normalised stream (B, T, width)."""
        x, head = x.flatten(0, -2), self._head_rows()
        if self.sampler is not None and torch.is_grad_enabled() and self.sampler.count:
            main = self.sampler.losses(self.loss, x.view(*targets.shape, -1), head, targets, self.bounds)
        else:
            losses = self.loss(x, head, targets.flatten(), *self.bounds)
            main = losses.view(targets.shape) if losses.dim() else losses
        inputs = LossInputs(x, head, tokens, targets, *self.bounds)
        return Losses(main, tuple(total(inputs) for total in self.terms))

    def head_input(self, tokens: Tensor, windows: Tensor) -> Tensor:
        """The normalised stream before the head, (B, T, width) in the compute format."""
        return self._head_input(self._stream_of(tokens, windows))

    def logits(self, tokens: Tensor, windows: Tensor) -> Tensor:
        """(B, T, head rows) fp32, capped."""
        return self.head_of(self._stream_of(tokens, windows))

    def head_of(self, x: Tensor) -> Tensor:
        """Logits from the residual stream."""
        return cap_logits(F.linear(self._head_input(x), self._head_rows()), *self.bounds)

    def _head_input(self, x: Tensor) -> Tensor:
        normed: Tensor = self.final_norm(x)
        return normed.to(torch_dtype(self.config.precision.compute))

    def _head_rows(self) -> Tensor:
        weight = self.embeddings.token if self.config.tied_lm_head else self.head
        return weight.to(torch_dtype(self.config.precision.compute))

    def _stream_of(self, tokens: Tensor, windows: Tensor) -> Tensor:
        documents = document_ids(tokens, self.end_of_text) if self.config.document_mask else None
        attend = self.plan(self.config, documents, tokens.size(-1), windows)
        if any(shape.key_offset for shape in self.config.attending):
            from paceline.model.previous import OffsetKeys

            attend = OffsetKeys(self.config, attend)
        start, end = self.first_position, self.first_position + tokens.size(-1)
        return self.stream(tokens, attend, slice(start, end))

    def rotary(self, positions: Tensor | slice, dim: int) -> RotaryCosSin:
        """Rows of these positions for heads of a width."""
        return RotaryCosSin(*(getattr(self, f"rotary_{name}_{dim}")[positions] for name in ("cos", "sin")))

    def stream(self, tokens: Tensor, attend: Attend, positions: Tensor | slice, before: Tensor | None = None) -> Tensor:
        """The residual stream after the last block, (B, T, width). `positions` says where tokens stand, `before` (B, 2)
        which came before them, -1: none."""
        x: Tensor = self.embeddings(tokens, positions, before)
        keys: Tensor | None = None  # of dropout
        if self.dropout is not None and torch.is_grad_enabled():
            keys = self.dropout(tokens, positions)
            x = self.dropout.drop(x, keys)
        if self.config.embedding_norm:
            x = rms_norm(x, self.config.norm_eps)
        x0, half = x, self.config.num_layers // 2
        ngrams = self.embeddings.ngrams_of(tokens, before) if self.config.ngrams.tables else None
        if ngrams is not None:
            x = x + self.ngram_gate * ngrams
        skips: list[Tensor] = []
        kept = {-1: x} if -1 in self.read_later else {}  # outputs of layers that later ones read; -1: before the first
        first_v: Tensor | None = None  # block 0's own values, which the `residual` value path mixes into all others
        rows: dict[int, Tensor] = {}  # of the value tables looked up so far; a second layer uses the same
        rotary = {dim: self.rotary(positions, dim) for dim in self.rotary_dims}
        for layer, block in zip(self.config.layers, self.blocks, strict=True):
            x = self._mixed(x, layer.index, kept)
            shape, later = layer.attention, self.config.unet_skips and layer.index >= half
            table = None if shape is None else shape.value_table
            if shape is not None and table is not None and table not in rows:
                rows[table] = self.embeddings.value_rows(tokens, shape)
            value_embed = first_v if table is None else rows[table]
            here = rotary.get(self.config.head_dim if shape is None else shape.qk_dim)
            skip = (self.skip_weights[layer.index - half], skips.pop()) if later else None
            if self.config.skip is not None and layer.index == self.config.skip[1]:
                skip = torch.sigmoid(self.skip_gate[0]), kept[self.config.skip[0]]
            attended = None if shape is None or shape.attends_to is None else kept[shape.attends_to]
            added = ngrams if layer.ngram_gate else None
            x, raw_v = self.run_block(block, x, x0, value_embed, here, attend, skip, keys, attended, added)
            if layer.index in self.read_later:
                kept[layer.index] = x
            if layer.index == 0 and self.config.value_path == "residual":
                first_v = raw_v
            if self.config.unet_skips and not later:
                skips.append(x)
        if self.config.backout_layer is not None:
            x = x - self.backout * kept[self.config.backout_layer]
        return self._mixed(x, self.config.num_layers, kept)

    def _mixed(self, x: Tensor, layer: int, kept: dict[int, Tensor]) -> Tensor:
        """With the earlier streams that are added before a layer, or before the head."""
        for at in (at for at in self.config.mixes if at.before == layer):
            x = self.mixes[str(layer)](x, [kept[source] for source in at.sources])
        return x

    def keep_row_gradients(self, table: str, store: RowGradients) -> None:
        """From now on the gradient of a lookup table goes to `store`, not to its `.grad`."""
        path, _, name = table.partition(".")
        module = self.get_submodule(path)
        assert isinstance(module, Embeddings)
        module.row_gradients[name.replace(".", "_")] = store

    def state_buffers(self) -> dict[str, Tensor]:
        """Persistent buffers, which checkpoints hold: scales of products, say."""
        parameters = {name for name, _ in self.named_parameters()}
        return {name: buffer for name, buffer in self.state_dict(keep_vars=True).items() if name not in parameters}

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """Parameters by their optimizer group, groups and members in the order of the description."""
        named, groups = dict(self.named_parameters()), dict[str, dict[str, nn.Parameter]]()
        for declared in spec.describe(self.config).parameters:
            groups.setdefault(declared.group, {})[declared.name] = named[declared.name]
        return groups
