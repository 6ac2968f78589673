"""`data prepare` against tiktoken's own batch encoding, on the same text and cores, in alternating repeats.

    python benchmarks/prepare_throughput.py SHARDS   (a folder of GPT-2 shards, .bin or .bin.xz, whose text is taken)

tiktoken is given the documents in memory and keeps the lists it returns; `prepare` reads a .jsonl file, starts its
processes, writes and flushes shards with hashes, and all of that is inside its time. Afterwards the shards are verified
and decoded, and must give the text back byte for byte. GPT-2's vocabulary must be in $TIKTOKEN_CACHE_DIR.
"""

import json
import lzma
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tyro

from paceline.core.environment import environment, package_versions, usable_cores
from paceline.core.files import write_json
from paceline.data.shards import open_shard
from paceline.text.config import PrepareConfig
from paceline.text.prepare import prepare
from paceline.text.tokenizer import gpt2_tokenizer
from paceline.text.verify import verify

TARGET = 0.8
"""Share of tiktoken's rate that `prepare` should reach."""


@dataclass(frozen=True, kw_only=True)
class Args:
    shards: tyro.conf.Positional[Path]
    """Folder of GPT-2 shards (.bin or .bin.xz) whose text is used."""
    megabytes: int = 100
    """Text to take, in millions of bytes."""
    repeats: int = 3
    out: Path = Path(__file__).parent / "results" / "prepare-throughput.json"


def read_texts(folder: Path, limit_bytes: int) -> list[str]:
    """Documents from the shards in name order, until there are `limit_bytes` bytes of them."""
    tokenizer, texts, size = gpt2_tokenizer(), [], 0
    for tokens in read_shards(folder):
        starts = np.flatnonzero(tokens == tokenizer.end_of_text)
        for document in np.split(tokens, starts)[1:]:
            text = tokenizer.decode_bytes(document.tolist())
            texts.append(text.decode("utf-8", errors="replace"))
            size += len(text)
            if size >= limit_bytes:
                return texts
    return texts


def read_shards(folder: Path) -> Iterator[np.ndarray]:
    for path in sorted((*folder.glob("*train*.bin"), *folder.glob("*train*.bin.xz"))):
        if path.suffix == ".bin":
            yield open_shard(path).tokens
        else:
            with tempfile.NamedTemporaryFile(suffix=".bin") as plain:
                plain.write(lzma.decompress(path.read_bytes()))
                plain.flush()
                yield open_shard(Path(plain.name)).tokens


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(texts: list[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat; tiktoken and `prepare` take turns, so that other load falls on both."""
    encoding = tiktoken.get_encoding("gpt2")
    found: dict[str, list[float]] = {"tiktoken_s": [], "prepare_s": []}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for repeat in range(repeats):
            out = Path(name) / str(repeat)
            config = PrepareConfig(inputs=(str(path),), out=str(out), shard_tokens=10_000_000)
            found["tiktoken_s"].append(
                seconds(lambda: encoding.encode_ordinary_batch(texts, num_threads=usable_cores()))
            )
            found["prepare_s"].append(seconds(lambda config=config: prepare(config)))
            print(f"repeat {repeat}: " + ", ".join(f"{key} {value[-1]:.2f}" for key, value in found.items()))
        check(out, texts)
    return found


def check(out: Path, texts: list[str]) -> None:
    """The shards verify, and their documents are the texts."""
    assert verify(out).ok
    tokenizer = gpt2_tokenizer()
    documents = []
    for side in ("train", "val"):
        tokens = np.concatenate([open_shard(path).tokens for path in sorted(out.glob(f"*_{side}_*.bin"))])
        starts = np.flatnonzero(tokens == tokenizer.end_of_text)
        documents += [tokenizer.decode_bytes(part.tolist()) for part in np.split(tokens, starts)[1:]]
    assert sorted(documents) == sorted(text.encode() for text in texts)
    print(f"{len(documents):,} documents decode to the text byte for byte")


def report(found: dict[str, list[float]], texts: list[str]) -> dict[str, Any]:
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rates = {key.removesuffix("_s"): megabytes / statistics.median(times) for key, times in found.items()}
    return {
        "what": "data prepare against tiktoken encode_ordinary_batch, GPT-2, the same documents and cores",
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment() | package_versions("tiktoken", "paceline"),
        "load_average_1min": os.getloadavg()[0],
        "text_megabytes": round(megabytes, 1),
        "documents": len(texts),
        **{key: [round(value, 3) for value in times] for key, times in found.items()},
        "median_megabytes_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "prepare_over_tiktoken": round(rates["prepare"] / rates["tiktoken"], 3),
        "target": TARGET,
    }


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    texts = read_texts(args.shards, args.megabytes * 1_000_000)
    result = report(measure(texts, args.repeats), texts)
    write_json(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
