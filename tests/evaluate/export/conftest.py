"""The code of exported models, which transformers copies before it runs it, goes to a folder of the tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _code_of_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield
