"""Public data from the Hugging Face hub into a folder, every file whole and of the right hash, or not noted.

huggingface-hub moves the bytes. Ours is what it leaves to others: choosing files, asking for disk space before the
first byte, the SHA-256 of the hub's listing, and a manifest beside each shard. `download.json` notes each file that was
found right, so the same command goes on after whatever ended it; a kill costs the file in progress.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError, DataError, PacelineError, optional_module
from paceline.core.files import blake2b_of, write_json
from paceline.core.schema import from_dict, read_json, to_dict
from paceline.core.units import human_bytes
from paceline.data.shards import manifest_path, open_shard, positions_of
from paceline.text.config import GPT2_END_OF_TEXT, PUBLIC, DownloadConfig, PublicData, matches
from paceline.text.continuation import only_writer
from paceline.text.shard_writer import write_manifest

FILE_NAME = "download.json"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""Of an OSError that is about the folder; the others are about the network."""


@dataclass(frozen=True)
class RemoteFile:
    name: str
    bytes: int
    sha256: str | None = None  # None: the hub states no hash, as for small files


@dataclass(frozen=True, kw_only=True)
class Download:
    """`download.json`: where a folder's files came from, and which of them are there and right."""

    repo: str
    revision: str
    files: tuple[RemoteFile, ...] = ()


class DownloadStatus(NamedTuple):
    bytes_read: int
    bytes_total: int
    files: int
    files_total: int

    def __str__(self) -> str:
        return f"{self.files} of {self.files_total} files"


def download(config: DownloadConfig, on_progress: Callable[[DownloadStatus], None] = lambda _: None) -> Download:
    """Fetch what is missing of `config`'s data. Calling it again continues, or finds all done."""
    public, folder = PUBLIC[config.name], config.folder
    absent = DataError("downloading needs huggingface-hub; pip install 'paceline[data]'")
    hub = optional_module("huggingface_hub", absent)
    revision, listed = _listing(hub, public)
    wanted = choose(listed, public, config.shards)
    with only_writer(folder, flag=""):
        for leftover in folder.glob(".cache/huggingface/download/**/*.incomplete"):  # of a download that was killed:
            leftover.unlink()  # huggingface-hub begins the file again under a new name and would keep them all
        done = _still_there(folder, wanted)
        missing = [file for file in wanted if file not in done]
        check_space(folder, sum(file.bytes for file in missing))
        noted = Download(repo=public.repo, revision=revision, files=tuple(done))
        write_json(folder / FILE_NAME, to_dict(noted))

        def report(received: int = 0) -> None:
            """`received`: bytes of the file in progress."""
            finished, total = (sum(file.bytes for file in files) for files in (noted.files, wanted))
            on_progress(DownloadStatus(finished + received, total, len(noted.files), len(wanted)))

        for file in missing:
            _fetch(hub, noted, file, folder, report)
            check_file(folder / file.name, file)
            if public.tokenized:
                path = folder / file.name
                manifest_path(path).unlink(missing_ok=True)
                shard = open_shard(path)
                documents = len(positions_of(shard, GPT2_END_OF_TEXT))
                write_manifest(path, shard.tokens, documents=documents, tokenizer="gpt2", blake2b=blake2b_of(path))
            noted = replace(noted, files=(*noted.files, file))
            write_json(folder / FILE_NAME, to_dict(noted))
            report()
    return noted


def choose(listed: list[RemoteFile], public: PublicData, shards: int | None) -> list[RemoteFile]:
    """The validation files and the first `shards` training files, in name order."""
    by_name = sorted(listed, key=lambda file: file.name)
    train = [file for file in by_name if matches(file.name, public.train)]
    val = [file for file in by_name if public.val is not None and matches(file.name, public.val)]
    if not train:
        raise DataError(f"{public.repo}: no file there matches {public.train}; its layout has changed")
    if shards is not None and shards > len(train):
        raise ConfigError(f"--shards {shards}: {public.repo} has {len(train)}; ask for as many, or leave it out")
    return [*val, *train[:shards]]


def check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        need = f"{human_bytes(needed)} are to be fetched and {human_bytes(free)} are free"
        raise PacelineError(f"{folder}: {need}; make room, or take less with --shards")


def check_file(path: Path, file: RemoteFile) -> None:
    """Compare size and hash with what was listed; a wrong file is deleted, so that the next try fetches it."""
    size = path.stat().st_size
    with open(path, "rb") as content:
        if size == file.bytes and file.sha256 in (None, hashlib.file_digest(content, "sha256").hexdigest()):
            return
    path.unlink()
    how = "its SHA-256 is not the listed one" if size == file.bytes else f"{size:,} bytes, listed are {file.bytes:,}"
    raise DataError(f"{path}: damaged on its way ({how}); it was deleted, run the same command again")


def _still_there(folder: Path, wanted: list[RemoteFile]) -> list[RemoteFile]:
    """Of the wanted files those that were found right before and are not gone."""
    try:
        noted = set(from_dict(Download, read_json(folder / FILE_NAME)).files)
    except ConfigError:  # there is none, or it is damaged: the files are looked at again
        return []
    kept = [file for file in wanted if file in noted and (folder / file.name).is_file()]
    return [file for file in kept if (folder / file.name).stat().st_size == file.bytes]


def _endpoint() -> str | None:
    """A mirror, as the hub's own tools take it; read here, since the library looks only when it is imported."""
    return os.environ.get("HF_ENDPOINT")


def _listing(hub: Any, public: PublicData) -> tuple[str, list[RemoteFile]]:
    with _naming_network(public.repo):
        info = hub.HfApi(endpoint=_endpoint()).dataset_info(public.repo, files_metadata=True, timeout=30)
    files = ((each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None) for each in info.siblings)
    return info.sha, [RemoteFile(*file) for file in files]


def _fetch(hub: Any, noted: Download, file: RemoteFile, folder: Path, on_bytes: Callable[[int], None]) -> None:
    received = 0

    class Bar(hub.utils.tqdm):  # type: ignore[misc, name-defined]
        """The library reports to a bar of tqdm's; this one shows nothing and passes the count on."""

        def __init__(self, *args: Any, **words: Any) -> None:
            super().__init__(*args, **(words | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            nonlocal received
            received += int(n or 0)
            on_bytes(received)

    source = {"repo_type": "dataset", "revision": noted.revision, "endpoint": _endpoint()}
    with _naming_network(noted.repo):
        hub.hf_hub_download(noted.repo, file.name, **source, local_dir=folder, tqdm_class=Bar)


@contextmanager
def _naming_network(repo: str) -> Iterator[None]:
    """One line for whatever a network does: errors of the library, of the system and of HTTP libraries."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        failed = f"{_endpoint() or 'https://huggingface.co'}: {repo} cannot be fetched ({said})"
        raise PacelineError(f"{failed}; with a network, run the same command again to continue") from error
