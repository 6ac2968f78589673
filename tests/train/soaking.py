"""What a soak has shown, as one file: `make soak` names it in PACELINE_SOAK, and every series adds its row."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.environment import code_version, environment
from paceline.core.schema import to_dict

VARIABLE = "PACELINE_SOAK"
WHAT = (
    "runs struck at random moments and resumed, compared bit for bit with one left in peace; files changed at random; "
    "whole run folders changed in several ways at once"
)


def note_result(series: str, *, began: float, **found: Any) -> None:
    """Add a row; `began` by `time.monotonic`. Without a file to add to, nothing."""
    if not (name := os.environ.get(VARIABLE)):
        return
    path = Path(name)
    result = json.loads(path.read_text()) if path.exists() else {"what": WHAT, "command": "make soak", "series": {}}
    result |= {"date": datetime.now(UTC).date().isoformat(), "environment": dict(environment())}
    result["code_version"] = to_dict(code_version())
    result["series"][series] = {**found, "seconds": round(time.monotonic() - began, 1)}
    path.write_text(json.dumps(result, indent=1) + "\n")
