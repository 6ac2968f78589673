"""The page at `/`: one document without requests of its own but those for text. Its script writes text as text only."""

import base64
import hashlib
import html
from functools import cache
from importlib.resources import files


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


def page(name: str, max_tokens: int) -> str:
    """`name`: of the model. It comes last: it may hold anything."""
    filled = _asset("page.html").replace("{{style}}", _asset("page.css")).replace("{{script}}", _asset("page.js"))
    return filled.replace("{{max_tokens}}", str(max_tokens - 1)).replace("{{name}}", html.escape(name))
