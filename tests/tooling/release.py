"""Looks at what is released: names of files, and versions. Needs nothing but Python.

python -m tests.tooling.release names dist/*          # names in archives that Windows could not have
python -m tests.tooling.release tag [v0.1.0]          # what the tag, the package, the changelog and the citation say
"""

import collections
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
# https://learn.microsoft.com/windows/win32/fileio/naming-a-file: with 260 characters for a whole path, this leaves 120
# for the folder that a checkout or an environment is in.
LONGEST = 140
_FORBIDDEN = re.compile(r'[<>:"\\|?*\x00-\x1f]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


def not_for_windows(paths: Iterable[str]) -> Iterator[str]:
    """Yields a line for each path that Windows could not have, or not beside another; paths have `/`."""
    alike = collections.defaultdict(set)
    for path in paths:
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            alike[str(folder).casefold()].add(str(folder))
        if len(path) > LONGEST:
            yield f"{path}: longer than {LONGEST} characters"
        for name in PurePosixPath(path).parts:
            if found := _FORBIDDEN.search(name):
                yield f"{path}: {found[0]!r} in a name"
            if _RESERVED.fullmatch(name):
                yield f"{path}: {name} is the name of a device"
            if name.endswith((" ", ".")):
                yield f"{path}: {name!r} ends with a space or a dot"
    for names in alike.values():
        if len(names) > 1:
            yield f"{', '.join(sorted(names))}: equal but for case"


def names_in(archive: Path) -> list[str]:
    """Returns the names of an archive's files."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as source:
        return source.getnames()


def version() -> str:
    """Returns the package's version."""
    return _only(r'^__version__ = "(.+)"$', ROOT / "moe_jax" / "__init__.py")


def cited_version() -> str:
    """Returns the version of CITATION.cff."""
    return _only(r"^version: (.+)$", ROOT / "CITATION.cff")


def newest_change() -> tuple[str, str]:
    """Returns the version and the date of the first section of CHANGELOG.md that has a version."""
    found = re.search(r"^## (\d\S*) - (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert found, "CHANGELOG.md has no section such as `## 0.1.0 - 2026-01-31`"
    return found[1], found[2]


def problems_of_tag(tag: str | None) -> Iterator[str]:
    """Yields a line for each thing that is not as a release with this tag needs it; None: not a release yet."""
    newest, date = newest_change()
    for place, found in (("CHANGELOG.md", newest), ("CITATION.cff", cited_version())):
        if found != version():
            yield f"{place}: version {found}, but the package has {version()}"
    if tag is not None and tag != f"v{version()}":
        yield f"tag {tag}: expected v{version()}"
    if tag is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        yield f"CHANGELOG.md: {newest} has no date, but {date!r}; write the day of the release"


def _only(pattern: str, file: Path) -> str:
    (found,) = re.findall(pattern, file.read_text("utf-8"), re.MULTILINE)
    return found


def main(what: str = "", *given: str) -> int:
    """Prints what is wrong; returns 1 if anything is, and 2 for words that ask for nothing."""
    if (what, len(given)) not in (("tag", 0), ("tag", 1)) and (what != "names" or not given):
        print(f"expected names ARCHIVE ..., or tag [v0.1.0], got {' '.join((what, *given)) or 'nothing'}")
        return 2
    if absent := [one for one in given if what == "names" and not Path(one).is_file()]:
        print(f"no archive at {', '.join(absent)}")
        return 2
    if what == "names":
        archives = [(Path(one).name, names_in(Path(one))) for one in given]
        problems = [f"{name}: {line}" for name, names in archives for line in not_for_windows(names)]
        for name, names in archives:
            print(f"{name}: {len(names)} names, the longest of {max(map(len, names))} characters")
    else:
        problems = list(problems_of_tag(given[0] if given else None))
    print("\n".join(problems), end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
