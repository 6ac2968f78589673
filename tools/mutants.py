"""Mutation testing: `python tools/mutants.py` changes one place of the core at a time and runs the tests that fit.

A mutant is one changed comparison, operator, constant, condition or returned value, or one dropped statement. It is
killed when a test fails or runs out of time. Sites are drawn by a hash of seed, file and change, so that an edit of
one module leaves the sample of the others as it was. Each mutant lives in a copy of the tree, one for each worker.
Tests: those named like the module, then those that import it, then the rest of its folder. Survivors that no test could
kill stand in tools/mutants.toml with the reason and do not count. 200 mutants take about an hour on 2 cores; what
has killed one is noted at once beside the result and tried first the next time, also after a run that was stopped.
mutmut and cosmic-ray were not taken: both run one command, here the whole suite, for every mutant.
"""

import argparse
import ast
import copy
import datetime
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from page_text import ROOT

CORE = ("data", "model", "optim", "train", "checkpoint", "settings", "analysis", "core/files.py", "core/schema.py",
        "evaluate/sampling.py", "evaluate/decode.py", "evaluate/score.py", "evaluate/validation.py")  # fmt: skip
NEEDS_GPU = ("train/cuda_graph.py", "train/memory_trial.py")
EQUIVALENTS = ROOT / "tools" / "mutants.toml"
RESULT = ROOT / "benchmarks" / "results" / "mutants.json"
WITHOUT_TESTS = ("journeys", "tools")
"""Minutes long, or of nothing in the core."""
ON_RANKS = ("train", "optim", "checkpoint")
"""Folders that tests/parallel runs on several ranks, in programs that it starts."""
ALSO = {"settings": ["tools/test_reference_pages.py", "tools/test_pages.py"]}
"""The reference pages have every default."""
ROUND_S, TEST_S = 600, 180
TARGET = 0.95
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["pytest", "hypothesis", "torch._dynamo", "scipy.stats", "tyro", "rich.console", "tiktoken"]
)
"""What takes seconds to import, once for all mutants; nothing of paceline."""
COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str
    """Under src/paceline."""
    line: int
    before: str
    after: str
    source: str
    """Of the whole mutated file."""

    def __str__(self) -> str:
        return f"{self.file}: {self.before}  =>  {self.after}"


def mutants_of(source: str, file: str) -> Iterator[Mutant]:
    """Every mutant of a module. Decorators, types and the text of messages stay as they are."""
    data = source.encode()
    starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    for node, text in (change for site in _sites(ast.parse(source)) for change in _changes(site)):
        begin, end = starts[node.lineno - 1], starts[node.end_lineno]
        first, last = begin + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        after = data[begin:first] + text.encode() + data[last:end]
        before, shown = (_without_comments(part.decode()) for part in (data[begin:end], after))
        yield Mutant(file, node.lineno, before, shown, (data[:begin] + after + data[end:]).decode())


def _without_comments(code: str) -> str:
    """On one line."""
    return " ".join(" ".join(line.partition("  # ")[0] for line in code.splitlines()).split())


def _sites(node: ast.AST) -> Iterator[Any]:
    for name, value in ast.iter_fields(node):
        if name in ("returns", "decorator_list", "exc"):
            continue
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        if name == "annotation":  # at_least(1) counts, `int | None` does not
            children = [call for call in ast.walk(value) if isinstance(call, ast.Call)] if value else []
        for child in children:
            if not isinstance(child, ast.JoinedStr):
                yield child
                yield from _sites(child)


