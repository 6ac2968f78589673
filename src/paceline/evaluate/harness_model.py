"""Our model as lm-evaluation-harness asks it: how likely is this continuation, this text, and what do you write next.

Needs lm_eval, so it is imported only by `harness.py`. Prompts are encoded as they are; end-of-text stands only before
an empty one. Texts longer than a sequence are cut as the harness cuts them for other models.
"""

from typing import Any

from lm_eval.api.model import TemplateLM

from paceline.evaluate.config import SamplingConfig
from paceline.evaluate.generate import TextStream, generate
from paceline.evaluate.load import LoadedRun
from paceline.evaluate.score import Progress, Row, Score, cut_to, score_rows, silent
from paceline.evaluate.text import rolling_rows

DEFAULT_NEW_TOKENS = 256
"""What the harness lets other models write where a task does not say."""


class HarnessModel(TemplateLM):
    def __init__(self, run: LoadedRun, *, most_tokens: int, progress: Progress = silent) -> None:
        super().__init__()
        self.run, self.most_tokens, self.progress = run, most_tokens, progress

    @property
    def eot_token_id(self) -> int:
        return self.run.tokenizer.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.run.tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context or [self.eot_token_id], continuation) for _, context, continuation in requests]
        rows = [cut_to(Row([*before, *after], len(before)), self.most_tokens) for before, after in pairs]
        return [(-score.nats, bool(score.likeliest.all())) for score in self._scores(rows)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [[self.eot_token_id, *self.tok_encode(request.args[0])] for request in requests]
        rows = [list(rolling_rows(text, self.most_tokens, overlap=0)) for text in texts]
        scores = iter(self._scores([row for of_text in rows for row in of_text]))
        return [-sum(next(scores).nats for _ in of_text) for of_text in rows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for number, request in enumerate(requests, start=1):
            texts.append(self._continued(*request.args))
            self.progress(number, len(requests))
        return texts

    def _scores(self, rows: list[Row]) -> list[Score]:
        return score_rows(self.run.model, rows, windows=self.run.windows, progress=self.progress)

    def _continued(self, context: str, options: dict[str, Any]) -> str:
        """Up to the first of the task's stop words, an end-of-text, or its number of tokens. A prompt that leaves no
        room for those loses its beginning."""
        new_tokens = min(int(options.get("max_gen_toks", DEFAULT_NEW_TOKENS)), self.most_tokens - 1)
        prompt = (self.tok_encode(context) or [self.eot_token_id])[-(self.most_tokens - new_tokens) :]
        until = options.get("until") or []
        text = TextStream(self.run.tokenizer, [stop for stop in ([until] if isinstance(until, str) else until) if stop])
        sampling, written = _sampling(options), ""
        for token in generate(self.run.model, prompt, sampling, windows=self.run.windows, new_tokens=new_tokens):
            written += text.push(token)
            if text.stopped:
                break
        return written + text.end()


def _sampling(options: dict[str, Any]) -> SamplingConfig:
    """Greedy unless the task asks for draws."""
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
    return SamplingConfig(temperature=temperature, top_k=options.get("top_k"), top_p=float(options.get("top_p") or 1.0))
