"""The corpus that every Python installation carries: pydoc's topics and the docstrings of the standard library.

A document is a topic, or all docstrings of one module that were not seen before, read by `ast`. 2.2 MB of text and 720
documents on Python 3.11; 3 s to make on two cores, then cached. Documents that share a run of 13 words form a cluster,
which is never split between training and validation (by 8 words one cluster swallows a quarter of the text). The text
follows the Python version; figures from two versions do not compare.
"""

import ast
import hashlib
import inspect
import itertools
import os
import re
import shutil
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.core.errors import DataError, PacelineError
from paceline.core.files import cache_folder, sync_folder, write_json
from paceline.settings.data import is_path
from paceline.text.records import is_encodable
from paceline.text.shard_writer import write_shard
from paceline.text.tokenizer import load_tokenizer, train_tokenizer

RECIPE = 1  # raised when text, split or the tokenizer's training changes, so that no old cache is taken for new
VAL_SHARE = 0.05
SHARED_WORDS = 13  # a run of so many words makes two documents near-duplicates: the usual measure of contamination
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Split(NamedTuple):
    train: list[str]
    val: list[str]


def builtin_corpus(tokenizer: str = "bpe-2048") -> Path:
    """The folder with the built-in corpus under `tokenizer`, made now if this is the first time."""
    known = load_tokenizer(None, tokenizer).fingerprint if is_path(tokenizer) else tokenizer
    folder = cache_folder() / f"builtin-{fingerprint(known)}"
    if not folder.exists():
        _build(folder, tokenizer)
    return folder


def fingerprint(tokenizer: str) -> str:
    """What the corpus depends on, without reading it: the recipe, this Python, and which modules it came with."""
    modules = sorted(set(os.listdir(sysconfig.get_path("stdlib"))) - SKIPPED_FOLDERS)
    content = repr((RECIPE, tokenizer, sys.version, modules))
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _build(folder: Path, tokenizer: str) -> None:
    """Write the corpus under a name of our own, then rename it. Who loses a race uses the winner's, which is equal."""
    split = split_documents(extract_documents())
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed and had our number
    try:
        temporary.mkdir(parents=True)
        _write(temporary, tokenizer, split)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except OSError as error:
        if not folder.exists():
            why = f"cannot hold the built-in data ({error.strerror or error})"
            raise PacelineError(f"{folder.parent}: {why}; name another by the variable PACELINE_CACHE_DIR") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, name: str, split: Split) -> None:
    tokenizer = train_tokenizer(name, split.train) if name.startswith("bpe-") else load_tokenizer(None, name)
    tokenizer.save(folder)
    for file, texts in (("builtin_train_000001.bin", split.train), ("builtin_val_000000.bin", split.val)):
        ids = [token for text in texts for token in (tokenizer.end_of_text, *tokenizer.encode(text))]
        write_shard(folder / file, np.array(ids), documents=len(texts), tokenizer=tokenizer.fingerprint)
    write_json(folder / "source.json", {"recipe": RECIPE, "python": sys.version, "tokenizer": tokenizer.name})


def extract_documents() -> list[str]:
    """Topics by name, then modules by path; the same list on every machine with this Python."""
    documents, seen = list(_topics()), set[str]()
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for path in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            fresh = list(dict.fromkeys(text for text in _docstrings(path) if text not in seen))
            seen.update(fresh)
            if fresh:
                documents.append("\n\n".join(fresh) + "\n")
    if not documents:
        cure = "give --data.dir a folder of shards"
        raise DataError(f"{root}: no docstrings there (a Python without its sources); {cure}")
    return documents


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    for name in sorted(topics):
        yield topics[name].strip() + "\n"


def _docstrings(path: Path) -> list[str]:
    """None, if the file is no Python of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    cleaned = (inspect.cleandoc(text).strip() for text in _raw_docstrings(tree))
    return [text for text in cleaned if text and is_encodable(text)]


def _raw_docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings in order, also of definitions under `if`, `try` and `with`. ast.walk would visit every expression."""
    if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
        yield text
    for name in ("body", "handlers", "orelse", "finalbody"):
        if isinstance(nested := getattr(node, name, None), list):  # a lambda's body is none
            yield from itertools.chain.from_iterable(map(_raw_docstrings, nested))


def split_documents(documents: list[str]) -> Split:
    """Shuffle by hash and give whole clusters to validation as long as they fit into its share of the text."""
    shuffled = sorted(documents, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())
    clustered = list(zip(shuffled, cluster_documents(shuffled), strict=True))
    sizes: Counter[int] = Counter()
    for text, cluster in clustered:
        sizes[cluster] += len(text)
    room, in_val = int(VAL_SHARE * sizes.total()), set()
    for cluster, size in sizes.items():
        if size <= room:
            room -= size
            in_val.add(cluster)
    sides = ([text for text, cluster in clustered if (cluster in in_val) == is_val] for is_val in (False, True))
    return Split(*sides)


def cluster_documents(documents: list[str]) -> list[int]:
    """For each document the first one it is linked to by shared runs of 13 words; a shorter one is a run itself."""
    linked_to = list(range(len(documents)))  # itself, or an earlier one
    first_with: dict[tuple[str, ...], int] = {}

    def first_of(number: int) -> int:
        while linked_to[number] != number:
            number = linked_to[number]
        return number

    for number, text in enumerate(documents):
        words = re.findall(r"\w+", text.lower())
        for start in range(max(1, len(words) - SHARED_WORDS + 1)):
            other = first_with.setdefault(tuple(words[start : start + SHARED_WORDS]), number)
            if other != number:
                earlier, later = sorted((first_of(number), first_of(other)))
                linked_to[later] = earlier
    return list(map(first_of, linked_to))
