"""Tensors to safetensors files, each whole in one of them; `store.py` reads them back.

Files are hashed while they are written, in pieces that leave the interpreter free for the thread that trains, and hold
at most 256 MiB, so that they can be verified in parallel. torch.distributed.checkpoint was dropped: it keeps its plan
as a pickle, and takes 0.8 s to import.
"""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.manifest import FileEntry
from paceline.core.files import new_digest

FILE_BYTES = 256 << 20
WRITE_BYTES = 8 << 20  # written and hashed in one go
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


def write_group(folder: Path, group: str, tensors: Mapping[str, Tensor]) -> list[FileEntry]:
    """Write plain tensors of the host as files of `group`, flushed to the disk; what a manifest says of them."""
    files, size = list[dict[str, Tensor]](), 0
    for name, tensor in tensors.items():
        if not files or size + tensor.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor.detach().contiguous()
        size += tensor.nbytes
    names = (folder / f"{group}-{number:05d}.safetensors" for number in itertools.count(1))
    return [write_tensors(path, part) for path, part in zip(names, files, strict=False)]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """One safetensors file: the length of its header, the header, and the bytes of every tensor, widest formats first,
    so that each is aligned."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    described, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        described[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest, size = new_digest(), 0
    with open(path, "wb") as file:
        start_of_file = memoryview(len(header).to_bytes(8, "little") + header)
        for piece in (start_of_file, *(t.reshape(-1).view(torch.uint8).numpy().data for t in tensors.values())):
            for start in range(0, len(piece), WRITE_BYTES):
                part = piece[start : start + WRITE_BYTES]
                file.write(part)
                digest.update(part)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, bytes=size, blake2b=digest.hexdigest())
