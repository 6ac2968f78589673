"""Plug-ins: every kind reaches the run, a resume wants the same bytes, and nothing but a file that is named is run."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paceline
from paceline.analysis.groups import experiment_key, groups_of
from paceline.analysis.runs import read_run
from paceline.cli import main
from paceline.core.errors import ConfigError, UserError
from paceline.core.files import blake2b_of
from paceline.lab.ablate.arms import Choice, keep_plan, make_plan
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import read_metrics
from paceline.recipes.plugins import load_plugins
from paceline.recipes.presets import preset
from paceline.settings.plugins import LOADED, PluginRef
from parallel.launch import free_port, one_rank, torchrun
from train.killing import assert_same, flags, left_by
from train.tiny import losses

STEPS = 6
TRICKS = '''
"""One of each kind. Each time that it is executed it says so in a file."""
from dataclasses import replace
from pathlib import Path

import torch

from paceline import Plugin
from paceline.optim.rule import Slot, no_more
from paceline.settings.groups import RuleFacts
from paceline.settings.model import LossTerm

with open(Path(__file__).with_name("executed"), "a") as file:
    file.write("x")


def softplus(x):
    return torch.nn.functional.softplus(x)


def norm(inputs):
    return inputs.x.float().square().sum()


class Signs:
    """Moves every weight by the rate, against the sign of a momentum."""

    FACTS = RuleFacts(fp32_slots=1)

    def __init__(self, group, params, context):
        self.params, self.sync = params, context.sync
        self.weights = {name: self.sync.own(param, param.detach()) for name, param in params.items()}
        self.momenta = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in self.weights.items()}

    def start(self, event):
        for name, param in self.params.items():
            new = torch.lerp(self.sync.grad(param).float(), self.momenta[name], event.settings.beta1)
            keep = torch.zeros((), dtype=torch.bool) if event.skip is None else event.skip
            self.momenta[name].copy_(torch.where(keep, self.momenta[name], new))
            weight = self.weights[name]
            weight.copy_(torch.where(keep, weight, weight - event.settings.lr * new.sign()))
            if self.sync.rows(param) is not None:
                self.sync.start_gather(param)
        return no_more

    def state(self):
        rows = {name: self.sync.rows(param) for name, param in self.params.items()}
        return {f"signs.{name}": Slot([self.momenta[name]], self.params[name], rows[name]) for name in rows}


def root(remaining):
    return remaining**0.5


def tricky(config):
    """The demo with all of it."""
    optim = replace(config.optim, matrices="signs", schedule=replace(config.optim.schedule, shape="root"))
    model = replace(config.model, activation="softplus", loss_terms=(LossTerm(name="norm", weight=0.01),))
    return replace(config, model=model, optim=optim)


plugin = Plugin(
    activations={"softplus": softplus},
    loss_terms={"norm": norm},
    rules={"signs": Signs},
    rate_shapes={"root": root},
    presets={"demo-tricky": ("demo", tricky)},
)
'''


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    LOADED.clear()
    yield
    LOADED.clear()


def executed(file: Path) -> int:
    """How often."""
    path = file.with_name("executed")
    return len(path.read_text()) if path.exists() else 0


def a_plugin(folder: Path, text: str = TRICKS, name: str = "tricks.py") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tricks/tricks.py`; `whole` is a finished run with all of it, `cut` was stopped on its way."""
    folder = tmp_path_factory.mktemp("plugins")
    file = a_plugin(folder / "tricks")
    assert main(words(folder, "whole", "--plugin", str(file))) == 0
    assert main(words(folder, "cut", "--plugin", str(file), "--train.stop-after", "3", "--checkpoint.every", "2")) == 0
    return folder


def words(folder: Path, name: str, *more: str, base: str = "demo-tricky") -> list[str]:
    return ["train", base, "--out", str(folder / name), "--no-finish", *flags(folder, STEPS), *more]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    LOADED.clear()  # as in a process of its own
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


# ---- what a plug-in brings


