"""Run folders as somebody who means harm may send them: a frozen run, changed in several ways at once.

`Sender(world, number)` makes the folder `runs/foreign` of a number; `COMMANDS` are what it is then given to, in a
process of their own (`train/foreign_victim.py`)."""

import copy
import json
import os
import pickle
import random
import re
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from paceline.checkpoint.manifest import seal_of
from paceline.core.files import blake2b_of
from paceline.text.tokenizer import TrainedTokenizer, byte_letters
from train import frozen
from train.tiny import write_text_shards

FOREIGN, OWN, CANARY, EXPORTED = Path("runs", "foreign"), Path("runs", "own"), Path("canary"), Path("exported")
SECRET = "nobody-has-sent-this"
OWNED = "</script><b id=owned>"
"""Markup of the folder's, which may stand on no page as it is."""
EVIL = f"evil\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x08[bold]:smile:{OWNED}"
STEP = Path("checkpoints", "step_000003")
COMMANDS: dict[str, list[str]] = {
    "verify": ["verify", str(FOREIGN)],
    "verify a checkpoint": ["verify", str(FOREIGN / STEP)],
    "report": ["report", str(FOREIGN)],
    "compare": ["compare", str(FOREIGN), str(OWN)],
    "evaluate": ["evaluate", str(FOREIGN), "--device", "cpu"],
    "sample": ["sample", str(FOREIGN), "--tokens", "4"],
    "export": ["export", str(FOREIGN), "--out", str(EXPORTED)],
    "resume": ["train", "--resume", str(FOREIGN), "--train.stop-after", "4", "--train.no-compile"],
}

PLACEHOLDER = "@raw@"
RAW = ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, '"\\ud800"', "[" * 100_000, '{"a":' * 3000, "", "0x10", "1_0"]
VALUES: list[Any] = [
    -1, 0, 1, 3, 7, 2**31, 2**63, 10**30, -(2**70), 0.5, -0.5, 1e308, 5e-324, True, False, None, "", " ", "a\0b", EVIL,
    "../../canary", "/etc/passwd", "/dev/zero", "..", "latest", "x" * 100_000, "١٢٣", "%s%n", "{0.__class__}", "cuda",
    [], {}, [[]], [[0, 1, 2]], {"a": {"b": {}}}, [None] * 3, [EVIL], {EVIL: EVIL}, {"": 0}, [1e308, -1e308], "fp8",
]  # fmt: skip
FORMATS = ("format-1", "format-2", "format-3", "format-3", "format-3")


class Traitor:
    """What a pickle of theirs does when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(CANARY / "a pickle was read"),)


def make_world(world: Path) -> None:
    """Where commands run: data, a run of ours, and what is none of the sender's business."""
    write_text_shards(world / frozen.DATA)
    shutil.copytree(frozen.FOLDER / "format-3", world / OWN)
    shutil.copytree(world / OWN, world / CANARY / "run")
    finish(world / OWN, seed=0)
    for name in ("card.json", "config.json", "metrics.jsonl"):
        path = world / CANARY / "run" / name
        path.write_text(path.read_text().replace('"run"', f'"{SECRET}"').replace('"demo"', f'"{SECRET}"'))
    (world / CANARY / "file").write_text(SECRET)
    (world / CANARY / "empty").mkdir()


def finish(run: Path, *, seed: int) -> None:
    """Its card says so, which is all that comparisons ask."""
    card = json.loads((run / "card.json").read_text())
    losses = [*card["losses"], [6, 5.4 + seed / 100, 7.8, 0.02, 2.1]]
    card |= {"finished": True, "steps_done": 6, "val_loss": 5.4 + seed / 100, "seed": seed, "losses": losses}
    (run / "card.json").write_text(json.dumps(card))


