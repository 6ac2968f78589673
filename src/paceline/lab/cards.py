"""The tables of techniques and claims as pages: `python -m paceline.lab.cards` writes them, `--check` compares.

docs/techniques/<key>.md, one card a technique · docs/techniques/index.md · docs/ledger.md, all claims with verdicts ·
docs/seeds.md, from each claim to card, switch, code, test and measurement. Nobody edits these pages by hand.
"""

import sys
import typing
from collections.abc import Iterable
from typing import Any

from paceline.lab.claims import VERDICTS, Claim, Seed, claims, counts, seeds
from paceline.lab.isolated import in_short, isolated, telling
from paceline.lab.ledger import count_line
from paceline.lab.pages import PagesOf, listed, paragraphs, result_links, table
from paceline.lab.results import (
    Pair,
    Series,
    ablated,
    all_series,
    files_of,
    pairs,
    read,
    switches_between,
    told,
)
from paceline.lab.technique import Given, Measurement, Switch, Technique, command
from paceline.lab.techniques import TECHNIQUES, TOPICS
from paceline.lab.totals import whole_record
from paceline.recipes.records import PUBLIC
from paceline.train.config import RunConfig

NOT_MEASURED = "Not measured here yet."
WITH_OTHERS = "not measured alone"


def _texts() -> dict[str, str]:
    """Path under docs/ to text, for every page."""
    cards = {f"techniques/{key}.md": card(technique) for key, technique in TECHNIQUES.items()}
    return {**cards, "techniques/index.md": index(), "ledger.md": ledger_page(), "seeds.md": seeds_page()}


# ---- one card


def card(technique: Technique) -> str:
    sections = [
        f"# {technique.title}",
        technique.what,
        f"```text\n{technique.formula}\n```" if technique.formula else None,
        _origin(technique),
        "## Switch",
        _switch_section(technique),
        "## Code and proof",
        "Code:\n\n" + listed(_code_links(technique, "../..")),
        "Tests:\n\n" + listed(_test_links(technique, "../..")),
        "## What it buys",
        "**In the public records.** "
        + paragraphs(technique.public, whole_record(technique.record) if technique.record else None),
        f"**Cost.** {technique.cost}",
        f"**Measured here.** {_measured_technique(technique)}",
        _claims_section(technique),
    ]
    return "\n\n".join(section for section in sections if section)


def _origin(technique: Technique) -> str:
    brought = f"Brought by record {technique.record}. " if technique.record else ""
    if not technique.presets:
        return f"{brought}In none of the record presets."
    if len(technique.presets) == len(PUBLIC):
        return f"{brought}Here in all record presets."
    return f"{brought}In {', '.join(f'`{name}`' for name in technique.presets)}."


def _switch_section(technique: Technique) -> str:
    needs = listed(f"Acts only where `{given.field}` is {_among(given)}." for given in technique.given)
    if not technique.switches:
        return paragraphs("None: it is always so.", needs)
    rows = [(_field_link(s.field, "../.."), _on_values(s), _value(s.off)) for s in technique.switches]
    which = "without" if technique.presets else "with"
    shown = f"To train `{technique.shown_on}` {which} it:\n\n```sh\n{command(technique)}\n```"
    return paragraphs(table(("field", "on", "off"), rows), needs, shown)


def _on_values(switch: Switch) -> str:
    return " or ".join(map(_value, (switch.on, *switch.also_on)))


def _among(given: Given) -> str:
    return " or ".join(map(_value, given.among))


def _value(value: Any) -> str:
    return f"`{value:.6g}`" if isinstance(value, float) and value else f"`{value}`"


def _measured_technique(technique: Technique) -> str:
    said = [_measured(measurement, "../..") for measurement in technique.measurements]
    compared = [_compared(pair) for pair in pairs(technique)]
    return paragraphs(" ".join(said) or None, isolated(ablated(technique), "../.."), *compared) or NOT_MEASURED


def _measured(measurement: Measurement, root: str) -> str:
    return f"{told(measurement)} ({result_links(measurement.sources, root)})"


