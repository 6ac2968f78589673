"""Run folders with a card and a config, as far as comparisons and boards read them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.environment import CodeVersion
from paceline.core.schema import to_dict
from paceline.lab.technique import with_values
from paceline.metrics.card import CARD_FILE, RunCard, card_diff
from paceline.recipes.presets import preset

STEP_S = 0.5


def write_run(
    folder: Path,
    *,
    seed: int,
    loss: float,
    softcap: float = 15.0,
    steps: int = 100,
    settings: Mapping[str, Any] | None = None,
    **values: Any,
) -> Path:
    """A finished run of the demo preset, validated at half of its steps (0.2 above its end) and at the end. `settings`
    are further ones by dotted names, `values` those of the card."""
    demo = preset("demo")
    own = {"seed": seed, "steps": steps, "track": values.get("track"), "model.softcap": softcap, **(settings or {})}
    config = with_values(demo, own)
    rows = ((0, 7.6, None, 0.0, 3.0), (steps // 2, loss + 0.2, None, steps / 2 * STEP_S, 40.0))
    card = RunCard(
        name=folder.name,
        preset="demo",
        track=None,
        seed=seed,
        finished=True,
        steps=steps,
        steps_done=steps,
        tokens=steps * config.batch.tokens,
        parameters=1_574_932,
        val_loss=loss,
        train_s=steps * STEP_S,
        device="cpu",
        data_fingerprint="6f0c2b1de1a94f77",
        diff=card_diff(demo, config),
        code_version=CodeVersion(version="0.1.0", commit="0123456789" * 4, dirty=False),
        environment={"cpu": "A processor", "cores": 2},
        started="2025-01-04T10:00:00+00:00",
        losses=(*rows, (steps, loss, None, steps * STEP_S, 80.0)),
    )
    folder.mkdir(parents=True)
    for name, value in (("config.json", config), (CARD_FILE, dataclasses.replace(card, **values))):
        (folder / name).write_text(json.dumps(to_dict(value)))  # unlike a real run, without waiting for the disk
    return folder


def write_group(runs: Path, name: str, losses: list[float], **values: Any) -> list[Path]:
    """A run for each loss, with seeds from 0."""
    return [write_run(runs / f"{name}-{seed}", seed=seed, loss=loss, **values) for seed, loss in enumerate(losses)]
