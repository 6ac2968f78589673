"""The live page without a browser: what a folder shows while its runs start, grow, break and go; what it answers."""

import errno
import http.client
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.core.errors import UserError
from paceline.recipes.presets import preset
from paceline.report import page, watch
from paceline.report.subject import Subject
from paceline.report.watch import RunsFolder, make_server
from paceline.settings.schedule import Stage
from report.ablation_on_disk import write_ablation
from report.runs_on_disk import write_run


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_plotly_js", lambda: "/* plotly.js */")


def labels(subject: Subject) -> list[str]:
    return [run.label for run in subject.runs]


def make(root: Path, name: str, **values: Any) -> Path:
    return write_run(root / name, name=name, **{"steps": 40, **values})


# ---- the folder


def test_runs_appear_grow_and_go(tmp_path: Path) -> None:
    root = tmp_path / "later"
    folder = RunsFolder(root, newest=9)
    assert labels(folder.look()[0]) == []  # the folder itself is not there yet
    path = make(root, "a", done=10) / "metrics.jsonl"
    make(root, "b")
    subject, seen = folder.look()
    assert labels(subject) == ["a", "b"]
    assert folder.look()[1] == seen  # nothing has changed
    with open(path, "a") as file:
        file.write(json.dumps({**json.loads(path.read_text().splitlines()[-1]), "step": 11}) + '\n{"kind": "st')
    subject, now = folder.look()
    assert now != seen
    assert subject.runs[0].steps_done == 11
    shutil.rmtree(root / "b")
    subject, _ = folder.look()
    assert labels(subject) == ["a"]
    shutil.rmtree(root)
    assert labels(folder.look()[0]) == []


def test_a_run_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    make(tmp_path, "a")
    folder = RunsFolder(tmp_path, newest=9)
    [run] = folder.look()[0].runs
    make(tmp_path, "b")
    assert folder.look()[0].runs[0] is run


def test_a_damaged_run_is_said_and_shown_again_once_it_is_well(tmp_path: Path) -> None:
    make(tmp_path, "a")
    card = make(tmp_path, "b") / "card.json"
    whole = card.read_text()
    folder = RunsFolder(tmp_path, newest=9)
    card.write_text(whole[:100])
    subject, _ = folder.look()
    assert labels(subject) == ["a"]
    assert "b/card.json: not valid JSON" in subject.left_out[0]
    card.write_text(whole)
    assert labels(folder.look()[0]) == ["a", "b"]


def test_a_run_without_metrics_has_only_begun(tmp_path: Path) -> None:
    (make(tmp_path, "a", done=0) / "metrics.jsonl").unlink()
    [run] = RunsFolder(tmp_path, newest=9).look()[0].runs
    assert len(run.curves.steps["step"]) == 0


def test_a_killed_run_is_called_quiet_after_a_minute_and_one_that_ended_never(tmp_path: Path) -> None:
    make(tmp_path, "killed", done=10)
    make(tmp_path, "stopped", done=10, ended="2025-01-04T10:02:00+00:00")
    make(tmp_path, "finished")
    now = time.time()
    assert RunsFolder(tmp_path, newest=9, clock=lambda: now + 50).look()[0].notes == []
    [note] = RunsFolder(tmp_path, newest=9, clock=lambda: now + 300).look()[0].notes
    assert note == "Killed, or hanging: killed (nothing new for 5m00s)."


def cards(section: str) -> list[dict[str, str]]:
    """What is said of each run in progress, and the width of its bar."""
    return [
        {
            "run": re.findall(r'aria-label="Progress of ([^"]*)"', card)[0],
            "bar": re.findall(r'"width:([^;]*);', card)[0],
            **dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", card)),
        }
        for card in section.split("<article")[1:]
    ]


