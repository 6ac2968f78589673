"""Files that chance or malice has changed: a clean error or what was written, never a crash, a hang or a lie.

The default suite takes a fixed sample; the soak the ten thousand."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.samples import FILES, checkpoint, equal, saved
from paceline.checkpoint import manifest, store
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.verified import read_run_config
from paceline.commands.train import MAY_CHANGE_ON_RESUME
from paceline.core.errors import PacelineError
from paceline.core.files import blake2b_of
from paceline.core.schema import changes
from paceline.evaluate.validation import validation_batches
from paceline.metrics.card import read_card
from paceline.metrics.metrics_file import read_metrics
from paceline.settings.run import RunConfig, read_config
from paceline.text.dataset import open_corpus
from paceline.text.verify import verify
from train import frozen
from train.soaking import note_result
from train.tiny import write_text_shards

Mutation = Callable[[bytes], bytes]


def _flip(place: float, bit: int) -> Mutation:
    def mutate(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[int(place * (len(data) - 1))] ^= 1 << bit
        return bytes(changed)

    return mutate


def _splice(place: float, length: int, new: bytes) -> Mutation:
    def mutate(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] + new + data[at + length :]

    return mutate


def _number(place: float, new: str) -> Mutation:
    """Another number, or anything else, in the place of one."""

    def mutate(data: bytes) -> bytes:
        digits = [index for index, byte in enumerate(data[:4096]) if chr(byte).isdigit()]
        if not digits:
            return data + new.encode()
        start = end = digits[int(place * (len(digits) - 1))]
        while end < len(data) and chr(data[end]).isdigit():
            end += 1
        return data[:start] + new.encode() + data[end:]

    return mutate


PLACE = st.floats(0, 1)
HOSTILE = [
    "-1",
    "0",
    "1e999",
    "NaN",
    "null",
    "[]",
    '"../../../etc/passwd"',
    "9" * 30,
    "9" * 5000,
    "true",
    "[" * 3000,
    "",
]
MUTATIONS = st.one_of(
    st.builds(_flip, PLACE, st.integers(0, 7)),
    st.builds(_splice, PLACE, st.integers(0, 40), st.binary(max_size=16)),
    st.builds(_splice, PLACE, st.just(1 << 30), st.just(b"")),  # cut off
    st.builds(_number, PLACE, st.sampled_from(HOSTILE) | st.integers(-(2**70), 2**70).map(str)),
)


def mutate(path: Path, how: Mutation) -> bool:
    """Whether the file is another now."""
    before = path.read_bytes()
    after = how(before)
    path.write_bytes(after)
    return after != before


class Subject:
    """Something on the disk, fresh for every example."""

    def __init__(self, folder: Path) -> None:
        self.original, self.copy = folder / "original", folder / "copy"
        self.make(self.original)

    def make(self, folder: Path) -> None: ...

    def fresh(self) -> Path:
        shutil.rmtree(self.copy, ignore_errors=True)
        return Path(shutil.copytree(self.original, self.copy))

    def check(self, number: int, how: Mutation) -> None: ...


class Checkpoints(Subject):
    """One changed file of the newest checkpoint: it is passed over, or it is what was written."""

    def make(self, folder: Path) -> None:
        saved(folder, 1, 2)

    def check(self, number: int, how: Mutation) -> None:
        run = RunFolder(self.fresh())
        mutate(run.checkpoint(2) / FILES[number % len(FILES)], how)
        newest, passed_over = store.newest_good(run)
        assert equal(store.load(newest), checkpoint(2 if not passed_over else 1))


class VouchedCheckpoints(Checkpoints):
    """The same with a manifest that vouches for the change, as an attacker would write it."""

    def check(self, number: int, how: Mutation) -> None:
        run = RunFolder(self.fresh())
        folder, name = run.checkpoint(2), FILES[number % (len(FILES) - 1)]
        mutate(folder / name, how)
        entries = [
            manifest.FileEntry(name=n, bytes=(folder / n).stat().st_size, blake2b=blake2b_of(folder / n))
            for n in FILES[:-1]
        ]
        manifest.write_manifest(folder, 2, entries)
        try:
            found = store.load(store.newest_good(run)[0])
        except PacelineError:
            return
        assert found.step in (1, 2)


class Runs(Subject):
    """A config that this version reads is the one that was written; card and metrics are read or refused."""

    def make(self, folder: Path) -> None:
        shutil.copytree(frozen.FOLDER / "format-2", folder)
        self.config = self._read(folder)[0]

    @staticmethod
    def _read(folder: Path) -> tuple[RunConfig, str | None]:
        return read_run_config(RunFolder(folder), read_config, may_change=MAY_CHANGE_ON_RESUME)

    def check(self, number: int, how: Mutation) -> None:
        run = self.fresh()
        name = ("config.json", "checkpoints/step_000003/config.json", "card.json", "metrics.jsonl")[number % 4]
        mutate(run / name, how)
        try:
            found, _ = self._read(run)
            read_card(run)
            read_metrics(run)
        except PacelineError:
            return
        differing = [change.field for change in changes(self.config, found)]
        assert all(field.startswith(MAY_CHANGE_ON_RESUME) for field in differing)


class Shards(Subject):
    """Opened and read without a crash; and if the tokens are others, `verify` says so."""

    def make(self, folder: Path) -> None:
        write_text_shards(folder)
        self.tokens = self._tokens(folder)

    @staticmethod
    def _tokens(folder: Path) -> list[np.ndarray]:
        corpus = open_corpus(folder, "*val*.bin", 257)
        return [batch.tokens for batch in validation_batches(corpus, 64, 0, 8)]

    def check(self, number: int, how: Mutation) -> None:
        data = self.fresh()
        changed = mutate(data / ("x_val_000000.bin", "x_val_000000.bin.json", "tokenizer.json")[number % 3], how)
        whole = verify(data).ok
        try:
            found = self._tokens(data)
        except PacelineError:
            assert changed
            return
        same = len(found) == len(self.tokens) and all(map(np.array_equal, found, self.tokens))
        assert same or not whole


SUBJECTS = [Checkpoints, VouchedCheckpoints, Runs, Shards]
SAMPLE, WHOLE = 60, 2500


def fuzz(subject: Subject, examples: int) -> None:
    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(number=st.integers(0, 100), how=MUTATIONS)
    def check(number: int, how: Mutation) -> None:
        subject.check(number, how)

    check()


@pytest.mark.parametrize("kind", SUBJECTS)
def test_a_changed_file_is_refused_or_read_as_it_was_written(kind: type[Subject], tmp_path: Path) -> None:
    fuzz(kind(tmp_path), SAMPLE)


@pytest.mark.soak
@pytest.mark.parametrize("kind", SUBJECTS)
def test_thousands_of_changed_files(kind: type[Subject], tmp_path: Path) -> None:
    began = time.monotonic()
    fuzz(kind(tmp_path), WHOLE)
    note_result(f"fuzzing, {kind.__name__}", examples=WHOLE, began=began)
