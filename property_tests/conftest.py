"""Profiles, options, and which tests an option selects.

HYPOTHESIS_PROFILE=dev     quick, other examples every time
HYPOTHESIS_PROFILE=ci      the default: the same examples every time
HYPOTHESIS_PROFILE=deep    many examples, for a night

--adapter MODULE:FUNCTION  hold another project's merge function to the laws (see laws.py and adapters.py)
--tokenizer PATH           run the drift and template properties on a tokenizer.json, or a folder that has one
--template FILE            with this chat template instead of the folder's own
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

from property_tests import adapters, chats

PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # "explain" costs more than it tells here
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
COMMON = {"deadline": None, "phases": PHASES, "suppress_health_check": SLOW}
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, **COMMON)
settings.register_profile("deep", max_examples=5000, **COMMON)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("harnessrl")
    group.addoption("--adapter", metavar="MODULE:FUNCTION", help="a merge function to hold to the laws")
    group.addoption("--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder that has one")
    group.addoption("--template", metavar="FILE", help="a chat template (jinja); needs --tokenizer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An option asks a question about one thing: run the tests that answer it, and no others."""
    wanted = {name for name in ("adapter", "tokenizer") if config.getoption(name)}
    if config.getoption("template") and "tokenizer" not in wanted:
        raise pytest.UsageError("--template needs --tokenizer")
    if wanted:
        items[:] = [item for item in items if wanted & set(getattr(item, "fixturenames", ()))]
    if PROFILE == "deep":
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def adapter(request: pytest.FixtureRequest) -> object:
    """The merge function under test: ours, or the one that --adapter names."""
    name = request.config.getoption("adapter")
    if not name:
        return adapters.ours
    try:
        return adapters.load(name)
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(f"--adapter {name}: {error}") from error


@pytest.fixture(scope="session")
def tokenizer(request: pytest.FixtureRequest) -> object:
    """What --tokenizer and --template name; without the option the test that asks is skipped."""
    path = request.config.getoption("tokenizer")
    if not path:
        pytest.skip("no --tokenizer was given")
    try:
        return chats.load(path, request.config.getoption("template"))
    except (OSError, ValueError, ImportError) as error:
        raise pytest.UsageError(f"--tokenizer {path}: {error}") from error
