"""`data prepare | download | verify | stats`: arguments and what is printed. Heavy imports wait for the call."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from paceline.core.command_line import Positional, parse
from paceline.core.units import human_bytes, human_count, human_seconds
from paceline.data.config import DownloadConfig, PrepareConfig
from paceline.data.public import PUBLIC

if TYPE_CHECKING:
    from paceline.data.download import DownloadStatus
    from paceline.data.manifest import DatasetManifest
    from paceline.data.prepare import Status
    from paceline.data.stats import ShardStats

LINE_EVERY_S = 10.0
"""Between two progress lines where there is no terminal."""
BAR_COLUMNS = 40


PREPARE_HELP = """Turn text into shards. Running the same command again continues where it was stopped.

example: paceline data prepare books/ --out data/books --tokenizer bpe-8192"""
DOWNLOAD_HELP = "\n\n".join(
    (
        "Fetch public data from the Hugging Face hub. Running the same command again continues where it was stopped.",
        *(f"{name}: {public.about} ({public.repo})" for name, public in PUBLIC.items()),
        "example: paceline data download fineweb10B --shards 8",
    )
)
VERIFY_HELP = """Check sizes and hashes of shards, and name what is damaged or missing.

example: paceline data verify data/books"""
STATS_HELP = """Count documents and tokens, and show how long documents are.

example: paceline data stats data/books"""


@dataclass(frozen=True, kw_only=True)
class PrepareArgs(PrepareConfig):
    inputs: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT [INPUT ...]")]]
    """Files (.txt, .md, .jsonl, .jsonl.gz, .parquet), folders of them, - for standard input, or hf:NAME:CONFIG:SPLIT
    for a dataset of the Hugging Face hub, as a stream (needs the package datasets)."""
    json: bool = False
    """Print dataset.json instead of a summary."""


@dataclass(frozen=True, kw_only=True)
class DownloadArgs(DownloadConfig):
    name: Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]
    """Which data; they are listed above."""
    json: bool = False
    """Print download.json instead of a summary."""


@dataclass(frozen=True, kw_only=True)
class VerifyArgs:
    path: Positional[Path]
    """A shard or a folder of shards."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class StatsArgs:
    path: Positional[Path]
    """A shard or a folder of shards."""
    end_of_text: int | None = None
    """Token id that opens a document; None: as the tokenizer beside the shards says, else GPT-2's 50256."""
    json: bool = False
    """Print the result as JSON."""


def prepare(argv: Sequence[str]) -> int:
    return run_prepare(parse(PrepareArgs, argv, verb="data prepare", description=PREPARE_HELP))


def download(argv: Sequence[str]) -> int:
    return run_download(parse(DownloadArgs, argv, verb="data download", description=DOWNLOAD_HELP))


def verify(argv: Sequence[str]) -> int:
    return run_verify(parse(VerifyArgs, argv, verb="data verify", description=VERIFY_HELP))


def stats(argv: Sequence[str]) -> int:
    return run_stats(parse(StatsArgs, argv, verb="data stats", description=STATS_HELP))


def run_prepare(args: PrepareArgs) -> int:
    from paceline.core.schema import to_dict
    from paceline.data.prepare import prepare

    started = time.monotonic()
    with show_progress(_tokens) as on_progress:
        manifest = prepare(args, on_progress)
    if args.json:
        _print_json(to_dict(manifest))
    else:
        _print_summary(manifest, Path(args.out), time.monotonic() - started)
    return 0


def run_download(args: DownloadArgs) -> int:
    from paceline.core.schema import to_dict
    from paceline.data.download import download, folder_of

    with show_progress(_files) as on_progress:
        done = download(args, on_progress)
    if args.json:
        _print_json(to_dict(done))
        return 0
    folder, public = folder_of(args), PUBLIC[args.name]
    following = f"train on it with --data.dir {folder}"
    if not public.tokenized:
        following = f"make shards of it with `paceline data prepare {folder} --out {folder}-shards`"
    size = human_bytes(sum(file.bytes for file in done.files))
    print(f"{folder}: {len(done.files)} files of {public.repo}, {size}, hashes right; {following}")
    return 0


