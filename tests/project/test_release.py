"""What a release needs, as far as it is seen without building: versions that agree, workflows, names of files."""

import os
import re
import subprocess
import tomllib

import pytest

from tests.support.environment import ROOT
from tests.tooling.release import cited_version, main, newest_change, not_for_windows, problems_of_tag, version

yaml = pytest.importorskip("yaml")

GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAPERS = {"arXiv:2503.01359", "arXiv:2401.02731", "arXiv:2503.06881", "arXiv:2411.08212"}


def read(path):
    return yaml.safe_load(path.read_text("utf-8"))


def pinned(name):
    (found,) = (one for one in PROJECT["optional-dependencies"]["test"] if one.startswith((f"{name}==", f"{name}[")))
    return found.partition("==")[2]


def test_versions_of_changelog_and_citation_are_the_packages():
    assert newest_change()[0] == cited_version() == version()
    assert not list(problems_of_tag(None))


def test_a_tag_must_be_of_the_version_and_the_changelog_have_its_day(monkeypatch):
    monkeypatch.setattr("tests.tooling.release.newest_change", lambda: (version(), "2026-01-31"))
    assert not list(problems_of_tag(f"v{version()}"))
    (wrong,) = problems_of_tag("v9.9")
    assert f"expected v{version()}" in wrong
    monkeypatch.setattr("tests.tooling.release.newest_change", lambda: ("9.9", "Unreleased"))
    other, undated = problems_of_tag(f"v{version()}")
    assert "CHANGELOG.md: version 9.9" in other and "no date" in undated


def test_the_citation_names_the_papers_and_the_licence():
    cited = read(ROOT / "CITATION.cff")
    assert {one["value"] for paper in cited["references"] for one in paper["identifiers"]} == PAPERS
    assert all(paper["authors"] and paper["url"].endswith(paper["identifiers"][0]["value"].partition(":")[2])
               for paper in cited["references"])  # fmt: skip
    assert cited["license"] == PROJECT["license"] and cited["cff-version"] == "1.2.0"


def test_workflows_run_what_is_run_here_on_every_python_that_is_declared():
    test = read(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]
    declared = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert test["strategy"]["matrix"]["python"] == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert test["steps"][-1]["run"] == ".ci/run"


def test_only_the_job_that_publishes_may_and_it_runs_nothing_of_ours():
    release = read(GITHUB / "workflows" / "release.yml")
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert release["permissions"] == {"contents": "read"} and "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"])
    assert any(step.get("run", "").startswith(".ci/release ") for step in build["steps"])
    # YAML reads the key `on` as true.
    assert release[True] == {"push": {"tags": ["v*"]}}


@pytest.mark.parametrize("name", ["run", "release"])
def test_programs_of_the_workflows_are_programs(name):
    assert os.access(ROOT / ".ci" / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / ".ci" / name], check=True)


def test_forms_of_issues_ask_for_what_is_needed():
    for name in ("bug", "feature"):
        form = read(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
        ids = [part["id"] for part in form["body"]]
        assert form["name"] and form["description"] and len(set(ids)) == len(ids)
        assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_hooks_are_of_the_versions_that_are_pinned():
    (ruff,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert ruff["rev"] == f"v{pinned('ruff')}"


def test_every_file_can_be_on_windows():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a checkout")
    assert len(names := done.stdout.split("\0")[:-1]) > 500
    assert not list(not_for_windows(names))


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["a/b:c.txt"], "':' in a name"),
        (["a/b?"], "'?' in a name"),
        (["nul.json"], "name of a device"),
        (["a/COM1/x"], "name of a device"),
        (["a./b"], "ends with"),
        (["a/README.md", "a/readme.md"], "equal but for case"),
        (["Aux1/b", "aux1/c"], "equal but for case"),
        (["a" * 141], "longer than"),
    ],
)
def test_names_that_windows_cannot_have_are_found(paths, said):
    (line,) = not_for_windows(paths)
    assert said in line
    assert not list(not_for_windows(["console/com10.py", ".github/x", "a-b_c"]))


@pytest.mark.parametrize("words", [[], ["tags"], ["tag", "v1", "v2"], ["names"], ["names", "nothing.whl"]])
def test_words_that_ask_for_nothing_are_no_release(words, capsys):
    assert main(*words) == 2
    assert capsys.readouterr().out.count("\n") == 1
