"""`data prepare | download | verify | stats` and `verify`: arguments and output. Heavy imports wait for the call."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from paceline.commands.output import LINE_EVERY_S, answer, say
from paceline.core.command_line import Positional, parse
from paceline.core.errors import RunError
from paceline.core.schema import to_dict
from paceline.core.units import human_bytes, human_count, human_seconds
from paceline.text.config import PUBLIC, DownloadConfig, PrepareConfig

if TYPE_CHECKING:
    from paceline.text.download import DownloadStatus
    from paceline.text.manifest import DatasetManifest
    from paceline.text.prepare import Status
    from paceline.text.stats import Stats
    from paceline.text.verify import Verification

BAR_COLUMNS = 40
FEW_VAL_TOKENS = 50_000
AGAIN = "Running the same command again continues where it was stopped."
PREPARE_HELP = f"""Turn text into shards. {AGAIN}

example: paceline data prepare books/ --out data/books --tokenizer bpe-8192"""
PUBLIC_HELP = "\n\n".join(f"{name}: {public.about} ({public.repo})" for name, public in PUBLIC.items())
DOWNLOAD_HELP = f"""Fetch public data from the Hugging Face hub. {AGAIN}

{PUBLIC_HELP}

example: paceline data download fineweb10B --shards 8"""
VERIFY_HELP = """Check sizes and hashes of shards, and name what is damaged or missing.

example: paceline data verify data/books"""
VERIFY_ANY_HELP = """Check every hash of a run, a checkpoint or prepared data, and name what is damaged or missing.

example: paceline verify runs/demo"""
STATS_HELP = """Count documents and tokens, and show how long documents are.

example: paceline data stats data/books"""


@dataclass(frozen=True, kw_only=True)
class PrepareArgs(PrepareConfig):
    json: bool = False
    """Print dataset.json instead of a summary."""


@dataclass(frozen=True, kw_only=True)
class DownloadArgs(DownloadConfig):
    json: bool = False
    """Print download.json instead of a summary."""


@dataclass(frozen=True, kw_only=True)
class VerifyArgs:
    path: Positional[Path]
    """A shard or a folder of shards."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class VerifyAnyArgs:
    path: Positional[Annotated[str, tyro.conf.arg(metavar="[PATH]")]] = "latest"
    """A run (its folder, its name under runs/, or `latest`), a checkpoint, a shard or a folder of shards."""
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
    args = parse(PrepareArgs, argv, verb="data prepare", description=PREPARE_HELP)
    from paceline.text.prepare import prepare as make_shards

    started = time.monotonic()
    with show_progress() as on_progress:
        manifest = make_shards(args, on_progress)
    seconds = time.monotonic() - started
    if lost := manifest.lost_much:
        say(f"WARNING: {lost}")
    return answer(to_dict(manifest), lambda: _print_summary(manifest, Path(args.out), seconds), as_json=args.json)


def download(argv: Sequence[str]) -> int:
    args = parse(DownloadArgs, argv, verb="data download", description=DOWNLOAD_HELP)
    from paceline.text.download import download as fetch

    with show_progress() as on_progress:
        done = fetch(args, on_progress)
    folder, public, size = args.folder, PUBLIC[args.name], human_bytes(sum(file.bytes for file in done.files))
    shards = f"make shards of it with `paceline data prepare {folder} --out {folder}-shards`"
    following = f"train on it with --data.dir {folder}" if public.tokenized else shards
    line = f"{folder}: {len(done.files)} files of {public.repo}, {size}, hashes right; {following}"
    return answer(to_dict(done), lambda: print(line), as_json=args.json)


def verify(argv: Sequence[str]) -> int:
    args = parse(VerifyArgs, argv, verb="data verify", description=VERIFY_HELP)
    from paceline.text.verify import verify as check_data

    result = check_data(args.path)
    unhashed = sum(not check.hashed for check in result.files if check.tokens and not check.problem)
    tokens = human_count(sum(check.tokens for check in result.files))
    what = f"{args.path}: {len(result.files)} files, {tokens} tokens"
    return _give(what, result, unhashed, ": only sizes were checked", args.json)


def verify_any(argv: Sequence[str]) -> int:
    args = parse(VerifyAnyArgs, argv, verb="verify", description=VERIFY_ANY_HELP)
    path, result = _verified(args.path)
    unhashed = sum(not check.hashed for check in result.files if not check.problem)
    return _give(f"{path}: {len(result.files)} files", result, unhashed, " were only read", args.json)


def _give(what: str, result: "Verification", unhashed: int, how: str, as_json: bool) -> int:
    """0 when all is well, 1 when something is damaged or missing. `how`: what was done without a hash."""
    note = f" ({unhashed} without a hash{how})" if unhashed else ""
    verdict = "ok" if result.ok else f"{len(result.problems)} damaged or missing"
    lines = [*(f"{check.file}: {check.problem}" for check in result.problems), f"{what}, {verdict}{note}"]
    answer({"ok": result.ok, **dataclasses.asdict(result)}, lambda: print("\n".join(lines)), as_json=as_json)
    return 0 if result.ok else 1


def _verified(given: str) -> "tuple[Path, Verification]":
    """What the path turns out to be, checked by the rules of its kind."""
    from paceline.checkpoint.run_folder import RunFolder, open_run
    from paceline.checkpoint.verified import is_checkpoint, verify_checkpoint, verify_run
    from paceline.core.files import check_links
    from paceline.settings.run import read_config
    from paceline.text.manifest import FILE_NAME
    from paceline.text.verify import verify

    path = Path(given)
    if path.is_dir():
        os.listdir(path)  # raises where a search for files would find none
    if is_checkpoint(path):
        check_links(path)
        return path, verify_checkpoint(path)
    if path.is_file() or (path / FILE_NAME).exists() or any(path.glob("*.bin")):
        return path, verify(path)
    try:
        run = open_run(given)
    except RunError as error:
        if path.is_dir() and RunFolder(path).config.exists():
            raise
        raise RunError(f"{error}; to verify something else, name a checkpoint or a folder of shards") from None
    return run.path, verify_run(run, read_config)


