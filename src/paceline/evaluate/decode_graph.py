"""One more token for every text of a cache, as one fixed sequence of kernels that a GPU replays as a graph.

The step of `Decoder.feed` and `choose` in one shape whatever the texts are: all slots, whole rings under their masks,
the draw on the device, and drawn tokens where the next step reads them. What the host knows is copied in before a step,
and token ids come back after it; who launches the next step before waiting for them leaves the GPU no pause. On a CPU
the same step runs kernel by kernel.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.probe import compiler
from paceline.evaluate.decode import NOWHERE, AttendOver, Decoder, Place, PlanOver, plan_plainly
from paceline.evaluate.sampling import Dials, Kind, Writing, draw_all, draw_few, draw_sorted, kind_of

log = logging.getLogger(__name__)

LENGTH, KIND, TEMPERATURE, TOP_K, TOP_P, UNIFORM = range(6)
"""Rows of what the host tells a step, a column for each slot; fp32 holds lengths up to 2^24 exactly."""
KINDS: dict[Kind, float] = {"greedy": 1.0, "few": 1.0, "all": 2.0, "sorted": 3.0}
"""What stands in the row KIND; 0: this slot does not advance. Kinds of 1 are drawn within the graph, the others after
it and only where some text asks for them."""
WARM_UP_STEPS = 3
"""Before the capture: libraries choose their kernels."""
IN_FLIGHT = 2
"""Steps whose ids may be waited for at the same time."""


@dataclass(frozen=True)
class Ids:
    """Token ids of a step, one for each slot, once the device has made them."""

    host: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> list[int]:
        if self.done is not None:
            self.done.synchronize()
        return list(self.host.tolist())


def plan_for(decoder: Decoder) -> PlanOver:
    """Our kernel for one token a text, on a GPU where Triton can be used, which like torch.compile needs a C compiler,
    and for heads as wide as it can take."""
    device = decoder.device.type
    if device != "cuda" or not compiler(device).usable:
        return plan_plainly
    from paceline.kernels.attention_decode import WIDEST

    fits = all(shape.qk_dim == shape.v_dim <= WIDEST for shape in decoder.model.config.attending)
    return plan_cells if fits else plan_plainly


def plan_cells(place: Place, scale: float) -> AttendOver:
    """One token for each slot."""
    from paceline.kernels.attention_decode import attend_cells, mark_seen

    seen = mark_seen(place.cells, place.mask)
    return lambda q, k, v, keys, values: attend_cells(q, k, v, keys, values, seen, scale)


class DecodeGraph:
    """The step of a decoder whose slots are all free."""

    def __init__(self, decoder: Decoder, *, compiled: bool = False) -> None:
        slots, device = len(decoder.lengths), decoder.device
        self.decoder, self.on_gpu, self.vocab_size = decoder, device.type == "cuda", decoder.model.config.vocab_size
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)
        """What each slot is fed next."""
        self.inputs = torch.zeros(6, slots, device=device)
        self.host_inputs = [torch.zeros(6, slots, pin_memory=self.on_gpu) for _ in range(IN_FLIGHT)]
        self.host_ids = [torch.zeros(slots, dtype=torch.long, pin_memory=self.on_gpu) for _ in range(IN_FLIGHT)]
        self.launched = 0
        self.plan = plan_for(decoder)
        self.following: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = self._following
        can_compile = self.plan is plan_cells or not self.on_gpu  # else whole caches would be copied at every write
        self.compiled = compiled and can_compile and self._compiles()
        self.replay: Callable[[], None] = self._captured() if self.on_gpu else self._step

    def begin(self, slot: int, token: int) -> None:
        """The first token of a text whose prompt is in the cache."""
        self.tokens[slot] = token

    @torch.no_grad()
    def launch(self, texts: Sequence[Writing | None]) -> Ids:
        """Feed each slot with a text its token and draw the next one; the others stay as they are. The ids of all but
        the last launch must have been waited for."""
        turn = self.launched % IN_FLIGHT
        self.launched += 1
        told = [self._told(slot, text) for slot, text in enumerate(texts)]
        self.host_inputs[turn].copy_(torch.tensor(told).T)
        self.inputs.copy_(self.host_inputs[turn], non_blocking=True)
        self.replay()
        self._draw_others({column[KIND] for column in told})
        for slot, text in enumerate(texts):
            self.decoder.lengths[slot] += text is not None
        ids = Ids(self.host_ids[turn], torch.cuda.Event() if self.on_gpu else None)
        ids.host.copy_(self.tokens, non_blocking=True)
        if ids.done is not None:
            ids.done.record()
        return ids

    def _told(self, slot: int, text: Writing | None) -> tuple[float, ...]:
        """A column of the inputs, in the order of its rows."""
        length = self.decoder.lengths[slot]
        if text is None:
            return (length, 0.0, 0.0, 0.0, 0.0, 0.0)
        s, kind = text.sampling, kind_of(text.sampling, self.vocab_size)
        top_k = self.vocab_size if s.top_k is None else min(s.top_k, self.vocab_size)
        uniform = 0.0 if kind == "greedy" else text.generator.random()
        return (length, KINDS[kind], s.temperature, top_k, s.top_p, uniform)

    def _following(self, tokens: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (slots, vocabulary) after these tokens, and what each slot is fed next."""
        d = self.decoder
        starts = inputs[LENGTH].long()
        x = d.append(tokens[:, None], starts, first=0, used=d.cells, plan=self.plan)
        logits = d.model.head_of(x)[:, 0, : self.vocab_size]  # padding columns are no tokens
        return logits, torch.where(inputs[KIND] > 0, draw_few(logits, Dials(*inputs[TEMPERATURE:])), tokens)

    def _step(self) -> None:
        self.logits, following = self.following(self.tokens, self.inputs)
        self.tokens.copy_(following)

    def _draw_others(self, kinds: set[float]) -> None:
        for kind, draw in ((KINDS["all"], draw_all), (KINDS["sorted"], draw_sorted)):
            if kind in kinds:
                drawn = draw(self.logits, Dials(*self.inputs[TEMPERATURE:]))
                self.tokens.copy_(torch.where(self.inputs[KIND] == kind, drawn, self.tokens))

    @torch.no_grad()
    def _compiles(self) -> bool:
        """Compile the step by taking one. A compiler may fail at this after all that could be asked of it before; then
        the step is what it was."""
        try:
            self.following = torch.compile(self._following, fullgraph=True, dynamic=False)
            self._step()
            return True
        except Exception as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            log.warning("the step is not compiled: %s", " ".join(lines[:2]))  # who failed, and with what
            self.following = self._following
            return False

    @torch.no_grad()
    def _captured(self) -> Callable[[], None]:
        """Captured with no slot advancing: what that writes into the cache is forgotten."""
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self._step()
        here.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        self.decoder.positions.fill_(NOWHERE)
        return self.graph.replay
