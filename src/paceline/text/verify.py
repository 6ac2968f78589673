"""Is every byte of a prepared folder still what was written? Sizes, hashes, and that nothing is missing.

Files are hashed by threads: 0.5 GB/s a core. A shard without a manifest can only be checked for its size.
"""

import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.core.errors import DataError, PacelineError
from paceline.core.files import blake2b_of
from paceline.core.schema import read_json
from paceline.data.shards import Shard, made_with_another, open_shard
from paceline.text.manifest import FILE_NAME, read_dataset
from paceline.text.sources import kind_of
from paceline.text.token_files import how_to_convert
from paceline.text.tokenizer import FILE_NAME as TOKENIZER_FILE
from paceline.text.tokenizer import carried_identity, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class FileCheck:
    file: str
    tokens: int = 0
    hashed: bool = False  # false: there was no hash to compare with, only the size was checked
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verification:
    files: tuple[FileCheck, ...]

    @property
    def problems(self) -> tuple[FileCheck, ...]:
        return tuple(check for check in self.files if check.problem)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: Path) -> Verification:
    """Check one shard, or a folder: its shards, its tokenizer, and that what dataset.json lists is there."""
    if path.is_file():
        return Verification(files=(check_shard(path),))
    shards = sorted(path.glob("*.bin"))
    if not shards and not (path / FILE_NAME).exists():
        hint = next((how for file in sorted(path.rglob("*")) if (how := _how_to_prepare(file, named=path))), None)
        raise DataError(f"{path}: no shards there; {hint or 'name a .bin file or the folder that holds them'}")
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(partial(check_shard, named=path), shards))
    sound = [open_shard(path / check.file) for check in files if not check.problem]
    damaged = {check.file for check in files if check.problem}
    return Verification(files=(*files, *_check_tokenizer(path, sound), *_check_dataset(path, sound, damaged)))


def check_shard(path: Path, named: Path | None = None) -> FileCheck:
    """Header, size, manifest and hash of one shard, or of one in the folder that was `named`."""
    try:
        shard = open_shard(path)
    except DataError as error:
        how = _how_to_prepare(path, named=named or path)
        return FileCheck(file=path.name, problem=how or str(error).removeprefix(f"{path}: "))
    problem, manifest = None, shard.manifest
    if manifest and blake2b_of(path) != manifest.blake2b:
        problem = "its content is not what was written (the hash differs); prepare or fetch it again"
    elif manifest and (largest := int(shard.tokens.max())) != manifest.max_token:
        problem = f"its largest id is {largest}, its manifest says {manifest.max_token}; prepare it again"
    return FileCheck(file=path.name, tokens=len(shard), hashed=manifest is not None, problem=problem)


def _how_to_prepare(path: Path, *, named: Path) -> str | None:
    """What makes shards of a file of text, or of ids that are no shard; for a folder, of the one that was `named`."""
    if path.is_file() and kind_of(path):
        return f"text; `paceline data prepare {shlex.quote(str(named))} --out FOLDER` makes shards of it"
    return how_to_convert(path, named=named) if path.is_file() else None


def _check_tokenizer(folder: Path, shards: list[Shard]) -> Iterator[FileCheck]:
    path = folder / TOKENIZER_FILE
    if not path.exists():
        return
    problem = None
    try:
        saved = read_json(path)
        loadable = saved.get("name") != "gpt2" or "vocabulary" in saved  # an older file may need a download
        if loadable:
            load_tokenizer(folder, "")
        carried = carried_identity(folder)
        if carried is not None and (other := made_with_another(shards, carried.names)):
            problem = f"not the tokenizer that {other.path.name} was made with; put that one back or prepare again"
    except (PacelineError, AttributeError) as error:
        loadable, problem = False, str(error).removeprefix(f"{path}: ")
    yield FileCheck(file=path.name, hashed=loadable, problem=problem)


def _check_dataset(folder: Path, sound: list[Shard], damaged: set[str]) -> Iterator[FileCheck]:
    """What dataset.json says, against the files that were found."""
    try:
        manifest = read_dataset(folder)
    except DataError as error:
        yield FileCheck(file=FILE_NAME, problem=str(error).removeprefix(f"{folder / FILE_NAME}: "))
        return
    if manifest is None:
        return
    said = {shard.path.name: shard.manifest.blake2b if shard.manifest else None for shard in sound}  # and found true
    for file, blake2b in ((entry.file, entry.blake2b) for entry in manifest.shards if entry.file not in damaged):
        if file not in said:
            yield FileCheck(file=file, problem=f"missing, although {FILE_NAME} lists it; prepare the data again")
        elif (said[file] or blake2b_of(folder / file)) != blake2b:
            yield FileCheck(file=file, problem=f"not the shard that {FILE_NAME} lists; prepare the data again")
    unfinished = "the preparation was not finished; run the same `data prepare` again"
    yield FileCheck(file=FILE_NAME, problem=None if manifest.complete else unfinished)
