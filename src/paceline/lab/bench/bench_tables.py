"""A benchmark's result for a person: the same values as its JSON, in tables."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from paceline.metrics.console import console_on

FILE_COLUMNS = 160  # width of the tables where the output is no terminal
WORDS = ("class", "kernel", "weight", "product")  # columns that hold words; the others hold numbers


def show_step(result: dict[str, Any]) -> None:
    cold, warm = (_number(result[f"{name}_start_s"], "{:.1f} s") for name in ("cold", "warm"))
    facts = {
        **_whose(result),
        "step": _number(result["step_s"], "{:.4f} s, mean over the schedule"),
        "tokens": _number(result["tokens_per_s"], "{:,.0f} a second"),
        "arithmetic": _number(result["mfu"], "{:.1%} of the measured peak")
        + f" of {result['peak_tflops']:.3g} TFLOP/s; at that peak a step would take {result['floor_s']:.4f} s",
        **({} if result["ranks"] == 1 else _communication(result)),
        "memory": _number(result["peak_gib"], "{:.2f} GiB at most"),
        "start": f"launch to step 10: {cold} with an empty compile cache, {warm} with a filled one",
        "clock, power": f"{_number(result['sm_clock_mhz'], '{:.0f} MHz')}, {_number(result['power_w'], '{:.0f} W')}",
    }
    step_s, shares = result["profiled_step_s"], (result["shares"] or {}).items()
    windows = map(_window_row, result["windows"])
    classes = ((_words(name), f"{share:.1%}", f"{share * step_s:.4f}") for name, share in shares)
    kernels = (
        (f"{row['seconds']:.5f}", f"{row['calls']:g}", _words(row["class"]), row["name"]) for row in result["kernels"]
    )
    _print(
        facts,
        _table("step by window", ("window", "blocks", "steps of the schedule", "seconds", "spread"), windows),
        _table("where a profiled step goes", ("class", "share", "seconds"), classes),
        _table("longest kernels", ("seconds a step", "calls", "class", "kernel"), kernels),
    )


def show_gemm(result: dict[str, Any]) -> None:
    facts = {
        **_whose(result),
        "products": f"{result['gemm_s']:.4f} s a step at {result['gemm_tflops']:.3g} TFLOP/s",
        "floor": f"{result['floor_s']:.4f} s for a step's whole arithmetic at that rate",
        "peak": f"{result['peak_tflops']:.3g} TFLOP/s, measured",
    }
    headings = ("weight", "product", "rows", "depth", "columns", "calls", "seconds", "TFLOP/s", "a step")
    _print(facts, _table("products", headings, map(_product_row, result["products"])))


def show_sample(result: dict[str, Any]) -> None:
    facts = {"model": result["model"], "on": _device(result), "step": result["step"]}
    headings = ("texts", "tokens/s", "of one", "first token", "start", "memory", "kernels")
    _print(facts, _table("texts at once", headings, map(_stream_row, result["streams"])))


def _whose(result: dict[str, Any]) -> dict[str, str]:
    return {"preset": f"{result['preset']} at scale {result['scale']}", "on": _device(result)}


def _device(result: dict[str, Any]) -> str:
    return str(result["hardware"].get("gpu") or result["hardware"].get("cpu"))


def _communication(result: dict[str, Any]) -> dict[str, str]:
    hidden = _number(result["exposed_communication_s"], "{:.4f} s of a step are not hidden")
    share = _number(result["communication_share"], "{:.1%} of it")
    return {"ranks": f"{result['ranks']}, these figures are the first one's", "communication": f"{hidden}, {share}"}


def _window_row(row: dict[str, Any]) -> Sequence[str]:
    window = "none" if row["tokens"] is None else f"{row['tokens']:,}"
    seconds = (f"{row['seconds']:.4f}", f"{row['spread_s']:.4f}")
    return (window, _number(row["blocks"], "{:g}"), f"{row['steps']:,}", *seconds)


def _product_row(row: dict[str, Any]) -> Sequence[str]:
    sides = (f"{side:,g}" for side in (*row["shape"], row["calls"]))
    return (row["name"], row["kind"], *sides, f"{row['seconds']:.6f}", f"{row['tflops']:.3g}", f"{row['step_s']:.4f}")


def _stream_row(row: dict[str, Any]) -> Sequence[str]:
    rates = (f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s'] / row['streams']:,.0f}")
    times = (f"{row['first_token_s']:.4f} s", f"{row['prepare_s']:.1f} s")
    rest = (_number(row["peak_gib"], "{:.2f} GiB"), _number(row["kernels_per_step"], "{:g}"))
    return (f"{row['streams']:,}", *rates, *times, *rest)


def _print(facts: dict[str, str], *tables: Table) -> None:
    """As wide as the terminal; in a file, wide enough for the names of kernels. An empty table is left out."""
    console = console_on(sys.stdout, width=None if sys.stdout.isatty() else FILE_COLUMNS)
    about = Table(box=None, pad_edge=False, show_header=False)
    for fact in facts.items():
        about.add_row(*fact)
    console.print(about, *(table for table in tables if table.rows))


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, title=f"\n{title}", title_justify="left", title_style="bold")
    for heading in headings:
        needed = {"kernel": None, "class": len("attention projections")}.get(heading, len(heading))
        table.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=True, min_width=needed)
    for row in rows:
        table.add_row(*row)
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)