class Sender:
    """The folder of a number. Each change notes in a word what it does."""

    def __init__(self, world: Path, number: int) -> None:
        self.world, self.run, self.draw = world, world / FOREIGN, random.Random(number)
        self.changes: list[str] = []
        shutil.copytree(frozen.FOLDER / self.draw.choice(FORMATS), self.run)
        if self.draw.random() < 0.5:
            finish(self.run, seed=1)

    def make(self) -> list[str]:
        """Some that go into files and, if they are vouched for, through the hashes; then some to the folder itself."""
        for change in self.draw.choices(CONTENT, k=self.draw.choice((0, 1, 1, 1, 2, 3))):
            change(self)
        if self.draw.random() < 0.8:
            self.vouch()
        for change in self.draw.choices(PLACES, k=self.draw.choice((0, 0, 0, 1, 1, 2, 3))):
            change(self)
        return self.changes

    def note(self, *words: object) -> None:
        self.changes.append(" ".join(f"{word!s:.60}" for word in words))

    def file(self, pattern: str = "*") -> Path | None:
        found = sorted(path for path in self.run.rglob(pattern) if path.is_file() and not path.is_symlink())
        return self.draw.choice(found) if found else None

    def name(self, path: Path) -> Path:
        return path.relative_to(self.run)

    def reaches(self, path: Path) -> bool:
        """Whether it lies in the folder, past links that were laid before."""
        return path.parent.resolve().is_relative_to(self.run) and not path.parent.is_file()

    # ---- what files hold

    def value(self) -> None:
        """In one to three places of a JSON file, for the config also in the copy that the checkpoint has."""
        path = self.file(self.draw.choice(("config.json", "config.json", "card.json", "state.json", "*.json")))
        if path is None or not isinstance(values := parsed(path), dict):
            return
        for _ in range(self.draw.choice((1, 1, 1, 2, 3))):
            self.note(self.name(path), *self._changed(values))
        text = self._written(values)
        path.write_text(text)
        if path.name == "config.json":
            for other in self.run.rglob("config.json"):
                other.write_text(text)

    def _changed(self, values: dict[str, Any]) -> tuple[object, ...]:
        place = list(self._places(values))
        holder, key = self.draw.choice(place) if place else (values, "")
        old = holder[key] if isinstance(holder, list) or key in holder else None
        what = self.draw.choice(("set", "set", "set", "set", "near", "near", "near", "drop", "add", "swap", "raw"))
        if what == "drop":
            del holder[key]
        elif what == "add" and isinstance(holder, dict):
            holder[self.draw.choice(("format", "path", EVIL, "fa3_library", "blake2b"))] = self.draw.choice(VALUES)
        elif what == "swap":
            other, name = self.draw.choice(place)
            holder[key] = copy.deepcopy(other[name])
        elif what == "near":
            holder[key] = self._near(old)
        else:
            holder[key] = PLACEHOLDER if what == "raw" else self._hostile(old)
        shown = holder[key] if isinstance(holder, dict) and key in holder else "-"
        return what, repr(key), "=", repr(shown)

    def _places(self, value: Any) -> Iterator[tuple[Any, Any]]:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            if isinstance(item, dict | list):
                yield from self._places(item)

    def _hostile(self, old: Any) -> Any:
        """Mostly of the same kind, so that it comes further than to the reader of JSON."""
        kinds = (int, float) if type(old) in (int, float) else (str, type(None)) if isinstance(old, str) else type(old)
        alike = [value for value in VALUES if isinstance(value, kinds)]
        return self.draw.choice(alike if alike and self.draw.random() < 0.7 else VALUES)

    def _near(self, old: Any) -> Any:
        if isinstance(old, bool):
            return not old
        if isinstance(old, int | float):
            return self.draw.choice((old + 1, old * 2, old - 1, -old, old / 2, old * 1000, old * 10**6, old * 10**12))
        if old is None:
            return self.draw.choice((1, 3, 0.5))
        return [old, old] if not isinstance(old, str) else self.draw.choice((old + EVIL, old.upper(), old * 2, ""))

    def _written(self, values: Any) -> str:
        text = json.dumps(values, indent=1, allow_nan=True)
        if self.draw.random() < 0.05:  # the first key a second time
            text = text.replace("{", '{"format": 3, "steps": 7, ', 1)
        return text.replace(f'"{PLACEHOLDER}"', self.draw.choice(RAW))

    def metrics(self) -> None:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        line = self.draw.choice(lines or ["{}"])
        line = re.sub(r"\d+(\.\d+)?", lambda old: self.draw.choice((old[0], "1e999", "-1", "9" * 400, '"x"')), line)
        line = self.draw.choice(
            (line, "{" * 5000, "[]", "null", '{"kind":"step"}', "\0" * 40, '"\\ud800"', "x" * 10**6)
        )
        lines.insert(self.draw.randint(0, len(lines)), line)
        path.write_text("\n".join(lines) + "\n")
        self.note("metrics.jsonl gets", line)

    def tensors(self) -> None:
        """Other shapes, formats, names and numbers, in a file that is one of safetensors."""
        path = self.file("*.safetensors")
        if path is None or not (tensors := loaded(path)):
            return
        name = self.draw.choice(sorted(tensors))
        old = tensors[name]
        news = {
            "transposed": lambda: old.T.copy(),
            "flat": lambda: old.reshape(-1),
            "twice": lambda: np.concatenate([old.reshape(-1)] * 2),
            "nan": lambda: np.full_like(old, np.nan if old.dtype.kind == "f" else 255),
            "infinite": lambda: np.full_like(old, np.inf if old.dtype.kind == "f" else 0),
            "64 bits": lambda: old.astype(np.float64),
            "integers": lambda: np.zeros(old.shape, np.int32),
            "unsigned": lambda: np.zeros(old.shape, np.uint64),
            "empty": lambda: np.zeros((0, *old.shape), old.dtype),
            "a number": lambda: np.zeros((), old.dtype),
        }
        what = self.draw.choice([*news, "gone", "renamed", "another"])
        if what in news:
            tensors[name] = news[what]()
        elif what == "another":
            tensors[EVIL] = old
        else:
            gone = tensors.pop(name)
            tensors |= {f"{name}\0/../{EVIL}": gone} if what == "renamed" else {}
        save_file(tensors, path)
        self.note(self.name(path), name, what)

    def header(self) -> None:
        """A file of tensors that claims more than it holds, or is something else."""
        path = self.file("*.safetensors")
        if path is None or not loaded(path):
            return
        data = path.read_bytes()
        what = self.draw.choice(("length", "shape", "offsets", "deep", "pickle", "zip", "empty", "cut", "overlap"))
        if what == "length":
            data = self.draw.choice((2**63 - 1, 2**64 - 1, 10**8, 2**40, 0)).to_bytes(8, "little") + data[8:]
        elif what in ("shape", "offsets", "overlap"):
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
            entry = header[self.draw.choice([name for name in header if name != "__metadata__"])]
            if what == "shape":
                entry["shape"] = self.draw.choice(([2**40, 2**40], [2**63, 0], [-1], [10**9] * 3, [1] * 1000))
            else:
                entry["data_offsets"] = self.draw.choice(([0, 2**62], [-1, 5], [8, 0])) if what == "offsets" else [0, 4]
            new = json.dumps(header).encode()
            data = len(new).to_bytes(8, "little") + new + data[8 + size :]
        elif what == "deep":
            new = b'{"a":' * 50_000
            data = len(new).to_bytes(8, "little") + new
        elif what == "pickle":
            data = pickle.dumps(Traitor())
        elif what == "zip":
            with zipfile.ZipFile(path, "w") as archive:  # as torch.save writes
                archive.writestr("archive/data.pkl", pickle.dumps(Traitor()))
            data = path.read_bytes()
        else:
            data = b"" if what == "empty" else data[: int(len(data) * self.draw.random())]
        path.write_bytes(data)
        self.note(self.name(path), what)

    def group(self) -> None:
        """A group of tensors more, under the name of one that some runs have."""
        if (path := self.file("*.safetensors")) is not None:
            other = self.draw.choice(("average", "buffers", "bad_steps", "random", "optimizer", "model", ""))
            path.with_name(f"{other}-00002.safetensors").write_bytes(path.read_bytes())
            self.note(self.name(path), "also as", other)

    def tokenizer(self) -> None:
        """Another than the model's, with the fingerprint that it should have."""
        many = ["x", *(left + right for left in byte_letters().values() for right in "ab")]
        words = self.draw.choice((["x"], ["x", "a", "b", "ab"], many, ["x", "a", "a"], [""]))
        rules = {"vocabulary": list(words), "merges": [["a", "b"]] if "ab" in words else []}
        try:
            fingerprint = TrainedTokenizer("bpe-300", **rules).fingerprint
        except (ValueError, KeyError):
            fingerprint = "0" * 32
        values = {"name": "bpe-300", "end_of_text": 0, "fingerprint": fingerprint, "rules": rules}
        (self.run / "tokenizer.json").write_text(json.dumps(values))
        self.note("tokenizer of", len(words))

    def bytes(self) -> None:
        """Another encoding, other bytes, nothing, or far too many."""
        if (path := self.file(self.draw.choice(("*.json", "*.json*", "*")))) is None:
            return
        what = self.draw.choice(("utf-16", "bom", "flip", "empty", "zeros", "cut", "hole", "lists", "gzip"))
        data = bytearray(path.read_bytes())
        if what == "utf-16":
            data = bytearray(data.decode("latin-1").encode("utf-16"))
        elif what == "bom":
            data = bytearray(b"\xef\xbb\xbf") + data
        elif what == "flip" and data:
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        elif what in ("empty", "zeros"):
            data = bytearray(0 if what == "empty" else 1 << 16)
        elif what == "cut":
            del data[int(len(data) * self.draw.random()) :]
        elif what == "lists":
            data = bytearray(b"[" + b"[],{}," * self.draw.choice((1 << 16, 4 << 20)) + b"0]")
        elif what == "gzip":
            data = bytearray(b"\x1f\x8b\x08\x00") + data
        path.write_bytes(data)
        if what == "hole":
            os.truncate(path, self.draw.choice((10**8, 10**10, 10**13)))
        self.note(self.name(path), what)

    # ---- what the checkpoint says of itself

    def vouch(self) -> None:
        """A manifest that fits the files as they are now, which some lies are added to."""
        path = next(iter(self.run.rglob("manifest.json")), None)
        values = parsed(path) if path is not None else None
        if path is None or not isinstance(values, dict):
            return
        sizes = [file for file in sorted(path.parent.iterdir()) if file.name != path.name and file.is_file()]
        if any(file.stat().st_size > 1 << 28 for file in sizes):
            return  # hashing it would take the sender minutes
        hashes = {file.name: blake2b_of(file) for file in sizes}
        if values.get("format") == 1:
            values["blake2b"] = hashes
        else:
            values["files"] = [{"name": f.name, "bytes": f.stat().st_size, "blake2b": hashes[f.name]} for f in sizes]
        if self.draw.random() < 0.2:
            self._lie(values)
        if values.get("format") != 1:
            values["seal"] = seal_of({name: value for name, value in values.items() if name != "seal"})
        text = json.dumps(values)
        path.write_text(text)
        self.note("vouched for")

    def _lie(self, values: dict[str, Any]) -> None:
        what = self.draw.choice(("outside", "twice", "more", "value", "value", "step", "format"))
        entry = {"name": "../../../../canary/file", "bytes": None, "blake2b": "0" * 32}
        entries = values.get("files")
        if isinstance(entries, list) and what in ("outside", "twice", "more"):
            entries.append({"outside": entry, "twice": entries[0], "more": {**entry, "name": EVIL}}[what])
        elif what == "step":
            values["step"] = self.draw.choice((0, -3, 4, 10**40, 3.0, "3", True))
        elif what == "format":
            values["format"] = self.draw.choice((0, -1, 4, 10**40, 2.0, "3", True, None))
        else:
            self._changed(values)
        self.note("manifest lies:", what)

    # ---- what lies where

    def link(self) -> None:
        """In place of a file or folder, or of one that a command is about to write."""
        names = [self.name(path) for path in self.run.rglob("*")]
        names += [Path(name) for name in WRITTEN]
        path = self.run / self.draw.choice(sorted(names))
        target = self.draw.choice((*TARGETS, os.path.relpath(self.world / CANARY / "run" / path.name, path.parent)))
        if not self.reaches(path):
            return
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target.replace("WORLD", str(self.world)))
        self.note(self.name(path), "->", target)

    def node(self) -> None:
        """A pipe, a socket, a device or a folder in the place of a file."""
        names = [self.name(path) for path in self.run.rglob("*") if path.is_file()]
        path = self.run / self.draw.choice(sorted([*names, *(Path(name) for name in WRITTEN)]))
        what = self.draw.choice(("pipe", "socket", "folder", "device"))
        if not self.reaches(path):
            return
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder" or os.geteuid() != 0:
            path.mkdir()
        elif what == "socket":
            here = os.getcwd()
            os.chdir(path.parent)  # a socket's path is short
            socket.socket(socket.AF_UNIX).bind(path.name)
            os.chdir(here)
        else:
            os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
        self.note(self.name(path), "is a", what)

    def missing(self) -> None:
        """Or doubled, or under another name."""
        paths = sorted(self.run.rglob("*"))
        path = self.draw.choice(paths)
        what = self.draw.choice(("gone", "gone", "twice", "renamed"))
        other = path.with_name(self.draw.choice(NAMES))
        if what == "twice" and not os.path.lexists(other):
            copied = shutil.copytree if path.is_dir() and not path.is_symlink() else shutil.copy
            if not any(p.is_symlink() or not (p.is_file() or p.is_dir()) for p in (path, *path.rglob("*"))):
                copied(path, other)  # type: ignore[operator]
        elif what == "renamed" and not os.path.lexists(other):
            path.rename(other)
        else:
            remove(path)
        self.note(self.name(path), what, repr(other.name) if what != "gone" else "")

    def code(self) -> None:
        """Programs under names that Python, PyTorch and transformers look for."""
        text = f"import os\nos.mkdir({str(CANARY / 'code was run')!r})\n"
        for name in ("paceline.py", "sitecustomize.py", "conftest.py", "torch.py", "modeling_paceline.py", "x.pth"):
            (self.run / name).write_text(text)
        (self.run / "libfa3.so").write_bytes(b"\x7fELF")
        for name in ("model.pt", "pytorch_model.bin", "random.pkl"):
            (self.run / name).write_bytes(pickle.dumps(Traitor()))
        self.note("code lies there")

    def deep(self) -> None:
        path = self.run / self.draw.choice((".", "checkpoints", STEP))
        if not self.reaches(path / "d"):
            return
        for _ in range(200):
            path = path / "d"
        path.mkdir(parents=True, exist_ok=True)
        self.note("folders 200 deep")

    def many(self) -> None:
        folder = self.run / self.draw.choice((".", "checkpoints", STEP))
        if folder.is_dir() and self.reaches(folder / "x"):
            for number in range(300):
                (folder / f"step_{number:06d}x").touch()
            self.note("300 files in", self.name(folder))


