"""Parity of the fused kernels under Triton's interpreter, in fp32; run by test_fused.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.fused_cases import head_errors, heads_errors, joined_errors, mlp_errors, relative_error, seeded
from paceline.backends.newton_schulz_fused import orthogonalise_symmetric
from paceline.backends.registry import Operation, Request, find
from paceline.kernels import head_loss_fused, qkv_rope
from paceline.kernels.head_loss_fused import head_loss_fused as head_loss
from paceline.kernels.row_update import update_rows
from paceline.model.gpt import GPT, Seams
from paceline.model.masks import window_tensor
from paceline.optim.newton_schulz import orthogonalise
from paceline.optim.rule import Event
from paceline.optim.rules.adam_rows import update_plainly
from paceline.recipes.presets import preset
from paceline.settings.groups import GroupSettings

CPU = {"device": "cpu", "dtype": torch.float32}
ROUNDING = 2e-6
"""fp32 sums of a few thousand terms."""


@pytest.mark.parametrize("cap", [None, 15.0, 2.0, 100.0])  # 100 exceeds what needs no running maximum
@pytest.mark.parametrize(
    ("tokens", "vocab"), [(1, 40), (9, 2048), (19, 2052), (17, 4099)]
)  # chunks of 8, blocks of 2048 here
def test_head_and_loss(cap: float | None, tokens: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss_fused, "FUSED_CHUNK_TOKENS", 8)
    monkeypatch.setattr(head_loss_fused, "BLOCK", 2048)
    beyond_the_fit = 5e-5 if cap == 2.0 else ROUNDING  # logits of ten times the cap: tanh is taken as tanh(6) there
    shift = 0.0 if cap is None else cap / 3
    assert max(head_errors(tokens, vocab, cap, **CPU)) < beyond_the_fit
    assert max(head_errors(tokens, vocab, cap, shift, **CPU)) < 2 * beyond_the_fit


@pytest.mark.parametrize(("rows", "vocab", "width"), [(1, 40, 8), (9, 256, 24), (19, 419, 16)])
def test_slopes_become_the_gradient_by_targets_and_shares(rows: int, vocab: int, width: int) -> None:
    """Slopes and sums over 128 columns, as the product makes them: the last of 35 or 40 columns. Programs of 8 rows."""
    x, weight = seeded(rows, width, seed=1), seeded(vocab, width, seed=2, scale=2.0)
    raw = (x.double() @ weight.double().T).requires_grad_()
    targets = torch.arange(rows) * 7 % vocab
    targets[2::3] = -100
    capped = 15.0 * torch.tanh((raw + 4.0) / 15.0)
    exponentials = capped.detach().exp()
    slopes = (exponentials * (1.0 - (capped.detach() / 15.0).square())).float()
    sums = torch.stack([part.sum(1) for part in exponentials.split(128, dim=1)]).float()
    expected = F.cross_entropy(capped, targets, reduction="none", ignore_index=-100)
    expected.sum().backward()
    losses, shares, before = torch.empty(rows), torch.empty(rows), slopes.clone()
    head_loss_fused.launch_targets(slopes, sums, x, weight, targets, losses, shares[:0], (15.0, 4.0))
    assert relative_error(losses, expected) < ROUNDING
    assert torch.equal(slopes, before)
    shared_x = head_loss_fused.launch_targets(slopes, sums, x, weight, targets, losses, shares, (15.0, 4.0))
    assert relative_error(losses, expected) < ROUNDING
    assert relative_error(shares[:, None] * slopes, raw.grad) < ROUNDING
    assert torch.equal(shared_x, shares[:, None] * x)


def test_without_autograd_the_head_makes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    launch = head_loss_fused.launch_rows
    monkeypatch.setattr(
        head_loss_fused, "launch_rows", lambda *a, **k: (asked.append(k["with_gradient"]), launch(*a, **k))
    )
    x, weight, targets = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8), torch.arange(4)
    recorded = head_loss(x, weight, targets, 15.0)
    with torch.no_grad():
        assert torch.equal(head_loss(x, weight, targets, 15.0), recorded)
    assert asked == [True, False]


@pytest.mark.parametrize(("tokens", "width", "hidden"), [(1, 8, 16), (129, 72, 264), (300, 64, 512)])
def test_mlp(tokens: int, width: int, hidden: int) -> None:
    """Around tiles of 128 tokens, 256 hidden units and a depth of 64."""
    assert max(mlp_errors(tokens, width, hidden, **CPU)) < ROUNDING


@pytest.mark.parametrize(
    ("mixed", "value_embed", "shape", "rotary_fraction"),
    [
        (True, True, (2, 2, 16), 0.5),
        (True, False, (4, 2, 16), 0.5),  # grouped heads; a layer without a table
        (False, False, (2, 1, 32), 1.0),
        (True, True, (3, 1, 128), 0.5),
    ],
)
def test_heads(mixed: bool, value_embed: bool, shape: tuple[int, int, int], rotary_fraction: float) -> None:
    sequence = qkv_rope.TOKENS + 3  # ragged; two in one program
    found = heads_errors(
        shape,
        rotary_fraction=rotary_fraction,
        mixed=mixed,
        value_embed=value_embed,
        sequence=sequence,
        sequences=2,
        **CPU,
    )
    assert max(found) < ROUNDING


@pytest.mark.parametrize(
    ("mixed", "value_embed", "shape", "rotary_fraction"),
    [
        (True, True, (2, 1, 64), 0.5),
        (True, False, (2, 2, 128), 0.5),
        (False, False, (1, 1, 64), 1.0),
    ],
)
def test_stream_to_attended_values(
    mixed: bool, value_embed: bool, shape: tuple[int, int, int], rotary_fraction: float
) -> None:
    found = joined_errors(
        shape, rotary_fraction=rotary_fraction, mixed=mixed, value_embed=value_embed, sequence=256, sequences=2, **CPU
    )
    assert max(found) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r18-softcap", "frontier-60"])
def test_a_small_model_by_all_kernels_is_the_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and the gradient of every parameter, traced as compiled code is."""
    monkeypatch.setattr(head_loss_fused, "FUSED_CHUNK_TOKENS", 100)
    record = preset(name).model
    record = replace(
        record,
        candidates=None,
        ngrams=replace(record.ngrams, trigram_rows=None, bigram_rows=record.ngrams.bigram_rows and 99),
    )
    exact = replace(record.precision, compute="fp32", embeddings="fp32")
    config = replace(record, vocab_size=250, num_heads=2, head_dim=64, width=128, precision=exact)
    tokens = torch.randint(0, 250, (1, 128), generator=torch.Generator().manual_seed(1))
    seen = (tokens, tokens.roll(-1, 1), window_tensor([256] * len(config.windows), torch.device("cpu")))
    request = Request(model=config, device="cuda", compute="bf16", compiled=True)

    def kernel(operation: Operation, name: str = "fused") -> Any:
        return find(operation, name).build(request)

    fused = Seams(
        plan=kernel("attention", "ranges"), lm_head=kernel("lm_head"), attention=kernel("qkv"), mlp=kernel("mlp")
    )
    plain, fast = GPT(config, end_of_text=0), GPT(config, end_of_text=0, seams=fused)
    with torch.no_grad():
        for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
            b.copy_(a.add_(0.02 * torch.randn(a.shape, generator=torch.Generator().manual_seed(a.numel()))))
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    expected, found = plain(*seen).main.sum(), compiled(*seen).main.sum()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    expected.backward()
    found.backward()
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        most = 2e-4 if a.numel() <= 2 else 2e-5  # fp32 sums through all layers; those of scalars nearly cancel
        assert relative_error(b.grad, a.grad) < most, name


