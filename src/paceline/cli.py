"""The verbs: look one up, import what it needs, call it, turn its outcome into an exit code.

0 success · 1 failure · 2 a user's mistake, told in one line. Help, `presets` and `diff` never import torch.
"""

import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from paceline import __version__
from paceline.core.errors import PacelineError, UserError, naming_files
from paceline.core.migrations import migrate_flags
from paceline.core.output import Output, standard_streams, tell
from paceline.core.threads import limit_openmp_spin


class Verb(NamedTuple):
    summary: str
    run: str
    """`module:function` under paceline, called with the arguments after the verb; returns the exit code."""
    answers: bool = True
    """What it prints is what it is for; the others go on without an output."""


VERBS = {
    "train": Verb("train a preset (no preset: demo)", "commands.train:train", answers=False),
    "presets": Verb("list the presets", "commands.presets:presets"),
    "diff": Verb("what changed between two presets", "commands.presets:diff"),
    "sample": Verb("let a trained run write", "commands.trained:sample"),
    "serve": Verb("answer the completions protocol with a run", "commands.trained:serve", answers=False),
    "evaluate": Verb("judge a trained run: loss, bits per byte, tasks", "commands.evaluate:evaluate"),
    "export": Verb("write a run for transformers, or as plain weights", "commands.trained:export"),
    "data prepare": Verb("text to shards", "commands.data:prepare"),
    "data download": Verb("public data to a folder", "commands.data:download"),
    "data verify": Verb("check the hashes of shards", "commands.data:verify"),
    "data stats": Verb("documents, lengths, tokens", "commands.data:stats"),
    "bench step": Verb("time and profile a preset's step", "commands.bench:step"),
    "bench gemm": Verb("time a step's matrix products", "commands.bench:gemm"),
    "bench sample": Verb("time how fast a model writes", "commands.bench:sample"),
    "plan": Verb("predict a run's time, memory and cost", "commands.plan:plan"),
    "schedule": Verb("batch sizes, windows and rates of a preset by step", "commands.presets:schedule"),
    "ablate": Verb("what each part of a record buys", "commands.ablate:ablate", answers=False),
    "compare": Verb("what runs show, and what is noise", "commands.results:compare"),
    "board": Verb("rank the runs of a track", "commands.results:board"),
    "report": Verb("one page about one or more runs", "commands.results:report"),
    "watch": Verb("the same page, live, for runs in progress", "commands.results:watch", answers=False),
    "verify": Verb("check every hash of a run, a checkpoint or data", "commands.data:verify_any"),
    "doctor": Verb("what this machine can do", "commands.doctor:doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    limit_openmp_spin()
    with standard_streams() as output:
        try:
            with naming_files():
                code = _dispatch(arguments, output)
            output.flush()
            return code
        except PacelineError as error:
            if not error.told:
                tell(f"paceline: {error}", sys.stderr)
            return error.exit_code
        except (MemoryError, RuntimeError) as error:  # torch's of a CPU has no type of its own
            if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
                raise
            tell("paceline: there is not enough memory for what was asked; ask for less", sys.stderr)
            return 1
        except KeyboardInterrupt:
            tell("paceline: interrupted", sys.stderr)
            return 130


def _dispatch(arguments: list[str], output: Output) -> int:
    output.needed = True
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"paceline {__version__}")
        return 0
    words = 2 if " ".join(arguments[:2]) in VERBS else 1
    name = " ".join(arguments[:words])
    if name not in VERBS:
        raise UserError(_unknown(name, arguments))
    module, function = VERBS[name].run.split(":")
    # bytes that are not UTF-8 come as halves of characters, which can be neither printed nor written
    if strange := next((word for word in arguments if re.search("[\ud800-\udfff]", word)), None):
        raise UserError(f"{strange!a} is not text in UTF-8, which no file of a run can hold; rename it")
    flags = migrate_flags(arguments[words:], _warn)
    output.needed = VERBS[name].answers or bool({"-h", "--help"} & set(flags))
    return int(getattr(importlib.import_module(f"paceline.{module}"), function)(flags))


def _warn(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        tell(f"paceline: {line}", sys.stderr)


def _unknown(name: str, arguments: list[str]) -> str:
    if group := [verb.split()[1] for verb in VERBS if verb.startswith(f"{name} ")]:
        return f"{name!r} needs one of {', '.join(group)}; see paceline --help"
    near = difflib.get_close_matches(" ".join(arguments[:2]), VERBS, n=1) or difflib.get_close_matches(name, VERBS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VERBS)}"
    return f"no verb {name!r}; {hint}"


def _overview() -> str:
    width = max(map(len, VERBS))
    rows = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    end = "Every verb answers --help with an example. Start: paceline train"
    return f"usage: paceline VERB [OPTIONS]\n\n{rows}\n\n{end}"


if __name__ == "__main__":
    sys.exit(main())