def run_verify(args: VerifyArgs) -> int:
    """0 when all is well, 1 when something is damaged or missing."""
    from paceline.data.verify import verify

    result = verify(args.path)
    if args.json:
        _print_json({"ok": result.ok, **dataclasses.asdict(result)})
        return 0 if result.ok else 1
    for check in result.problems:
        print(f"{check.file}: {check.problem}")
    unhashed = sum(not check.hashed for check in result.files if check.tokens and not check.problem)
    note = f" ({unhashed} without a hash: only sizes were checked)" if unhashed else ""
    tokens = human_count(sum(check.tokens for check in result.files))
    verdict = "ok" if result.ok else f"{len(result.problems)} damaged or missing"
    print(f"{args.path}: {len(result.files)} files, {tokens} tokens, {verdict}{note}")
    return 0 if result.ok else 1


def run_stats(args: StatsArgs) -> int:
    from paceline.data.stats import stats

    result = stats(args.path, args.end_of_text)
    if args.json:
        _print_json(dataclasses.asdict(result))
        return 0
    for shard in result.shards:
        print(f"{shard.file}: {shard.documents:,} documents, {shard.tokens:,} tokens")
    mean = result.total.tokens / max(1, result.total.documents)
    print(f"in all: {result.total.documents:,} documents, {result.total.tokens:,} tokens, {mean:,.0f} a document")
    _print_histogram(result.total)
    return 0


def _print_histogram(total: "ShardStats") -> None:
    longest = max((bucket.documents for bucket in total.lengths), default=1)
    for bucket in total.lengths:
        bar = "█" * round(BAR_COLUMNS * bucket.documents / longest)
        print(f"{bucket.at_least:>9,} to {2 * bucket.at_least - 1:>9,} tokens {bucket.documents:>12,} {bar}")


def _print_summary(manifest: "DatasetManifest", out: Path, seconds: float) -> None:
    train, val = manifest.side_tokens("train"), manifest.side_tokens("val")
    text, rate = human_bytes(manifest.text_bytes), human_bytes(manifest.text_bytes / max(seconds, 1e-9))
    print(
        f"{out}: {manifest.documents:,} documents, {train:,} training and {val:,} validation tokens in "
        f"{len(manifest.shards)} shards, {text} of text in {human_seconds(seconds)} ({rate}/s)"
    )
    if manifest.skipped:
        print(f"left out: {manifest.skipped:,} bad records")
    for side, tokens in (("train", train), ("val", val)):
        if not tokens and (side == "train" or manifest.options.val_share):
            print(f"no document went to {side}, and a run needs both: {_remedy(side, manifest)}")


def _remedy(side: str, manifest: "DatasetManifest") -> str:
    """Sides are chosen by a hash, so a share that takes three documents of a few leaves none with a chance of 5 %."""
    if side == "train" or manifest.documents < 6:
        return f"give more documents or change --val-share {manifest.options.val_share}"
    share = 3 / manifest.documents
    return f"--val-share {share:.2g} --overwrite takes about 3 of {manifest.documents:,}"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


@contextmanager
def show_progress(describe: Callable[[Any], str]) -> Iterator[Callable[[Any], None]]:
    """A bar on a terminal, a line every ten seconds elsewhere; on standard error, so that --json stays readable.
    `describe`: what a status says beside its bytes."""
    if not sys.stderr.isatty():
        yield ProgressLines(time.monotonic, describe)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def show(status: "Status | DownloadStatus") -> None:
            total, words = status.bytes_total or None, describe(status)
            bar.update(task, completed=status.bytes_read, total=total, description=words)

        yield show


class ProgressLines:
    """Progress as plain lines: rate since the last line, and time left at that rate."""

    def __init__(self, clock: Callable[[], float], describe: Callable[[Any], str]) -> None:
        self.clock, self.describe, self.last_s, self.last_bytes = clock, describe, clock(), 0

    def __call__(self, status: "Status | DownloadStatus") -> None:
        now = self.clock()
        if now - self.last_s < LINE_EVERY_S:
            return
        rate = (status.bytes_read - self.last_bytes) / (now - self.last_s)
        left = max(0, status.bytes_total - status.bytes_read)
        ahead = f", {human_seconds(left / rate)} left" if status.bytes_total and rate > 0 else ""
        read = f"{human_bytes(status.bytes_read)} read, {human_bytes(rate)}/s"
        print(f"{read}, {self.describe(status)}{ahead}", file=sys.stderr, flush=True)
        self.last_s, self.last_bytes = now, status.bytes_read


def _tokens(status: "Status") -> str:
    return f"{human_count(status.tokens)} tokens, {status.shards} shards"


def _files(status: "DownloadStatus") -> str:
    return f"{status.files} of {status.files_total} files"
