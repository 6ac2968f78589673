"""Files that are there to be copied: what they run is what paceline understands."""

import re
from pathlib import Path

import yaml

from paceline.commands import train
from test_documents import ROOT


def test_the_skypilot_file_starts_a_run_that_parses() -> None:
    """The launcher's line, with the words of the shell around it left out."""
    task = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2
    _, launcher = re.sub(r"\\\n", " ", task["run"]).split("torchrun ", 1)
    words = launcher.split()
    rest = words[words.index("train") + 1 :]
    arguments = train.parse_arguments([word.strip('"') for word in rest], train.base_config(rest))
    assert arguments.config.checkpoint.every
    assert Path(arguments.config.data.dir).parent == Path(arguments.out or "").parents[1]  # the disk that both see
    assert str(Path(arguments.config.data.dir).parent) in task["file_mounts"]
