"""Two machines: network namespaces with a cable between them, torchrun on each, one rank each, over gloo.

They share the disk, as the machines of a cluster do."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.metrics.card import read_card
from parallel.launch import TESTS, child_of, flags, torchrun, wait_for_checkpoint
from train.tiny import losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of the package iproute2"),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root makes network namespaces"),
]
ENDS_S = 90
STEPS = "60"
PATIENCE = ["--parallel.timeout-s", "5"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    name: str
    address: str

    def plug(self, up: bool) -> None:
        ip("-n", self.name, "link", "set", "wire", "up" if up else "down")

    def torchrun(self, first: "Host", *arguments: object, restarts: int) -> subprocess.Popen[str]:
        """Its part of a launch on two machines, with one rank; it meets the other at `first`."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29400", "--rdzv-id", first.name]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
        hosts_it = f"is_host={int(self == first)},join_timeout={ENDS_S}"  # torch would look the address up by host name
        command += [
            "--rdzv-conf",
            hosts_it,
            "--local-addr",
            self.address,
            "--max-restarts",
            str(restarts),
            "-m",
            "paceline.cli",
        ]
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    pair = tuple(Host(f"paceline-{os.getpid()}-{end}", f"10.77.0.{end}") for end in (1, 2))
    try:
        for host in pair:
            ip("netns", "add", host.name)
        ends = [word for host, flag in zip(pair, ("name", "peer"), strict=True) for word in _end(host, flag)]
        ip("link", "add", *ends[:4], "type", "veth", *ends[4:])
        for host in pair:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "wire")
            ip("-n", host.name, "link", "set", "lo", "up")
            host.plug(True)
        yield pair
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)


def _end(host: Host, flag: str) -> list[str]:
    return [*([] if flag == "name" else [flag]), "name", "wire", "netns", host.name]


def on_both(hosts: tuple[Host, Host], *arguments: object, restarts: int = 0) -> list[subprocess.Popen[str]]:
    return [host.torchrun(hosts[0], *arguments, restarts=restarts) for host in hosts]


def undisturbed(folder: Path) -> list[float | None]:
    """The same two ranks on one machine."""
    launcher = torchrun(2, "paceline.cli", "train", "demo", "--steps", STEPS, "--no-finish", "--out", folder / "whole",
                        *flags(folder))  # fmt: skip
    said, _ = launcher.communicate(timeout=ENDS_S)
    assert launcher.returncode == 0, said
    return losses(folder / "whole")


def test_a_rank_killed_on_one_of_two_hosts_is_replaced_and_the_run_goes_on(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launchers = on_both(
        hosts, "train", "demo", "--steps", STEPS, "--no-finish", "--out", run, *flags(tmp_path), *PATIENCE, restarts=2
    )
    wait_for_checkpoint(run, launchers[0])
    os.kill(next(child_of(launcher, rank) for launcher, rank in _placed(launchers) if rank == 1), signal.SIGKILL)
    said = [launcher.communicate(timeout=ENDS_S)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    card = read_card(run)
    assert card.finished
    assert any(note.startswith("resumed from step_") for note in card.notes)
    assert losses(run) == undisturbed(tmp_path)


def _placed(launchers: list[subprocess.Popen[str]]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Each launcher with the rank that it started: rank 0 is on the machine that reaches the rendezvous first."""
    for launcher in launchers:
        for rank in range(2):
            try:
                child_of(launcher, rank)
            except AssertionError:
                continue
            yield launcher, rank


def test_a_cut_cable_ends_the_run_in_one_line_and_it_goes_on_when_mended(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launchers = on_both(
        hosts, "train", "demo", "--steps", STEPS, "--no-finish", "--out", run, *flags(tmp_path), *PATIENCE
    )
    wait_for_checkpoint(run, launchers[0])
    first = next(launcher for launcher, rank in _placed(launchers) if rank == 0)
    hosts[1].plug(False)
    said, _ = first.communicate(timeout=ENDS_S)
    assert first.returncode != 0
    lines = [line for line in said.splitlines() if line.startswith("paceline: ")]
    assert len(lines) == 1, said
    assert lines[0].startswith("paceline: rank 0 of 2 lost another rank (it was silent for 5 s")
    for launcher in launchers:  # the other torchrun may still be looking for the first one's
        launcher.kill()
        launcher.communicate()
    assert not read_card(run).finished
    hosts[1].plug(True)
    launchers = on_both(hosts, "train", "--resume", run, "--no-finish")
    said = [launcher.communicate(timeout=ENDS_S)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert losses(run) == undisturbed(tmp_path)
