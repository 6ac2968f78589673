"""Runs whose truth is known: loss curves by formula, with the luck of a seed and noise along the way.

A run's evaluations share an offset (the luck of its seed, part of it common to both arms of a pair) and carry an
Ornstein-Uhlenbeck noise that forgets within a tenth of the run, as neighbouring validations of one model do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq


def power_law(share: ArrayLike) -> np.ndarray:
    """Loss over the share of a run's steps that are done: 8.9 at the start, 3.2 at the end."""
    return 2.4 + 6.5 * (1 + np.asarray(share) / 0.02) ** -0.55


def cooled(share: ArrayLike) -> np.ndarray:
    """The same with a cool-down over the last 40 %, which ends steeply."""
    return power_law(share) - 0.12 * np.clip((np.asarray(share) - 0.6) / 0.4, 0, 1) ** 1.5


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Two arms of `pairs` seeds: the technique lowers the loss by `gain` and makes a step `slower` times as long."""

    curve: Callable[[ArrayLike], np.ndarray] = cooled
    steps: int = 1390
    evaluate_every: int = 125
    step_s: float = 0.8
    pairs: int = 3
    gain: float = 0.01
    slower: float = 1.0
    luck: float = 0.002
    """Standard deviation of a run's offset; half of its square is common to the pair."""
    noise: float = 0.001
    """Standard deviation along a run."""

    @property
    def at(self) -> np.ndarray:
        return np.unique(np.append(np.arange(0, self.steps, self.evaluate_every), self.steps)) / self.steps

    def clock(self, share: ArrayLike, slower: float) -> np.ndarray:
        return np.asarray(share) * self.steps * self.step_s * slower

    @property
    def truth(self) -> float:
        """Seconds at equal loss, with minus without, on the curves without luck and noise."""
        if self.gain >= 0:
            share = brentq(lambda x: self.curve(x) - self.gain - self.curve(1.0), 1e-9, 1.0)
            return float(self.clock(share, self.slower) - self.clock(1.0, 1.0))
        share = brentq(lambda x: self.curve(x) - self.curve(1.0) + self.gain, 1e-9, 1.0)
        return float(self.clock(1.0, self.slower) - self.clock(share, 1.0))

    def losses(self, repeats: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """With and without: (repeats, pairs, evaluations)."""
        shape = (repeats, self.pairs, 1)
        common = rng.normal(0, self.luck / 2**0.5, shape)
        arms = (self.curve(self.at) - self.gain, self.curve(self.at))
        with_, without = (
            arm + common + rng.normal(0, self.luck / 2**0.5, shape) + self._noise(repeats, rng) for arm in arms
        )
        return with_, without

    def _noise(self, repeats: int, rng: np.random.Generator) -> np.ndarray:
        memory = np.exp(-np.diff(self.at, prepend=-np.inf) / 0.1)
        fresh = rng.normal(0, self.noise, (repeats, self.pairs, len(memory)))
        noise = np.zeros_like(fresh)
        for index, kept in enumerate(memory):
            noise[..., index] = kept * noise[..., index - 1] + (1 - kept**2) ** 0.5 * fresh[..., index]
        return noise
