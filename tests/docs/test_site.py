"""The site builds without a warning; `make docs` executes the notebooks besides."""

import html
import os
import re
import subprocess
import sys

import pytest

from tests.support.environment import ROOT
from tests.support.tiers import long


@long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("myst_nb")
    pytest.importorskip("furo")
    pytest.importorskip("sphinx_copybutton")
    strict = ("--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "-D", "nb_execution_mode=off")
    command = [sys.executable, "-m", "sphinx", *strict, "-d", str(tmp_path / "read"), "docs", str(tmp_path / "html")]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "html" / "reference" / "api" / "moe_jax.functional-routing.html").read_text(encoding="utf-8")
    assert 'id="moe_jax.functional.sort_by_expert"' in page
    # Shapes are as in the source, and names in backticks lead to what they name.
    words = html.unescape(re.sub("<[^>]*>", "", page))
    assert "experts: Int[Array, 'T k']" in words and "jaxlib" not in words
    assert 'href="#moe_jax.functional.Routing"' in page