def _changes(node: Any) -> Iterator[tuple[Any, str]]:
    """What is replaced and by which text."""

    def with_(**fields: Any) -> str:
        changed = copy.copy(node)
        vars(changed).update(fields)
        return ast.unparse(changed)

    match node:
        case ast.Compare(ops=[op, *more]) if type(op) in COMPARED:
            yield node, with_(ops=[COMPARED[type(op)](), *more])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            yield node, with_(op=OPERATORS[type(op)]())
        case ast.Constant(value=bool(value)):
            yield node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1)
            yield node, repr(value - 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case (
            ast.If(test=ast.Name() | ast.Call() | ast.Attribute() | ast.NamedExpr() as test)
            | ast.IfExp(test=ast.Name() | ast.Call() | ast.Attribute() | ast.NamedExpr() as test)
        ) if ast.unparse(test) != "TYPE_CHECKING":
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return None"
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Continue() | ast.Break():
            yield node, "pass"


def drawn(package: Path, count: int, seed: int, only: str = "") -> list[Mutant]:
    """At most one of a line, in the order of a hash."""
    paths = [path for part in CORE for path in (package / part, *sorted((package / part).rglob("*.py")))]
    found: dict[tuple[str, int], tuple[str, Mutant]] = {}
    for path in paths:
        file = path.relative_to(package).as_posix()
        if not path.is_file() or file in NEEDS_GPU or not file.startswith(only):
            continue
        for mutant in mutants_of(path.read_text(encoding="utf-8"), file):
            place = hashlib.sha256(f"{seed}\0{(mutant.file, mutant.before, mutant.after)}".encode()).hexdigest()
            if (key := (file, mutant.line)) not in found or place < found[key][0]:
                found[key] = place, mutant
    return [mutant for _, mutant in sorted(found.values(), key=lambda item: item[0])[:count]]


class Suite:
    """The test files of a tree and what each imports."""

    def __init__(self, tests: Path) -> None:
        self.root = tests
        files = [path for path in tests.rglob("test_*.py") if path.relative_to(tests).parts[0] not in WITHOUT_TESTS]
        names = {path.relative_to(tests).as_posix(): path for path in files if not path.stem.endswith("_gpu")}
        self.imports = {name: self._imports(path) for name, path in names.items()}
        self.bytes = {name: path.stat().st_size for name, path in names.items()}

    def _imports(self, path: Path) -> set[str]:
        """Dotted names, also those of the helpers beside the tests that it imports."""
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        helpers = [self.root.joinpath(*name.split(".")).with_suffix(".py") for name in found]
        return found.union(*(self._imports(helper) for helper in helpers if helper.is_file() and helper != path))

    def fitting(self, file: str) -> list[list[str]]:
        """Files for a module in rounds, the short ones first: those of its name, those of its folder that import it,
        others that do, the rest of its folder, those on several ranks."""
        module, folder = Path(file), file.split("/")[0]
        dotted = ".".join(("paceline", *module.with_suffix("").parts))
        named = [name for name in self.imports if Path(name).name.startswith(f"test_{module.stem}")]
        importing = [name for name in self.imports if dotted in self.imports[name]]
        beside = [name for name in self.imports if name.startswith(f"{folder}/")]
        near = [name for name in importing if name in beside]
        ranks = {name for name in self.imports if name.startswith("parallel/")}
        late = ranks if folder in ON_RANKS else ranks & set(importing)
        rounds: list[list[str]] = []
        for names in (named, near + ALSO.get(folder, []), importing, beside, late):
            new = set(names).difference(*rounds, ranks if names is not late else ())
            rounds.append(sorted(new, key=lambda name: self.bytes.get(name, 0)))
        return [names for names in rounds if names]


def pytest_status(tree: Path, names: Sequence[str], limit_s: float, *words: str) -> tuple[int | None, list[str]]:
    """Exit status, None if the time is over, and the tests that failed."""
    log = tree / "said.txt"
    process = FORKS.Process(target=_run, args=(tree, [*words, *(f"tests/{name}" for name in names)], log))
    process.start()
    process.join(limit_s)
    if (status := process.exitcode) is None:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return status, [name.removeprefix("tests/") for name in failed]


def _run(tree: Path, arguments: list[str], log: Path) -> None:
    """In a process that has imported torch already, and nothing of paceline."""
    import pytest

    os.setpgid(0, 0)
    os.chdir(tree)
    sys.path.insert(0, str(tree / "src"))
    os.environ |= {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every run compiles every module
    sys.dont_write_bytecode = False
    sys.stdout.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    words = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--timeout", str(TEST_S), "--tb", "no"]
    status = pytest.main([*words, *arguments])
    sys.stdout.flush()
    os._exit(status)  # threads that a broken test left behind do not keep it


def killer(mutant: Mutant, tree: Path, suite: Suite, known: str | None = None) -> str | None:
    """The first test, or file, that fails in a tree that has this mutant, which is taken back afterwards."""
    path = tree / "src" / "paceline" / mutant.file
    original = path.read_text(encoding="utf-8")
    cached = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(mutant.source, encoding="utf-8")
        cached.unlink(missing_ok=True)  # else one of the same second and size would be taken for this one
        for names in [*([[known]] if known else []), *suite.fitting(mutant.file)]:
            status, failed = pytest_status(tree, names, ROUND_S, "-x")
            if failed:
                return failed[0]
            if status not in (0, 4, 5, None):  # 4 and 5: there is no such test
                return names[0]
        return None
    finally:
        path.write_text(original, encoding="utf-8")
        cached.unlink(missing_ok=True)


def copied(folder: Path) -> Path:
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="beginning of the files' paths under src/paceline")
    parser.add_argument(
        "--out", type=Path, default=RESULT, help="result file; one that is there says what to try first"
    )
    args = parser.parse_args(argv)
    equivalents = tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8"))["equivalent"]
    reasons = {str(Mutant(row["file"], 0, row["before"], row["after"], "")): row["reason"] for row in equivalents}
    sample = drawn(ROOT / "src" / "paceline", args.count, args.seed, args.only)
    mutants = [mutant for mutant in sample if str(mutant) not in reasons]
    part = args.out.with_suffix(".part")  # of a run that was stopped
    known = {
        name: by
        for path in (args.out, part)
        if path.exists()
        for name, by in json.loads(path.read_text(encoding="utf-8"))["killers"].items()
    }

    def note(mutant: Mutant, by: str | None) -> None:
        if by is not None:
            known[str(mutant)] = by
            part.write_text(json.dumps({"killers": known}, ensure_ascii=False), encoding="utf-8")

    killers = tried(mutants, dict(known), args.workers, note)
    survivors = [mutant for mutant, by in zip(mutants, killers, strict=True) if by is None]
    dead = len(mutants) - len(survivors)
    result = {
        "what": "mutants of the core: one changed place at a time, and whether the tests that fit notice it",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python tools/mutants.py", *argv]),
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("torch", "numpy", "pytest")}},
        "seed": args.seed,
        "sampled": len(sample),
        "equivalent": len(sample) - len(mutants),
        "killed": dead,
        "killed_share": round(dead / len(mutants), 4),
        "survivors": [_row(mutant) for mutant in survivors],
        "equivalents": [
            {**_row(mutant), "reason": reasons[str(mutant)]} for mutant in sample if str(mutant) in reasons
        ],
        "killers": {str(mutant): by for mutant, by in zip(mutants, killers, strict=True) if by is not None},
    }
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.unlink(missing_ok=True)
    print(f"{dead} of {len(mutants)} killed; {args.out}")
    return 0 if dead >= TARGET * len(mutants) else 1


