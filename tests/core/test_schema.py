"""Configs as JSON: what is written is read back equal, and nothing half-understood is ever accepted."""

import copy
import dataclasses
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.schema import Change, changes, flatten, from_dict, plain, read_json, stated, to_dict
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import scaled
from paceline.settings.run import RunConfig
from paceline.settings.schedule import Stage


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    layers: tuple[int, ...] = ()
    kind: Literal["plain", "fancy"] = "plain"
    lambdas: Literal[1, 2] = 2


@dataclass(frozen=True, kw_only=True)
class Outer:
    steps: int
    on: bool = False
    name: str = "x"
    cap: float | None = None
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_survives_json(name: str) -> None:
    for config in (preset(name), scaled(preset(name), 1 / 16)):
        text = json.dumps(to_dict(config))
        back = from_dict(RunConfig, json.loads(text))
        assert back == config
        assert json.dumps(to_dict(back)) == text


def test_dataclasses_in_lists_and_dicts_become_objects() -> None:
    stages = (Stage(share=0.5, batch_tokens=4096), Stage(share=0.5))

    @dataclass
    class Holder:
        changed: dict[str, Any]

    found = to_dict(Holder({"stages": [None, stages]}))
    assert json.loads(json.dumps(found)) == {"changed": {"stages": [None, [to_dict(stage) for stage in stages]]}}


def test_numbers_come_back_to_the_last_bit() -> None:
    config = preset("r04-muon")
    back = from_dict(RunConfig, json.loads(json.dumps(to_dict(config))))
    assert back.model.attention_branch_scale.hex() == config.model.attention_branch_scale.hex()
    assert isinstance(from_dict(RunConfig, to_dict(preset("r17-sparse-values"))).model.layers_without_attention, tuple)


def test_missing_keys_take_their_default_where_there_is_one() -> None:
    assert from_dict(Outer, {"steps": 3}) == Outer(steps=3)
    assert from_dict(Outer, {"steps": 3, "inner": {}}) == Outer(steps=3)


