"""Public data over a real connection: fetched once, resumed where it broke, checked, and one line for what fails."""

import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from paceline.cli import main
from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.recipes.presets import PRESETS, preset
from paceline.settings.data import DataConfig
from paceline.text.config import PUBLIC, DownloadConfig, matches
from paceline.text.dataset import open_corpus, open_dataset
from paceline.text.download import FILE_NAME, DownloadStatus, download
from paceline.text.shard_writer import write_shard
from paceline.text.verify import verify
from text.hub import Hub, serving

pytest.importorskip("huggingface_hub")
TRAIN = [f"fineweb_train_{number:06d}.bin" for number in (1, 2, 3)]
VAL = "fineweb_val_000000.bin"


def shard_bytes(path: Path, seed: int, *, tokens: int = 40_000) -> bytes:
    """A file as the publisher serves it: no manifest, documents opened by GPT-2's end-of-text."""
    ids = np.random.Generator(np.random.PCG64(seed)).integers(0, 50_256, size=tokens, dtype=np.uint16)
    ids[::500] = 50_256
    write_shard(path, ids, documents=tokens // 500, tokenizer="")
    return path.read_bytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {name: shard_bytes(tmp_path / "served" / name, seed) for seed, name in enumerate([VAL, *TRAIN])}
    files["README.md"] = b"not asked for"
    with serving(Hub(PUBLIC["fineweb10B"].repo, files)) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        yield served


@pytest.fixture
def config(tmp_path: Path) -> DownloadConfig:
    return DownloadConfig(name="fineweb10B", out=str(tmp_path / "out"), shards=2)


def fetched(hub: Hub) -> list[str]:
    return [name for name, _ in hub.asked]


def test_the_first_shards_arrive_verified_and_ready_to_train_on(
    hub: Hub, config: DownloadConfig, tmp_path: Path
) -> None:
    said: list[DownloadStatus] = []
    done = download(config, said.append)
    assert fetched(hub) == [VAL, *TRAIN[:2]]
    assert [file.name for file in done.files] == [VAL, *TRAIN[:2]]
    for name in fetched(hub):
        assert (tmp_path / "out" / name).read_bytes() == hub.files[name]
    checked = verify(tmp_path / "out")
    assert checked.ok
    assert all(check.hashed for check in checked.files if check.tokens)
    corpus = open_corpus(tmp_path / "out", "*train*.bin", 50_257)
    assert corpus.lengths == (40_000, 40_000)
    assert corpus.shards[0].manifest is not None
    assert corpus.shards[0].manifest.documents == 80
    total = sum(len(hub.files[name]) for name in fetched(hub))
    assert said[-1] == DownloadStatus(total, total, 3, 3)
    assert all(0 <= status.bytes_read <= total for status in said)


def test_the_same_command_fetches_only_what_is_missing(hub: Hub, config: DownloadConfig, tmp_path: Path) -> None:
    download(config)
    hub.asked.clear()
    (tmp_path / "out" / TRAIN[0]).unlink()
    download(config)
    assert fetched(hub) == [TRAIN[0]]
    hub.asked.clear()
    download(config)
    assert fetched(hub) == []
    more = DownloadConfig(name=config.name, out=config.out)
    assert len(download(more).files) == 4
    assert fetched(hub) == [TRAIN[2]]


def test_a_broken_connection_goes_on_where_it_broke(
    hub: Hub, config: DownloadConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # what reaches the disk at once
    hub.break_after[TRAIN[0]] = 30_000
    download(config)
    assert hub.asked[1:3] == [(TRAIN[0], None), (TRAIN[0], "bytes=30000-")]
    assert (tmp_path / "out" / TRAIN[0]).read_bytes() == hub.files[TRAIN[0]]


def test_a_wrong_hash_is_named_and_the_file_is_fetched_again(hub: Hub, config: DownloadConfig, tmp_path: Path) -> None:
    hub.listed_hash[TRAIN[1]] = "0" * 64
    with pytest.raises(DataError, match="SHA-256") as caught:
        download(config)
    assert str(tmp_path / "out" / TRAIN[1]) in str(caught.value)
    assert not (tmp_path / "out" / TRAIN[1]).exists()
    hub.listed_hash.clear()
    hub.asked.clear()
    download(config)
    assert fetched(hub) == [TRAIN[1]]


def test_a_file_that_was_changed_here_is_fetched_again(hub: Hub, config: DownloadConfig, tmp_path: Path) -> None:
    download(config)
    with open(tmp_path / "out" / TRAIN[0], "ab") as file:
        file.write(b"x")
    hub.asked.clear()
    with pytest.raises(DataError, match="listed are"):
        download(config)
    download(config)
    assert fetched(hub) == [TRAIN[0]]
    assert verify(tmp_path / "out").ok


KILLED = """
import os, signal, sys
from paceline.text.config import DownloadConfig
from paceline.text.download import download

def half_way(status):
    if status.files == 1 and status.bytes_read > 110_000:
        os.kill(os.getpid(), signal.SIGKILL)

download(DownloadConfig(name="fineweb10B", out=sys.argv[1], shards=2), half_way)
"""


def test_a_killed_download_goes_on_and_leaves_nothing_behind(hub: Hub, config: DownloadConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(out.rglob("*.incomplete"))) == 1
    hub.asked.clear()
    download(config)
    assert fetched(hub) == TRAIN[:2]
    assert list(out.rglob("*.incomplete")) == []
    assert verify(out).ok


def test_a_file_that_is_no_shard_is_refused(hub: Hub, config: DownloadConfig) -> None:
    hub.files[TRAIN[0]] = b"<html>" * 1000
    with pytest.raises(DataError, match="not a token shard"):
        download(config)


def test_a_damaged_note_costs_a_look_at_the_files_not_the_files(
    hub: Hub, config: DownloadConfig, tmp_path: Path
) -> None:
    download(config)
    (tmp_path / "out" / FILE_NAME).write_text("{")
    hub.asked.clear()
    assert len(download(config).files) == 3
    assert fetched(hub) == []


# ---- what can fail outside


def test_too_little_space_is_told_before_the_first_byte(
    hub: Hub, config: DownloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100_000})())
    with pytest.raises(PacelineError, match=r"97\.7 KiB are free.*--shards"):
        download(config)
    assert fetched(hub) == []