def tried(
    mutants: Sequence[Mutant], known: Mapping[str, str], workers: int, note: Callable[[Mutant, str | None], object]
) -> list[str | None]:
    """The test that kills each mutant, if one does; what killed it the last time is tried first. `note` is called
    with each verdict when it is known."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(workers):
            trees.put(copied(Path(folder) / str(number)))
        suite, lock = Suite(Path(folder) / "0" / "tests"), threading.Lock()

        def one(mutant: Mutant) -> str | None:
            tree = trees.get()
            try:
                by = killer(mutant, tree, suite, known.get(str(mutant)))
            finally:
                trees.put(tree)
            with lock:
                note(mutant, by)
            print(f"SURVIVED {mutant}" if by is None else f"killed {mutant}  by {by}", flush=True)
            return by

        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(one, mutants))
        used = sorted({by.partition("[")[0] for by in found if by is not None})
        broken = {name.partition("[")[0] for name in pytest_status(trees.get(), used, 3600)[1]} if used else set()
    for name in sorted(broken):
        print(f"{name} fails without a mutant, too, so it has killed nothing")
    return [None if by is None or by.partition("[")[0] in broken else by for by in found]


def _row(mutant: Mutant) -> dict[str, Any]:
    return {"file": mutant.file, "line": mutant.line, "before": mutant.before, "after": mutant.after}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
