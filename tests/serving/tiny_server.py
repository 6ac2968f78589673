"""A model of bytes that writes nonsense at once, and a server of it in this process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from model.lively import lively
from paceline.evaluate.config import ServeConfig
from paceline.evaluate.serving.app import listen, make_app, make_engine, make_server
from paceline.evaluate.serving.batcher import Batcher
from paceline.model.gpt import GPT
from paceline.settings.model import ModelConfig, RotaryConfig, WindowConfig
from paceline.text.tokenizer import ByteTokenizer

MAX_TOKENS = 8192
"""Long enough for a text that is still being written when it is left."""
WINDOWS = (128,)
TOKENIZER = ByteTokenizer()


@cache
def tiny_model() -> GPT:
    config = ModelConfig(
        vocab_size=257, width=32, num_layers=2, num_heads=2, head_dim=16, qk_norm="before_rotary", softcap=15.0,
        rotary=RotaryConfig(max_tokens=MAX_TOKENS), document_mask=True,
        window=WindowConfig(unit="blocks", start_tokens=128, growth_tokens=128),
    )  # fmt: skip
    return lively(GPT(config, end_of_text=TOKENIZER.end_of_text))


@dataclass(frozen=True)
class Served:
    url: str
    port: int
    batcher: Batcher

    def settle(self) -> None:
        """Wait until nothing is being written; fails if something goes on."""
        end = time.monotonic() + 10
        while not self.batcher.idle:
            assert time.monotonic() < end, "a stream goes on that nobody reads"
            time.sleep(0.01)


@contextmanager
def served(limits: ServeConfig, name: str = "tiny") -> Iterator[Served]:
    """The real server on a free port, until the block ends."""
    listening = listen("127.0.0.1", 0)
    engine = make_engine(tiny_model(), WINDOWS, limits)
    app = make_app(engine, TOKENIZER, name, limits)
    server = make_server(app, texts=engine.room, answer_s=limits.timeout_s)
    server.config.timeout_graceful_shutdown = 1
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    port = listening.getsockname()[1]
    yield Served(f"http://127.0.0.1:{port}/", port, engine.batcher)
    server.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()
    listening.close()
