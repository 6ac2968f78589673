"""Public data by a name of ours, and how a folder that is missing can be had. Facts only; `download.py` fetches."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

GPT2_END_OF_TEXT = 50_256


@dataclass(frozen=True, kw_only=True)
class PublicData:
    repo: str
    """A dataset on the Hugging Face hub."""
    train: str
    """Pattern of the training files, of which `--shards` takes the first."""
    val: str | None = None
    """Pattern of files that are always fetched; None: there are none."""
    about: str

    @property
    def tokenized(self) -> bool:
        """Shards to train on, not text that `data prepare` must read first."""
        return self.train.endswith(".bin")


PUBLIC = {
    "fineweb10B": PublicData(
        repo="kjj0/fineweb10B-gpt2",
        train="fineweb_train_*.bin",
        val="fineweb_val_*.bin",
        about="FineWeb, GPT-2 tokens in shards of about 100 M: what the records were trained on",
    ),
    "fineweb100B": PublicData(
        repo="kjj0/fineweb100B-gpt2",
        train="fineweb_train_*.bin",
        val="fineweb_val_*.bin",
        about="ten times as much of it",
    ),
    "fineweb-edu": PublicData(
        repo="kjj0/finewebedu10B-gpt2",
        train="finewebedu_train_*.bin",
        val="finewebedu_val_*.bin",
        about="FineWeb-Edu, GPT-2 tokens in shards of about 100 M",
    ),
    "fineweb10B-text": PublicData(
        repo="HuggingFaceFW/fineweb",
        train="sample/10BT/*.parquet",
        about="FineWeb's sample of 10 B tokens as text, for `data prepare`",
    ),
    "fineweb-edu-text": PublicData(
        repo="HuggingFaceFW/fineweb-edu",
        train="sample/10BT/*.parquet",
        about="FineWeb-Edu's sample of 10 B tokens as text, for `data prepare`",
    ),
}


def default_folder(name: str) -> Path:
    return Path("data") / name


def matches(file: str, pattern: str) -> bool:
    """Whether a file of a dataset fits a pattern. A star stays inside one folder, so that no name leads elsewhere."""
    path = PurePosixPath(file)
    return path.match(pattern) and len(path.parts) == len(PurePosixPath(pattern).parts)


def how_to_get(folder: Path) -> str:
    """What makes the shards of a folder that has none."""
    public = PUBLIC.get(folder.name)
    if public is None or not public.tokenized:
        return "make it with `paceline data prepare`"
    elsewhere = "" if folder == default_folder(folder.name) else f" --out {folder}"
    return f"`paceline data download {folder.name}{elsewhere}` fetches it"