def _compared(pair: Pair) -> str:
    """Two runs side by side, the commands that made them, and that they are no isolation."""
    first, second = pair.arms
    diff = f"`paceline diff {first.preset} {second.preset}`"
    intro = (
        f"{pair.series.setting[0].upper()}{pair.series.setting[1:]} ({result_links(pair.files, '../..')}). "
        f"{diff} shows the {switches_between(pair)} settings between these two, so this bounds the technique and does "
        "not isolate it."
    )
    rows = [(f"`{arm.preset}`", "yes" if arm is pair.having else "no", *arm.values) for arm in pair.arms]
    commands = "\n".join(pair.series.command(arm) for arm in pair.arms)
    shown = table(("run", "has it", *pair.series.columns), rows)
    return paragraphs(intro, shown, " ".join(pair.notes), f"```sh\n{commands}\n```")


def _claims_section(technique: Technique) -> str | None:
    found = [claim for claim in claims() if technique.key in claim.techniques]
    if not found:
        return None
    lines = [f"Seed {c.seed:03d}, {c.at}: {c.claim} *{VERDICTS[c.verdict].capitalize()}.* {c.fact}" for c in found]
    return f"## Claims about it\n\n{listed(lines)}"


# ---- the other pages


def index() -> str:
    intro = (
        f"{len(TECHNIQUES)} techniques: what each is, in which record presets it is, how to switch it, where its code "
        "and its tests are, and what is known of its worth. A name in a claim of the [ledger](../ledger.md) leads here."
    )
    headings = ("technique", "measured", "record", "presets", "switch")
    tables = [f"## {topic}\n\n" + table(headings, map(_index_row, group)) for topic, group in TOPICS.items()]
    return paragraphs("# Techniques", intro, _index_measured(), *tables, _measured_runs())


def _index_measured() -> str:
    """How far our own measurements reach, and how to read their column."""
    best = [one for technique in TECHNIQUES.values() if (one := telling(ablated(technique)))]
    told_apart = sum(not one.noise for one in best)
    return (
        "**What each buys.** Under *measured* is what having a technique does to the validation loss, with the 95 % "
        "interval of the difference with it minus without it, by the most telling of our [ablations](../ablations.md), "
        f"the largest size first. {len(best)} of the techniques were ablated, and the effect of {told_apart} is told "
        "apart from noise. The runs are short, and what was measured at 1/16 on a CPU settles nothing about the full "
        f"size. *{WITH_OTHERS.capitalize()}*: there are only runs that differ in more than it; they are on its card."
    )


def _measured_runs() -> str:
    """The result files that some card draws on, and the presets side by side."""
    used = sorted({name for technique in TECHNIQUES.values() for name in files_of(technique)})
    files = [
        (result_links([name], "../.."), str(read(name).get("what", "–")), str(read(name).get("date", "–")))
        for name in used
    ]
    return paragraphs("## Measured here", table(("file", "what", "date"), files), *map(_series, all_series()))


def _series(series: Series) -> str:
    rows = [(f"`{arm.preset}`", *arm.values, result_links([arm.file], "../..")) for arm in series.arms]
    heading = f"### {series.setting[0].upper()}{series.setting[1:]}"
    return paragraphs(heading, table(("run", *series.columns, "file"), rows))


def _index_row(technique: Technique) -> tuple[str, ...]:
    numbers = [name.partition("-")[0] for name in technique.presets]
    switch = "<br>".join(f"`{s.field}`: {_value(s.on)} / {_value(s.off)}" for s in technique.switches)
    record = str(technique.record) if technique.record else "–"
    name = f"[{technique.title}]({technique.key}.md)"
    return name, _index_cell(technique), record, " ".join(numbers) or "–", switch or "always"


def _index_cell(technique: Technique) -> str:
    if one := telling(ablated(technique)):
        return in_short(one)
    return WITH_OTHERS if files_of(technique) else "not measured"


