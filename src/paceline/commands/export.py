"""`paceline export RUN`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.command_line import OptionalRun, parse

HELP = """Write a trained run's model for other programs: for transformers, or as plain weights.

example: paceline export latest --to hf --out exported/demo"""


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    run: OptionalRun = "latest"
    """A run's folder, its name under runs/, or `latest`."""
    out: Path
    """Folder to make; it may exist if it is empty."""
    to: Literal["hf", "safetensors"] = "hf"
    """`hf`: what transformers loads with trust_remote_code=True: weights, config, tokenizer, code, model card.
    `safetensors`: weights under paceline's names and a JSON file of the architecture."""
    checkpoint: int | None = None
    """Step of the checkpoint; None: the newest."""


def export(argv: Sequence[str]) -> int:
    arguments = parse(ExportArgs, argv, verb="export", description=HELP)
    from paceline.evaluate.export.export import check_free
    from paceline.evaluate.export.export import export as write_export
    from paceline.evaluate.load import read_saved

    check_free(arguments.out)  # before gigabytes are read
    saved = read_saved(arguments.run, step=arguments.checkpoint)
    write_export(saved, arguments.to, arguments.out)
    print(f"{saved.folder.path}, step {saved.checkpoint.step:,}: exported to {arguments.out}")
    return 0
