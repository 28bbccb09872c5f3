"""A bucket for tests, `gs://bucket`, which the true clients reach over HTTP."""

from collections.abc import Iterator

import pytest

from moe_jax.files import objects
from tests.files.remote.fake_bucket import FakeBucket, serving


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBucket]:
    with serving() as fake:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", fake.url)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        monkeypatch.setenv(objects.SECONDS, "20")
        objects.objects_of.cache_clear()
        yield fake
        objects.objects_of.cache_clear()
