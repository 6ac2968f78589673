"""Writing token shards, each with its manifest beside it."""

from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.core.files import atomic_write, new_digest, write_json
from paceline.core.schema import to_dict
from paceline.data.shards import HEADER_WORDS, MAGIC, TOKEN_DTYPE, VERSION, ShardManifest, manifest_path

MAX_SHARD_TOKENS = 2**31 - 1  # the header counts tokens in an int32


def write_shard(path: Path, tokens: np.ndarray, *, documents: int, tokenizer: str) -> ShardManifest:
    """Write shard and manifest, each wholly or not at all. A manifest never stands beside a shard it does not fit."""
    if not 0 < len(tokens) <= MAX_SHARD_TOKENS:
        raise DataError(f"{path}: a shard holds 1 to {MAX_SHARD_TOKENS:,} tokens, not {len(tokens):,}")
    header = np.zeros(HEADER_WORDS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    digest = new_digest()
    manifest_path(path).unlink(missing_ok=True)
    with atomic_write(path) as file:
        for part in (header.data, np.ascontiguousarray(tokens, dtype=TOKEN_DTYPE).data):
            digest.update(part)
            file.write(part)
    return write_manifest(path, tokens, documents=documents, tokenizer=tokenizer, blake2b=digest.hexdigest())


def write_manifest(path: Path, tokens: np.ndarray, *, documents: int, tokenizer: str, blake2b: str) -> ShardManifest:
    """The manifest of the shard at `path`, which holds `tokens`."""
    manifest = ShardManifest(
        tokens=len(tokens), documents=documents, max_token=int(tokens.max()), tokenizer=tokenizer, blake2b=blake2b
    )
    write_json(manifest_path(path), to_dict(manifest))
    return manifest
