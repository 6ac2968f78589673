"""Is every byte of a prepared folder still what was written? Sizes, hashes, and that nothing is missing.

Files are hashed by threads (hashlib releases the interpreter's lock): 0.5 GB/s a core. A shard without a manifest can
only be checked for its size, and the report says so.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import DataError, PacelineError
from paceline.core.files import blake2b_of
from paceline.core.schema import read_json
from paceline.data.manifest import FILE_NAME, DatasetManifest, read_dataset
from paceline.data.shards import Shard, made_with_another, max_token, open_shard
from paceline.data.tokenizer import FILE_NAME as TOKENIZER_FILE
from paceline.data.tokenizer import load_tokenizer, saved_identity


@dataclass(frozen=True, kw_only=True)
class FileCheck:
    file: str
    tokens: int = 0
    hashed: bool = False
    """False: there was no hash to compare with, only the size was checked."""
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
        raise DataError(f"{path}: no shards there; name a .bin file or the folder that holds them")
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(check_shard, shards))
    sound = [open_shard(path / check.file) for check in files if not check.problem]
    found = {check.file: check for check in files}
    return Verification(files=(*files, *_check_tokenizer(path, sound), *_check_dataset(path, found)))


def check_shard(path: Path) -> FileCheck:
    """Header, size, manifest and hash of one shard."""
    try:
        shard = open_shard(path)
    except DataError as error:
        return FileCheck(file=path.name, problem=str(error).removeprefix(f"{path}: "))
    if shard.manifest is None:
        return FileCheck(file=path.name, tokens=len(shard))
    problem = None
    if blake2b_of(path) != shard.manifest.blake2b:
        problem = "its content is not what was written (the hash differs); prepare or fetch it again"
    elif (largest := max_token(shard)) != shard.manifest.max_token:
        problem = f"its largest id is {largest}, its manifest says {shard.manifest.max_token}; prepare it again"
    return FileCheck(file=path.name, tokens=len(shard), hashed=True, problem=problem)


def _check_tokenizer(folder: Path, shards: list[Shard]) -> Iterator[FileCheck]:
    path = folder / TOKENIZER_FILE
    if not path.exists():
        return
    problem = None
    try:
        loadable = read_json(path).get("name") != "gpt2"  # whose vocabulary is not in the file and may need a download
        if loadable:
            load_tokenizer(folder, "")
        if other := made_with_another(shards, saved_identity(folder)):
            problem = f"not the tokenizer that {other.path.name} was made with; put that one back or prepare again"
    except (PacelineError, AttributeError) as error:
        loadable, problem = False, str(error).removeprefix(f"{path}: ")
    yield FileCheck(file=path.name, hashed=loadable, problem=problem)


def _check_dataset(folder: Path, found: dict[str, FileCheck]) -> Iterator[FileCheck]:
    """What dataset.json says, against the files that were found."""
    try:
        manifest = read_dataset(folder)
    except DataError as error:
        yield FileCheck(file=FILE_NAME, problem=str(error).removeprefix(f"{folder / FILE_NAME}: "))
        return
    if manifest is not None:
        yield from _check_listed(folder, manifest, found)
        unfinished = "the preparation was not finished; run the same `data prepare` again"
        yield FileCheck(file=FILE_NAME, problem=None if manifest.complete else unfinished)


def _check_listed(folder: Path, manifest: DatasetManifest, found: dict[str, FileCheck]) -> Iterator[FileCheck]:
    for shard in manifest.shards:
        check = found.get(shard.file)
        if check is None:
            yield FileCheck(file=shard.file, problem=f"missing, although {FILE_NAME} lists it; prepare the data again")
        elif not check.problem and _hash_of(folder / shard.file, check) != shard.blake2b:
            yield FileCheck(file=shard.file, problem=f"not the shard that {FILE_NAME} lists; prepare the data again")


def _hash_of(path: Path, check: FileCheck) -> str:
    """The file's hash: the manifest's where it was just found true."""
    shard = open_shard(path)
    return shard.manifest.blake2b if check.hashed and shard.manifest else blake2b_of(path)
