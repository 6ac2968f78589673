"""What pages say of our own runs: only comparable runs side by side, the nearest ones, with the files' numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError
from paceline.lab.technique import techniques
from paceline.recipes.records import PUBLIC
from result_files import CPU_PRESETS, Pair, Sentence, all_series, effects, judged, names, pairs, read

TECHNIQUES = techniques()


def gpu_run(record: int, length: int, **changes: Any) -> dict[str, Any]:
    values = {"steps": length, "seed": 0, "data_fingerprint": "f", "val_loss": 4 + record / 100, "val_bpb": 1.3,
              "train_s": 100.0, "first_steps_s": 20.0, "peak_gib": 37.0}  # fmt: skip
    return {"command": f"paceline train r{record:02d} --steps {length}", "note": None, **values, **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = [(5, 60), (14, 60), (16, 95), (17, 95), (18, 95)]
    for record, steps in runs:
        write(tmp_path, f"h200-r{record:02d}-{steps}.json", gpu_run(record, steps))
    write(tmp_path, "h200-track-r18-reference.json", {"what": "another kind"})
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    read.cache_clear()


def records_of(pair: Pair) -> tuple[int, int]:
    _, first, second = pair
    return PUBLIC[first.preset].record, PUBLIC[second.preset].record


@pytest.mark.parametrize(
    ("key", "between", "newer_has_it"),
    [
        ("softcap-15", (17, 18), True),
        ("coordinate-descent", (17, 18), False),
        ("sparse-values", (16, 17), True),
        ("expandable-segments", (17, 18), False),  # of two neighbours the newer
        ("value-embeddings", (5, 14), True),
        ("document-mask", (5, 14), True),
        ("value-chunks", (5, 14), True),  # record 15, which has it too, is not among the runs
    ],
)
def test_the_nearest_runs_of_which_one_has_it(
    key: str, between: tuple[int, int], newer_has_it: bool, folder: Path
) -> None:
    (pair,) = pairs(TECHNIQUES[key], folder)
    assert records_of(pair) == between
    assert [run.preset in TECHNIQUES[key].presets for run in pair[1:]] == [not newer_has_it, newer_has_it]


@pytest.mark.parametrize("key", ["muon", "grouped-query", "block-window"])
def test_without_two_comparable_runs_there_is_nothing_to_say(key: str, folder: Path) -> None:
    """All have it, none has it, or only runs of unequal length differ in it (records 14 and 16)."""
    assert pairs(TECHNIQUES[key], folder) == []


SHORT_VALIDATION = {"command": "paceline train r18-softcap --steps 95 --evaluate.tokens 1310720"}


@pytest.mark.parametrize("change", [{"seed": 1}, {"data_fingerprint": "g"}, {"steps": 96}, SHORT_VALIDATION])
def test_runs_on_other_data_seeds_lengths_or_flags_are_not_compared(change: dict[str, Any], folder: Path) -> None:
    write(folder, "h200-r18-95.json", gpu_run(18, 95, **change))
    assert pairs(TECHNIQUES["softcap-15"], folder) == []


@pytest.mark.parametrize("flag", ["--train.no-coordinate-descent", "--train.coordinate-descent"])
def test_a_run_whose_flags_set_the_switch_says_nothing_of_it(flag: str, folder: Path) -> None:
    for record in (17, 18):
        command = f"paceline train r{record} --steps 95 {flag}"
        write(folder, f"h200-r{record}-95.json", gpu_run(record, 95, command=command))
    assert pairs(TECHNIQUES["coordinate-descent"], folder) == []
    assert [records_of(pair) for pair in pairs(TECHNIQUES["softcap-15"], folder)] == [(17, 18)]


def test_cells_and_commands_are_the_files(folder: Path) -> None:
    ((_, *runs),) = pairs(TECHNIQUES["softcap-15"], folder)
    assert [run.loss for run in runs] == [run.cells[0] for run in runs] == ["4.1700", "4.1800"]
    assert [run.command for run in runs] == ["paceline train r17 --steps 95", "paceline train r18 --steps 95"]
    assert [run.file for run in runs] == ["h200-r17-95.json", "h200-r18-95.json"]


def test_the_presets_on_a_cpu_are_a_series_of_their_own(folder: Path) -> None:
    one = {"steps": 50, "first_train_loss": 8.0, "last_train_loss": 6.0, "val_loss": 6.1}
    one |= {"median_step_s": 0.7, "fastest_step_s": 0.5}
    presets = [{"preset": name, **one} for name in PUBLIC]
    write(folder, CPU_PRESETS, {"command": "paceline train PRESET", "note": None, "presets": presets})
    gpu, cpu = pairs(TECHNIQUES["value-embeddings"], folder)
    assert records_of(gpu) == (5, 14)
    assert records_of(cpu) == (13, 14)
    assert [run.command for run in cpu[1:]] == ["paceline train r13-window-warmup", "paceline train r14-value-embed"]


def test_what_was_not_measured_is_a_dash(folder: Path) -> None:
    write(folder, "h200-r18-95.json", gpu_run(18, 95, peak_gib=None))
    ((_, *runs),) = pairs(TECHNIQUES["softcap-15"], folder)
    assert [run.cells[-1] for run in runs] == ["37.0", "–"]


def test_an_empty_folder_has_no_series(tmp_path: Path) -> None:
    assert all_series(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h200-r17-95.json", "{"),
        ("h200-r17-95.json", "{}"),
        ("h200-r99-95.json", json.dumps(gpu_run(99, 95))),  # there is no such record
    ],
)
def test_a_file_that_cannot_be_used_is_named(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)
    read.cache_clear()
    with pytest.raises(PacelineError, match=name):
        all_series(folder)


def test_a_sentence_gets_its_numbers_from_its_files() -> None:
    said = "{0[steps]} steps end at {0[val_loss]:.2f}, the original at {0[original][266]:.2f}"
    assert (
        str(Sentence(said=said, files=("h200-track-r18-reference.json",)))
        == "266 steps end at 3.33, the original at 3.31"
    )


EFFECT = {"technique": "softcap-15", "kind": "leave-one-out", "n": 3, "loss": {"mean": -0.1, "low": -0.2, "high": 0.0},
          "step_s": None, "noise": True}  # fmt: skip
ADDED = {**EFFECT, "kind": "add-one-in", "loss": {"mean": -0.3, "low": -0.4, "high": -0.2}}
DROPPED = {**EFFECT, "technique": "a+no-softcap-15"}


SMALL = {"preset": "r18-softcap", "against": "r17-sparse-values", "scale": "1/16", "why_indicative": "scale 1/16, CPU",
         "steps": 24, "hardware": "2 cores of AMD EPYC"}  # fmt: skip
FULL = {**SMALL, "scale": None, "why_indicative": None, "hardware": "1 x NVIDIA H200"}


def test_what_ablations_say_of_a_technique_is_found_by_its_key(folder: Path) -> None:
    write(folder, "cpu-ablation-r18.json", {**SMALL, "effects": [EFFECT, DROPPED, {**EFFECT, "technique": "softcap"}]})
    write(folder, "h200-ablation-r18.json", {**FULL, "effects": [{**EFFECT, "technique": "a+softcap-15"}]})
    together, alone, exchanged = effects(TECHNIQUES["softcap-15"], folder)
    assert (together.company, alone.company, exchanged.company) == (", together with `a`", "", ", in place of `a`")
    assert exchanged.done == "added to `r18-softcap`, in place of `a`, as in `r17-sparse-values`"


def test_the_full_size_stands_first(folder: Path) -> None:
    write(folder, "cpu-ablation-r18.json", {**SMALL, "effects": [EFFECT]})
    write(folder, "h200-ablation-r18.json", {**FULL, "effects": [EFFECT]})
    full, small = effects(TECHNIQUES["softcap-15"], folder)
    assert (full.setting, small.setting) == ("full size, H200, 24 steps", "1/16, CPU, 24 steps")
    assert (full.reach, "scale 1/16, CPU" in small.reach) == ("", True)


@pytest.mark.parametrize(
    ("run", "size"),
    [
        ({**FULL, "why_indicative": "CPU", "hardware": "2 cores of AMD EPYC"}, "full size, CPU"),
        ({**SMALL, "why_indicative": "scale 1/16", "hardware": "1 x NVIDIA H200"}, "1/16, H200"),
        ({**FULL, "why_indicative": "width 384 instead of 768"}, "not full size, H200"),
    ],
)
def test_a_size_is_that_of_the_model_and_the_machine(run: dict[str, Any], size: str, folder: Path) -> None:
    write(folder, "an-ablation-r18.json", {**run, "effects": [EFFECT]})
    (one,) = effects(TECHNIQUES["softcap-15"], folder)
    assert one.setting == f"{size}, 24 steps"


@pytest.mark.parametrize(
    ("part", "kind", "done", "low"),
    [
        ("softcap-15", "leave-one-out", "left out of `r18-softcap`, as in `r17-sparse-values`", -0.2),
        ("softcap-15", "add-one-in", "added to `r17-sparse-values`, as in `r18-softcap`", -0.2),
        ("no-softcap-15", "leave-one-out", "added to `r18-softcap`, as in `r17-sparse-values`", 0.0),  # it dropped it
        ("no-softcap-15", "add-one-in", "left out of `r17-sparse-values`, as in `r18-softcap`", 0.0),
    ],
)
def test_a_difference_is_with_the_technique_minus_without_it(
    part: str, kind: str, done: str, low: float, folder: Path
) -> None:
    """Also where the record dropped the technique, and the file has the difference of dropping it."""
    write(folder, "cpu-ablation-r18.json", {**SMALL, "effects": [{**EFFECT, "technique": part, "kind": kind}]})
    (one,) = effects(TECHNIQUES["softcap-15"], folder)
    assert one.done == done
    assert one.loss["low"] == low
    assert one.loss["mean"] == (0.1 if part.startswith("no-") else -0.1)


def test_a_technique_whose_name_begins_with_no_is_not_one_that_was_dropped(folder: Path) -> None:
    write(folder, "cpu-ablation-r16.json", {**SMALL, "effects": [{**EFFECT, "technique": "no-buffer-broadcast"}]})
    (one,) = effects(TECHNIQUES["no-buffer-broadcast"], folder)
    assert one.done.startswith("left out of")
    assert one.loss["mean"] == -0.1


def difference(mean: float, half: float = 0.01, p: float | None = 0.01) -> dict[str, Any]:
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "p_holm": p}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (difference(-0.05), "lowers the loss"),
        (difference(0.05), "raises the loss"),
        (difference(-0.05, p=0.2), "lowers the loss, but not significantly after Holm's correction"),
        (difference(-0.001, p=1.0), "has no measurable effect on the loss (interval includes 0)"),
        (difference(0.0, half=0.0, p=1.0), "changes no bit of the loss"),
        (
            {"mean": -0.05, "low": None, "high": None, "p": None, "p_holm": None},
            "was compared once, so its effect on the loss has no interval",
        ),
    ],
)
def test_words_have_the_direction_of_the_sign_and_call_only_the_significant_an_effect(
    values: dict[str, Any], words: str
) -> None:
    assert judged(values) == words


def test_the_words_agree_with_the_losses_of_the_runs() -> None:
    """Asked of the losses themselves, not of the difference that the file has."""
    one = effects(TECHNIQUES["softcap-15"])[0]
    arms = {arm["name"]: arm["losses"] for arm in read(one.file)["arms"]}
    assert max(arms["full"]) < min(arms["without-softcap-15"])
    assert judged(one.loss) == "lowers the loss"


def test_every_result_file_says_what_it_is_and_when_it_was_made() -> None:
    for name in names():
        assert {"what", "date"} <= read(name).keys(), name
