"""How a page is read, and what is added to its commands."""

from pathlib import Path

import pytest

from journeys import pages
from journeys.pages import Shown, shown_on
from journeys.smaller import smaller

PAGE = """# A page

<!-- Written by `paceline never`. -->
Type `paceline train`, then `paceline.load("latest")`; `config.json` is no command.

```
$ paceline diff a b
switch  a
…
$ paceline presets   # all of them
```

```
src/
  cli.py
paceline sample latest \\
  --prompt "Return the"
```

```text
Return the
```

```sh
unknown --flag  # a comment
# only a comment
```

- in a list

  ```python
  import paceline
  ```

The end of the answer:

```text
not of the block above
```
"""


def test_what_is_found_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    assert shown_on(tmp_path / "page.md") == [
        Shown("page.md", "paceline train", inline=True),
        Shown("page.md", 'paceline.load("latest")', "python", inline=True),
        Shown("page.md", "paceline diff a b", output=("switch  a", "…")),
        Shown("page.md", "paceline presets"),
        Shown("page.md", 'paceline sample latest    --prompt "Return the"', output=("Return the",)),
        Shown("page.md", "unknown --flag"),
        Shown("page.md", "import paceline\n", "python"),
    ]


@pytest.mark.parametrize(
    ("shown", "run"),
    [
        ("diff r17-sparse-values r18-softcap", "diff r17-sparse-values r18-softcap"),
        ("compare", "compare --help"),
        ("train --resume RUN", "train --resume latest"),
        ("serve latest", "serve latest --port 0"),
        ("evaluate latest --tasks a b", "evaluate latest --tasks a b --tasks-dir tasks/"),
        ("data prepare books/ --out x", "data prepare books/ --out x --tokenizer bpe-2048"),
        (
            "train demo --steps 2",
            "train demo --steps 2 --steps 2 --evaluate.tokens 256",
        ),
        (
            "train r18-softcap --steps 95",
            "train r18-softcap --steps 95 --steps 2 --batch.tokens 256 --batch.sequence-tokens 128 "
            "--evaluate.tokens 256 --scale 1/16 --data.dir data/fineweb10B",
        ),
    ],
)
def test_what_is_added_to_a_command(shown: str, run: str) -> None:
    assert " ".join(smaller(shown.split(), inline=True)) == run
