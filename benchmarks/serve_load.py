"""Sampling speed of one stream, and many concurrent streams over `paceline serve` for minutes: errors, rates, memory.

python benchmarks/serve_load.py --run runs/demo --out benchmarks/results/serve-cpu.json [--streams 64] [--seconds 300]

Each client asks for one text after the other, of unequal length, as events of a stream, and leaves some of them
half-way. Memory counts from a tenth of the time on: before that, caches and allocators fill up.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.environment import code_version, environment
from paceline.core.files import write_json
from paceline.core.schema import to_dict
from paceline.core.threads import limit_openmp_spin

TARGETS = {"one_stream_tokens_per_cpu_s": 300.0, "errors": 0, "growth_mib": 16.0}
"""The first at least, the others at most. 16 MiB: a ninth of the cache of 64 streams of the demo."""
PROMPT_WORDS = ("Return", "the", "number", "of", "items", "in", "list", "that", "are", "not", "None", "and", "raise")
NEW_TOKENS = (50, 400)
LEFT_SHARE = 0.05
"""Of the requests, those that are abandoned half-way."""


@dataclass
class Seen:
    """What the clients saw."""

    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)


async def one_text(port: int, draw: random.Random, seen: Seen) -> None:
    prompt = " ".join(draw.choices(PROMPT_WORDS, k=draw.randint(1, 200)))
    asked = {"prompt": prompt, "max_tokens": draw.randint(*NEW_TOKENS), "temperature": 0.8, "top_k": 50, "stream": True}
    leaves_after = asked["max_tokens"] // 2 if draw.random() < LEFT_SHARE else None
    body, started = json.dumps(asked).encode(), time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        status = (await reader.readline()).decode().strip()
        if " 200 " not in status:
            raise RuntimeError(status)
        seen.ends[await read_events(reader, seen, started, leaves_after)] += 1
    finally:
        writer.close()


async def read_events(reader: asyncio.StreamReader, seen: Seen, started: float, leaves_after: int | None) -> str:
    """Why the text ended: `left` where it was abandoned."""
    count, finish = 0, None
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            return str(finish)
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        finish = event["choices"][0]["finish_reason"]
        count += finish is None
        seen.tokens += finish is None
        if count == 1:
            seen.first_token_s.append(time.perf_counter() - started)
        if count == leaves_after:
            return "left"
    raise RuntimeError("the stream broke off")


async def client(port: int, number: int, end: float, seen: Seen) -> None:
    draw = random.Random(number)
    while time.monotonic() < end:
        try:
            await one_text(port, draw, seen)
        except (OSError, RuntimeError, ValueError) as error:
            seen.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)


def memory_mib(pid: int) -> float:
    """What of a process is in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def watch_memory(pid: int, end: float, every_s: float) -> list[float]:
    found = []
    while time.monotonic() < end:
        found.append(memory_mib(pid))
        await asyncio.sleep(every_s)
    return found


async def load(port: int, pid: int, streams: int, seconds: float) -> tuple[Seen, list[float]]:
    seen, end = Seen(), time.monotonic() + seconds
    clients = [client(port, number, end, seen) for number in range(streams)]
    memory, *_ = await asyncio.gather(watch_memory(pid, end, seconds / 100), *clients)
    return seen, memory


def under_load(run: Path, streams: int, seconds: float) -> dict[str, Any]:
    words = ["serve", str(run), "--port", "0", "--max-streams", str(streams)]
    server = subprocess.Popen([sys.executable, "-m", "paceline.cli", *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline().split("/")[2].rpartition(":")[2])
        started = time.perf_counter()
        seen, memory = asyncio.run(load(port, server.pid, streams, seconds))
        taken_s = time.perf_counter() - started
    finally:
        server.send_signal(signal.SIGINT)
        exit_code = server.wait(timeout=60)
    settled = memory[len(memory) // 10 :]
    tenth = len(settled) // 10
    return {
        "streams": streams,
        "seconds": round(taken_s, 1),
        "requests": dict(seen.ends),
        "errors": len(seen.errors) + (exit_code != 0),
        "first_errors": seen.errors[:5],
        "tokens_per_s": round(seen.tokens / taken_s, 1),
        "first_token_s": {
            "median": round(statistics.median(seen.first_token_s), 3),
            "worst": round(max(seen.first_token_s), 3),
        },
        "memory_mib": [round(value, 1) for value in memory[::10]],
        "growth_mib": round(statistics.mean(settled[-tenth:]) - statistics.mean(settled[:tenth]), 1),
    }


def one_stream(run: Path, *, new_tokens: int = 1000, tries: int = 5) -> dict[str, Any]:
    """As `paceline sample` draws, of tries the median. Where other work is going on, processor time says more than the
    clock; to be run with one thread, so that it is that of one core."""
    from paceline.evaluate.config import SamplingConfig
    from paceline.evaluate.generate import generate
    from paceline.evaluate.load import load_run

    loaded, rates, cpu_rates = load_run(str(run), device="cpu"), [], []
    for seed in range(tries):
        started, cpu_before = time.perf_counter(), time.process_time()
        prompt, sampling = [loaded.tokenizer.end_of_text], SamplingConfig(seed=seed)
        stream = generate(loaded.model, prompt, sampling, windows=loaded.windows, new_tokens=new_tokens)
        tokens = sum(1 for _ in stream)
        rates.append(tokens / (time.perf_counter() - started))
        cpu_rates.append(tokens / (time.process_time() - cpu_before))
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_cpu_s": round(statistics.median(cpu_rates), 1),
        "of_tries": [round(rate, 1) for rate in rates],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="of the demo preset")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    limit_openmp_spin()  # as the command line does, before torch is imported
    code, load_before = to_dict(code_version()), os.getloadavg()[0]
    alone = one_stream(arguments.run)
    loaded = under_load(arguments.run, arguments.streams, arguments.seconds)
    met = (
        alone["tokens_per_cpu_s"] >= TARGETS["one_stream_tokens_per_cpu_s"]
        and loaded["errors"] <= TARGETS["errors"]
        and loaded["growth_mib"] <= TARGETS["growth_mib"]
    )
    result = {
        "what": f"sampling alone, and {arguments.streams} concurrent streams over paceline serve, on the CPU",
        "date": datetime.now(UTC).date().isoformat(),
        "code": code,
        "environment": environment(),
        "load_before": round(load_before, 2),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "targets": TARGETS,
        "met": met,
        "alone": alone,
        "loaded": loaded,
    }
    write_json(arguments.out, result)
    print(json.dumps(result, indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