@pytest.mark.parametrize(("rows", "columns"), [(128, 192), (384, 384), (512, 256), (100, 64)])  # 100 is no whole tile
def test_symmetric_products_give_the_same_orthogonal_factors(rows: int, columns: int) -> None:
    G = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(5))
    settings = {"steps": 5, "dtype": torch.float32, "norm_of": "rounded", "association": "polynomial_first"}
    expected = orthogonalise(G, **settings)
    torch.testing.assert_close(orthogonalise_symmetric(G, **settings), expected, rtol=1e-4, atol=1e-5)
    assert orthogonalise_symmetric(G[:0], **settings).shape == (0, rows, columns)  # a rank may be dealt none


def test_the_other_association_is_computed_plainly() -> None:
    """The kernels know one order of the products only."""
    G = torch.randn(2, 128, 192, generator=torch.Generator().manual_seed(5))
    settings = {"steps": 5, "dtype": torch.float32, "norm_of": "rounded", "association": "product_first"}
    assert torch.equal(orthogonalise_symmetric(G, **settings), orthogonalise(G, **settings))


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("skip", [None, False, True])
def test_one_launch_updates_rows_as_the_plain_twin(width: int, skip: bool | None) -> None:
    """Ids that repeat more often than a program loads at once, one that never does, and places that nobody took."""
    ids = torch.tensor([3, 7, 3, -1, 3, 3, 0, 3, 3, 3, 3, 7, 3, 19, -1])
    rows = seeded(len(ids), width, seed=1)
    rows[ids < 0] = 0.0
    start = seeded(20, width, seed=2), torch.rand(20), torch.randint(3, (20,), dtype=torch.int32)
    settings = GroupSettings(lr=0.1, beta1=0.0, beta2=0.9, eps=1e-8, weight_decay=0.3, momentum=0.0, moves=True)
    event = Event(settings=settings, step=5, skipped=torch.ones(()), skip=None if skip is None else torch.tensor(skip))
    found, plain = ([part.clone() for part in start] for _ in range(2))
    update_rows(*found, ids, rows, event)
    update_plainly(*plain, ids, rows, event)
    for mine, theirs, before in zip(found, plain, start, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(mine, before) == bool(skip)
