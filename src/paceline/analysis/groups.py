"""Which runs are averaged: one decision for `compare`, `board`, `ablate` and pages. No torch.

**A group is one experiment** (`experiment`): the config without the settings in SAME_EXPERIMENT and those that have no
effect beside the others (`settings/idle.py`), and what only the card has: track, fingerprint of the data, steps and
kind of device (a CPU computes a preset's bf16 products in fp32). The preset's name does not split a group: two names of
one config are one experiment. Code versions do not either; a remark names them. **Hardware does not split losses**, but
times: they are averaged over equal hardware and code only.

**A run counts** if `why_left_out` has nothing against it, and once per seed. What does not count is named with its
reason. **Two groups are compared** unless `why_incomparable` says that their losses mean different things.
"""

import hashlib
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.analysis.facts import setting, short_data, some
from paceline.analysis.runs import LeftOut, StoredRun, validations
from paceline.metrics.card import RunCard
from paceline.settings.idle import why_idle

SAME_EXPERIMENT = (
    "preset", "seed", "data.dir", "data.train", "evaluate.every", "checkpoint.", "metrics.", "train.device",
    "train.stop_after", "train.threads", "train.memory_limit_gib",
)  # fmt: skip
"""Settings, or beginnings of their names, that make no other experiment of a run: they change nothing of what is
computed but, at most, its last bits. Data count by their fingerprint, the device by what the run was on."""

R = TypeVar("R", bound=StoredRun)


def experiment_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that make the experiment, by dotted names."""
    return {name: value for name, value in config.items() if not name.startswith(SAME_EXPERIMENT)}


def card_facts(card: RunCard) -> dict[str, Any]:
    """What else makes the experiment."""
    return {
        "track": card.track,
        "steps": card.steps,
        "data fingerprint": card.all_data,
        "device": card.device,
        "initial weights": None if card.init_from is None else card.init_from.fingerprint,
        "extended": ", ".join(f"{planned} steps at step {step}" for step, planned in card.extended) or None,
    }


def experiment(run: StoredRun) -> dict[str, Any]:
    """Equal for runs that may be averaged."""
    return {**_effective(run, run.config), **card_facts(run.card)}


def _effective(run: StoredRun, settings: dict[str, Any]) -> dict[str, Any]:
    """Those that make the experiment and have an effect in this run."""
    return {name: value for name, value in experiment_settings(settings).items() if not why_idle(name, run.config)}


def experiment_key(run: StoredRun) -> str:
    """The same as a short text."""
    text = json.dumps(experiment(run), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def why_left_out(run: StoredRun, *, remade: bool = False) -> str | None:
    """Why the run's last loss must not be averaged with others; None: it may. `remade`: also if parts were remade."""
    card = run.card
    if not card.finished:
        return f"not finished: {run.steps_done:,} of {card.steps:,} steps"
    if card.val_loss is None:
        return "diverged: its last loss is not finite, so the mean of the others is too low"
    if (last := validations(card).get(card.steps)) is None or last.loss != card.val_loss:
        return "its card contradicts itself: the last row of its losses is not its final loss"
    return None if remade else why_remade(card)


def why_remade(card: RunCard) -> str | None:
    """A run of which a part was made again, or that was given more steps, by who had seen the first outcome."""
    counts = {"rewound": card.rewinds, "restarted": card.restarts}
    done = [f"{word} {'once' if n == 1 else f'{n} times'}" for word, n in counts.items() if n]
    done += [f"extended from {planned:,} steps" for _, planned in card.extended]
    read = f"its card counts {card.tokens:,} tokens for {card.steps:,} steps"
    return f"{' and '.join(done)}, {read}; `compare` and `board` count it --with-remade" if done else None


