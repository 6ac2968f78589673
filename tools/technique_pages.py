"""docs/techniques: below what people write about a technique, its switches, code, tests, measurements and claims.

Code and tests are named in the front matter of its page, and so are measurements that are told in words.
"""

import functools
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from claims import about
from paceline.core.errors import UserError
from paceline.core.schema import changes, from_dict
from paceline.lab.technique import Technique, flag_words, technique, techniques
from paceline.recipes.presets import preset
from paceline.recipes.records import PUBLIC
from paceline.settings.run import RunConfig
from page_text import DOCS, linked, listed, paragraphs, result_links, table
from plan_fit import PUBLIC_STEPS_MS
from plan_page import HELD_OUT_STEPS_MS, PUBLIC_PEAKS_MIB
from result_files import Effect, Pair, Sentence, Series, all_series, effects, judged, pairs, read, significant

NEWEST = "r18-softcap"
"""Where a technique that no record has is shown."""
NOT_MEASURED = "Not measured here yet."
WITH_OTHERS = "not measured alone"
STEP_MS = {**PUBLIC_STEPS_MS, **HELD_OUT_STEPS_MS}
TRAIN_S = {4: 1339.07, 5: 910.55, 13: 279.56, 14: 264.63, 15: 236.86, 16: 231.01, 17: 213.12, 18: 204.34}
"""Means over a record's public logs on eight H100, without the first ten steps."""


@dataclass(frozen=True, kw_only=True)
class FrontMatter:
    code: tuple[str, ...]
    """`file:symbol`, the file under src/paceline."""
    tests: tuple[str, ...]
    """`file::test`, the file under tests."""
    measurements: tuple[Sentence, ...] = ()


@functools.cache
def front_matter(key: str) -> FrontMatter:
    path = DOCS / "techniques" / f"{key}.md"
    if not path.exists():
        raise UserError(f"docs/techniques/{key}.md does not exist; every technique has a page")
    return from_dict(FrontMatter, yaml.safe_load(path.read_text(encoding="utf-8").split("---\n")[1]), at=path.name)


# ---- one technique


def below_its_text(page: str) -> str:
    found = technique(page.removeprefix("techniques/").removesuffix(".md"))
    return paragraphs(
        _origin(found),
        whole_record(found.record) if found.record else None,
        "## Switch",
        _switch_section(found, page),
        "## Code and tests",
        listed([*links_to_code(found.key, page), *links_to_tests(found.key, page)]),
        "## Measured here",
        _measured(found, page) or NOT_MEASURED,
        *(["## Claims about it", listed(lines)] if (lines := about(found.key)) else []),
    )


def _origin(found: Technique) -> str:
    brought = f"Brought by record {found.record}. " if found.record else ""
    if len(found.presets) == len(PUBLIC):
        return f"{brought}Here in all record presets."
    return f"{brought}In {', '.join(f'`{name}`' for name in found.presets) or 'none of the record presets'}."


def whole_record(record: int) -> str | None:
    """What a record as a whole did, so the bounds within which a technique can have acted; None if its direct
    predecessor is no preset."""
    name = next((name for name, public in PUBLIC.items() if public.record == record), None)
    before = name and PUBLIC[name].predecessor
    if not name or not before or PUBLIC[before].record != record - 1:
        return None
    told = [
        f"{preset(before).steps:,} → {preset(name).steps:,} steps",
        f"{STEP_MS[before]:.2f} → {STEP_MS[name]:.2f} ms a step",
        f"{TRAIN_S[record - 1]:.2f} → {TRAIN_S[record]:.2f} s",
        f"loss {PUBLIC[before].val_loss:.4f} → {PUBLIC[name].val_loss:.4f}",
    ]
    if before in PUBLIC_PEAKS_MIB:
        told.append(f"peak memory {PUBLIC_PEAKS_MIB[before]:,} → {PUBLIC_PEAKS_MIB[name]:,} MiB")
    return f"Record {record} as a whole, against record {record - 1}: {', '.join(told)}."


def _switch_section(found: Technique, page: str) -> str:
    needs = listed(f"Acts only where `{given.field}` is {_values(given.among)}." for given in found.given)
    if not found.switches:
        return paragraphs("None: it is always on.", needs)
    rows = [(field_link(s.field, page), _values((s.on, *s.also_on)), value(s.off)) for s in found.switches]
    shown = f"To train `{shown_on(found)}` {'without' if found.presets else 'with'} it:"
    return paragraphs(table(("field", "on", "off"), rows), needs, shown, f"```sh\n{command(found)}\n```")


def shown_on(found: Technique) -> str:
    """The preset on which commands show the technique: the newest that has it."""
    return found.presets[-1] if found.presets else NEWEST


def command(found: Technique) -> str:
    """The command that trains a record without the technique, or with it where no record has it."""
    settings = [(switch.field, switch.off if found.presets else switch.on) for switch in found.switches]
    words = [word for field, setting in settings for word in flag_words(field, setting)]
    return " ".join(["paceline train", shown_on(found), *words])


def _values(values: Sequence[Any]) -> str:
    return " or ".join(map(value, values))


def value(setting: Any) -> str:
    return f"`{setting:.6g}`" if isinstance(setting, float) and setting else f"`{setting}`"


def field_link(field: str, page: str) -> str:
    """A dotted field, leading to the file that defines it."""
    owner: type = RunConfig
    for part in field.split(".")[:-1]:
        owner = typing.get_type_hints(owner)[part]
    return linked(field, f"src/{owner.__module__.replace('.', '/')}.py", page)