def stats(argv: Sequence[str]) -> int:
    args = parse(StatsArgs, argv, verb="data stats", description=STATS_HELP)
    from paceline.text.stats import stats as count

    result = count(args.path, args.end_of_text)
    return answer(dataclasses.asdict(result), lambda: _print_stats(result), as_json=args.json)


def _print_stats(stats: "Stats") -> None:
    for shard in stats.shards:
        print(f"{shard.file}: {shard.documents:,} documents, {shard.tokens:,} tokens")
    total = stats.total
    mean = total.tokens / max(1, total.documents)
    print(f"in all: {total.documents:,} documents, {total.tokens:,} tokens, {mean:,.0f} a document")
    longest = max((bucket.documents for bucket in total.lengths), default=1)
    for bucket in total.lengths:
        bar = "█" * round(BAR_COLUMNS * bucket.documents / longest)
        print(f"{bucket.at_least:>9,} to {2 * bucket.at_least - 1:>9,} tokens {bucket.documents:>12,} {bar}")


def _print_summary(manifest: "DatasetManifest", out: Path, seconds: float) -> None:
    train, val = manifest.side_tokens("train"), manifest.side_tokens("val")
    text, rate = human_bytes(manifest.text_bytes), human_bytes(manifest.text_bytes / max(seconds, 1e-9))
    of_text = "" if manifest.options.ids_of else f", {text} of text in {human_seconds(seconds)} ({rate}/s)"
    print(
        f"{out}: {manifest.documents:,} documents, {train:,} training and {val:,} validation tokens in "
        f"{len(manifest.shards)} shards{of_text}"
    )
    for line in remarks(manifest):
        print(line)


def remarks(manifest: "DatasetManifest") -> Iterator[str]:
    """What one should know of prepared data, a line each: what was not read, and what is wrong with the validation."""
    from paceline.text.token_files import is_validation

    if manifest.skipped:
        yield f"left out: {_counted(manifest.skipped, 'bad record')}"
    if manifest.skipped_lines:
        yield f"left out: {_counted(manifest.skipped_lines, 'bad line')} ({human_bytes(manifest.skipped_line_bytes)})"
    if manifest.replaced_bytes:
        yield f"replaced by U+FFFD: {_counted(manifest.replaced_bytes, 'bad byte')}"
    separator, parts = manifest.options.document_separator, len(manifest.sources) + bool(manifest.splits_by.cut)
    if separator is not None and manifest.documents <= parts:
        yield f"--document-separator {separator!r}: not found, so a file is one document; another with --overwrite"
    if manifest.other_files:
        more = ", …" if manifest.other_files > len(manifest.other_names) else ""
        yield f"not read: {_counted(manifest.other_files, 'file')} ({', '.join(manifest.other_names)}{more})"
    train, val = manifest.side_tokens("train"), manifest.side_tokens("val")
    share = manifest.options.val_share
    given = manifest.options.ids_of and any(is_validation(source.name) for source in manifest.sources)
    if 0 < train < val:
        cure = "give more files of training" if given else f"lower --val-share {share}"
        yield f"validation has {val:,} tokens, more than the {train:,} of training; {cure}"
    elif 0 < val < FEW_VAL_TOKENS:
        more = "a longer file of validation" if given else f"a --val-share above {share}, or more text,"
        few = f"fewer than {FEW_VAL_TOKENS:,}, so its loss is not precise"
        yield f"validation has {val:,} tokens, {few}; {more} gives more"
    for side, tokens in (("train", train), ("val", val)):
        if not tokens and (side == "train" or share):
            yield f"no document went to {side}, and a run needs both: {_remedy(side, manifest)}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _remedy(side: str, manifest: "DatasetManifest") -> str:
    """Sides are chosen by a hash, so a share that takes three documents of a few leaves none with a chance of 5 %."""
    if side == "train" or manifest.documents < 6:
        return f"give more documents or change --val-share {manifest.options.val_share}"
    share = 3 / manifest.documents
    return f"--val-share {share:.2g} --overwrite takes about 3 of {manifest.documents:,}"


@contextmanager
def show_progress() -> Iterator[Callable[["Status | DownloadStatus"], None]]:
    """A bar on a terminal, a line every ten seconds elsewhere; on standard error, so that --json stays readable."""
    if not sys.stderr.isatty():
        yield ProgressLines(time.monotonic)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from paceline.metrics.console import console_on

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}", markup=False), console=console_on(sys.stderr)) as bar:
        task = bar.add_task("", total=None)
        yield lambda status: bar.update(
            task, completed=status.bytes_read, total=status.bytes_total or None, description=str(status)
        )


class ProgressLines:
    """Progress as plain lines: rate since the last line, and time left at that rate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.last_s, self.last_bytes = clock, clock(), 0

    def __call__(self, status: "Status | DownloadStatus") -> None:
        now = self.clock()
        if now - self.last_s < LINE_EVERY_S:
            return
        rate = (status.bytes_read - self.last_bytes) / (now - self.last_s)
        left = max(0, status.bytes_total - status.bytes_read)
        ahead = f", {human_seconds(left / rate)} left" if status.bytes_total and rate > 0 else ""
        say(f"{human_bytes(status.bytes_read)} read, {human_bytes(rate)}/s, {status}{ahead}")
        self.last_s, self.last_bytes = now, status.bytes_read
