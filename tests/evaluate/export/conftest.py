"""The code of exported models, which transformers copies before it runs it, goes to a folder of the tests."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _code_of_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)  # before that of an earlier test of this process
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            patch.delitem(sys.modules, name)
        yield