def links_to_code(key: str, page: str) -> list[str]:
    return [linked(ref, f"src/paceline/{ref.partition(':')[0]}", page) for ref in front_matter(key).code]


def links_to_tests(key: str, page: str) -> list[str]:
    return [linked(ref, f"tests/{ref.partition('::')[0]}", page) for ref in front_matter(key).tests]


# ---- what was measured


def files_of(found: Technique) -> list[str]:
    """Every result file that the technique's page uses."""
    told = [file for sentence in front_matter(found.key).measurements for file in sentence.files]
    compared = [run.file for _, *runs in pairs(found) for run in runs]
    return list(dict.fromkeys([*told, *compared, *(effect.file for effect in effects(found))]))


def _measured(found: Technique, page: str) -> str | None:
    if not files_of(found):
        return None
    told = [f"{s} ({result_links(s.files, page)})" for s in front_matter(found.key).measurements]
    side_by_side = listed(_compared(found, pair, page) for pair in pairs(found))
    how = "[How to read this](index.md#how-to-read-the-measurements)."
    return paragraphs(how, *told, *_isolated(effects(found), page), side_by_side)


def _isolated(found: Sequence[Effect], page: str) -> list[str]:
    """Ablations as a table, and a note for each file that has one."""
    rows, notes = [], {}
    for effect in found:
        p = "–" if effect.loss["p_holm"] is None else f"{effect.loss['p_holm']:.2g}"
        differences = interval(effect.loss, 4), p, judged(effect.loss), interval(effect.step_s, 3)
        rows.append((effect.setting, effect.done, str(effect.n), *differences, result_links([effect.file], page)))
        notes[effect.file] = " ".join(filter(None, (effect.note, effect.reach)))
    headings = ("size", "it was", "seeds", "loss, with it - without it", "p", "it", "s a step", "file")
    return [table(headings, rows), *(f"`{file}`: {note}" for file, note in notes.items() if note)] if rows else []


def interval(values: dict[str, Any] | None, digits: int) -> str:
    if values is None:
        return "–"
    mean = f"{values['mean']:+.{digits}f}"
    return mean if values["low"] is None else f"{mean} [{values['low']:+.{digits}f}, {values['high']:+.{digits}f}]"


def _compared(found: Technique, pair: Pair, page: str) -> str:
    """Two runs side by side."""
    series, *runs = pair
    first, second = (run.preset for run in runs)
    has = [f"{run.loss} in `{run.preset}` {'with' if run.preset in found.presets else 'without'} it" for run in runs]
    between = sum(change.field not in ("preset", "steps") for change in changes(preset(first), preset(second)))
    diff = f"`paceline diff {first} {second}` shows the {between} settings between them"
    files = result_links(dict.fromkeys(run.file for run in runs), page)
    return f"{series.setting}: validation loss {', '.join(has)} ({files}); {diff}."


# ---- docs/techniques/index.md


def index(page: str) -> str:
    """A table of the techniques of each topic."""
    found = techniques().values()
    best = [one for technique in found if (one := telling(effects(technique)))]
    reach = (
        f"{len(found)} techniques; {len(best)} were ablated, and {sum(significant(one.loss) for one in best)} of them "
        "have a significant effect on the loss."
    )
    topics = dict.fromkeys(technique.topic for technique in found)
    headings = ("technique", "measured", "record", "presets", "switch")
    tables = [
        f"## {topic}\n\n{table(headings, [_index_row(one) for one in found if one.topic == topic])}" for topic in topics
    ]
    return paragraphs(reach, *tables)


def _index_row(found: Technique) -> tuple[str, ...]:
    numbers = " ".join(name.partition("-")[0] for name in found.presets)
    switch = "<br>".join(f"`{s.field}`: {value(s.on)} / {value(s.off)}" for s in found.switches)
    name = f"[{found.title}]({found.key}.md)"
    return name, _index_cell(found), str(found.record or "–"), numbers or "–", switch or "always"


def _index_cell(found: Technique) -> str:
    """lowers the loss: -0.0476 [-0.0620, -0.0331] (full size, H200, 38 steps)"""
    if one := telling(effects(found)):
        change = f": {interval(one.loss, 4)}" if significant(one.loss) else ""
        return f"{judged(one.loss)}{one.company}{change} ({one.setting})"
    return WITH_OTHERS if files_of(found) else "not measured"


def telling(found: Sequence[Effect]) -> Effect | None:
    """The comparison that says most: of those at the largest size one of the technique alone, with the smallest p."""

    def weight(effect: Effect) -> tuple[bool, bool, float]:
        p = effect.loss["p_holm"]
        return bool(effect.reach), bool(effect.company), 1.0 if p is None else p

    return min(found, key=weight, default=None)


def measured_runs(page: str) -> str:
    """The result files that some technique's page uses, and the presets side by side."""
    used = sorted({name for technique in techniques().values() for name in files_of(technique)})
    files = [(result_links([name], page), read(name)["what"], read(name)["date"]) for name in used]
    return paragraphs(table(("file", "what", "date"), files), *(_series(series, page) for series in all_series()))


def _series(series: Series, page: str) -> str:
    rows = [(f"`{run.preset}`", *run.cells, run.note or "", result_links([run.file], page)) for run in series.runs]
    commands = "\n".join(run.command for run in series.runs)
    shown = table(("run", *series.columns, "note", "file"), rows)
    return paragraphs(f"### {series.setting}", shown, f"```sh\n{commands}\n```")
