"""Scores of rows: those of a plain forward pass, whatever shares the pass, past window and document borders."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.lively import windows_of
from model.small import END_OF_TEXT, shaken, small, windows
from paceline.evaluate import score
from paceline.evaluate.score import Row, Score, cut_to, pair_row, score_rows
from paceline.model.gpt import GPT
from paceline.text.tokenizer import Tokenizer

WINDOW = 128


def rows_of(lengths: list[int]) -> list[Row]:
    generator = np.random.Generator(np.random.PCG64(0))
    rows = [generator.integers(0, 40, size=length).tolist() for length in lengths]  # END_OF_TEXT among them
    assert any(END_OF_TEXT in row[1:-1] for row in rows)
    return [Row(ids, max(1, len(ids) // 3)) for ids in rows]


def by_a_plain_pass(model: GPT, row: Row) -> Score:
    """From the logits of one row alone."""
    with torch.no_grad():
        logits = model.logits(torch.tensor([row.ids[:-1]]), windows(*windows_of(model, WINDOW)))[0]
    targets = torch.tensor(row.ids[1:])
    losses = -logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    hits = logits[:, : model.config.vocab_size].argmax(-1) == targets
    return Score(losses[row.counted_from - 1 :].numpy(), hits[row.counted_from - 1 :].numpy())


@pytest.mark.parametrize(
    "name", [pytest.param("r05-modern-arch", marks=pytest.mark.slow), "r13-window-warmup", "r18-softcap"]
)
def test_a_row_has_the_same_score_alone_and_among_longer_and_shorter_ones(name: str) -> None:
    model = shaken(small(name))
    rows = rows_of([2, 300, 17, 1026, 129, 5, 128])  # around a block, past the window, and padded to whole blocks
    for row, found in zip(rows, score_rows(model, rows, windows=windows_of(model, WINDOW)), strict=True):
        plain = by_a_plain_pass(model, row)
        np.testing.assert_allclose(found.losses, plain.losses, rtol=1e-4, atol=1e-4)
        assert found.likeliest.tolist() == plain.likeliest.tolist()


def test_the_likeliest_tokens_are_known_as_such() -> None:
    model = shaken(small("r18-softcap"))
    with torch.no_grad():
        first = int(model.logits(torch.tensor([[3, 4]]), windows(WINDOW))[0, -1, :300].argmax())
    right, wrong = score_rows(model, [Row([3, 4, first], 2), Row([3, 4, (first + 1) % 300], 2)], windows=(WINDOW,))
    assert (right.likeliest.tolist(), wrong.likeliest.tolist()) == ([True], [False])
    assert right.nats < wrong.nats


def test_progress_is_told_up_to_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "PASS_TOKENS", 100)
    told: list[tuple[int, int]] = []
    model, rows = shaken(small("r18-softcap")), [Row([1] * 33, 32)] * 5
    score_rows(model, rows, windows=(WINDOW,), progress=lambda done, total: told.append((done, total)))
    assert told == [(3, 5), (5, 5)]  # three rows of 32 tokens share a pass of 100


@given(ids=st.lists(st.integers(0, 9), min_size=2, max_size=30), most=st.integers(1, 40), data=st.data())
def test_a_row_that_is_too_long_loses_its_beginning_only(ids: list[int], most: int, data: st.DataObject) -> None:
    counted_from = data.draw(st.integers(1, len(ids) - 1))
    cut = cut_to(Row(ids, counted_from), most)
    assert list(cut.ids) == ids[-(most + 1) :]
    counted = len(ids) - counted_from
    assert len(cut.ids) - cut.counted_from == min(counted, most)


@pytest.mark.parametrize("context", ["The cat", "The cat ", "  ", ""])
def test_a_pair_is_the_whole_text_and_spaces_belong_to_the_continuation(context: str, tokenizer: Tokenizer) -> None:
    row = pair_row(tokenizer, context, " sat down.")
    assert tokenizer.decode_bytes(row.ids).decode() == context + " sat down."
    before = tokenizer.decode_bytes(row.ids[: row.counted_from]).decode()
    assert before == context.rstrip()
    assert (row.ids[0] == tokenizer.end_of_text) == (not context.strip())
