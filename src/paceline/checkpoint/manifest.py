"""What a checkpoint says it holds, and whether that is true. No torch.

`manifest.json` names every file with its size and blake2b hash, and carries a hash of itself, so that no byte of a
checkpoint can change unseen. Nothing in the folder is opened before all hashes hold; files are hashed by threads (0.5
to 1 GB/s a core). Older formats are brought up to date by a table of migrations on their way into memory; their files
stay as they are.
"""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.run_folder import RunFolder, named_step, step_of
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.files import blake2b_of, is_plain_name, new_digest, write_json
from paceline.core.schema import from_dict, read_json, to_dict

FORMAT = 2
MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.json"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    name: str
    bytes: int | None
    """None: written by format 1, which did not count."""
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: int = FORMAT
    step: int
    files: tuple[FileEntry, ...]
    seal: str
    """Hash of everything above."""

    def names(self, group: str) -> list[str]:
        """The safetensors files of one group, in order: `group.safetensors` or `group-00001.safetensors` and on."""
        names = [entry.name for entry in self.files if entry.name.endswith(".safetensors")]
        return [name for name in names if name.removesuffix(".safetensors").partition("-")[0] == group]


def _from_1(manifest: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had a table of hashes and nothing to vouch for itself."""
    files = [{"name": name, "bytes": None, "blake2b": found} for name, found in manifest["blake2b"].items()]
    migrated = {"format": 2, "step": manifest["step"], "files": files}
    return migrated | {"seal": _seal(migrated)}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""From the manifest of a format to that of the next. What a format did not keep, loading does without."""


def write_manifest(folder: Path, step: int, files: Iterable[FileEntry]) -> None:
    """The last file of a checkpoint."""
    content = {"format": FORMAT, "step": step, "files": [to_dict(entry) for entry in files]}
    write_json(folder / MANIFEST, content | {"seal": _seal(content)})


def _seal(content: dict[str, Any]) -> str:
    digest = new_digest()
    digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """A manifest that is whole and of this checkpoint, or an error that says what is wrong. Files are not looked at."""
    found = read_json(folder / MANIFEST)
    if not isinstance(found, dict) or type(found.get("format")) is not int:
        raise RunError(f"{MANIFEST}: states no format")
    if found["format"] != FORMAT and found["format"] not in MIGRATIONS:
        raise RunError(f"{MANIFEST}: format {found['format']}, this version reads 1 to {FORMAT}")
    try:
        while found["format"] < FORMAT:
            found = MIGRATIONS[found["format"]](found)
        manifest = from_dict(Manifest, found)
    except (ConfigError, KeyError, AttributeError, TypeError) as error:
        raise RunError(f"{MANIFEST}: {error}") from None
    _check(manifest, found, folder)
    return manifest


def _check(manifest: Manifest, found: dict[str, Any], folder: Path) -> None:
    content = {name: value for name, value in found.items() if name != "seal"}
    if manifest.seal != _seal(content):
        raise RunError(f"{MANIFEST}: does not match its own hash")
    if named_step(folder) not in (None, manifest.step):
        raise RunError(f"{MANIFEST}: is that of step {manifest.step}")
    names = [entry.name for entry in manifest.files]
    if strange := next((name for name in names if not is_plain_name(name)), None):
        raise RunError(f"{MANIFEST}: lists {strange!r}, which is not a file of this folder")
    if len(set(names)) < len(names) or STATE not in names or not manifest.names("model"):
        raise RunError(f"{MANIFEST}: lists a file twice, or lacks {STATE} or the weights")


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file, or None."""
    return next((f"{name}: {problem}" for name, problem in check_files(folder).items() if problem), None)


def check_files(folder: Path) -> dict[str, str | None]:
    """For each file of a checkpoint what is wrong with it, or None."""
    try:
        manifest = read_manifest(folder)
    except PacelineError as error:
        return {MANIFEST: str(error).removeprefix(f"{folder}/").removeprefix(f"{MANIFEST}: ")}
    with ThreadPoolExecutor() as pool:
        problems = pool.map(lambda entry: _problem(folder / entry.name, entry), manifest.files)
        return {MANIFEST: None, **{entry.name: found for entry, found in zip(manifest.files, problems, strict=True)}}


def _problem(path: Path, entry: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
        if entry.bytes is not None and size != entry.bytes:
            return f"{size:,} bytes instead of {entry.bytes:,}"
        return None if blake2b_of(path) == entry.blake2b else "does not match its hash"
    except OSError as error:
        return error.strerror


def newest_good(
    run: RunFolder, *, usable: Callable[[Path], object] = lambda _: None, until: int | None = None
) -> tuple[Path, list[str]]:
    """The newest checkpoint whose hashes hold and to which `usable` does not object by an error of ours, and why newer
    ones were passed over; of those up to step `until`, if that is given."""
    passed_over: list[str] = []
    for folder in reversed(run.checkpoints()):
        if until is not None and step_of(folder) > until:
            continue
        if (reason := damage(folder) or _objection(usable, folder)) is None:
            return folder, passed_over
        passed_over.append(f"{folder.name}: {reason}")
    detail = "; ".join(passed_over) or ("none was saved yet" if until is None else f"none is of step {until} or before")
    raise RunError(f"{run.path}: no usable checkpoint ({detail}); let the run reach one, or train again")


def _objection(usable: Callable[[Path], object], folder: Path) -> str | None:
    try:
        usable(folder)
    except PacelineError as error:
        return str(error).removeprefix(f"{folder}/")
    return None
