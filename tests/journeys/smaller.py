"""A command as shown, made small by rule: the same words, then flags that keep it to seconds on a CPU.

The last of two equal flags counts, so a size that a page states is replaced here; everything else it states stays.
"""

import re
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint.run_folder import open_run, step_of
from paceline.cli import VERBS
from paceline.recipes.presets import PRESETS, preset
from paceline.recipes.scaling import with_steps
from paceline.settings.data import BUILTIN
from paceline.settings.run import RunConfig

PATTERN_WORDS = {
    "RUN": ["latest"],
    "RUN…": ["runs/a", "runs/b"],
    "DATA": ["data/fineweb10B"],
    "PROJECT": ["project"],
    "…": [],
}
"""What stands for a word that the reader is to replace."""
ONLY_NAMED = (
    *("ablate", "board", "compare", "diff", "export"),  # they do nothing without further words
    *("data prepare", "data download", "data verify", "data stats"),
    *("train", "bench step"),  # `paceline train` is `paceline train demo`
)
"""Verbs that running text names when they stand alone. They are asked for their help."""
STEPS, BATCH_TOKENS, SEQUENCE_TOKENS = 2, 256, 128
"""Two sequences, one for each of two ranks."""
TRAINING = {
    "--steps": STEPS,
    "--batch.tokens": BATCH_TOKENS,
    "--batch.sequence-tokens": SEQUENCE_TOKENS,
    "--evaluate.tokens": BATCH_TOKENS,
}
ONE_PART = {"r18-softcap": "softcap-15"}
"""Of the diff that an ablation takes apart; of a preset that is not here, all are."""
RULES: dict[str, dict[str, object]] = {
    "train": TRAINING,
    "ablate": {**TRAINING, "--seeds": 1, "--no-add": None},
    "bench step": {**TRAINING, "--points": 1, "--repeats": 1, "--no-start": None},
    "bench gemm": {**TRAINING, "--repeats": 1},
    "bench sample": {"--steps": 4, "--streams": 2, "--prompt-tokens": 8, "--repeats": 1},
    "serve": {"--port": 0},
    "watch": {"--port": 0},
}
"""By verb; a flag without a value has None."""
LOCAL_JOB = {"--slurm.cluster": "local", "--slurm.nodes": 1, "--slurm.gpus": 1}
"""submitit starts the job's task on this machine. Two of them are tried in tests/commands/test_slurm.py."""


def verb_of(words: list[str]) -> str:
    return " ".join(words[:2]) if " ".join(words[:2]) in VERBS else words[0]


def smaller(shown: list[str], *, inline: bool) -> list[str]:
    """Of a command without the program's name; `inline`: it stands in running text."""
    words = [word for one in shown for word in PATTERN_WORDS.get(one, [one])]
    verb, rest = verb_of(words), words[len(verb_of(words).split()) :]
    if inline and not rest and verb in ONLY_NAMED:
        return [*words, "--help"]
    if "--help" in words or "--resume" in words:  # a resumed run has its own size
        return words
    added = {name: value for name, value in RULES.get(verb, {}).items() if value is not None or name not in rest}
    if _few_steps(rest):  # small already, and perhaps about its batch
        added = {name: value for name, value in added.items() if not name.startswith("--batch.")}
    if "--steps" in added and (record := _at_full_size(rest)):
        added["--scale"] = "1/16"
        if verb != "bench sample" and "--data.dir" not in rest:
            added["--data.dir"] = preset(record).data.dir  # at that scale it would read the built-in text
    if "--optim.schedule.warmup-steps" in rest:
        added["--optim.schedule.warmup-steps"] = 1  # as short as the run
    if "--parallel.context-parallel" in rest:
        added["--batch.sequence-tokens"] = BATCH_TOKENS  # a block of 128 for each rank
    if verb == "ablate" and rest[0] in ONE_PART and "--only" not in rest:
        added["--only"] = ONE_PART[rest[0]]
    if "--ids-of" in words:
        words = [*words, "--ids-of", "bytes"]  # GPT-2's vocabulary has to be downloaded
    elif verb == "data prepare" and "--tokenizer" not in rest:
        added["--tokenizer"] = "bpe-2048"  # GPT-2's, the default, has to be downloaded
    if "slurm" in rest:
        added |= LOCAL_JOB
    if "--tasks" in rest and "--tasks-dir" not in rest:
        added["--tasks-dir"] = "tasks/"  # where those named are made of local files
    return [*words, *flags(added)]


def flags(values: dict[str, object]) -> list[str]:
    return [str(word) for name, value in values.items() for word in (name, value) if word is not None]


def _few_steps(rest: list[str]) -> bool:
    return "--steps" in rest and int(rest[rest.index("--steps") + 1]) <= STEPS


def _at_full_size(rest: list[str]) -> str | None:
    """The record that is meant, which at full size asks for a GPU."""
    name = rest[0] if rest and rest[0] in PRESETS else "demo"
    return None if "--scale" in rest or preset(name).data.dir == BUILTIN else name


def with_steps_that_exist(words: list[str]) -> list[str]:
    """Checkpoints that a page names by their steps: the run's newest, or to rewind to, its oldest. In the folder where
    the runs are."""
    named = list(words)
    for number, word in enumerate(words):
        if found := re.fullmatch(r"(runs/[\w-]+)/checkpoints/step_\d+", word):
            named[number] = str(_checkpoints(found[1])[-1])
        if word == "--steps" and "--resume" in words:  # more than it has
            config = open_run(words[words.index("--resume") + 1]).read_config()
            named[number + 1] = str(config["steps"] + STEPS)
        if word in ("--checkpoint", "--rewind"):
            run = words[words.index("--resume") + 1] if "--resume" in words else words[1]
            named[number + 1] = str(step_of(_checkpoints(run)[-1 if word == "--checkpoint" else 0]))
    return named


def _checkpoints(run: str) -> list[Path]:
    return open_run(run).checkpoints()


def smaller_config(config: RunConfig, steps: int = STEPS) -> RunConfig:
    """The same for a run that is made from Python."""
    batch = replace(config.batch, tokens=BATCH_TOKENS, sequence_tokens=SEQUENCE_TOKENS, micro_tokens=None)
    evaluate = replace(config.evaluate, tokens=BATCH_TOKENS)
    return replace(with_steps(config, steps), batch=batch, evaluate=evaluate)
