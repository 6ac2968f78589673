"""docs/ledger.md, every claim with its verdict, and docs/seeds.md, from each claim to switch, code, test and result."""

from collections.abc import Sequence

from claims import VERDICTS, Claim, Seed, claims, counts, seeds
from paceline.lab.technique import technique
from paceline.recipes.records import PUBLIC
from page_text import paragraphs, result_links, table
from technique_pages import field_link, files_of, links_to_code, links_to_tests, value


def ledger(page: str) -> str:
    rows = [(f"[{s.name}](#seed-{s.name}-record-{s.record})", str(s.record), *_numbers(s.claim)) for s in seeds()]
    headings = ("seed", "record", "claims", *(f"{word} ({verdict})" for verdict, word in VERDICTS.items()))
    summary = table(headings, [*rows, ("all", "", *_numbers(claims()))])
    return paragraphs(f"{count_line(claims())}.", summary, *(_ledger_seed(seed, page) for seed in seeds()))


def _numbers(found: Sequence[Claim]) -> list[str]:
    return [str(number) for number in (len(found), *counts(found).values())]


def count_line(found: Sequence[Claim]) -> str:
    """134 claims: 53 supported (T), …"""
    parts = [f"{number} {VERDICTS[verdict]} ({verdict})" for verdict, number in counts(found).items()]
    return f"{len(found)} claims: {', '.join(parts)}"


def _ledger_seed(seed: Seed, page: str) -> str:
    rows = [(c.at, c.claim, f"**{c.verdict}**", c.fact, c.measurement(page) or "–") for c in seed.claim]
    return paragraphs(_heading(seed), table(("at", "claim", "verdict", "fact", "measured"), rows), _left_out(seed))


def _heading(seed: Seed) -> str:
    return f"## Seed {seed.name}, record {seed.record}"


def _left_out(seed: Seed) -> str | None:
    return f"Changed by the record and not mentioned: {seed.left_out.strip()}" if seed.left_out else None


def trace(page: str) -> str:
    return paragraphs(*(_trace_seed(seed, page) for seed in seeds()))


def _trace_seed(seed: Seed, page: str) -> str:
    before = PUBLIC[seed.preset].predecessor
    line = f"`paceline diff {before} {seed.preset}` shows what changed. {count_line(seed.claim)}."
    lines = "\n".join(_trace_claim(claim, page) for claim in seed.claim)
    return paragraphs(_heading(seed), line, lines, _left_out(seed))


def _trace_claim(claim: Claim, page: str) -> str:
    measured = claim.measurement(page)
    below = [
        *([f"measured: {measured}"] if measured else []),
        *([_trace_technique(key, page) for key in claim.techniques] or ["concerns no technique"]),
    ]
    head = f"- **{claim.at}** {claim.claim} *{VERDICTS[claim.verdict].capitalize()}.*"
    return "\n    - ".join([head, *below])


def _trace_technique(key: str, page: str) -> str:
    found = technique(key)
    switch = ", ".join(f"{field_link(s.field, page)} {value(s.on)} / {value(s.off)}" for s in found.switches)
    measured = result_links(files_of(found), page)
    parts = [
        f"[{found.title}](techniques/{key}.md)",
        f"switch {switch}" if switch else "always on",
        f"code {', '.join(links_to_code(key, page))}",
        f"tests {', '.join(links_to_tests(key, page))}",
        f"measured {measured}" if measured else "not measured yet",
    ]
    return " · ".join(parts)
