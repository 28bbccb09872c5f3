"""What the documents and the code say of each other: sections that are cited, rooms and files that are named."""

import re
import tomllib

import pytest

from tests.support.environment import ROOT

CITATION = re.compile(r"methods\.md (\d(?:\.\d)?(?:(?:-|, | and )\d(?:\.\d)?)*)")


def cited_sections() -> dict[str, list[str]]:
    """Files by the section that they cite; of a range, its two ends."""
    cited: dict[str, list[str]] = {}
    for folder in ("moe_jax", "convert", "benchmarks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.name == "test_documents.py":
                continue
            for citation in CITATION.findall(file.read_text()):
                for section in re.findall(r"\d(?:\.\d)?", citation):
                    cited.setdefault(section, []).append(str(file.relative_to(ROOT)))
    return cited


def test_every_section_that_a_docstring_cites_is_in_the_methods():
    sections = re.findall(r"^#+ (\d(?:\.\d)?)\.? ", (ROOT / "docs" / "methods.md").read_text(), re.MULTILINE)
    cited = cited_sections()
    assert len(cited) > 8 and len(sections) == len(set(sections))
    assert not {section: files for section, files in cited.items() if section not in sections}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_files_that_a_document_names_exist(name):
    text = (ROOT / name).read_text()
    named = set(re.findall(r"\]\(([^)#:]+)\)", text))
    named |= set(re.findall(r"`((?:moe_jax|convert|train|tests|benchmarks|docs)/[\w/.]*)`", text))
    assert named and not {path for path in named if "NAME" not in path and not (ROOT / path).exists()}


def test_the_license_is_the_one_that_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
