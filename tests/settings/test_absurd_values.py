"""No setting takes a number that no tensor, clock or file can hold: each is answered in one line, before any memory is
asked for."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from paceline.cli import main
from paceline.core.errors import ConfigError
from paceline.core.schema import parse_json
from paceline.lab.technique import with_values
from paceline.metrics.metrics_file import from_line
from paceline.recipes.presets import preset
from paceline.report.markup import element
from paceline.settings.run import RunConfig

PARTS = {
    "stages": {"share": 1.0},
    "model.loss_terms": {"name": "z_loss", "weight": 0.1},
    "model.layer_overrides": {"layers": [0]},
    "model.mixes": {"before": 2, "sources": [0], "starts": [0.0]},
    "optim.groups": {"name": "lm_head"},
}
"""Settings that are lists of objects, with one that can be."""


def numbers(cls: Any, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every number of a config by its dotted name; of a list of numbers, the list."""
    hints = get_type_hints(cls)
    for each in fields(cls):
        kinds = {hints[each.name], *get_args(hints[each.name])}
        kinds |= {inner for kind in kinds for inner in get_args(kind)}
        for kind in kinds:
            if is_dataclass(kind):
                yield from numbers(kind, f"{prefix}{each.name}.")
        if found := kinds & {int, float}:
            yield f"{prefix}{each.name}", float if float in found else int


NUMBERS = dict(numbers(RunConfig))


def with_value(name: str, value: Any) -> RunConfig:
    for part, whole in PARTS.items():
        if name.startswith(f"{part}."):
            field = name.removeprefix(f"{part}.")
            listed = field in ("loss_weights", "layers", "sources", "starts")
            return with_values(preset("demo"), {part: [{**whole, field: [value] if listed else value}]})
    if name.startswith("model.long_window."):
        window = {"unit": "blocks", "start_tokens": 128, "growth_tokens": 0}
        return with_values(preset("demo"), {"model.long_window": {**window, name.rpartition(".")[2]: value}})
    listed = name == "model.layers_without_attention"
    return with_values(preset("demo"), {name: [value] if listed else value})


def test_every_number_is_known() -> None:
    assert {"optim.clip_norm", "parallel.timeout_s", "stages.loss_weights", "model.loss_terms.weight"} <= NUMBERS.keys()
    assert len(NUMBERS) > 70


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_finite_and_within_64_bits(name: str) -> None:
    values = (float("inf"), float("-inf"), float("nan")) if NUMBERS[name] is float else (2**63, -(2**63), 10**30)
    for value in values:
        with pytest.raises(ConfigError, match=name.rpartition(".")[2].replace("_", "[-_]")) as error:
            with_value(name, value)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model.vocab-size", "99999999999999"),
        ("--model.embedding-multiple", "9223372036854775807"),
        ("--model.mlp-ratio", "9223372036854775807"),
        ("--model.rotary.max-tokens", "99999999999999"),
        ("--model.window.growth-tokens", "99999999999999"),
        ("--model.softcap", "1e308"),
        ("--optim.muon.ns-steps", "99999999999999"),
        ("--parallel.timeout-s", "1e308"),
        ("--steps", "99999999999999"),
        ("--data.tokenizer", "bpe-" + "9" * 5000),
        ("--data.dir", "data-\udcff"),
    ],
)
def test_an_absurd_value_is_refused_before_memory_is_taken(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "demo", flag, value, "--train.device", "cpu", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert len(said) < 400
    assert not (tmp_path / "run").exists()


def test_half_of_a_character_is_no_text() -> None:
    line = json.dumps({"kind": "step", "step": 1, "extra": {"\ud800": 1.0}})
    with pytest.raises(ValueError, match="surrogates"):
        from_line(line)
    assert parse_json(r'"\ud83d\ude00"') == "😀"  # two halves
    assert element("p", "a\udcff").encode() == rb"<p>a\udcff</p>"
