"""A diff falls apart into parts that cover it once, make sense by themselves, and are named after techniques."""

import pytest

from lab.ablate.pretended import small
from paceline.core.errors import ConfigError, UserError
from paceline.core.schema import changes
from paceline.lab.ablate.parts import NEVER_A_PART, Part, idle, judged_alike, parts_of, picked
from paceline.lab.technique import with_values
from paceline.recipes.presets import preset
from paceline.recipes.records import PUBLIC
from paceline.settings.run import RunConfig

NEIGHBOURS = [(result.predecessor, name) for name, result in PUBLIC.items() if result.predecessor]


def both(before: str, after: str, *, full_size: bool = False) -> tuple[RunConfig, RunConfig]:
    base, full = (preset(before), preset(after)) if full_size else (small(before), small(after))
    return judged_alike(base, full), full


def keys(before: str, after: str) -> list[str]:
    return [part.key for part in parts_of(*both(before, after))]


@pytest.mark.parametrize(
    ("before", "after", "full_size"), [(*two, False) for two in NEIGHBOURS] + [(*two, True) for two in NEIGHBOURS[-2:]]
)
def test_all_parts_together_are_the_diff_and_each_field_is_in_one(before: str, after: str, full_size: bool) -> None:
    base, full = both(before, after, full_size=full_size)
    parts = parts_of(base, full)
    fields = [field for part in parts for field in part.after]
    assert sorted(fields) == sorted(c.field for c in changes(base, full) if not c.field.startswith(NEVER_A_PART))
    everything = {field: value for part in parts for field, value in part.after.items()}
    assert with_values(base, {**everything, "preset": full.preset}) == full


def test_the_parts_of_record_18() -> None:
    assert keys("r17-sparse-values", "r18-softcap") == [
        *("padded-tables", "softcap-15", "selective-bf16", "cooldown-share"),
        *("no-coordinate-descent", "no-skipped-guards", "no-expandable-segments"),
    ]


def test_of_two_names_for_a_change_the_one_that_came_is_taken() -> None:
    assert "value-embeddings" in keys("r13-window-warmup", "r14-value-embed")  # not no-value-residual
    assert "sparse-values" in keys("r16-block-mask", "r17-sparse-values")  # not no-mirrored-values


def test_at_a_sixteenth_a_technique_is_still_known_by_its_full_size() -> None:
    """Six heads of 128 are heads of 16 there."""
    part = next(part for part in parts_of(*both("r04-muon", "r05-modern-arch")) if part.key == "wide-heads")
    assert dict(part.before) == {"model.num_heads": 12, "model.head_dim": 8}


def test_what_is_only_accepted_together_stays_together() -> None:
    """Under a tied head, table and head are one matrix."""
    assert "padded-head+padded-tables" in keys("r04-muon", "r05-modern-arch")


def test_what_no_technique_explains_is_the_rest() -> None:
    rest = parts_of(*both("r13-window-warmup", "r14-value-embed"))[-1]
    assert (rest.key, list(rest.after)) == ("rest", ["optim.schedule.cooldown_steps"])


def test_a_part_that_would_have_nothing_to_do_says_so() -> None:
    base, full = both("r13-window-warmup", "r14-value-embed")
    chunks = next(part for part in parts_of(base, full) if part.key == "value-chunks")
    assert chunks.without(full).model.value_storage == "tables"
    with pytest.raises(ConfigError, match=r"value-chunks has nothing to do where model\.value_path is not layerwise"):
        chunks.alone(base)


def test_leaving_a_part_out_and_adding_it_change_its_fields_alone() -> None:
    base, full = both("r17-sparse-values", "r18-softcap")
    for part in parts_of(base, full):
        assert {c.field for c in changes(part.without(full), full)} == set(part.after)
        assert {c.field for c in changes(base, part.alone(base))} == set(part.after)


@pytest.mark.parametrize(
    ("key", "device", "ranks", "why"),
    [
        ("no-skipped-guards", "cuda", 1, "compiled"),
        ("no-expandable-segments", "cpu", 1, "GPU"),
        ("no-expandable-segments", "cuda", 1, None),
        ("softcap-15", "cpu", 1, None),
    ],
)
def test_parts_that_cannot_show_here(key: str, device: str, ranks: int, why: str | None) -> None:
    base, full = both("r17-sparse-values", "r18-softcap")
    reason = idle(next(p for p in parts_of(base, full) if p.key == key), full, device=device, ranks=ranks)
    assert reason is None if why is None else why in (reason or "")


def test_bucket_views_need_several_processes() -> None:
    base, full = both("r15-unet-values", "r16-block-mask")
    views = next(part for part in parts_of(base, full) if part.key == "bucket-views")
    assert "between processes" in (idle(views, full, device="cpu", ranks=1) or "")
    assert idle(views, full, device="cpu", ranks=2) is None


def test_some_parts_are_picked_by_name() -> None:
    parts = [Part("a+b", "A; B", {}, {}), Part("c", "C", {}, {})]
    assert picked(parts, None) == parts
    assert picked(parts, "b") == picked(parts, " a+b ") == parts[:1]
    with pytest.raises(UserError, match=r"--only d: no part of this diff; there are a\+b, c"):
        picked(parts, "c,d")