WRITTEN = (
    "report.html", ".lock", ".card.lock", "card.json", "metrics.jsonl", "checkpoints/beginning.json", "tokenizer.json",
    "metrics.jsonl.damaged", "set_aside_1", "checkpoints/step_000004", "checkpoints/.step_000004.tmp", ".launch",
    "checkpoints/set_aside_step_000003", "tensorboard",
)  # fmt: skip
TARGETS = (
    "WORLD/canary/file", "WORLD/canary/run", "WORLD/canary/empty", "WORLD/canary/none", "..", ".", "/", "/dev/zero",
    "/dev/stdin", "/proc/self/mem", "/etc/passwd", "self", "../../canary/file", "../own",
)  # fmt: skip
NAMES = (
    "step_000004", "step_999999999999999999", "step_٠٠٠٠٠٤", "step_000003\n", "step_000000", "copy",
    EVIL.partition("<")[0],
    "ablation.json", "model-00002.safetensors", "average-00001.safetensors", "buffers-00001.safetensors",
    "dataset.json", "x.bin", "state.json", "guard.safetensors", "\udcff", "-rf", ".hidden",
)  # fmt: skip
CONTENT: list[Callable[[Sender], None]] = [Sender.value] * 6 + [
    Sender.metrics, Sender.tensors, Sender.tensors, Sender.header, Sender.bytes, Sender.group, Sender.tokenizer,
]  # fmt: skip
PLACES: list[Callable[[Sender], None]] = [
    Sender.link, Sender.link, Sender.node, Sender.missing, Sender.missing, Sender.code, Sender.deep,
    Sender.many, Sender.bytes,
]  # fmt: skip


def parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text()) if path.stat().st_size < 1 << 20 else None
    except (ValueError, RecursionError, OSError):
        return None


def loaded(path: Path) -> dict[str, Any]:
    """Nothing, if it is no file of tensors any more."""
    try:
        return load_file(path)
    except SafetensorError:
        return {}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