def ledger_page() -> str:
    intro = (
        "The project began from five descriptions (seeds) of what a speed record changed. This is each of their claims "
        "in our words, and what the public training scripts and logs say to it. The last column is our own measurement."
    )
    rows = [(f"[{s.name}](#{_anchor(s)})", str(s.record), str(len(s.claims)), *_count_cells(s.claims)) for s in seeds()]
    every = claims()
    rows.append(("all", "", str(len(every)), *_count_cells(every)))
    summary = table(("seed", "record", "claims", *(f"{word} ({v})" for v, word in VERDICTS.items())), rows)
    return paragraphs("# Ledger of claims", intro, f"{count_line(every)}.", summary, *map(_ledger_seed, seeds()))


def _count_cells(found: Iterable[Claim]) -> tuple[str, ...]:
    return tuple(map(str, counts(found).values()))


def _ledger_seed(seed: Seed) -> str:
    rows = [
        (c.at, c.claim, f"**{c.verdict}**", c.fact, _measured(c.measured, "..") if c.measured else "–")
        for c in seed.claims
    ]
    shown = table(("at", "claim", "verdict", "fact", "measured"), rows)
    return paragraphs(_seed_heading(seed), shown, _left_out(seed))


def _seed_heading(seed: Seed) -> str:
    return f"## Seed {seed.name}, record {seed.record}"


def _anchor(seed: Seed) -> str:
    """What GitHub and MkDocs make of the heading."""
    return f"seed-{seed.name}-record-{seed.record}"


def _left_out(seed: Seed) -> str | None:
    return f"Changed by the record and not mentioned: {seed.left_out.strip()}" if seed.left_out else None


def seeds_page() -> str:
    intro = (
        "From a sentence of a founding description to everything about it: the verdict on the claim, and for each "
        "technique it concerns the card, the switch with its values on / off, the code, the tests and our measurement. "
        "The mark before a claim names the heading of the description under which it stands."
    )
    return paragraphs("# From the seeds to the code", intro, *map(_trace_seed, seeds()))


def _trace_seed(seed: Seed) -> str:
    line = f"`paceline diff {seed.predecessor} {seed.preset}` shows what changed. {count_line(seed.claims)}."
    return paragraphs(_seed_heading(seed), line, "\n".join(map(_trace_claim, seed.claims)), _left_out(seed))


def _trace_claim(claim: Claim) -> str:
    head = f"- **{claim.at}** {claim.claim} *{VERDICTS[claim.verdict].capitalize()}.*"
    own = [f"    - measured: {_measured(claim.measured, '..')}"] if claim.measured else []
    lines = [f"    - {_trace_technique(TECHNIQUES[key])}" for key in claim.techniques]
    return "\n".join([head, *own, *(lines or ["    - concerns no technique"])])


def _trace_technique(technique: Technique) -> str:
    switch = ", ".join(f"{_field_link(s.field, '..')} {_value(s.on)} / {_value(s.off)}" for s in technique.switches)
    measured = result_links(files_of(technique), "..")
    parts = [
        f"[{technique.title}](techniques/{technique.key}.md)",
        f"switch {switch}" if switch else "always on",
        f"code {', '.join(_code_links(technique, '..'))}",
        f"tests {', '.join(_test_links(technique, '..'))}",
        f"measured {measured}" if measured else "not measured yet",
    ]
    return " · ".join(parts)


# ---- markdown


def _field_link(field: str, root: str) -> str:
    """A dotted field, leading to the file that defines it."""
    owner: type = RunConfig
    for part in field.split(".")[:-1]:
        owner = typing.get_type_hints(owner)[part]
    file = owner.__module__.removeprefix("paceline.").replace(".", "/")
    return f"[`{field}`]({root}/src/paceline/{file}.py)"


def _code_links(technique: Technique, root: str) -> list[str]:
    return [f"[`{ref}`]({root}/src/paceline/{ref.partition(':')[0]})" for ref in technique.code]


def _test_links(technique: Technique, root: str) -> list[str]:
    return [f"[`{ref}`]({root}/tests/{ref.partition('::')[0]})" for ref in technique.tests]


WRITTEN = PagesOf(
    module="paceline.lab.cards",
    about="Write the pages about techniques and claims.",
    source="src/paceline/lab",
    folder="techniques",
    texts=_texts,
)


if __name__ == "__main__":
    sys.exit(WRITTEN.exit_code(sys.argv[1:]))
