"""How often a question was looked at while its runs were still being made, and what that does to its p-value.

Whoever looks after every run and stops at the first p below 0.01 passes an unfit recipe not once in a hundred times but
four times (looks at 3, 4, … 10 runs, simulated in tests/lab). So `paceline compare` keeps a small file beside the runs:
for each question the numbers of runs it was asked with, and the number that was planned when it was first asked. A plan
decides at its own number and looks before that cost nothing; without one, the k-th look multiplies p by k(k + 1), which
lets all looks together, however many, pass at most 1.5 % instead of 1 %: the sum of 1/(k(k + 1)) from 2 on is 1/2.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import write_json
from paceline.core.schema import from_dict, read_json, to_dict

LOOKS_FILE = ".looks.json"
"""Hidden, so that runs/* still means the runs."""
LOOKS_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Question:
    key: str
    planned: int | None = None
    """Runs that were to be made, as said at the first look; a later change would be no plan."""
    counts: tuple[int, ...] = ()
    """Runs there were at each look, in the order of the looks; the same runs again are no new look."""

    def looked(self, n: int, planned: int | None) -> "Question":
        """With this look added."""
        if n in self.counts:
            return self
        return replace(self, counts=(*self.counts, n), planned=self.planned if self.counts else planned)

    @property
    def early(self) -> bool:
        """Whether the planned runs are not all there."""
        return self.planned is not None and max(self.counts) < self.planned

    @property
    def factor(self) -> int:
        """What p is to be multiplied by."""
        chances = sum(self.planned is None or count >= self.planned for count in self.counts)
        return 1 if chances <= 1 else chances * (chances + 1)

    def remarks(self, n: int, planned: int | None) -> list[str]:
        """What the reader of this look's p must know."""
        told = []
        if planned is not None and planned != self.planned:
            was = "no number was" if self.planned is None else f"{self.planned} were"
            told.append(f"a plan of {planned} runs comes too late: {was} planned at the first look, and that counts")
        if n < max(self.counts):
            told.append(f"{max(self.counts)} runs were looked at before, now {n}: leaving runs out afterwards biases p")
        if self.early:
            told.append(f"{n} of {self.planned} planned runs are there: this look decides nothing")
        if self.factor > 1:
            counts = ", ".join(map(str, self.counts))
            told.append(
                f"looked at with {counts} runs: stopping when a look pleases is not one test, so p is multiplied by "
                f"{self.factor}"
            )
        return told


@dataclass(frozen=True, kw_only=True)
class Looks:
    format: int = LOOKS_FORMAT
    questions: tuple[Question, ...] = ()

    def question(self, key: str) -> Question:
        return next((question for question in self.questions if question.key == key), Question(key=key))

    def updated(self, questions: Iterable[Question]) -> "Looks":
        kept = {question.key: question for question in (*self.questions, *questions)}
        return replace(self, questions=tuple(kept.values()))


def read_looks(folder: Path) -> Looks:
    """What is known in this folder of runs; nothing, where nobody has looked yet."""
    path = folder / LOOKS_FILE
    if not path.exists():
        return Looks()
    try:
        values = read_json(path)
        if not isinstance(values, dict) or values.get("format") != LOOKS_FORMAT:
            raise ConfigError(f"not a record of looks that this version reads (format {LOOKS_FORMAT})")
        return from_dict(Looks, values)
    except ConfigError as error:
        place = "" if str(error).startswith(str(path)) else f"{path}: "
        raise RunError(f"{place}{error}; without it nobody knows how often these runs were looked at") from None


def write_looks(folder: Path, looks: Looks) -> None:
    write_json(folder / LOOKS_FILE, to_dict(looks))


class Book:
    """The looks there were, and those of this call."""

    def __init__(self, before: Looks, planned: int | None) -> None:
        self.before, self.planned = before, planned
        self.asked: list[Question] = []

    def look(self, key: str, n: int, planned: int | None) -> Question:
        self.asked.append(self.before.question(key).looked(n, planned))
        return self.asked[-1]

    def written(self, folder: Path) -> list[str]:
        """Save the looks; remarks about that."""
        told = []
        if self.planned is None and any(question.planned is None for question in self.asked):
            told.append(
                "no number of runs was planned: to stop or go on because of a p seen here is peeking; "
                "say --planned N at the first look"
            )
        try:
            write_looks(folder, self.before.updated(self.asked))
        except OSError as error:
            told.append(
                f"this look could not be recorded in {folder} ({error.strerror}), so the next one will not know"
            )
        return told
