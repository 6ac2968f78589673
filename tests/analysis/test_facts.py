"""How facts of a run are put into words."""

import pytest

from paceline.analysis.facts import version_line
from paceline.core.environment import CodeVersion


@pytest.mark.parametrize(
    ("commit", "dirty", "words"),
    [
        (None, None, "paceline 0.2.0"),
        ("0123456789abcdef", False, "paceline 0.2.0, commit 0123456789"),
        ("0123456789abcdef", True, "paceline 0.2.0, commit 0123456789, with changes"),
    ],
)
def test_a_version_has_its_commit_and_whether_it_was_changed_as_far_as_known(
    commit: str | None, dirty: bool | None, words: str
) -> None:
    assert version_line(CodeVersion(version="0.2.0", commit=commit, dirty=dirty)) == words