def why_incomparable(a: StoredRun, b: StoredRun) -> str | None:
    """Why the losses of two runs mean different things; None: they can be compared."""
    one, other = a.card, b.card
    if one.all_data != other.all_data:
        return f"other data (fingerprints {short_data(one, 10)} and {short_data(other, 10)})"
    if one.track != other.track:
        return f"other tracks ({one.track or 'none'} and {other.track or 'none'})"
    tokens = [setting(run.config.get("evaluate.tokens")) for run in (a, b)]
    return None if tokens[0] == tokens[1] else f"validated on other tokens ({tokens[0]} and {tokens[1]})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Group(Generic[R]):
    key: str
    label: str
    members: tuple[R, ...]  # all of one experiment, in the order given
    runs: tuple[R, ...]  # those that count, by seed: every mean is taken over these
    left_out: tuple[LeftOut, ...]  # the others, with reasons

    @property
    def drawn(self) -> tuple[R, ...]:
        """The runs that count; while there is none, all."""
        return self.runs or self.members

    @property
    def first(self) -> R:
        return self.drawn[0]

    @property
    def losses(self) -> list[float]:
        return [run.card.val_loss for run in self.runs if run.card.val_loss is not None]

    @property
    def seeds(self) -> list[int]:
        return [run.card.seed for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def stdev(self) -> float | None:
        return statistics.stdev(self.losses) if len(self.runs) > 1 else None

    @property
    def times_comparable(self) -> bool:
        return len({run.machine for run in self.drawn}) == 1

    @property
    def recipe(self) -> str:
        """In words: the preset, the steps and what differs from the preset."""
        changed = [f"{name} {setting(value)}" for name, value in changed_settings(self.first).items()]
        card = self.first.card
        changed += [f"plug-in {one}" for one in card.plugins]
        changed += [f"from the weights of {card.init_from}"] if card.init_from else []
        changed += [f"extended from {planned:,} steps" for _, planned in card.extended]
        return ", ".join([card.preset, f"{card.steps:,} steps", *changed])


def changed_settings(run: StoredRun) -> dict[str, Any]:
    """The settings that make the experiment and are not the preset's; not those that `card_facts` has."""
    changed = {change.field: change.after for change in run.card.diff}
    return {name: value for name, value in _effective(run, changed).items() if name not in card_facts(run.card)}


def groups_of(runs: Iterable[R], *, by_machine: bool = False, remade: bool = False) -> list[Group[R]]:
    """In the order of their first runs; also those in which nothing counts. `by_machine`: runs of other hardware or
    code are groups of their own, for means of times. `remade`: see `why_left_out`."""
    found: dict[tuple[str, ...], list[R]] = {}
    for run in runs:
        found.setdefault((experiment_key(run), *(run.machine if by_machine else ())), []).append(run)
    return [_group(key[0], members, remade) for key, members in found.items()]


def _group(key: str, members: Sequence[R], remade: bool) -> Group[R]:
    counted: dict[int, R] = {}
    left_out = []
    for run in members:
        why = why_left_out(run, remade=remade)
        if why is None and (first := counted.setdefault(run.card.seed, run)) is not run:
            why = f"repeats seed {run.card.seed} of {first.label}, which is no new sample"
        if why is not None:
            left_out.append(LeftOut(run=run.label, why=why))
    runs = tuple(counted[seed] for seed in sorted(counted))
    return Group(key=key, label=key, members=tuple(members), runs=runs, left_out=tuple(left_out))


def mixture(group: Group[Any]) -> list[str]:
    """What a reader of a group's means has to know: in what its runs differ besides the seed."""
    hardware, code = (sorted({run.machine[index] for run in group.drawn}) for index in (0, 1))
    said = []
    if len(code) > 1:
        said.append(f"made by {len(code)} versions of the code ({', '.join(code)}), which may compute differently")
    if len(hardware) > 1:
        said.append(f"made on {len(hardware)} kinds of hardware ({'; '.join(hardware)})")
    if remade := [run.label for run in group.runs if why_remade(run.card)]:
        said.append(f"rewound, restarted or extended, and counted because that was asked for: {some(remade)}")
    if skipped := sum(run.card.skipped_steps for run in group.runs):
        said.append(f"{skipped} steps with bad numbers were skipped")
    return said