def test_the_time_left_is_that_of_the_tokens_of_the_stages_to_come(tmp_path: Path) -> None:
    metrics = make(tmp_path, "running", done=30) / "metrics.jsonl"
    demo = preset("demo")
    last = {**json.loads(metrics.read_text().splitlines()[-1]), "tokens_per_s": 2 * demo.batch.tokens}
    metrics.write_text("\n".join([*metrics.read_text().splitlines()[:-1], json.dumps(last), ""]))
    subject, _ = RunsFolder(tmp_path, newest=24).look()
    [run] = subject.runs
    assert run.settings is not None
    stages = (Stage(share=0.5, batch_tokens=demo.batch.tokens // 2), Stage(share=0.5, batch_tokens=3 * 2_048))
    staged = replace(run, settings=replace(run.settings, stages=stages))
    shown = page.sections_of(replace(subject, runs=[staged], running=[staged]))["running"]
    assert cards(shown)[0]["Time left"] == "15.0s"  # ten steps of three times the tokens
    unknown = replace(run, settings=None)
    shown = page.sections_of(replace(subject, runs=[unknown], running=[unknown]))["running"]
    assert cards(shown)[0]["Time left"] == "–"


def test_what_runs_now_is_on_top_until_it_is_quiet_or_has_ended(tmp_path: Path) -> None:
    write_ablation(tmp_path / "ablation")
    metrics = make(tmp_path, "running", done=30) / "metrics.jsonl"
    tokens = preset("demo").batch.tokens  # two steps a second from now on
    last = {**json.loads(metrics.read_text().splitlines()[-1]), "tokens_per_s": 2 * tokens}
    metrics.write_text("\n".join([*metrics.read_text().splitlines()[:-1], json.dumps(last), ""]))
    make(tmp_path, "stopped", done=10, ended="2025-01-04T10:02:00+00:00")
    subject, _ = RunsFolder(tmp_path, newest=24).look()
    sections = page.sections_of(subject)
    assert list(sections)[:2] == ["about", "running"]
    assert list(sections).index("curves") < list(sections).index("ablation")
    [card] = cards(sections["running"])
    rate, left, step = card["Tokens per second"], card["Time left"], card["Step"]
    assert (card["run"], card["bar"], step, rate, left) == ("running", "75%", "30 of 40", f"{2 * tokens:,}", "5.0s")
    assert "running" not in sections["results"] + sections["warnings"]
    boxes = re.findall(r"<details id=.*?</summary>", sections["results"])
    assert [re.sub("<[^>]*>", "", box) for box in boxes] == ["Finished: 9 runs", "Stopped or killed: 1 run"]
    assert " open" not in "".join(re.findall("<details[^>]*>", sections["results"]))
    later = RunsFolder(tmp_path, newest=24, clock=lambda: time.time() + 300).look()[0]
    assert page.sections_of(later)["running"] == ""
    assert '<details open id="finished">' in page.sections_of(later)["results"]
    (tmp_path / "running" / "metrics.jsonl").write_text("")
    begun = page.sections_of(RunsFolder(tmp_path, newest=24).look()[0])["running"]
    [card] = cards(begun)
    assert (card["Time left"], card["Tokens per second"]) == ("–", "–")


def test_the_newest_runs_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    for number in range(4):
        for path in make(tmp_path, f"run-{number}").iterdir():
            os.utime(path, (1_000_000 - number, 1_000_000 - number))
    subject, _ = RunsFolder(tmp_path, newest=2).look()
    assert labels(subject) == ["run-0", "run-1"]
    assert subject.notes == ["The 2 newest of 4 runs in the folder."]


def test_an_ablation_is_watched_with_its_runs(tmp_path: Path) -> None:
    write_ablation(tmp_path / "ablation")
    subject, _ = RunsFolder(tmp_path, newest=24).look()
    assert len(subject.runs) == 9
    assert len(subject.ablations) == 1
    (tmp_path / "ablation/ablation.json").write_text("{")
    assert "ablation.json" in RunsFolder(tmp_path, newest=24).look()[0].left_out[0]


def test_nothing_outside_the_folder_is_read_and_no_pipe_is_waited_for(tmp_path: Path) -> None:
    root, outside = tmp_path / "runs", make(tmp_path / "elsewhere", "outside")
    make(root, "inside")
    (root / "link").symlink_to(outside)
    (root / "circle").symlink_to(root / "circle")
    for name in ("card.json", "config.json"):
        (root / "half").mkdir(exist_ok=True)
        shutil.copy(outside / name, root / "half" / name)
    os.mkfifo(root / "half" / "metrics.jsonl")
    (root / "alias").symlink_to(root / "inside")
    for name, linked in (("borrowed", "card.json"), ("copied", "config.json")):
        (root / name).mkdir()
        (root / name / linked).symlink_to(outside / linked)
    shutil.copy(outside / "card.json", root / "copied" / "card.json")
    subject, _ = RunsFolder(root, newest=9).look()
    assert [run.folder.name for run in subject.runs] == ["alias", "inside"]
    copied, half = subject.left_out
    assert "copied/config.json: is not there, or leads out" in copied
    assert "half/metrics.jsonl: is neither a file nor a folder" in half


# ---- the server


@contextmanager
def served(root: Path) -> Iterator[int]:
    server = make_server(root, port=0, newest=9)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(port: int, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    result = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return result


def test_the_state_is_sent_once_and_then_only_when_it_changes(tmp_path: Path) -> None:
    make(tmp_path, "a", done=10)
    with served(tmp_path) as port:
        code, headers, body = get(port, "/state")
        state = json.loads(body)
        assert code == 200
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "connect-src 'self'" in headers["Content-Security-Policy"]
        assert get(port, f"/state?seen={state['name']}")[0] == 204
        make(tmp_path, "a", done=12)
        code, _, body = get(port, f"/state?seen={state['name']}")
        assert code == 200
        assert json.loads(body)["data"]["runs"][0]["x"]["step"][-1] == 12


def half_sent(stack: ExitStack, port: int) -> socket.socket:
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
    client.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
    return client


def test_three_hundred_connections_at_once_are_answered_promptly(tmp_path: Path) -> None:
    make(tmp_path, "a")
    with served(tmp_path) as port, ExitStack() as stack:
        began = time.perf_counter()
        clients = [stack.enter_context(socket.socket()) for _ in range(300)]
        for client in clients:  # all before any is accepted
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        for client in clients:
            client.settimeout(10)
            while client.connect_ex(("127.0.0.1", port)) not in (0, errno.EISCONN):
                pass
            client.sendall(b"GET /state?seen= HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}
        assert time.perf_counter() - began < 5


def test_half_sent_requests_are_cut_off_and_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MOST_CONNECTIONS", 20)
    with served(tmp_path) as port, ExitStack() as stack:
        clients = [half_sent(stack, port) for _ in range(60)]
        assert get(port, "/state")[0] == 200
        assert clients[0].recv(1) == b""  # too many: the oldest goes
    monkeypatch.setattr(watch, "HEADERS_S", 0.2)
    with served(tmp_path) as port, ExitStack() as stack:
        assert half_sent(stack, port).recv(1) == b""


@pytest.mark.parametrize(
    ("host", "code"),
    [("localhost", 200), ("LOCALHOST:9", 200), ("[::1]:8008", 200), ("evil.example:8008", 403), ("", 403),
     ("127.0.0.1.evil.example", 403), ("localhost@evil.example", 403), ("localhost:80:80", 403)],
)  # fmt: skip
def test_only_a_request_for_this_machine_is_answered(host: str, code: int, tmp_path: Path) -> None:
    with served(tmp_path) as port:
        assert get(port, "/", host=host)[0] == code
        assert get(port, "/state", host=host)[0] == code


@pytest.mark.parametrize(
    "path",
    ["/../card.json", "/a/card.json", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/state/..", "/favicon.ico", "//["],
)
def test_no_path_leads_to_a_file(path: str, tmp_path: Path) -> None:
    make(tmp_path, "a")
    with served(tmp_path) as port:
        assert get(port, path)[0] == 404


def test_nothing_can_be_sent(tmp_path: Path) -> None:
    with served(tmp_path) as port:
        assert get(port, "/", method="POST")[0] == 501


def test_whatever_a_run_is_called_it_is_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    write_run(tmp_path / "a", name=evil, steps=20, sample=evil, notes=(evil,), done=10)
    with served(tmp_path) as port:
        sections = json.loads(get(port, "/state")[2])["sections"]
    assert "&lt;img" in sections["warnings"]
    assert all("<img" not in text for text in sections.values())


def test_it_listens_on_loopback_only(tmp_path: Path) -> None:
    server = make_server(tmp_path, port=0, newest=9)
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()


def test_a_port_that_is_taken_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: cannot be listened on"):
            make_server(tmp_path, port=port, newest=9)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "70000"], "--port 70000 is outside"),
        (["--newest", "0"], "--newest 0 must be at least 1"),
        (["FILE"], "is a file; give the folder of runs"),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["watch", *(str(file) if word == "FILE" else word for word in argv)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_without_plotly_it_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise UserError("the report page needs plotly")

    monkeypatch.setattr(page, "_plotly_js", missing)
    with pytest.raises(UserError, match="needs plotly"):
        make_server(tmp_path, port=0, newest=9)
