"""What a checkpoint says it holds. No torch.

`manifest.json` names every file with its size and blake2b hash, and carries a hash of itself, so that no byte of a
checkpoint can change unseen. `verified.py` reads it back.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.files import new_digest, write_json
from paceline.core.schema import to_dict

FORMAT = 3
MANIFEST, STATE, CONFIG = "manifest.json", "state.json", "config.json"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    name: str
    bytes: int | None  # None: written by format 1, which did not count
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: int = FORMAT
    step: int
    files: tuple[FileEntry, ...]
    seal: str  # hash of everything above

    def groups(self) -> dict[str, list[str]]:
        """The safetensors files of each group, in order: `group.safetensors` or `group-00001.safetensors` and on."""
        found: dict[str, list[str]] = {}
        for name in (entry.name for entry in self.files if entry.name.endswith(".safetensors")):
            group = name.removesuffix(".safetensors").partition("-")[0]
            found.setdefault("bad_steps" if group == "guard" else group, []).append(name)  # as format 2 called it
        return found


def write_manifest(folder: Path, step: int, files: Iterable[FileEntry]) -> None:
    """The last file of a checkpoint."""
    content = {"format": FORMAT, "step": step, "files": [to_dict(entry) for entry in files]}
    write_json(folder / MANIFEST, content | {"seal": seal_of(content)})


def seal_of(content: dict[str, Any]) -> str:
    digest = new_digest()
    digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()