@contextmanager
def files_of_at_most(limit: int) -> Iterator[None]:
    """The system refuses to let a file grow further, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_is_one_line_and_the_rest_is_fetched_later(
    hub: Hub, config: DownloadConfig, tmp_path: Path
) -> None:
    hub.files[TRAIN[1]] = shard_bytes(tmp_path / "served" / "large.bin", 7, tokens=400_000)
    with files_of_at_most(200_000), pytest.raises(PacelineError) as caught:
        download(config)
    assert str(caught.value).startswith(f"{config.out}: cannot be written (")
    assert "same command again" in str(caught.value)
    assert list((tmp_path / "out").rglob("*.incomplete")) == []
    hub.asked.clear()
    assert len(download(config).files) == 3
    assert fetched(hub) == [TRAIN[1]]


def test_without_a_network_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert main(["data", "download", "fineweb10B", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "kjj0/fineweb10B-gpt2 cannot be fetched (ConnectError" in said
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_is_gone_is_one_line(hub: Hub, config: DownloadConfig) -> None:
    hub.repo = "somebody/else"
    with pytest.raises(PacelineError, match="kjj0/fineweb10B-gpt2 cannot be fetched"):
        download(config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("finweb",), "no public data called 'finweb'; there are fineweb10B, "),
        (("fineweb10B", "--shards", "0"), "--shards 0 must be at least 1"),
        (("fineweb10B", "--shards", "9"), "--shards 9: kjj0/fineweb10B-gpt2 has 3"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], said: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "download", *words, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert fetched(hub) == []


def test_the_command_says_what_to_do_next(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["data", "download", "fineweb10B", "--shards", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"hashes right; train on it with --data.dir {out}\n")


# ---- the table


@pytest.mark.parametrize("name", ["fineweb_train_../../x.bin", "a/fineweb_train_1.bin", "fineweb_val_000000.bin"])
def test_a_name_that_leads_elsewhere_is_not_taken(name: str) -> None:
    assert not matches(name, "fineweb_train_*.bin")


def test_the_records_name_the_command_that_fetches_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in PRESETS:
        if name == "demo":
            continue
        with pytest.raises(DataError, match="`paceline data download fineweb10B` fetches it"):
            open_dataset(preset(name).data, preset(name).model.vocab_size)


def test_another_folder_is_told_where_its_shards_could_come_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--out"):
        open_dataset(DataConfig(dir=str(tmp_path / "fineweb-edu")), 50_257)
    with pytest.raises(DataError, match="paceline data prepare"):
        open_dataset(DataConfig(dir=str(tmp_path / "books")), 50_257)


def test_an_unknown_name_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(ConfigError, match="no public data"):
        DownloadConfig(name="pile")
