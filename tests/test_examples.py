"""Files that are there to be copied: what they run is what paceline understands."""

import re
from pathlib import Path

import yaml

from paceline.commands import train
from paceline.parallel.batch_split import rank_batch
from test_documents import DOCUMENTS, ROOT


def test_the_skypilot_file_starts_a_run_that_parses() -> None:
    """The launcher's line, with the words of the shell around it left out."""
    task = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2
    _, launcher = re.sub(r"\\\n", " ", task["run"]).split("torchrun ", 1)
    words = launcher.split()
    rest = words[words.index("train") + 1 :]
    arguments = train.parse_arguments([word.strip('"') for word in rest], train.base_config(rest))
    c = arguments.config
    rank_batch(c.batch, 2 * int(task["resources"]["accelerators"].split(":")[1]), c.parallel.context_parallel)
    assert arguments.config.checkpoint.every
    assert Path(arguments.config.data.dir).parent == Path(arguments.out or "").parents[1]  # the disk that both see
    assert str(Path(arguments.config.data.dir).parent) in task["file_mounts"]


def test_the_ranks_of_every_torchrun_line_can_share_a_step() -> None:
    pattern = (
        r"torchrun ((?:--nnodes (\d+) )?--nproc-per-node (\d+)) [^`\n]*?-m paceline\.cli (?:train|bench step) ([^`\n]*)"
    )
    shown = [found for page in DOCUMENTS for found in re.finditer(pattern, page.read_text())]
    assert len(shown) >= 5
    for found in shown:
        _, machines, each, words = found.groups()
        preset, *flags = words.split()
        split = (
            int(flags[flags.index("--parallel.context-parallel") + 1]) if "--parallel.context-parallel" in flags else 1
        )
        rank_batch(train.base_config([preset]).batch, int(machines or 1) * int(each), split)
