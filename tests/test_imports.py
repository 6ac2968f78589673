"""Imports point one way, as docs/design.md draws them, and help answers without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
LAYERS = ["cli", ("commands", "library"), "lab", "report", "analysis", "recipes", "train", "evaluate", "checkpoint",
          "parallel", "metrics", "backends", "text", ("model", "optim", "data"), "kernels", "settings",
          "core"]  # fmt: skip
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in ([layer] if isinstance(layer, str) else layer)}


def imports(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {n.name for node in nodes if isinstance(node, ast.Import) for n in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_imports_point_downwards() -> None:
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in imports(path) if room in RANK else ():
            other = name.split(".")[1] if name.startswith("paceline.") else None
            if other and other != room and other in RANK:
                assert RANK[other] > RANK[room], f"{path} imports {name}"


def test_the_package_does_not_import_the_tools() -> None:
    tools = {path.stem for path in (ROOT.parents[1] / "tools").glob("*.py")}
    assert "pages" in tools
    for path in ROOT.rglob("*.py"):
        assert not tools & {name.partition(".")[0] for name in imports(path)}, path


def test_configs_and_presets_do_not_import_torch() -> None:
    code = "import sys, paceline.cli, paceline.recipes.presets, paceline.library; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