def test_an_int_is_a_float_and_stays_equal() -> None:
    inner = from_dict(Inner, {"rate": 2})
    assert inner.rate == 2.0
    assert isinstance(inner.rate, float)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"Outer: .*'steps'"),
        ({"steps": 1, "stepz": 2}, r"stepz: unknown key; Outer has cap, inner, name, on, steps"),
        ({"steps": 1, "inner": {"ratio": 1}}, r"inner\.ratio: unknown key; Inner has kind, lambdas, layers, rate"),
        ({"steps": True}, r"steps: expected int, got True"),
        ({"steps": 1.0}, r"steps: expected int, got 1.0"),
        ({"steps": "1"}, r"steps: expected int, got '1'"),
        ({"steps": None}, r"steps: expected int, got None"),
        ({"steps": [1]}, r"steps: expected int, got \[1\]"),
        ({"steps": 1, "on": 1}, r"on: expected bool, got 1"),
        ({"steps": 1, "name": 3}, r"name: expected str, got 3"),
        ({"steps": 1, "cap": "15"}, r"cap: expected float, got '15'"),
        ({"steps": 1, "cap": True}, r"cap: expected float, got True"),
        ({"steps": 1, "inner": None}, r"inner: expected an object, got None"),
        ({"steps": 1, "inner": {"rate": "0.5"}}, r"inner\.rate: expected float, got '0.5'"),
        ({"steps": 1, "inner": {"rate": False}}, r"inner\.rate: expected float, got False"),
        ({"steps": 1, "inner": {"layers": 7}}, r"inner\.layers: expected a list, got 7"),
        ({"steps": 1, "inner": {"layers": "7"}}, r"inner\.layers: expected a list, got '7'"),
        ({"steps": 1, "inner": {"layers": [1, "2"]}}, r"inner\.layers\[1\]: expected int, got '2'"),
        ({"steps": 1, "inner": {"layers": [True]}}, r"inner\.layers\[0\]: expected int, got True"),
        ({"steps": 1, "inner": {"kind": "Plain"}}, r"inner\.kind: 'Plain' is not one of plain, fancy"),
        ({"steps": 1, "inner": {"lambdas": True}}, r"inner\.lambdas: True is not one of 1, 2"),
        ({"steps": 1, "inner": {"lambdas": 1.0}}, r"inner\.lambdas: 1.0 is not one of 1, 2"),
        ([], r"Outer: expected an object, got \[\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_dotted_name(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        from_dict(Outer, data)


def test_long_values_are_shown_short() -> None:
    with pytest.raises(ConfigError, match=r"^steps: expected int, got 'a{36}\.\.\.$"):
        from_dict(Outer, {"steps": "a" * 500})


def test_a_bad_value_deep_in_a_preset_is_named() -> None:
    data = to_dict(preset("demo"))
    data["model"]["rotary"]["base"] = "1024"
    with pytest.raises(ConfigError, match=r"^model\.rotary\.base: expected float, got '1024'"):
        from_dict(RunConfig, data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
"""Any JSON value."""


def paths(data: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The way to every key, at any depth."""
    found = [(*prefix, key) for key in data]
    return found + [path for key in data if isinstance(data[key], dict) for path in paths(data[key], (*prefix, key))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A preset's JSON with one or two keys replaced, removed, renamed or doubled."""
    data = copy.deepcopy(to_dict(preset(draw(st.sampled_from(sorted(PRESETS))))))
    for _ in range(draw(st.integers(1, 2))):
        *way, key = draw(st.sampled_from(paths(data)))
        place = data
        for step in way:
            place = place[step]
        match draw(st.sampled_from(["replace", "nudge", "remove", "rename", "extra"])):
            case "replace":
                place[key] = draw(JSON)
            case "nudge" if isinstance(place[key], int | float):
                place[key] = draw(st.sampled_from([0, -1, 1, 2, 3, -place[key], place[key] + 1, 2 * place[key]]))
            case "remove":
                del place[key]
            case "rename":
                place[key + "_"] = place.pop(key)
            case _:
                place[draw(st.text(max_size=5))] = draw(JSON)
    return data


@settings(max_examples=300)
@given(mutated())
def test_mutated_json_is_refused_or_read_as_what_it_says(data: dict[str, Any]) -> None:
    """Either a ConfigError, or a config that is written back as the same values."""
    try:
        config = from_dict(RunConfig, json.loads(json.dumps(data)))
    except ConfigError:
        return
    again = to_dict(config)
    assert from_dict(RunConfig, again) == config
    for way in paths(data):
        said, read = data, again
        for step in way:
            said, read = said[step], read[step]
        assert read == said or isinstance(said, dict), way


# ---- differences


def test_changes_are_the_leaves_that_differ() -> None:
    before = Outer(steps=1, inner=Inner(layers=(1,)))
    after = Outer(steps=2, cap=3.0, inner=Inner(layers=(1, 2)))
    assert changes(before, after) == [
        Change(field="steps", before=1, after=2),
        Change(field="cap", before=None, after=3.0),
        Change(field="inner.layers", before=(1,), after=(1, 2)),
    ]
    assert changes(before, before) == []


def test_a_config_that_one_side_lacks_is_one_change() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Holder:
        inner: Inner | None = None

    (change,) = changes(Holder(), Holder(inner=Inner()))
    assert change == Change(field="inner", before=None, after=Inner())
    assert change.nested
    assert Change(field="stages", before=(Stage(share=1.0),), after=()).nested
    assert not Change(field="layers", before=(1, 2), after=None).nested


def test_of_a_dataclass_only_what_is_not_its_default_is_said() -> None:
    assert stated((1, 2)) == "(1, 2)"
    assert stated(Stage(share=0.5, lr=0.7)) == "share 0.5: lr 0.7"
    assert stated(Inner(kind="fancy")) == "kind fancy"
    stages = (Stage(share=0.5, candidates=0), Stage(share=0.5))
    assert stated(stages, lambda value: f"<{value}>", " / ") == "share <0.5>: candidates <0> / share <0.5>"
    assert stated(Outer(steps=1, on=True)) == "steps 1: on"


def test_flat_names_are_dotted_unique_and_complete() -> None:
    flat = list(flatten(preset("r18-softcap")))
    names = [name for name, _ in flat]
    assert len(set(names)) == len(names)
    assert ("model.rotary.base", 1024.0) in flat
    assert not any(dataclasses.is_dataclass(value) for _, value in flat)


def test_applying_all_changes_gives_the_other_config() -> None:
    """A record is its predecessor plus the list of changes."""
    names = list(PRESETS)
    for before, after in pairwise(names):
        data = to_dict(preset(before))
        for change in changes(preset(before), preset(after)):
            *way, key = change.field.split(".")
            place = data
            for step in way:
                place = place[step]
            place[key] = plain(change.after)
        assert from_dict(RunConfig, data) == preset(after)


# ---- files


@pytest.mark.parametrize(
    "content", [b'{"a": ', b"", b"\xff\xfe{}", b"{'a': 1}", b"[NaN]", b"[Infinity]", b"[-Infinity]"]
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON .*damaged or half-written"):
        read_json(path)


def test_a_file_of_32_mib_is_read_and_one_of_a_byte_more_is_refused(tmp_path: Path) -> None:
    path, most = tmp_path / "config.json", 32 * 2**20
    path.write_bytes(b'"' + b"a" * (most - 2) + b'"')
    assert len(read_json(path)) == most - 2
    with open(path, "ab") as file:
        file.write(b" ")
    with pytest.raises(ConfigError, match=r"config\.json: 33,554,433 bytes, more than any JSON file of ours"):
        read_json(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read \(No such file or directory\)"):
        read_json(tmp_path / "none.json")
