"""The notebook runs in a real kernel, from an empty folder, and every cell gives what its text says."""

import os
import re
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import test_documents
from paceline.core.schema import read_json

NOTEBOOK = Path(__file__).parents[2] / "examples" / "from-text-to-an-ablation.ipynb"
CHART = "application/vnd.plotly.v1+json"
SHORT = "STEPS, SHORT_STEPS, SEEDS, VAL_TOKENS = 8, 3, 2, 2048"
LIMIT_S = 600


def executed(folder: Path, parameters: str | None = None) -> dict[str, Any]:
    """The code cells by id, after they ran with these parameters set below the notebook's own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if parameters is not None:
        (own,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        own.source += f"\n{parameters}"
    NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}}).execute()
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def charts(cell: Any) -> list[Any]:
    return [output.data[CHART] for output in cell.outputs if output.output_type == "display_data"]


def kinds(cells: list[Any]) -> list[list[str]]:
    """What each cell shows, a run of prints as one."""
    return [sorted({output.output_type for output in cell.outputs}) for cell in cells]


@pytest.mark.journey
def test_a_short_version_of_the_notebook_goes_from_text_to_an_ablation(tmp_path: Path) -> None:
    cells = executed(tmp_path, SHORT)
    for name, said in {
        "text-code": "MB; gzip's method needs",
        "shards-code": "bytes to a token",
        "config-code": "ln(2,048) = 7.62",
        "train-code": "step    8: validation loss",
        "sample-code": "def ",
        "switch-code": "difference",
        "ablate-code": "without-muon-seed-1: ",
        "compare-code": "A - B paired by seed",
        "effects-code": "With muon the loss changes by",
        "waterfall-code": "indicative only: width 128 instead of 192, tokens a step 1,024 instead of 2,048, CPU",
    }.items():
        assert said in printed(cells[name]), f"{name}: {printed(cells[name])}"
    shown = {name: len(charts(cell)) for name, cell in cells.items() if charts(cell)}
    assert shown == {"curve-code": 1, "effects-code": 1, "waterfall-code": 1}
    (curve,) = charts(cells["curve-code"])
    assert [len(line["y"]) for line in curve["data"]] == [8, 5]
    found = read_json(tmp_path / "runs" / "notebook" / "ablation" / "ablation.json")
    assert [effect["technique"] for effect in found["effects"]] == ["softcap", "value-embeddings", "muon"]

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert kinds(kept) == kinds(list(cells.values()))
    assert not any(output.get("name") == "stderr" for cell in [*kept, *cells.values()] for output in cell.outputs)


def test_what_readers_see_is_small_and_names_no_folder_of_ours() -> None:
    text = NOTEBOOK.read_text()
    assert len(text) < 250_000
    assert CHART not in text
    assert not any(place in text for place in (str(Path.home()), os.getcwd(), "/tmp/", "site-packages"))


def test_links_lead_to_files_and_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    page = tmp_path / "page.md"
    page.write_text("\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown"))
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert targets
    assert [target for target in targets if not (NOTEBOOK.parent / target).exists()] == []
    commands = test_documents.commands([page])
    assert len(commands) >= 4
    for command in commands:
        test_documents.test_a_documented_command_parses(command, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_whole_notebook_takes_less_than_ten_minutes(tmp_path: Path) -> None:
    began = time.perf_counter()
    cells = executed(tmp_path)
    assert time.perf_counter() - began < LIMIT_S
    assert len(charts(cells["waterfall-code"])) == 1
