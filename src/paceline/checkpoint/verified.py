"""Is every byte of a checkpoint or a run still what was written, and which checkpoint is the newest that is? No torch.

Nothing in the folder is opened before all hashes hold; files are hashed by threads (0.5 to 1 GB/s a core). Older
formats are brought up to date by a table of migrations on their way into memory. The files beside the checkpoints have
no hashes and are read by the rules of their kind.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.manifest import CONFIG, FORMAT, MANIFEST, STATE, FileEntry, Manifest, seal_of
from paceline.checkpoint.run_folder import RunFolder, named_step, step_of
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.files import blake2b_of, is_plain_name
from paceline.core.schema import MAX_JSON_BYTES, changes, from_dict, parse_json, read_json
from paceline.metrics.card import CARD_FILE, read_card
from paceline.metrics.metrics_file import METRICS_FILE, read_metrics, readable
from paceline.metrics.sinks import missing_lines
from paceline.text.verify import FileCheck, Verification

T = TypeVar("T")


def _from_1(manifest: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had a table of hashes and nothing to vouch for itself."""
    files = [{"name": name, "bytes": None, "blake2b": found} for name, found in manifest["blake2b"].items()]
    migrated = {"format": 2, "step": manifest["step"], "files": files}
    return migrated | {"seal": seal_of(migrated)}


def _from_2(manifest: dict[str, Any]) -> dict[str, Any]:
    """Format 3 counts the position in the data by tokens (`state.json`) and has a group for each hook."""
    _check_seal(manifest)
    migrated = {**{name: value for name, value in manifest.items() if name != "seal"}, "format": 3}
    return migrated | {"seal": seal_of(migrated)}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1, 2: _from_2}
"""From the manifest of a format to that of the next. What a format did not keep, loading does without."""


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
    _check_seal(found)
    if named_step(folder) not in (None, manifest.step):
        raise RunError(f"{MANIFEST}: is that of step {manifest.step}")
    names = [entry.name for entry in manifest.files]
    if strange := next((name for name in names if not is_plain_name(name)), None):
        raise RunError(f"{MANIFEST}: lists {strange!r}, which is not a file of this folder")
    if len(set(names)) < len(names) or STATE not in names or "model" not in manifest.groups():
        raise RunError(f"{MANIFEST}: lists a file twice, or lacks {STATE} or the weights")


def _check_seal(found: dict[str, Any]) -> None:
    content = {name: value for name, value in found.items() if name != "seal"}
    if found.get("seal") != seal_of(content):
        raise RunError(f"{MANIFEST}: does not match its own hash")


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
        if entry.bytes is None and size != (claim := _claimed_bytes(path)):
            return f"{size:,} bytes, but it claims {claim:,}"
        return None if blake2b_of(path) == entry.blake2b else "does not match its hash"
    except OSError as error:
        return error.strerror


def _claimed_bytes(path: Path) -> int:
    """How long a file should be by its header, if its manifest has no size: a longer one is not read for hours."""
    if path.suffix != ".safetensors":
        return min(path.stat().st_size, MAX_JSON_BYTES)
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
        try:
            entries = parse_json(file.read(min(header, MAX_JSON_BYTES)).decode())
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            return 8 + header + max(ends, default=0)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return 0  # it has no header


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
    if not run.checkpoints():
        check_seen(run)
    detail = "; ".join(passed_over) or ("none was saved yet" if until is None else f"none is of step {until} or before")
    cure = "let the run reach one, or train again, with --checkpoint.at-end if that was off"
    raise RunError(f"{run.path}: no usable checkpoint ({detail}); {cure}")


def _objection(usable: Callable[[Path], object], folder: Path) -> str | None:
    try:
        usable(folder)
    except PacelineError as error:
        return str(error).removeprefix(f"{folder}/")
    return None


