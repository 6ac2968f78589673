"""The page at `/`: one document without requests of its own but those for text. Its script writes text as text only."""

import base64
import contextlib
import hashlib
import html
from functools import cache
from importlib.resources import files

from paceline.core.errors import RunError
from paceline.core.units import human_count
from paceline.evaluate.load import LoadedRun
from paceline.metrics.card import read_card


@cache
def _asset(name: str) -> str:
    return (files("paceline.evaluate.serving") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


@cache
def policy() -> str:
    """Nothing runs but our script, whatever a model or a run's name says."""
    return (
        f"default-src 'none'; script-src {_hash(_asset('page.js'))}; style-src {_hash(_asset('page.css'))}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def facts(run: LoadedRun) -> str:
    """What is served, in a line: the checkpoint's step, the model's size, the newest validation up to that step."""
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    found = [f"step {run.step:,} of {run.config.steps:,}", f"{human_count(parameters)} parameters"]
    with contextlib.suppress(RunError):
        losses = [row for row in read_card(run.folder.path).losses if row[0] is not None and row[0] <= run.step]
        if losses and losses[-1][1] is not None:
            at = "" if losses[-1][0] == run.step else f" at step {losses[-1][0]:,}"
            found.append(f"validation loss {losses[-1][1]:.4f}{at}")
    return ", ".join(found)


def page(name: str, max_tokens: int, about: str) -> str:
    """`name`: of the model. It comes last: it may hold anything."""
    filled = _asset("page.html").replace("{{style}}", _asset("page.css")).replace("{{script}}", _asset("page.js"))
    for field, value in {"max_tokens": str(max_tokens - 1), "facts": about, "name": name}.items():
        filled = filled.replace("{{" + field + "}}", html.escape(value))
    return filled
