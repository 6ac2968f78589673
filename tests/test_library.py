"""paceline as a library: what `import paceline` gives, and configs made with it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.core.schema import changes
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import scaled, with_steps


def test_importing_it_imports_almost_nothing_and_offers_everything() -> None:
    code = """
import sys
before = set(sys.modules)
import paceline
assert {name for name in set(sys.modules) - before if name.startswith("paceline")} == {"paceline"}
assert set(paceline.__all__) <= set(dir(paceline))
config = paceline.configure("r18-softcap", {"steps": 100}, scale="1/16")
sys.exit("torch" in sys.modules or "numpy" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    assert (getattr(paceline, name).__doc__ or "").strip()


def test_a_type_checker_sees_the_names_that_are_looked_up_later() -> None:
    tree = ast.parse(Path(paceline.__file__).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    (library,) = [node for node in imported if node.module == "paceline.library"]
    assert sorted(alias.name for alias in library.names) == paceline.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = paceline.nothing_like_this


# ---- configs


def test_a_preset_is_itself_and_every_one_is_listed() -> None:
    assert paceline.presets() == list(PRESETS)
    assert paceline.configure() == preset("demo")
    assert paceline.configure("r18-softcap") == preset("r18-softcap")


def test_changes_change_what_they_name_and_nothing_else() -> None:
    config = paceline.configure("demo", {"model.softcap": None, "seed": 3, "optim.muon.lr": 0.03})
    found = {change.field: change.after for change in changes(preset("demo"), config)}
    assert found == {"model.softcap": None, "seed": 3, "optim.muon.lr": 0.03}


def test_steps_and_scale_mean_what_they_mean_on_the_command_line() -> None:
    assert paceline.configure("r17-sparse-values", {"steps": 95}) == with_steps(preset("r17-sparse-values"), 95)
    assert paceline.configure("r18-softcap", scale="1/16") == scaled(preset("r18-softcap"), 1 / 16)
    assert paceline.configure("r18-softcap", scale=0.0625) == scaled(preset("r18-softcap"), 1 / 16)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("dmeo", {}, "did you mean demo"),
        ("demo", {"model.sofcap": 3.0}, "model.sofcap: no such setting"),
        ("demo", {"model": 3}, "model: no such setting"),
        ("demo", {"model.softcap": "low"}, "model.softcap"),
        ("demo", {"model.softcap": -1.0}, "must be positive"),
        ("demo", {"steps": 0}, "--steps 0 must be at least 1"),
        ("demo", {"steps": 1.5}, "steps: expected int"),
    ],
)
def test_a_mistake_is_an_error_of_ours(name: str, wrong: dict[str, object], said: str) -> None:
    with pytest.raises(paceline.PacelineError, match=said):
        paceline.configure(name, wrong)
