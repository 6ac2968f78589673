"""Cards: what is written is read back, and a file that is not a card of this format is named."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.environment import CodeVersion, environment
from paceline.core.errors import RunError
from paceline.metrics.card import CARD_FILE, Evaluation, RunCard, add_evaluation, card_diff, read_card, write_card
from paceline.recipes.presets import preset

CARD = RunCard(
    name="demo",
    preset="demo",
    track=None,
    seed=0,
    finished=False,
    steps=500,
    steps_done=0,
    tokens=0,
    parameters=1_000_000,
    data_fingerprint="ab12",
    code_version=CodeVersion(version="0.1.0"),
    environment={"python": "3.11", "cores": 2},
    started="2025-01-01T00:00:00+00:00",
)
TOP_LEVEL = {
    "preset", "track", "seed", "parameters", "steps", "tokens", "val_loss", "val_bpb", "train_s", "wall_s",
    "tokens_per_s", "peak_bytes", "data_fingerprint", "finished",
}  # fmt: skip


def finished_card() -> RunCard:
    demo = preset("demo")
    changed = replace(demo, steps=100, model=replace(demo.model, layers_without_attention=(1, -1)))
    return replace(
        CARD,
        finished=True,
        diff=card_diff(demo, changed),
        val_loss=3.25,
        notes=("bf16 -> fp32 on this CPU",),
        losses=((0, 7.6, 2.5, 0.0, 3.0), (500, 3.25, None, 80.0, 95.5)),
        sample="Once <b>upon</b> a time\n\u2028",
    )


@pytest.mark.parametrize("card", [CARD, finished_card()])
def test_a_card_is_read_back_as_it_was_written(card: RunCard, tmp_path: Path) -> None:
    write_card(tmp_path, card)
    assert read_card(tmp_path) == card


def test_the_file_has_the_promised_keys_while_the_run_is_young(tmp_path: Path) -> None:
    write_card(tmp_path, CARD)
    values = json.loads((tmp_path / CARD_FILE).read_text())
    assert set(values) >= TOP_LEVEL
    assert values["finished"] is False
    assert values["val_loss"] is None


def test_a_diff_names_only_what_changed() -> None:
    rows = {row.field: (row.before, row.after) for row in finished_card().diff}
    assert rows == {"steps": (preset("demo").steps, 100), "model.layers_without_attention": ([], [1, -1])}


def test_a_diverged_run_still_has_a_card(tmp_path: Path) -> None:
    write_card(tmp_path, replace(CARD, val_loss=math.nan, losses=((10, math.inf, None, 1.0, 2.0),)))
    card = read_card(tmp_path)
    assert card.val_loss is None
    assert card.losses == ((10, None, None, 1.0, 2.0),)


def evaluation(**changes: object) -> Evaluation:
    judged = Evaluation(
        kind="text",
        name="book.txt",
        step=500,
        made="2025-01-01T00:00:00+00:00",
        figures={"bits_per_byte": 1.5},
        of={"bytes": 10, "window_tokens": None},
        positions=((0, 15, True, 16, 2.5),),
    )
    return replace(judged, **changes)  # type: ignore[arg-type]


def test_evaluations_gather_on_the_card_and_a_repeated_one_takes_the_place_of_the_first(tmp_path: Path) -> None:
    write_card(tmp_path, CARD)
    again = evaluation(figures={"bits_per_byte": 1.25})
    others = [evaluation(step=250), evaluation(of={"bytes": 11, "window_tokens": None}), evaluation(kind="task")]
    for judged in (evaluation(), *others, again):
        add_evaluation(tmp_path, judged)
    assert read_card(tmp_path) == replace(CARD, evaluations=(*others, again))


def test_a_card_from_before_there_were_evaluations_is_read(tmp_path: Path) -> None:
    write_card(tmp_path, CARD)
    values = json.loads((tmp_path / CARD_FILE).read_text())
    del values["evaluations"]
    (tmp_path / CARD_FILE).write_text(json.dumps(values))
    assert read_card(tmp_path) == CARD


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[: len(text) // 2], "not valid JSON"),
        (lambda text: "", "not valid JSON"),
        (lambda text: "[]", "format None"),
        (lambda text: text.replace('"format": 1', '"format": 99'), "format 99"),
        (lambda text: text.replace('"seed": 0', '"seed": "zero"'), "seed"),
        (lambda text: text.replace('"seed": 0', '"sead": 0'), "sead"),
        (lambda text: text.replace('"seed": 0,', ""), "seed"),
    ],
)
def test_a_damaged_card_is_an_error_that_names_the_file(damage: object, complaint: str, tmp_path: Path) -> None:
    write_card(tmp_path, CARD)
    path = tmp_path / CARD_FILE
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(RunError, match=complaint) as caught:
        read_card(tmp_path)
    assert str(caught.value).count(str(path)) == 1


def test_a_folder_without_a_card_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        read_card(tmp_path)


def test_the_environment_fits_a_card_and_tells_nothing_private(tmp_path: Path) -> None:
    facts = environment()
    write_card(tmp_path, replace(CARD, environment=facts))
    assert read_card(tmp_path).environment == facts
    host, home = os.uname().nodename, str(Path.home())
    assert not any(host == value or home in str(value) for value in facts.values())


def test_what_another_process_adds_is_kept_when_the_trainer_writes_its_card(tmp_path: Path) -> None:
    """It holds the card that it has made, which knows nothing of the evaluation."""
    write_card(tmp_path, CARD)
    add_evaluation(tmp_path, evaluation())
    write_card(tmp_path, replace(CARD, steps_done=250))
    assert read_card(tmp_path) == replace(CARD, steps_done=250, evaluations=(evaluation(),))
    newer = evaluation(figures={"bits_per_byte": 1.5})  # after the trainer has read the card, as a resumed one does
    add_evaluation(tmp_path, newer)
    write_card(tmp_path, replace(CARD, evaluations=(evaluation(),)))
    assert read_card(tmp_path).evaluations == (newer,)


ADDS = """
import sys
from dataclasses import replace
from pathlib import Path
from paceline.metrics.card import add_evaluation, read_card, write_card
from paceline.metrics.card import Evaluation
folder, mine = Path(sys.argv[1]), sys.argv[2]
card = read_card(folder)
for step in range(25):
    if mine == "trainer":
        write_card(folder, replace(card, steps_done=step))
    else:
        add_evaluation(folder, Evaluation(kind="text", name=mine, step=step, made="", figures={}, of={}))
"""


def test_processes_that_write_one_card_at_once_lose_nothing(tmp_path: Path) -> None:
    write_card(tmp_path, CARD)
    words = [sys.executable, "-c", ADDS, str(tmp_path)]
    writers = [subprocess.Popen([*words, name]) for name in ("a", "b", "trainer")]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    card = read_card(tmp_path)
    assert card.steps_done == 24
    assert {(found.name, found.step) for found in card.evaluations} == {(n, s) for n in "ab" for s in range(25)}
    assert [path.name for path in tmp_path.iterdir()] == [CARD_FILE]
