"""Optional stopping: how often a question was tested while its runs were still being made, and what that does to p.

Testing after every run and stopping at the first p below 0.01 accepts an unfit recipe in 4 % of the cases instead of
1 % (looks at 3, 4, … 10 runs, simulated in tests/lab). So `paceline compare` keeps a small file beside the runs: for
each question the numbers of runs at which it was tested, and the number planned at the first look. A plan decides at
its own number, and looks before that cost nothing; without one, the k-th look multiplies p by k(k + 1), which lets all
looks together, however many, pass at most 1.5 % instead of 1 %: the sum of 1/(k(k + 1)) from 2 on is 1/2.

A question names its groups by their keys (`analysis.groups.experiment_key`), so a release that adds or renames a
setting begins new questions.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import write_json
from paceline.core.schema import from_dict, read_json, to_dict

LOOKS_FILE = ".looks.json"  # hidden, so that runs/* still means the runs
LOOKS_FORMAT = 2  # 1, of paceline 0.1, named groups by another rule; its looks fit none of today's


@dataclass(frozen=True, kw_only=True)
class Question:
    key: str
    planned: int | None = None  # runs to be made, as given at the first look; a later change is no plan
    counts: tuple[int, ...] = ()  # runs at each look, in order; the same runs again are no new look

    def looked(self, n: int, planned: int | None) -> "Question":
        if n in self.counts:
            return self
        return replace(self, counts=(*self.counts, n), planned=self.planned if self.counts else planned)

    @property
    def early(self) -> bool:
        return self.planned is not None and max(self.counts) < self.planned

    @property
    def factor(self) -> int:
        """What p is to be multiplied by."""
        chances = sum(self.planned is None or count >= self.planned for count in self.counts)
        return 1 if chances <= 1 else chances * (chances + 1)

    def remarks(self, n: int, planned: int | None) -> list[str]:
        found = []
        if planned is not None and planned != self.planned:
            was = "no number was" if self.planned is None else f"{self.planned} were"
            found.append(f"a plan of {planned} runs comes too late: {was} planned at the first look, and that counts")
        if n < (most := max(self.counts)):
            found.append(f"{most} runs were looked at before, now {n}: leaving runs out afterwards biases p")
        if self.early:
            found.append(f"{n} of {self.planned} planned runs are there: this look decides nothing")
        if self.factor > 1:
            counts = ", ".join(map(str, self.counts))
            found.append(f"looked at with {counts} runs: against optional stopping p is multiplied by {self.factor}")
        return found


@dataclass(frozen=True, kw_only=True)
class LooksFile:
    format: int = LOOKS_FORMAT
    questions: tuple[Question, ...] = ()


class Looks:
    """The looks at the runs of a folder, and those of this call."""

    def __init__(self, folder: Path, planned: int | None) -> None:
        self.folder, self.planned = folder, planned
        questions, self.remarks = _read(folder / LOOKS_FILE)
        self.questions = {question.key: question for question in questions}
        self.asked: list[str] = []

    def look(self, key: str, n: int, planned: int | None) -> Question:
        self.asked.append(key)
        self.questions[key] = self.questions.get(key, Question(key=key)).looked(n, planned)
        return self.questions[key]

    def save(self) -> list[str]:
        """Write the looks; remarks about them."""
        found = list(self.remarks)
        if self.planned is None and any(self.questions[key].planned is None for key in self.asked):
            unplanned = "no number of runs was planned: to stop or go on because of this p is optional stopping"
            found.append(f"{unplanned}; give --planned N at the first look")
        try:
            write_json(self.folder / LOOKS_FILE, to_dict(LooksFile(questions=tuple(self.questions.values()))))
        except OSError as error:
            where = f"{self.folder} ({error.strerror})"
            found.append(f"this look could not be recorded in {where}; the next will not count it")
        return found


def _read(path: Path) -> tuple[tuple[Question, ...], list[str]]:
    """Questions and remarks; none before the first look."""
    if not path.exists():
        return (), []
    try:
        values = read_json(path)
        found = values.get("format") if isinstance(values, dict) else None
        if found == 1:
            return (), [f"{path}: its looks are of paceline 0.1, which grouped runs by another rule; they do not count"]
        if found != LOOKS_FORMAT:
            raise ConfigError(f"not a record of looks that this version reads (format {LOOKS_FORMAT})")
        return from_dict(LooksFile, values).questions, []
    except ConfigError as error:
        place = "" if str(error).startswith(str(path)) else f"{path}: "
        raise RunError(f"{place}{error}; without it earlier looks cannot be counted") from None
