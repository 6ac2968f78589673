"""Tensors to safetensors files and back, through the planner of torch.distributed.checkpoint (DCP).

DCP plans who writes what and, on loading, which slice of a saved tensor goes where: a plain tensor gets all of it, a
DTensor of any mesh its own part. Its own storage keeps the plan as a pickle, which we never load; ours keeps none,
since a safetensors file says itself what it holds. Each tensor is in one file, whole. Files are hashed while they are
written, in pieces that leave the interpreter free for the thread that trains, and hold at most 256 MiB, so that they
can be verified in parallel. The library that reads them compares what a header claims with the file before it
allocates. DCP's own safetensors storage was dropped: it makes one copy in memory of each file to write, under the
interpreter's lock, and calls itself experimental.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from paceline.checkpoint.manifest import FileEntry
from paceline.core.errors import RunError
from paceline.core.files import new_digest

FILE_BYTES = 256 << 20
WRITE_BYTES = 8 << 20
"""Written and hashed in one go."""
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def write_group(folder: Path, group: str, tensors: Mapping[str, Tensor]) -> list[FileEntry]:
    """Write plain tensors of the host as files of `group`, flushed to the disk; what a manifest says of them."""
    writer = _Writer(folder, group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _silence()
    try:
        save(dict(tensors), storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error
    return writer.entries


def read_group(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """All tensors of these files, on the host."""
    reader = _Reader(folder, names)
    found = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in reader.shapes().items()}
    _read(reader, found)
    return found


def read_group_into(folder: Path, names: Sequence[str], targets: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, on any device, each DTensor with its own part. Names, shapes and formats must all fit;
    else nothing is changed."""
    reader = _Reader(folder, names)
    saved, wanted = reader.shapes(), {name: (tensor.shape, tensor.dtype) for name, tensor in targets.items()}
    if strange := sorted(set(saved) ^ set(wanted)):
        place = "is not in the checkpoint" if strange[0] in wanted else "is in the checkpoint only"
        raise RunError(f"{folder}: {strange[0]} {place}; it was written by another model, resume with its config")
    for name, fits in wanted.items():
        if saved[name] != fits:
            raise RunError(
                f"{folder}: {name} is {saved[name][1]} {tuple(saved[name][0])}, but this run needs {fits[1]} "
                f"{tuple(fits[0])}; resume with the config that wrote it"
            )
    _read(reader, {name: tensor.detach() for name, tensor in targets.items()})


def _read(reader: "_Reader", into: dict[str, Tensor]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _silence()
    try:
        load(into, storage_reader=reader, planner=planner, no_dist=True)  # each rank by itself: no collective
    except CheckpointException as error:
        raise _cause(error) from error


def _silence() -> None:
    """DCP warns whenever a process saves or loads by itself."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _cause(error: BaseException) -> BaseException:
    """What really went wrong: DCP wraps it in a report of all ranks, of which there is one."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    return next((failure[0] for failure in failures.values()), error)


class _Writer(StorageWriter):
    """DCP's side of writing: the plan's items, in order, as files of limited size."""

    def __init__(self, folder: Path, group: str) -> None:
        self.folder, self.group = folder, group
        self.entries: list[FileEntry] = []

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_filled(plan.items), start=1):
            path = self.folder / f"{self.group}-{number:05d}.safetensors"
            tensors = {item.index.fqn: _whole(item, planner) for item in items}
            self.entries.append(write_tensors(path, tensors))
            results += [WriteResult(item.index, tensors[item.index.fqn].nbytes, path.name) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _filled(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Items by file: as many as fit, at least one."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        needs = item.tensor_storage_size() or 0
        if file and size + needs > FILE_BYTES:
            yield file
            file, size = [], 0
        file.append(item)
        size += needs
    if file:
        yield file


def _whole(item: WriteItem, planner: SavePlanner) -> Tensor:
    tensor: Tensor = planner.resolve_data(item)  # type: ignore[assignment]
    if tensor.shape != item.tensor_data.size:  # type: ignore[union-attr]
        raise ValueError(f"{item.index.fqn} is a part of a tensor; take a snapshot first, which gathers it")
    return tensor.detach().contiguous()


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
        for piece in (start_of_file, *map(_bytes_of, tensors.values())):
            for start in range(0, len(piece), WRITE_BYTES):
                part = piece[start : start + WRITE_BYTES]
                file.write(part)
                digest.update(part)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, bytes=size, blake2b=digest.hexdigest())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _Reader(StorageReader):
    """DCP's side of reading: every tensor of some files, each a single chunk."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.files = [_open(folder / name) for name in names]
        self.file_of = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118 - no mapping

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        found = {}
        for name, file in self.file_of.items():
            piece = file.get_slice(name)
            if (dtype := DTYPES.get(piece.get_dtype())) is None:
                raise RunError(f"{name}: a checkpoint holds no numbers of format {piece.get_dtype()}")
            found[name] = torch.Size(piece.get_shape()), dtype
        return found

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(*shape) for name, shape in self.shapes().items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item)
            target.copy_(self._part(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, item: ReadItem) -> Tensor:
        name = item.storage_index.fqn
        if not item.lengths:
            return self.file_of[name].get_tensor(name)  # type: ignore[no-any-return]
        ends = zip(item.storage_offsets, item.lengths, strict=True)
        return self.file_of[name].get_slice(name)[tuple(slice(start, start + size) for start, size in ends)]  # type: ignore[no-any-return]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _metadata(size: torch.Size, dtype: torch.dtype) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path}: not a safetensors file ({error}); it is damaged") from None
