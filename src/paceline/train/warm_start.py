"""A run that begins with the weights of another (`--init-from`): which, whether they fit, and how they are filled in.

Every rank reads the weights by itself and keeps its rows; their hash, of the bits that the run starts with, is compared
between ranks and goes into checkpoints and onto the card.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.store import FORMATS
from paceline.core.errors import ConfigError, RunError
from paceline.core.schema import changes
from paceline.evaluate.export.reading import exported_model, is_export, read_export, same_tokenizer
from paceline.evaluate.load import read_saved
from paceline.metrics.card import InitFrom
from paceline.parallel.embedding_sync import put_rows
from paceline.parallel.memory_fit import Fit
from paceline.settings.model import ModelConfig
from paceline.settings.run import RunConfig
from paceline.settings.spec import describe
from paceline.text.tokenizer import Tokenizer, carried_identity
from paceline.train.assemble import Assembly, assemble_to_fit
from paceline.train.run import Launch


@dataclass(frozen=True)
class InitialWeights:
    """Read and found to fit, in the formats of this run's parameters."""

    origin: InitFrom
    weights: Mapping[str, Tensor]
    same_tokenizer: Callable[[Tokenizer | None], bool | None]  # None: it cannot be told
    notes: tuple[str, ...]


def assemble_filled(launch: Launch) -> tuple[Assembly, Fit, InitFrom, tuple[str, ...]]:
    """A run at its first step; where its weights came from, and what to note of them."""
    initial = read_weights(str(launch.options.init_from), launch.config)
    run, fit = assemble_to_fit(launch.resolved, launch.machine, launch.ranks)
    return run, fit, initial.origin, fill(run, initial)


def read_weights(where: str, config: RunConfig) -> InitialWeights:
    """Of a run, as it would be evaluated, or of an export. Raises RunError before a model is made."""
    folder, model = Path(where), config.model
    if is_export(folder):
        weights, theirs, step = read_export(folder, model), exported_model(folder), None
        name = folder.resolve().name

        def same(tokenizer: Tokenizer | None) -> bool | None:
            return same_tokenizer(folder, tokenizer, config.data.tokenizer)
    else:
        saved = read_saved(where)
        weights, theirs, step = dict(saved.checkpoint.model), saved.config.model, saved.checkpoint.step
        name, carried = saved.folder.path.resolve().name, carried_identity(saved.folder.path)
        identity = (carried.names if carried is not None else None) or frozenset({saved.config.data.tokenizer})

        def same(tokenizer: Tokenizer | None) -> bool | None:
            known = config.data.tokenizer if tokenizer is None else tokenizer.fingerprint
            return known in identity or (tokenizer is not None and identity == {tokenizer.name})

    fitting = _fitting(f"--init-from {where}", weights, model)
    origin = InitFrom(name=name, step=step, fingerprint=_fingerprint(fitting))
    return InitialWeights(origin, fitting, same, _differences(name, theirs, model))


def _fitting(at: str, weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Every parameter of the model and no others, in its shape, which must be the same, and its format."""
    wanted = {spec.name: (spec.shape, FORMATS[spec.dtype]) for spec in describe(model).parameters}
    cure = "use the model settings that they were trained with"
    for kind, names in (("lacks", set(wanted) - set(weights)), ("has", set(weights) - set(wanted))):
        if names:
            place = "which this model has" if kind == "lacks" else "for which this model has no place"
            raise RunError(f"{at}: {kind} {min(names)} ({len(names)} such tensors), {place}; {cure}")
    for name, (shape, _) in wanted.items():
        if (there := tuple(weights[name].shape)) != shape:
            raise RunError(f"{at}: {name} is {there} there and {shape} here; {cure}")
    return {name: weights[name].to(dtype) for name, (_, dtype) in wanted.items()}


def _fingerprint(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _differences(name: str, theirs: ModelConfig | None, ours: ModelConfig) -> tuple[str, ...]:
    """Settings of the model that shapes do not show."""
    return tuple(
        f"weights of {name}, whose model.{change.field} was {change.before}, not {change.after}"
        for change in (changes(theirs, ours) if theirs is not None else ())
        if change.field != "loss_terms" and not change.field.endswith("_init")
    )


def fill(run: Assembly, initial: InitialWeights) -> tuple[str, ...]:
    """Put the weights into the model, on each rank its rows; what to note. All ranks call it."""
    mine, first = initial.origin.fingerprint, run.ranks.from_first(lambda: initial.origin.fingerprint)
    if mine != first:
        raise ConfigError(f"--init-from {initial.origin.name}: rank {run.ranks.rank} has other weights than rank 0")
    same = initial.same_tokenizer(run.tokenizer)
    if same is False:
        why = f"was trained with another tokenizer than that of --data.dir {run.config.data.dir}"
        raise ConfigError(f"--init-from {initial.origin.name}: {why}; use data made with its own (data prepare)")
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            put_rows(parameter.detach(), initial.weights[name])
    unsure = () if same else (f"the tokenizer of {initial.origin.name} could not be compared",)
    return (f"begins with the weights of {initial.origin}", *initial.notes, *unsure)