def test_every_kind_reaches_the_run(folder: Path, tmp_path: Path) -> None:
    file = folder / "tricks" / "tricks.py"
    assert main(words(folder, str(tmp_path / "plain"), base="demo")) == 0
    assert (
        main(words(folder, str(tmp_path / "a"), "--plugin", str(file), "--model.activation", "softplus", base="demo"))
        == 0
    )
    assert losses(tmp_path / "a") != losses(tmp_path / "plain")  # activation
    steps = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert any("loss_norm" in json.dumps(step) for step in steps)  # loss term
    tensors = left_by(folder / "whole")["tensors"]
    assert any(name.startswith("optimizer/signs.") for name in tensors)  # rule
    scales = [step.lr_scale for step in read_metrics(folder / "whole")[0]]
    cooldown = 0.4 * STEPS
    assert scales == [min(1.0, (STEPS - step) / cooldown) ** 0.5 for step in range(STEPS)]  # rate shape
    card = read_card(folder / "whole")  # preset
    assert (card.preset, card.plugins) == ("demo-tricky", (PluginRef(name="tricks.py", blake2b=blake2b_of(file)),))
    assert not {change.field for change in card.diff} & {"model.activation", "optim.matrices", "plugins"}


def test_a_plugin_that_is_given_and_not_used_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    assert main(words(folder, str(tmp_path / "a"), base="demo")) == 0
    assert main(words(folder, str(tmp_path / "b"), "--plugin", str(folder / "tricks" / "tricks.py"), base="demo")) == 0
    assert_same(left_by(tmp_path / "a"), left_by(tmp_path / "b"))


PLUGIN = "from paceline import Plugin\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "line 1: SyntaxError: invalid syntax"),
        ("import paceline\n\nfoo()\n", "line 3: NameError: name 'foo' is not defined"),
        ("x = 1\n", "has 0 values of paceline.Plugin; it needs exactly one"),
        (PLUGIN + "a, b = Plugin(), Plugin()\n", "has 2 values of paceline.Plugin"),
        (PLUGIN + "a = Plugin(activations={'relu2': abs})\n", "activations 'relu2': paceline has one of that name"),
        (PLUGIN + "a = Plugin(rules={'adam': abs})\n", "rules 'adam': paceline has one of that name"),
        (PLUGIN + "a = Plugin(loss_terms={'z_loss': abs})\n", "loss_terms 'z_loss': paceline has one of that name"),
        (PLUGIN + "a = Plugin(presets={'demo': ('demo', abs)})\n", "presets 'demo': paceline has one of that name"),
        (PLUGIN + "a = Plugin(rate_shapes={'a b': abs})\n", "rate_shapes 'a b' is no name"),
        (PLUGIN + "a = Plugin(activations={'f': 1})\n", "activations 'f' is not a function or a class"),
        (PLUGIN + "a = Plugin(presets={'f': abs})\n", "presets 'f' is not a pair of a preset's name and a function"),
        (PLUGIN + "a = Plugin(presets={'f': ('g', abs)})\n", "its base 'g' is no preset that is known by then"),
        (PLUGIN + "a = Plugin(activations=[abs])\n", "activations is no mapping of names"),
    ],
)
def test_a_plugin_that_cannot_be_is_refused_in_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = a_plugin(tmp_path, text)
    found = refused(["train", "demo", "--plugin", str(file)], capsys)
    assert f"--plugin {file}: " in found
    assert said in found


def test_two_plugins_with_one_name_and_a_file_that_is_not_there_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (a_plugin(tmp_path, PLUGIN + f"{x} = Plugin(activations={{'f': abs}})\n", f"{x}.py") for x in "ab")
    said = refused(["train", "demo", "--plugin", str(one), "--plugin", str(two)], capsys)
    assert f"--plugin {two}: activations 'f': {one} has one of that name, too" in said
    assert "c.py: cannot be read" in refused(["train", "demo", "--plugin", str(tmp_path / "c.py")], capsys)


def test_a_rate_shape_that_gives_no_number_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = a_plugin(tmp_path, PLUGIN + "a = Plugin(rate_shapes={'down': lambda remaining: remaining - 2})\n")
    asked = ["schedule", "demo", "--plugin", str(file), "--optim.schedule.shape", "down"]
    assert "--optim.schedule.shape down gives -1.0" in refused(asked, capsys)


# ---- resuming


def test_a_resumed_run_is_bit_equal(folder: Path, tmp_path: Path) -> None:
    cut = shutil.copytree(folder / "cut", tmp_path / "cut")
    LOADED.clear()
    resume = ["train", "--resume", str(cut), "--no-finish", "--train.stop-after", "None"]
    moved = shutil.copytree(folder / "tricks", tmp_path / "elsewhere") / "tricks.py"  # the hash counts, not the place
    assert main([*resume, "--plugin", str(moved)]) == 0
    assert_same(left_by(cut), left_by(folder / "whole"))
    assert read_card(cut).plugins == read_card(folder / "whole").plugins


