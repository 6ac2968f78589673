"""What is built from this tree is whole, and works where the tree is not."""

import os
import re
import subprocess
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from built import ROOT, SHIPPED, build
from paceline import __version__

SOURCE = ROOT / "src" / "paceline"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> set[str]:
    """Every file of the package, as a wheel names it."""
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(SOURCE.parent).as_posix() for path in files}


def test_every_file_of_the_package_is_packed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["paceline"]
    packed = {str(PurePosixPath("paceline") / pattern) for pattern in patterns}
    for name in sources():
        if name.endswith(".py"):
            assert (SOURCE.parent / name).with_name("__init__.py").exists(), f"{name}: its folder is no package"
        else:
            assert any(PurePosixPath(name).match(pattern) for pattern in packed), f"{name}: not in package-data"


def test_the_version_has_one_definition_and_the_citation_follows_it() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\nlicense: {PROJECT['project']['license']}\n" in (ROOT / "CITATION.cff").read_text()


def test_an_error_names_only_extras_that_exist() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"paceline\[([a-z]+)\]", path.read_text())}
    assert named
    assert named <= set(extras)


def test_the_environment_of_the_tests_is_pinned_in_order() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0].lower())
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^=\s]+", line) for line in lines)


# ---- built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tree"))


@pytest.mark.slow
def test_archive_and_wheel_hold_what_they_should(built: Path) -> None:
    with zipfile.ZipFile(built / f"paceline-{__version__}-py3-none-any.whl") as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == sources()
    with tarfile.open(built / f"paceline-{__version__}.tar.gz") as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert set(SHIPPED) <= packed
    assert not any(name.startswith("tests") for name in packed)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel. Its dependencies are those of this one, which took minutes to
    install."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=True)
    binaries = folder / "bin"
    wheel = next(built.glob("*.whl"))
    subprocess.run([binaries / "python", "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return binaries


@pytest.mark.slow
def test_a_wheel_works_where_the_tree_is_not(installed: Path, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(program: str, *words: str) -> str:
        command = [str(installed / program), *words]
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    where = said("python", "-c", "import paceline; print(paceline.__file__)").strip()
    assert Path(where).is_relative_to(installed.parent)
    assert said("paceline", "--version") == f"paceline {__version__}\n"
    code = "from paceline.lab.technique import technique; print(technique('softcap-15').presets)"
    assert said("python", "-c", code) == "('r18-softcap',)\n"
    assert "r18-softcap" in said("paceline", "plan", "r18-softcap", "--gpus", "8", "--gpu", "h100")
    assert "runs/demo: finished" in said("paceline", "train", "demo", "--steps", "2")
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 100_000
    assert said("paceline", "sample", "latest", "--prompt", "Return", "--tokens", "4").startswith("Return")
    assert "ok" in said("paceline", "verify", "latest")
    code = "import paceline; print(paceline.load('demo').card.finished)"
    assert said("python", "-c", code) == "True\n"
