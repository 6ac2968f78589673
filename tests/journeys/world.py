"""The world of the pages: files and folders that their commands name, each made once and copied to a page.

What a page's own commands have made there is left alone, so a page is followed as its reader would follow it.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics
from zlib import crc32

import numpy as np
import pytest

import paceline
from journeys.smaller import STEPS, smaller_config, verb_of
from paceline.checkpoint.run_folder import RUNS, open_run
from paceline.cli import main
from paceline.core.errors import RunError
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import EvalMetrics, StepMetrics
from paceline.text.config import PUBLIC
from paceline.text.shard_writer import write_shard
from test_documents import shown_file
from text.hub import Hub, serving

KNOWN_TOKENS = 3000
"""Ids that every record knows at a sixteenth of its size, where its vocabulary has some 3,140."""
READ_A_RUN = ("sample", "evaluate", "export", "serve", "compare", "board", "report", "watch", "verify")


@dataclass
class World:
    store: Path
    """Where each thing is made before it is copied."""

    def furnish(self, words: list[str]) -> None:
        """Make what a command reads and the page has not made, in the working folder."""
        verb = verb_of(words)
        if "--resume" in words:
            self._interrupt(words[words.index("--resume") + 1])
        elif verb in READ_A_RUN and not any(RUNS.glob("*/config.json")):
            self.place("runs/demo")
        for before, word in zip(["", *words], words, strict=False):
            if before == "--out":
                _clear(Path(word))
            elif before == "--tasks-dir":
                following = words[words.index("--tasks") + 1 :]
                make_tasks(Path(word), list(takewhile(lambda name: not name.startswith("--"), following)))
            elif before != "--resume":
                self.place(word)

    def furnish_python(self, block: str) -> None:
        """What a block reads by a name in quotes; `out=` names what it writes."""
        for out, word in re.findall(r'(out=)?"([\w./-]+)"', block):
            _clear(Path(word)) if out else self.place(word)

    def place(self, word: str) -> None:
        """The thing called `word`, if it is one and is not there."""
        pattern = next((pattern for pattern in MAKERS if re.match(pattern, word)), None)
        if pattern is None:
            return
        name = re.match(pattern, word)[0]  # type: ignore[index]
        if not Path(name).exists():
            made = self.store / name
            if not made.exists():
                MAKERS[pattern](made)
            (shutil.copytree if made.is_dir() else shutil.copy2)(made, _parent_made(Path(name)))

    def _interrupt(self, run: str) -> None:
        """A run that can go on: the one there, or if it is finished or missing, one that was stopped half-way."""
        try:
            path = open_run(run).path
        except RunError:
            path = RUNS / "demo" if run == "latest" else Path(run)
        if not path.exists() or read_card(path).finished:
            _clear(path)
            made = self.store / "stopped"
            if not made.exists():
                make_run(made, until=STEPS)
            shutil.copytree(made, _parent_made(path), copy_function=shutil.copy)  # as of now, so that it is the latest


def _clear(path: Path) -> None:
    """A page shows alternatives, and what one leaves at --out would be in the way of the next."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _parent_made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# ---- runs


def make_run(path: Path, *, until: int | None = None) -> None:
    """A run of the demo preset, narrower, with a seed of its own and two checkpoints; stopped after a step if asked."""
    changes = {"model.width": 48, "model.head_dim": 16, "checkpoint.every": STEPS, "seed": crc32(path.name.encode())}
    config = smaller_config(paceline.configure("demo", changes), steps=2 * STEPS)

    def stop(record: StepMetrics | EvalMetrics) -> bool:
        return until is not None and record.step >= until

    paceline.pretrain(config, out=path, on_metrics=stop)


def make_plugin(path: Path) -> None:
    path.write_text(shown_file(path.name), encoding="utf-8")


def make_export(path: Path) -> None:
    run = path.parents[1] / "runs" / "demo"
    if not run.exists():
        make_run(run)
    assert main(["export", str(run), "--out", str(path)]) == 0


# ---- texts


def paragraphs() -> list[str]:
    """Enough documents that the default share of them for validation is not empty."""
    return [part for text in topics.values() for part in text.split("\n\n")]


def make_texts(folder: Path) -> None:
    """Text files and JSON lines side by side."""
    folder.mkdir(parents=True)
    first, *others = paragraphs()
    (folder / "first.txt").write_text(first)
    rows = [json.dumps({"text": text}) + "\n" for text in others]
    (folder / "others.jsonl").write_text("".join(rows))


def make_text(path: Path) -> None:
    path.write_text("\n\n".join(paragraphs()[:40]))


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{ctx_a}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: endings
metric_list: [{{metric: acc}}]
"""


def make_questions(path: Path) -> None:
    """As HellaSwag's file has them."""
    endings = ["is returned.", "raises an exception.", "is ignored.", "is called."]
    scene = {"activity_label": "Reading", "ctx_a": "If the argument is missing,", "ctx_b": "it", "endings": endings}
    path.write_text("".join(json.dumps(scene | {"label": number % 4}) + "\n" for number in range(8)))


def make_tasks(folder: Path, names: list[str]) -> None:
    """Tasks of lm-evaluation-harness by these names, made of a local file."""
    folder.mkdir(exist_ok=True)
    make_questions(folder / "rows.jsonl")
    for name in names:
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder.absolute()))


# ---- data


def make_shards(folder: Path) -> None:
    """With the demo's vocabulary."""
    texts = folder.with_name(f"{folder.name}-texts")
    make_texts(texts)
    assert main(["data", "prepare", str(texts), "--out", str(folder), "--tokenizer", "bpe-2048"]) == 0


def make_download(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, hub_of(folder.name, folder.parent / "hub", patch):
        assert main(["data", "download", folder.name, "--out", str(folder)]) == 0


@contextmanager
def hub_of(name: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub on this machine with small files where the public data `name` has large ones."""
    public = PUBLIC[name]
    files = {}
    for number in range(9):
        pattern = public.val if number == 0 and public.val else public.train
        file = pattern.replace("*", f"{number:06d}")
        path = _parent_made(folder / file)
        (write_tokens if public.tokenized else write_parquet)(path, number)
        files[file] = path.read_bytes()
    with serving(Hub(public.repo, files)) as served:
        patch.setenv("HF_ENDPOINT", served.endpoint)
        yield


def write_tokens(path: Path, seed: int) -> None:
    """Ids that a record at a sixteenth knows, documents opened as it expects them."""
    ids = np.random.Generator(np.random.PCG64(seed)).integers(1, KNOWN_TOKENS, size=4096, dtype=np.uint16)
    ids[::500] = 0
    write_shard(path, ids, documents=len(ids[::500]), tokenizer="")


def make_ids(folder: Path) -> None:
    """Files as nanoGPT writes them."""
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(np.frombuffer("\n".join(paragraphs()).encode(), np.uint8).astype("<u2").tobytes())


def write_parquet(path: Path, seed: int) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": paragraphs()[seed::9]}), path)


MAKERS: dict[str, Callable[[Path], None]] = {
    r"runs/[\w.-]+": make_run,
    r"exported/[\w-]+": make_export,
    rf"data/({'|'.join(PUBLIC)})$": make_download,
    r"data/[\w-]+$": make_shards,
    r"[\w-]*hellaswag[\w-]*\.jsonl": make_questions,
    r"[\w-]+\.txt": make_text,
    r"openwebtext/$": make_ids,
    r"my_tricks\.py$": make_plugin,
    r"(?!runs|data|tasks|docs|src|tests)[\w-]+/$": make_texts,
}
"""From what a word looks like to how it is made; the first that fits."""