def test_a_changed_a_missing_and_a_strange_plugin_are_refused_and_nothing_is_executed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = shutil.copytree(folder / "cut", tmp_path / "cut")
    changed = a_plugin(tmp_path / "changed", TRICKS + "# one more line\n")
    shutil.copy(changed, cut)
    for name in ("tricks.py", "paceline.py"):
        shutil.copy(changed, cut / name)
    resume = ["train", "--resume", str(cut), "--no-finish"]
    hashes = [blake2b_of(file)[:12] for file in (changed, folder / "tricks" / "tricks.py")]
    said = refused([*resume, "--plugin", str(changed)], capsys)
    assert f"has the hash {hashes[0]}, but {cut} was trained with tricks.py {hashes[1]}" in said
    assert f"was trained with the plug-in tricks.py {hashes[1]}; name that file with --plugin" in refused(
        resume, capsys
    )
    both = [*resume, "--plugin", str(folder / "tricks" / "tricks.py"), "--plugin", str(changed)]
    before = executed(folder / "tricks" / "tricks.py")
    assert "has the hash" in refused(both, capsys)
    assert executed(changed) == executed(cut / "tricks.py") == 0
    assert executed(folder / "tricks" / "tricks.py") == before


def test_a_config_alone_loads_no_code(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(folder / "whole", tmp_path / "run")
    said = refused(["train", "--like", str(run)], capsys)
    assert "preset 'demo-tricky' does not exist; did you mean demo? (A plug-in's needs --plugin FILE.)" in said
    changed = a_plugin(tmp_path / "changed", TRICKS + "# another version: a new run may have it\n")
    given = ["--like", str(run), "--plugin", str(changed), "--out", str(tmp_path / "like"), "--no-finish"]
    LOADED.clear()
    assert main(["train", *given]) == 0
    assert read_card(tmp_path / "like").plugins[0].blake2b == blake2b_of(changed)
    assert losses(tmp_path / "like") == losses(run)


def test_what_needs_no_plugin_reads_such_a_run_without_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LOADED.clear()
    assert main(["verify", str(folder / "whole")]) == 0
    assert main(["report", str(folder / "whole"), "--out", str(tmp_path / "page.html")]) == 0
    assert main(["export", str(folder / "whole"), "--to", "safetensors", "--out", str(tmp_path / "plain")]) == 0


def test_predicting_needs_the_plugin_of_the_activation_and_no_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, file = str(folder / "whole"), folder / "tricks" / "tricks.py"
    changed = a_plugin(tmp_path / "changed", TRICKS + "# one more line\n")
    for verb in (["sample", whole, "--tokens", "2"], ["evaluate", whole]):
        assert "its activation 'softplus' is of a plug-in (tricks.py" in refused(verb, capsys)
        assert "has the hash" in refused([*verb, "--plugin", str(changed)], capsys)
        assert main([*verb, "--plugin", str(file)]) == 0
    said = refused(["export", whole, "--out", str(tmp_path / "hf"), "--plugin", str(file)], capsys)
    assert "whose code an export does not carry; use --to safetensors" in said
    rest = ["--plugin", str(file), "--model.activation", "relu2"]  # a rule, a loss term and a rate shape are left
    assert main(words(folder, str(tmp_path / "rest"), *rest)) == 0
    LOADED.clear()
    assert main(["sample", str(tmp_path / "rest"), "--tokens", "2"]) == 0
    assert main(["export", str(tmp_path / "rest"), "--out", str(tmp_path / "hf")]) == 0


# ---- comparisons


def test_another_hash_is_another_group(folder: Path, tmp_path: Path) -> None:
    changed = a_plugin(tmp_path / "changed", TRICKS + "# one more line\n")
    LOADED.clear()
    assert main(words(folder, str(tmp_path / "other"), "--plugin", str(changed))) == 0
    assert losses(tmp_path / "other") == losses(folder / "whole")
    LOADED.clear()  # comparing needs none
    runs = [read_run(folder / "whole"), read_run(tmp_path / "other")]
    assert len({experiment_key(run) for run in runs}) == 2
    recipes = [group.recipe for group in groups_of(runs)]
    assert [f"plug-in {run.card.plugins[0]}" in recipe for run, recipe in zip(runs, recipes, strict=True)] == [True] * 2


def test_an_ablation_gives_the_plugin_to_its_runs_and_refuses_another_version(tmp_path: Path) -> None:
    file = a_plugin(tmp_path / "tricks")
    load_plugins([file])
    full = preset("demo-tricky")
    plan = make_plan(preset("demo"), full, Choice(seeds=1))
    assert all(("--plugin", str(file)) in zip(run.words, run.words[1:], strict=False) for run in plan.runs)
    assert {run.config.plugins for run in plan.runs} == {full.plugins}
    keep_plan(plan, tmp_path / "ablation")
    keep_plan(plan, tmp_path / "ablation")
    file.write_text(TRICKS + "# one more line\n")
    load_plugins([file])
    again = make_plan(preset("demo"), preset("demo-tricky"), Choice(seeds=1))
    with pytest.raises(UserError, match="was begun with other plug-ins, or another version of them"):
        keep_plan(again, tmp_path / "ablation")


@pytest.mark.slow
def test_presets_and_their_differences_are_listed_with_those_of_a_plugin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tricks.py"
    file.write_text(TRICKS)
    assert main(["presets", "--json", "--plugin", str(file)]) == 0
    entry = json.loads(capsys.readouterr().out)[-1]
    assert (entry["name"], entry["summary"], entry["predecessor"]) == ("demo-tricky", "The demo with all of it", "demo")
    assert main(["presets", "--plugin", str(file)]) == 0
    assert "demo-tricky" in capsys.readouterr().out
    assert main(["diff", "demo", "demo-tricky", "--plugin", str(file)]) == 0
    assert "softplus" in capsys.readouterr().out
    LOADED.clear()
    assert main(["diff", "demo", "demo-tricky"]) == 2
    assert "A plug-in's needs --plugin FILE" in capsys.readouterr().err


@pytest.mark.journey
def test_ablate_takes_apart_what_a_plugin_brings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default against the preset that it changes; the loss term, which is no flag, included."""
    file = a_plugin(tmp_path / "tricks")
    given = [
        *flags(tmp_path, 2),
        "--plugin",
        str(file),
        "--seeds",
        "1",
        "--only",
        "rest",
        "--out",
        str(tmp_path / "ab"),
        "--json",
    ]
    assert main(["ablate", "demo-tricky", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {arm["name"] for arm in found["arms"]} == {"base", "full", "without-rest", "with-rest"}


# ---- from Python


def test_python_gives_plugins_by_a_list_and_a_config_lists_what_it_may_use(folder: Path, tmp_path: Path) -> None:
    file = a_plugin(tmp_path / "tricks")
    config = paceline.configure("demo", {"model.activation": "softplus", "steps": 2}, plugins=[file])
    assert config.plugins == (PluginRef(name="tricks.py", blake2b=blake2b_of(file)),)
    with pytest.raises(ConfigError, match="'softplus' does not exist"):
        paceline.configure("demo", {"model.activation": "softplus"})  # loaded, but this config does not list it
    with pytest.raises(ConfigError, match="is no list of files"):
        paceline.configure("demo", plugins=str(file))
    file.write_text(TRICKS + "# one more line\n")
    paceline.configure("demo-tricky", plugins=[file])  # the newer version takes the place of the older
    with pytest.raises(ConfigError, match=r"the plug-in tricks.py \w+ is not loaded, or was changed since"):
        paceline.pretrain(config, out=tmp_path / "run")
    LOADED.clear()
    run = paceline.load(folder / "whole", plugins=[folder / "tricks" / "tricks.py"])
    assert len(run.generate(tokens=2)) >= 0
    assert torch.is_tensor(next(run.loaded.model.parameters()))


# ---- several ranks


@pytest.mark.slow
def test_two_ranks_with_a_plugin_make_the_run_of_one(folder: Path, tmp_path: Path) -> None:
    file = folder / "tricks" / "tricks.py"
    launched = torchrun(2, "paceline.cli", *words(folder, str(tmp_path / "two"), "--plugin", str(file)))
    assert launched.wait() == 0, launched.communicate()[0]
    assert losses(tmp_path / "two") == pytest.approx(losses(folder / "whole"), rel=1e-4)


@pytest.mark.slow
def test_ranks_with_other_versions_of_a_plugin_do_not_begin(folder: Path, tmp_path: Path) -> None:
    files = [folder / "tricks" / "tricks.py", a_plugin(tmp_path / "changed", TRICKS + "# one more line\n")]
    port = free_port()
    ranks = [one_rank(n, 2, port, *words(folder, str(tmp_path / "x"), "--plugin", str(files[n]))) for n in (0, 1)]
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    hashes = [blake2b_of(file)[:12] for file in files]
    assert f"rank 1 differs from rank 0: --plugin is tricks.py {hashes[1]} there and tricks.py {hashes[0]}" in said[0]
