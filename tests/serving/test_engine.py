"""The engine's thread when its device fails for good."""

import asyncio

import pytest

from paceline.evaluate.config import SamplingConfig, ServeConfig
from paceline.evaluate.serving.app import make_engine
from paceline.evaluate.serving.batcher import Stream
from paceline.evaluate.serving.request import RefusedError
from serving.tiny_server import WINDOWS, tiny_model

LIMITS = ServeConfig(max_streams=2, max_queue=2, max_tokens=600)


def stream() -> Stream:
    return Stream(SamplingConfig(), [1, 2, 3], 5, float("inf"))


def test_everybody_is_told_and_nobody_is_let_in() -> None:
    """After a sticky error of a GPU even cleaning up raises."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    async def scene() -> None:
        engine = make_engine(tiny_model(), WINDOWS, LIMITS)
        decoder = engine.batcher.decoder
        decoder.stream = decoder.free = broken
        engine.start()
        replies = [engine.open([stream()]), engine.open([stream(), stream()])]
        for reply in replies:
            for _ in reply.streams:
                event = await asyncio.wait_for(reply.events.get(), 10)
                assert event.finish == "error"
        with pytest.raises(RefusedError, match="device failed"):
            engine.open([stream()])
        await asyncio.to_thread(engine.stop)

    asyncio.run(scene())
