"""Runs change settings of the whole process; every test leaves them as it found them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def _settings_as_found() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    workspace = os.environ.pop(CUBLAS, None)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    os.environ.pop(CUBLAS, None)
    if workspace is not None:
        os.environ[CUBLAS] = workspace


@pytest.fixture(scope="session")
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def builtin_text(cache_of_the_session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in corpus, made once for all tests that ask for it."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(cache_of_the_session))
