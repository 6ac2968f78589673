"""The presets by name. A preset is a function without arguments that returns a whole RunConfig."""

import difflib
from collections.abc import Callable

from paceline.core.errors import ConfigError
from paceline.recipes import records
from paceline.recipes.demo import demo
from paceline.train.config import RunConfig

PRESETS: dict[str, Callable[[], RunConfig]] = {
    "demo": demo,
    "r04-muon": records.r04_muon,
    "r05-modern-arch": records.r05_modern_arch,
    "r13-window-warmup": records.r13_window_warmup,
    "r14-value-embed": records.r14_value_embed,
    "r15-unet-values": records.r15_unet_values,
    "r16-block-mask": records.r16_block_mask,
    "r17-sparse-values": records.r17_sparse_values,
    "r18-softcap": records.r18_softcap,
}


def preset(name: str) -> RunConfig:
    """The preset called `name`, or an error that suggests the nearest."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PRESETS)}"
        raise ConfigError(f"preset {name!r} does not exist; {hint}")
    return PRESETS[name]()
