"""One browser for all tests of pages."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, find_browser, started_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium on the PATH")
    with started_browser(program) as started:
        yield started
