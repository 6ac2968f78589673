"""Every random state of a process as tensors, and back. A run draws from generators of its own, keyed by seed and
purpose, and leaves these alone; what a user's code draws beside it goes on as if there had been no interruption."""

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import RunError

NUMPY_WORDS = 624


def random_states() -> dict[str, Tensor]:
    """torch's of the CPU and of the current GPU, numpy's and Python's; the last two may keep half of a normal pair."""
    _, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    version, words, next_normal = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), int(position), int(has_normal)]),
        "numpy_normal": torch.tensor(float(normal), dtype=torch.float64),
        "python": torch.tensor([version, *words]),
        "python_normal": torch.tensor(math.nan if next_normal is None else next_normal, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """What `random_states` gave, or nothing, where a checkpoint has none; a GPU's only where there is one."""
    if not states:
        return
    try:
        torch.set_rng_state(states["torch"])
        *keys, position, has_normal = states["numpy"].tolist()
        if not 0 <= position <= NUMPY_WORDS:  # numpy would read beyond its words
            raise ValueError(f"numpy's position is {position}")
        np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_normal, states["numpy_normal"].item()))
        version, *words = states["python"].tolist()
        next_normal = states["python_normal"].item()
        random.setstate((version, tuple(words), None if math.isnan(next_normal) else next_normal))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (KeyError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise RunError(f"random states: not those of a process ({reason}); resume from another checkpoint") from None


def of_all_ranks(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Those of several ranks, in rank order, as a checkpoint keeps them."""
    return {f"{rank}/{name}": state for rank, own in enumerate(states) for name, state in own.items()}


def of_rank(states: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """One rank's part of `of_all_ranks`; nothing for a rank that was not there."""
    return {name.removeprefix(f"{rank}/"): state for name, state in states.items() if name.startswith(f"{rank}/")}
