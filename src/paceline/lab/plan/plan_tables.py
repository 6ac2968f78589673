"""A plan for a person: the same values as its JSON."""

import sys

from rich.table import Table

from paceline.core.units import human_count, human_seconds
from paceline.lab.plan.predict import Plan
from paceline.metrics.console import console_on, plain_table


def show(plan: Plan) -> None:
    console = console_on(sys.stdout)
    console.print(_facts(plan), "", _split(plan), "")
    lines = [plan.limit]
    if not plan.fits:
        lacking = f"{plan.memory_gib:,.1f} GiB needed, {plan.usable_gib:.1f} usable"
        lines.append(f"It does not fit: {lacking}. Remedy: {plan.remedy}")
    for line in (*lines, *(f"note: {note}" for note in plan.notes)):
        console.print(line, soft_wrap=True, highlight=False)


def _facts(plan: Plan) -> Table:
    nodes = f" on {plan.nodes:,} nodes" if plan.nodes > 1 else ""
    growth = f", {_time(plan.first_step_s)} at first, {_time(plan.last_step_s)} at last"
    weights, slots, activations = (plan.memory_parts_gib[name] for name in ("weights", "slots", "activations"))
    facts = {
        "run": f"{plan.preset}, {human_count(plan.parameters)} parameters, {plan.steps:,} steps of "
        f"{plan.tokens_per_step:,} tokens, {plan.gpus:,} × {plan.gpu}{nodes}, {plan.profile} paths",
        "step": f"{_time(plan.step_s)}{growth if plan.last_step_s > 1.001 * plan.first_step_s else ''}",
        "throughput": f"{human_count(plan.tokens_per_s)} tokens a second, {plan.mfu:.1%} of the peak",
        "to the end": f"{_long(plan.train_s)} of steps, {_long(plan.wall_s)} with start and validation",
        "cost": f"{plan.gpu_hours:,.2f} GPU-hours, {plan.cost:,.2f} USD at {plan.price:.2f} an hour",
        "memory": f"{plan.memory_gib:,.1f} GiB of {plan.usable_gib:.1f} usable "
        f"(weights {weights:.1f}, optimizer {slots:.1f}, activations {activations:.1f})",
        "one GPU": f"{plan.micro_batches} × {plan.micro_tokens:,} tokens a step, sends "
        f"{plan.communication_bytes / 1e9:.3g} GB",
    }
    table = plain_table("", "", show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _split(plan: Plan) -> Table:
    table = plain_table("where a step goes", ">time", ">share")
    rows = {**plan.compute_s, "optimizer": plan.optimizer_s, "communication": plan.exposed_communication_s}
    for name, part_s in sorted(rows.items(), key=lambda row: -row[1]):
        table.add_row(name.replace("_", " "), _time(part_s), f"{part_s / plan.step_s:.1%}")
    return table


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _long(seconds: float) -> str:
    return f"{seconds / 86400:,.1f} days" if seconds >= 2 * 86400 else human_seconds(seconds)
