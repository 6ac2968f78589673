"""docs/plan.md from the planner itself: `python -m paceline.lab.plan.page` writes it, `--check` compares."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import PacelineError, UserError
from paceline.lab.pages import DOCS
from paceline.lab.plan.efficiency import fit, seconds, step_work
from paceline.lab.plan.figures import held_out_figures, memory_figures, step_figures
from paceline.lab.plan.gpus import GPUS
from paceline.lab.plan.memory import peak_gib
from paceline.lab.plan.plan import efficiencies_of, step_seconds
from paceline.lab.plan.work import Profile
from paceline.metrics.flops import DENSE_BF16_FLOPS

PAGE = DOCS / "plan.md"
PROFILES: tuple[Profile, ...] = ("reference", "fast")

TEXT = """<!-- Written by `python -m paceline.lab.plan.page`; edit src/paceline/lab/plan instead. -->

# Planning a run

`paceline plan r18-softcap --gpus 8 --gpu h100` foretells a run before it is paid for: seconds of a step and where they
go, time to finish, memory, communication, cost. Flags of `paceline train` change the preset, so any size can be asked
about: `paceline plan r18-softcap --gpus 64 --model.width 1536 --model.num-heads 12 --batch.tokens 4194304`. `--json`
gives all values; `--profile reference` asks about PyTorch's compiled paths, `fast` (the default) about kernels of our
own. A run that does not fit is an answer, not a mistake: the exit code is 0, with the memory it needs and the smallest
remedy, and `fits` is false in the JSON.

## The model

A step is a sum over classes of work, each bound by one resource ([work.py](../src/paceline/lab/plan/work.py)):

{work}

A compiled backward pass hands over its gradients at the end, so a step waits for their exchange, but for what travels
while Muon works. Memory is counted, not fitted ([memory_model.py](../src/paceline/parallel/memory_model.py)). Not in
the model: stragglers, reading data, failures, saving checkpoints, power limits. A small model is slower than foretold:
its products do not reach the efficiency that was measured at a width of 768.

## What was fitted

Five efficiencies a profile, by least squares on measured steps ([figures.py](../src/paceline/lab/plan/figures.py)).
`link` and, on one GPU, `newton_schulz` are mostly where they started: no fast step was measured on several GPUs yet.
"""

WORK = (
    ("products with weights", "6 FLOP a weight and token", "peak of the GPU × `products`"),
    (
        "attention",
        "12 FLOP a width and visited key; visited are blocks of 128 keys that the window lets through and no document "
        "border hides, averaged over the schedule ([visits.py](../src/paceline/lab/plan/visits.py))",
        "peak × `attention`",
    ),
    ("norms, mixes, activations, loss, lookups, Adam", "bytes read and written", "memory bandwidth × `memory`"),
    (
        "Newton–Schulz",
        "its products, over the share of processors that a small matrix occupies; by every rank in the scripts of "
        "records 4 and 5, shared since",
        "peak × `newton_schulz`",
    ),
    (
        "gradients, Muon's results",
        "2 (N-1)/N bytes of each gradient and (N-1)/N of each result, in their own formats, inside a node and then "
        "between nodes ([network.py](../src/paceline/lab/plan/network.py))",
        "link × `link`, and a latency for each doubling of the ranks",
    ),
    ("starting kernels", "5 µs each", "fixed"),
)

ERRORS = """## Errors

Every figure, the prediction, and the prediction of a fit that has seen no figure of that record on any machine. Unseen
by the fit only: where it starts, and how often kernels cross memory, was read off profiles of record 18 on one H200.
`original`: the record's script; `plain`: our `reference` paths; `fused`: our `fast` paths in their first version, when
they still kept queries and keys from before their norm, which the count of memory no longer has. Left out: steps taken
while other processes used the card, and peaks of 37 GiB from the first runs of records 17 and 18, which later code
undercut. Records 4, 13 and 15 are in no fit; record 4 decided that a head of odd size is slow, 13 and 15 decided
nothing.
"""


@dataclass(frozen=True)
class Check:
    """A figure, what the planner says, and what it would say had it never seen that record: None if nothing is
    fitted."""

    source: str
    measured: float
    predicted: float
    unseen: float | None

    @property
    def errors(self) -> list[float]:
        return [value / self.measured - 1 for value in (self.predicted, self.unseen) if value is not None]


def step_checks() -> list[Check]:
    figures, checks = step_figures(), []
    for figure in [*figures, *held_out_figures()]:
        others = [other for other in figures if other.setting.config.preset != figure.setting.config.preset]
        unseen = seconds(step_work(figure.setting), fit(figure.setting.profile, others))
        checks.append(Check(figure.source, figure.seconds, step_seconds(figure.setting), unseen))
    return checks


def memory_checks() -> list[Check]:
    return [Check(figure.source, figure.gib, peak_gib(figure.setting), None) for figure in memory_figures()]


def page() -> str:
    parts = [
        TEXT.strip().replace("{work}", _table(["work", "counted as", "bound by"], WORK, "---")),
        _efficiencies(),
        ERRORS.strip(),
        _errors("step, s", step_checks(), "{:.4f}"),
        _errors("peak, GiB", memory_checks(), "{:.2f}"),
        "## GPUs\n\nFrom the makers' datasheets; prices are an orientation, `--price` replaces them.",
        _gpus(),
    ]
    return "\n\n".join(parts) + "\n"


def _efficiencies() -> str:
    names = list(efficiencies_of("fast"))
    rows = [
        [
            f"`{profile}`",
            *(f"{efficiencies_of(profile)[name]:.2f}" for name in names),
        ]
        for profile in PROFILES
    ]
    return _table(["profile", *(f"`{name}`" for name in names)], rows)


def _errors(quantity: str, checks: Sequence[Check], form: str) -> str:
    rows = []
    for check in checks:
        predicted = [value for value in (check.predicted, check.unseen) if value is not None]
        pairs = zip(predicted, check.errors, strict=True)
        rows.append(
            [check.source, form.format(check.measured), *(f"{form.format(value)} ({e:+.1%})" for value, e in pairs)]
        )
    return _table([quantity, "measured", "predicted", "record unseen"][: len(rows[0])], rows)


def _gpus() -> str:
    rows = []
    for name, gpu in GPUS.items():
        peak = DENSE_BF16_FLOPS[gpu.driver_name] / 1e12
        rates = (peak, gpu.memory_gb_s, gpu.memory_gib, gpu.link_gb_s, gpu.node_gb_s)
        rows.append([f"`{name}`", *(f"{rate:g}" for rate in rates), f"{gpu.price:.2f}"])
    headings = ["bf16 TFLOP/s", "memory GB/s", "memory GiB", "link GB/s", "node GB/s", "USD an hour"]
    return _table(["`--gpu`", *headings], rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], others: str = "---:") -> str:
    """`others` aligns all columns but the first."""
    lines = [headings, ["---"] + [others] * (len(headings) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str], path: Path = PAGE) -> int:
    if list(argv) not in ([], ["--check"]):
        raise UserError(f"{' '.join(argv)}: only --check is known")
    if not argv:
        path.write_text(page(), encoding="utf-8")
    elif path.read_text(encoding="utf-8") != page():
        raise UserError(f"{path} is old; run `python -m paceline.lab.plan.page`")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PacelineError as error:
        sys.exit(f"plan page: {error}")