def check_seen(run: RunFolder) -> None:
    """Raise RunError if no checkpoint can be seen of a run that must have some. One that has saved nothing yet shows
    its `beginning`; of an older version, no step."""
    folder, hidden = run.beginning.parent, False
    try:
        if run.beginning.name in os.listdir(folder) or run.checkpoints():
            return
        reason = "holds no checkpoint"
    except FileNotFoundError:
        hidden = folder.is_symlink()
        reason = f"is a link to {os.readlink(folder)}, which is not there" if hidden else "is not there"
    except OSError as error:
        hidden, reason = True, f"cannot be read ({error.strerror})"
    shown = [record.step for record in readable(run.metrics)]
    with contextlib.suppress(RunError):
        shown.append(read_card(run.path).steps_done)
    if steps := max(shown, default=0):
        reason += f", though the run has made {steps:,} steps"
    if hidden or steps:
        raise RunError(f"{folder}: {reason}; put it back, or begin anew with --resume {run.path} --restart")


def read_run_config(run: RunFolder, parse: Callable[[Any], T], *, may_change: tuple[str, ...]) -> tuple[T, str | None]:
    """What `parse` makes of the run's config, from its own file or, where reading or `parse` raises an error of ours,
    from its newest checkpoint, with a line about that. The file has no hash, but a checkpoint's copy has: where they
    differ in more than the fields that `may_change` begins, the copy is right."""
    saved = _newest_saved(run, parse)
    try:
        found = parse(run.read_config())
        for change in changes(saved[1], found) if saved is not None else ():
            if not change.field.startswith(may_change):
                raise ConfigError(f"{run.config}: {change.field} is {change.after}, but was {change.before}")
        return found, None
    except PacelineError as error:
        if saved is None:
            raise
        return saved[1], f"{error}; the config is taken from {saved[0].name}"


def _newest_saved(run: RunFolder, parse: Callable[[Any], T]) -> tuple[Path, T] | None:
    """Of the newest checkpoint whose config has its hash and is understood; its other files are not looked at."""
    for folder in reversed(run.checkpoints()):
        try:
            entry = next((entry for entry in read_manifest(folder).files if entry.name == CONFIG), None)
            if entry is not None and blake2b_of(folder / CONFIG) == entry.blake2b:
                return folder, parse(read_json(folder / CONFIG))
        except (PacelineError, OSError):
            continue
    return None


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def verify_checkpoint(folder: Path, *, prefix: str = "") -> Verification:
    """Every file that the manifest names, and the manifest itself."""
    found = check_files(folder).items()
    checks = (FileCheck(file=f"{prefix}{name}", hashed=True, problem=problem) for name, problem in found)
    return Verification(files=tuple(checks))


def verify_run(run: RunFolder, parse_config: Callable[[Any], object]) -> Verification:
    """Config, card, metrics and every checkpoint. `parse_config` raises an error of ours at a config that this version
    does not understand."""
    readers: dict[str, Callable[[], object]] = {
        run.config.name: lambda: parse_config(run.read_config()),
        CARD_FILE: lambda: read_card(run.path),
        METRICS_FILE: lambda: _read_whole_metrics(run),
    }
    checks = [_read(run.path / name, read) for name, read in readers.items()]
    if (seen := _read(run.beginning.parent, lambda: check_seen(run))).problem:
        checks.append(seen)
    for folder in run.checkpoints():
        checks += verify_checkpoint(folder, prefix=f"{folder.parent.name}/{folder.name}/").files
    return Verification(files=tuple(checks))


def _read_whole_metrics(run: RunFolder) -> None:
    """Every line, and as many of them as each checkpoint was saved after."""
    read_metrics(run.path)
    for folder in reversed(run.checkpoints()):
        if (missing := missing_lines(run.metrics, _metrics_bytes(folder), folder.name)) is not None:
            raise RunError(missing)


def _metrics_bytes(checkpoint: Path) -> int:
    """0 if the checkpoint cannot tell; then it is damaged, which its own files are named for."""
    try:
        return int(read_json(checkpoint / STATE)["metrics_bytes"])
    except (PacelineError, KeyError, TypeError, ValueError):
        return 0


def _read(path: Path, read: Callable[[], object]) -> FileCheck:
    try:
        read()
    except PacelineError as error:
        return FileCheck(file=path.name, problem=str(error).removeprefix(f"{path}: "))
    return FileCheck(file=path.name)
