"""A shard that becomes shorter while it is open: one line with its name, where reading the lost part is a SIGBUS."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.shards import open_shard
from paceline.text.shard_writer import write_shard

READ = """
import os, sys
from pathlib import Path
import numpy as np
from paceline.core.errors import DataError
from paceline.data.aligned import AlignedCorpus
from paceline.data.corpus import Corpus
from paceline.data.shards import check_vocabulary, open_shard, positions_of
shard, where = open_shard(Path(sys.argv[1])), np.array([[0, 400_000]])
corpora = [Corpus((shard,)), AlignedCorpus((shard,), None, 0)]
for corpus in corpora:
    corpus.take(where, 256)
os.truncate(sys.argv[1], 300_000)
reads = [*(lambda corpus=corpus: corpus.take(where, 256) for corpus in corpora), lambda: positions_of(shard, 0),
         lambda: check_vocabulary(shard, 1)]
for read in reads:
    try:
        read()
    except DataError as error:
        print(error)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x_train_000001.bin"
    write_shard(path, np.arange(500_000, dtype=np.int64).astype(np.uint16) % 300, documents=0, tokenizer="")
    return path


def test_every_reader_of_a_shard_that_was_truncated_in_place_names_it(path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr  # -7 would be SIGBUS
    told = ended.stdout.splitlines()
    assert len(told) == 4
    assert all(line.startswith(f"{path}: has become shorter while it was read: 300,000 bytes") for line in told)


def test_a_shard_that_was_replaced_by_another_is_still_the_old_one(path: Path) -> None:
    shard = open_shard(path)
    path.with_name("short").write_bytes(b"short")
    os.replace(path.with_name("short"), path)
    assert shard.tokens[-1] == 499_999 % 65_536 % 300
    os.truncate(path, 3)
    with pytest.raises(DataError, match="shorter than"):
        open_shard(path)
