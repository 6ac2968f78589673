"""A captured step writes what the step writes kernel by kernel, on a GPU. The CPU twins are in test_decode_graph.py."""

import itertools
from dataclasses import replace

import pytest
import torch

from model.lively import lively, logits_without_cache
from paceline.core.probe import compiler
from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.decode import Decoder
from paceline.evaluate.decode_graph import DecodeGraph
from paceline.evaluate.generate import _one_by_one, generate
from paceline.evaluate.inference_model import prepared
from paceline.evaluate.sampling import Writing
from paceline.evaluate.serving.batcher import Stream, make_batcher
from paceline.model.gpt import GPT
from paceline.recipes.presets import PRESETS
from paceline.recipes.scaling import scaled
from paceline.settings.model import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WINDOWS = (256,)
GREEDY = SamplingConfig(temperature=0.0)
KINDS = [GREEDY, SamplingConfig(seed=3), SamplingConfig(top_k=None, seed=4), SamplingConfig(top_k=None, top_p=0.9)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def r18(compute: str, head_dim: int = 64) -> GPT:
    """Record 18 at about half its width, where every part says something. Heads of 44 are no power of 2."""
    config: ModelConfig = scaled(PRESETS["r18-softcap"](), 1 / 4).model
    config = replace(config, head_dim=head_dim, width=head_dim * config.num_heads)
    config = replace(config, precision=replace(config.precision, compute="fp32" if compute == "fp32" else "bf16"))
    return lively(GPT(config, end_of_text=0)).cuda()


def prompt_of(length: int, seed: int) -> list[int]:
    return [0, *torch.randint(1, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()]


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize(("slots", "head_dim"), [(1, 64), (3, 64), (1, 44)])
def test_a_captured_step_writes_the_same_as_a_whole_pass(slots: int, head_dim: int, compiled: bool) -> None:
    """In fp32, greedy, past the ring's end; a slot is freed and given to another text between two replays."""
    if compiled and not compiler("cuda").usable:
        pytest.skip("torch.compile cannot be used here")
    model = r18("fp32", head_dim)
    decoder = Decoder(prepared(model), windows=WINDOWS, max_tokens=1024, slots=slots)
    graph = DecodeGraph(decoder, compiled=compiled)
    assert graph.compiled == compiled
    vocab, seen = model.config.vocab_size, {}

    def begin(slot: int, prompt: list[int]) -> None:
        token = int(decoder.feed(torch.tensor([prompt], device="cuda"), first=slot)[0, :vocab].argmax())
        graph.begin(slot, token)
        seen[slot] = [*prompt, token]

    def go_on(steps: int) -> None:
        for _ in range(steps):
            for slot, token in enumerate(graph.launch([Writing(GREEDY)] * slots).wait()):
                seen[slot].append(token)

    def check() -> None:
        for tokens in seen.values():
            for end in (-1, -5, -10):
                logits = logits_without_cache(model, torch.tensor([tokens[:end]], device="cuda"), windows=WINDOWS)
                assert int(logits[0, :vocab].argmax()) == tokens[end]

    for slot, length in zip(range(slots), (505, 3, 300), strict=False):
        begin(slot, prompt_of(length, slot))
    go_on(20)
    check()
    decoder.free(0)
    begin(0, prompt_of(200, seed=9))
    go_on(20)
    check()


@pytest.mark.parametrize("config", KINDS, ids=["greedy", "few", "all", "sorted"])
def test_a_captured_sample_is_the_one_drawn_step_by_step(config: SamplingConfig) -> None:
    model = r18("fp32")
    captured = list(generate(model, prompt_of(40, 1), config, windows=WINDOWS, new_tokens=80))
    plain = _one_by_one(model, prompt_of(40, 1), Writing(config), WINDOWS, 80)
    assert captured == list(itertools.takewhile(lambda token: token != model.end_of_text, plain))
    assert len(captured) > 20


@pytest.mark.parametrize("slots", [1, 3])
def test_compiled_bf16_logits_are_those_of_single_launches_up_to_rounding(slots: int) -> None:
    if not compiler("cuda").usable:
        pytest.skip("torch.compile cannot be used here")
    model, tokens = r18("bf16"), torch.tensor([prompt_of(300, 1)] * slots, device="cuda")
    plain = Decoder(model, windows=WINDOWS, max_tokens=1024, slots=slots)
    graph = DecodeGraph(Decoder(prepared(model), windows=WINDOWS, max_tokens=1024, slots=slots), compiled=True)
    assert graph.compiled
    plain.feed(tokens)
    graph.decoder.feed(tokens)
    for slot in range(slots):
        graph.begin(slot, 7)
    graph.launch([Writing(GREEDY)] * slots).wait()
    expected = plain.feed(torch.full((slots, 1), 7, device="cuda"))[:, : model.config.vocab_size]
    assert (graph.logits - expected).norm() < 0.05 * expected.norm()  # bf16 keeps 2^-8 at each of twelve blocks


def test_streams_over_a_compiled_step_get_what_each_would_alone() -> None:
    model = r18("fp32")
    batch = make_batcher(model, windows=WINDOWS, slots=2, max_tokens=1024)
    streams = [Stream(KINDS[n % 4], prompt_of(40 * n, n), 30, float("inf")) for n in range(1, 6)]
    for stream in streams:
        batch.add(stream)
    events = []
    while not batch.idle:
        events += batch.step()
    for stream in streams:
        made = [event.token for event in events if event.stream is stream and event.token is not None]
        assert made == list(generate(model, stream.prompt, stream.sampling, windows=WINDOWS, new_tokens=30))
