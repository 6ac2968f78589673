"""Which tokenizer made the data of a run: the one place where a config gets end of text, vocabulary and tokenizer.

docs/data.md has the rule. It takes milliseconds and no torch. A resumed run keeps what it began with.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.data.shards import SCAN_TOKENS, Shard
from paceline.settings.data import BUILTIN, NAMED_TOGETHER, DataConfig, is_path
from paceline.settings.run import RunConfig
from paceline.text.dataset import check_end_of_text, open_or_convert
from paceline.text.manifest import read_dataset
from paceline.text.tokenizer import (
    END_OF_TEXTS,
    GPT2_FINGERPRINT,
    Identity,
    carried_identity,
    identity_of,
    load_tokenizer,
    trained_size,
)

KNOWN = {name: Identity(name, end, end + 1) for name, end in END_OF_TEXTS.items()}


def following(
    config: RunConfig, stated: Mapping[str, Any], tell: Callable[[str], None] = lambda line: None
) -> RunConfig:
    """`config` with tokenizer, end of text and vocabulary of its data, if there are any. `stated`: the user's settings,
    by dotted names, which the caller puts on top. `tell` gets a line on what has changed."""
    names = ("dir", "train", "tokenizer")
    folder, train, tokenizer = (str(stated.get(f"data.{name}", getattr(config.data, name))) for name in names)
    end = str(stated.get("data.end_of_text", ""))
    opener = int(end) if end.isdecimal() else config.data.end_of_text
    data = replace(config.data, dir=folder, train=train, tokenizer=tokenizer, end_of_text=opener)
    found = _find(data, by_name=True)
    if found is None:
        if _first_shard(data) is not None and "data.end_of_text" not in stated:
            raise ConfigError(
                f"--data.dir {data.dir}: nothing there says which token opens a document (no tokenizer, no manifest, "
                f"not GPT-2's ids); give --data.end-of-text, or the path of the tokenizer as --data.tokenizer"
            )
        return config
    before = (config.data.tokenizer, config.data.end_of_text, config.model.vocab_size)
    if before[:2] == (found.name, found.end_of_text) and before[2] >= found.vocab_size:
        return config
    after = (found.name, found.end_of_text, found.vocab_size)
    each = zip(NAMED_TOGETHER, before, after, strict=True)
    changed = [(name.replace("_", "-"), was, now) for name, was, now in each if was != now and name not in stated]
    if changed:
        news = ", ".join(f"--{name} {now} instead of {was}" for name, was, now in changed)
        tell(f"{data.dir} holds tokens of {found.name}: {news}")
    named = replace(config.data, tokenizer=found.name, end_of_text=found.end_of_text)
    return replace(config, data=named, model=replace(config.model, vocab_size=found.vocab_size))


def check_identity(config: RunConfig) -> None:
    """Raise ConfigError, which names the value to use, where the config contradicts its data."""
    data, vocab_size, found = config.data, config.model.vocab_size, _find(config.data, by_name=False)
    if found is None:
        return
    if data.tokenizer != found.name and not _is_same(data.tokenizer, found):
        raise ConfigError(f"--data.tokenizer {data.tokenizer}: {data.dir} holds tokens of {found.name}; use that")
    check_end_of_text(data, found)
    if vocab_size < found.vocab_size:
        size = f"{found.name} has {found.vocab_size:,} tokens"
        raise ConfigError(f"--model.vocab-size {vocab_size}: {size}; use {found.vocab_size} or more for {data.dir}")


def _is_same(path: str, found: Identity) -> bool:
    if not is_path(path):
        return False
    named = load_tokenizer(None, path)
    return named.fingerprint == found.fingerprint if found.fingerprint else named.name == found.name


def _find(data: DataConfig, *, by_name: bool) -> Identity | None:
    """The tokenizer of the data; None: nothing says. `by_name`: its name does where ids fit and nothing else says."""
    if data.dir == BUILTIN:
        return _named(data.tokenizer)
    folder, shard = Path(data.dir), _first_shard(data)
    if shard is None:
        return None
    if (found := carried_identity(folder) or _in_manifests(folder, shard)) is not None:
        return found
    if is_path(data.tokenizer):
        return _named(data.tokenizer)
    blocks = (shard.tokens[start : start + SCAN_TOKENS] for start in range(0, len(shard), SCAN_TOKENS))
    largest = shard.manifest.max_token if shard.manifest else max((int(block.max()) for block in blocks), default=0)
    end_of_text = END_OF_TEXTS["gpt2"]
    if largest == end_of_text and end_of_text in (shard.tokens[0], data.end_of_text):
        return KNOWN["gpt2"]
    return KNOWN[data.tokenizer] if by_name and largest <= END_OF_TEXTS.get(data.tokenizer, -1) else None


def _named(tokenizer: str) -> Identity:
    if is_path(tokenizer):
        return replace(identity_of(load_tokenizer(None, tokenizer)), name=tokenizer)
    return KNOWN.get(tokenizer) or Identity(tokenizer, 0, trained_size(tokenizer))


def _in_manifests(folder: Path, shard: Shard) -> Identity | None:
    if (dataset := read_dataset(folder)) is not None:
        entry = dataset.tokenizer
        return Identity(entry.name, entry.end_of_text, entry.vocab_size, entry.fingerprint)
    made_by = shard.manifest.tokenizer if shard.manifest else ""
    return KNOWN["gpt2"] if made_by in ("gpt2", GPT2_FINGERPRINT) else None


def _first_shard(data: DataConfig) -> Shard | None:
    """None where there is none, which the run says when it opens its data."""
    paths = sorted(path for path in Path(data.dir).glob(data.train) if path.is_file()) if data.dir != BUILTIN else []
    return open_or_convert(paths[0]) if paths else None
