"""A newcomer's path: the wheel into an empty environment, then train, evaluate, sample, export, and the same tokens
from transformers. Nothing of this tree or of the tests' environment is within reach. That takes about 110 s of
processor time, 31 of them for installing."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from built import ROOT, build
from paceline import __version__

pytestmark = pytest.mark.journey

STEPS = 40
"""Enough that what is likeliest next depends on the prompt; the whole demo would take 90 s."""
NEW_TOKENS = 24
LONG = "Return the name of the module. The function is called with an object, and a new string is written. " * 40
PROMPTS = ["Return the", "class Thing:\n    def __init__(self", "", LONG]
"""The third is a document's start; the last is longer than the window of 512 tokens, and than training's sequences."""

OURS = """
import json, sys, paceline
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.generate import generate
run = paceline.load("latest").loaded
def written(prompt):
    ids = [run.tokenizer.end_of_text, *run.tokenizer.encode(prompt)]
    return list(generate(run.model, ids, SamplingConfig(temperature=0.0), windows=run.windows, new_tokens=NEW_TOKENS))
print(json.dumps([written(prompt) for prompt in json.load(sys.stdin)]))
"""
TRANSFORMERS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "paceline" not in sys.modules
tokenizer = AutoTokenizer.from_pretrained("exported/demo", trust_remote_code=True, add_bos_token=True)
model = AutoModelForCausalLM.from_pretrained("exported/demo", trust_remote_code=True)
prompts = json.load(sys.stdin)
batch = tokenizer(prompts, padding=True, return_tensors="pt")
rows = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)[:, batch["input_ids"].size(1) :].tolist()
ids = [row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row for row in rows]
print(json.dumps({"ids": ids, "texts": [p + tokenizer.decode(row) for p, row in zip(prompts, ids, strict=True)]}))
"""


class Newcomer:
    """An environment of their own, and a folder to work in that is not this tree."""

    def __init__(self, binaries: Path, home: Path) -> None:
        self.binaries, self.home = binaries, home
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.variables = {**kept, "HF_HOME": str(home / "hf")}

    def run(self, program: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.binaries / program), *words],
            cwd=self.home,
            env=self.variables,
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )

    def said(self, program: str, *words: str, given: str = "") -> str:
        done = self.run(program, *words, given=given)
        assert done.returncode == 0, f"{program} {' '.join(words)[:200]}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """With the wheel and what it asks for, in the versions that were tested."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = Newcomer(folder / "bin", tmp_path_factory.mktemp("home"))
    pinned = ("-q", "-c", str(ROOT / "constraints.txt"))
    if found.run("pip", "download", *pinned, "--no-deps", "-d", str(folder / "probe"), "tyro").returncode:
        pytest.skip("there is no package index to install from")
    [wheel] = build(tmp_path_factory.mktemp("tree"), "--wheel").glob("*.whl")
    found.said("pip", "install", *pinned, "--no-compile", f"{wheel}[hf]")
    yield found
    shutil.rmtree(folder)  # a gigabyte, which pytest would keep for three sessions


@pytest.fixture(scope="module")
def trained(newcomer: Newcomer) -> str:
    """What training the demo printed."""
    return newcomer.said("paceline", "train", "demo", "--steps", str(STEPS))


def test_the_environment_is_whole_and_its_own(newcomer: Newcomer) -> None:
    assert newcomer.said("pip", "check") == "No broken requirements found.\n"
    where = newcomer.said("python", "-c", "import paceline; print(paceline.__file__)")
    assert Path(where).is_relative_to(newcomer.binaries.parent)
    assert newcomer.said("paceline", "--version") == f"paceline {__version__}\n"
    assert re.search(r"^  device +(cpu|cuda) ", newcomer.said("paceline", "doctor"), re.MULTILINE)


def test_the_demo_ends_with_a_sample_and_says_what_a_page_needs(newcomer: Newcomer, trained: str) -> None:
    assert re.search(
        r"^runs/demo: finished, validation loss \d\.\d+ \(\d\.\d+ bits per byte; gzip -9 needs ", trained, re.MULTILINE
    )
    assert "pip install 'paceline[report]'" in trained
    page = newcomer.run("paceline", "report", "latest")
    assert page.returncode == 2
    assert page.stderr.count("\n") == 1
    assert "pip install 'paceline[report]'" in page.stderr


def test_the_run_is_judged_as_training_left_it(newcomer: Newcomer, trained: str) -> None:
    [told] = json.loads(newcomer.said("paceline", "evaluate", "latest", "--json"))
    assert f"validation loss {told['figures']['loss']:.4f} " in trained


def test_transformers_writes_the_same_tokens(newcomer: Newcomer, trained: str) -> None:
    newcomer.said("paceline", "export", "latest", "--to", "hf", "--out", "exported/demo")
    prompts = json.dumps(PROMPTS)
    theirs = json.loads(newcomer.said("python", "-c", with_count(TRANSFORMERS), given=prompts))
    assert theirs["ids"] == json.loads(newcomer.said("python", "-c", with_count(OURS), given=prompts))
    assert len({tuple(ids) for ids in theirs["ids"]}) > 1
    greedy = ("--temperature", "0", "--tokens", str(NEW_TOKENS), "--prompt")
    sampled = [newcomer.said("paceline", "sample", "latest", *greedy, prompt) for prompt in PROMPTS]
    assert sampled == [f"{text}\n" for text in theirs["texts"]]


def with_count(code: str) -> str:
    return code.replace("NEW_TOKENS", str(NEW_TOKENS))
