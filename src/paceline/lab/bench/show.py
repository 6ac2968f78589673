"""A benchmark's result for a person: the same values as its JSON, in tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

FILE_COLUMNS = 160
"""Width of the tables where the output is no terminal."""
WORDS = ("class", "kernel", "weight", "product")
"""Columns that hold words; the others hold numbers."""


def show_step(result: dict[str, Any]) -> None:
    console = _console()
    console.print(_facts(_step_facts(result)))
    if result["windows"]:
        console.print(_windows(result["windows"]))
    if result["shares"]:
        console.print(_shares(result["shares"], result["profiled_step_s"]))
        console.print(_kernels(result["kernels"]))


def show_gemm(result: dict[str, Any]) -> None:
    console = _console()
    facts = {
        **_whose(result),
        "products": f"{result['gemm_s']:.4f} s a step at {result['gemm_tflops']:.3g} TFLOP/s",
        "floor": f"{result['floor_s']:.4f} s for a step's whole arithmetic at that rate",
        "peak": f"{result['peak_tflops']:.3g} TFLOP/s, measured",
    }
    console.print(_facts(facts))
    table = _titled(
        "\nproducts", "weight", "product", "rows", "depth", "columns", "calls", "seconds", "TFLOP/s", "a step"
    )
    for row in result["products"]:
        sides = (f"{side:,}" for side in (*row["shape"], row["calls"]))
        rates = (f"{row['seconds']:.6f}", f"{row['tflops']:.3g}", f"{row['step_s']:.4f}")
        table.add_row(row["name"], row["kind"], *sides, *rates)
    console.print(table)


def show_sample(result: dict[str, Any]) -> None:
    console = _console()
    hardware = result["hardware"]
    facts = {"model": result["model"], "on": str(hardware.get("gpu") or hardware.get("cpu")), "step": result["step"]}
    console.print(_facts(facts))
    table = _titled("\ntexts at once", "texts", "tokens/s", "of one", "first token", "start", "memory", "kernels")
    for row in result["streams"]:
        rates = (f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s'] / row['streams']:,.0f}")
        times = (f"{row['first_token_s']:.4f} s", f"{row['prepare_s']:.1f} s")
        rest = (_number(row["peak_gib"], "{:.2f} GiB"), _number(row["kernels_per_step"], "{:g}"))
        table.add_row(f"{row['streams']:,}", *rates, *times, *rest)
    console.print(table)


def _whose(result: dict[str, Any]) -> dict[str, str]:
    hardware = result["hardware"]
    return {
        "preset": f"{result['preset']} at scale {result['scale']}",
        "on": str(hardware.get("gpu") or hardware.get("cpu")),
    }


def _step_facts(result: dict[str, Any]) -> dict[str, str]:
    return {
        **_whose(result),
        "step": _number(result["step_s"], "{:.4f} s, mean over the schedule"),
        "tokens": _number(result["tokens_per_s"], "{:,.0f} a second"),
        "arithmetic": _number(result["mfu"], "{:.1%} of the measured peak")
        + f" of {result['peak_tflops']:.3g} TFLOP/s; at that peak a step would take {result['floor_s']:.4f} s",
        **_communication(result),
        "memory": _number(result["peak_gib"], "{:.2f} GiB at most"),
        "start": _start(result),
        "clock, power": f"{_number(result['sm_clock_mhz'], '{:.0f} MHz')}, {_number(result['power_w'], '{:.0f} W')}",
    }


def _communication(result: dict[str, Any]) -> dict[str, str]:
    """Of several ranks."""
    if result["ranks"] == 1:
        return {}
    hidden = _number(result["exposed_communication_s"], "{:.4f} s of a step are not hidden")
    share = _number(result["communication_share"], "{:.1%} of it")
    return {"ranks": f"{result['ranks']}, these figures are the first one's", "communication": f"{hidden}, {share}"}


def _start(result: dict[str, Any]) -> str:
    cold, warm = (_number(result[f"{name}_start_s"], "{:.1f} s") for name in ("cold", "warm"))
    return f"launch to step 10: {cold} with an empty compile cache, {warm} with a filled one"


def _facts(facts: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _windows(rows: list[dict[str, Any]]) -> Table:
    table = _titled("\nstep by window", "window", "blocks", "steps of the schedule", "seconds", "spread")
    for row in rows:
        window = "none" if row["tokens"] is None else f"{row['tokens']:,}"
        blocks = _number(row["blocks"], "{:g}")
        table.add_row(window, blocks, f"{row['steps']:,}", f"{row['seconds']:.4f}", f"{row['spread_s']:.4f}")
    return table


def _shares(shares: dict[str, float], step_s: float) -> Table:
    table = _titled("\nwhere a profiled step goes", "class", "share", "seconds")
    for name, share in shares.items():
        table.add_row(name.replace("_", " "), f"{share:.1%}", f"{share * step_s:.4f}")
    return table


def _kernels(rows: list[dict[str, Any]]) -> Table:
    table = _titled("\nlongest kernels", "seconds a step", "calls", "class", "kernel")
    for row in rows:
        table.add_row(f"{row['seconds']:.5f}", f"{row['calls']:g}", row["class"].replace("_", " "), row["name"])
    return table


def _titled(title: str, *headings: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for heading in headings:
        needed = {"kernel": None, "class": len("attention projections")}.get(heading, len(heading))
        table.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=True, min_width=needed)
    return table


def _console() -> Console:
    """As wide as the terminal; in a file, wide enough for the names of kernels."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_COLUMNS)


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)
