"""The order of the house: which module may import which, and that names of modules tell them apart."""

import ast
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pytest

from tests.support.environment import ROOT

# A module may import, directly or through others, its own room and those before it (CONTRIBUTING.md).
ROOMS = (
    *(
        "core",
        "files",
        "images",
        "kernels",
        "functional",
        "experts",
        "distributed",
        "models",
        "checkpoints",
        "nn",
        "data",
    ),
    *("evaluation", "generation", "model_io", "harness", "checks", "conversion", "figures", "peft", "compression"),
    *("training", "upcycling", "planning", "configs", "api", "typing", "report", "serve", "demo", "commands"),
)
STRANGERS = (("training", "conversion"), ("conversion", "training"))
# Where one file stands for one thing that a user names: more of them do not make a room harder to enter.
LISTS = ("commands",)
MOST_FILES = 16
ONLY_IMPORTER_OF_ORBAX = "moe_jax.checkpoints.orbax_store"
FORBIDDEN = ("torch", "transformers", "tensorflow")

# Here the same name is the same operation on purpose: as a pure function, as a kernel, with parameters, as a config.
CORE = ("functional", "kernels", "experts", "nn", "models")
# `commands/NAME.py` and `api/NAME.py` are the faces of the verb or the room NAME; `configs` is that of all configs,
# `typing` that of types for annotations.
FACES = ("commands", "api", "configs", "typing")
# Names that say what a module is to its room, and not what it is about.
ROLES = {"spec": "options of verbs", "report": "what a job says at its end"}


class Import(NamedTuple):
    """An import statement.

    Attributes:
      module: what is imported, a module of ours by its longest name: `errors` for `from moe_jax import errors`.
      line: of the statement.
      for_types: whether it is under `if TYPE_CHECKING`.
    """

    module: str
    line: int
    for_types: bool


def modules_below(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the library's modules by name."""
    found = {}
    for file in sorted((root / "moe_jax").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(source: str, modules: Mapping[str, object]) -> list[Import]:
    """All imports of a module, those inside functions too."""
    found: list[Import] = []

    def visit(node: ast.AST, for_types: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, for_types)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, for_types) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            for alias in node.names:
                longest = f"{node.module}.{alias.name}"
                found.append(Import(longest if longest in modules else str(node.module), node.lineno, for_types))
        for child in ast.iter_child_nodes(node):
            visit(child, for_types)

    visit(ast.parse(source), False)
    return found


def graph_of(imports: Mapping[str, Sequence[Import]]) -> dict[str, set[str]]:
    """Which modules of ours a module imports when it runs.

    An import of `a.b.c` runs `a.b` too, which counts unless the importer is inside `a.b`, where it has begun already.
    The package itself does not count: it only names what is public.
    """
    graph: dict[str, set[str]] = {}
    for module, statements in imports.items():
        targets = set()
        for statement in statements:
            if statement.for_types:
                continue
            parts = statement.module.split(".")
            for end in range(2, len(parts) + 1):
                package = ".".join(parts[:end])
                inside = package != statement.module and module.startswith(f"{package}.")
                if package in imports and not inside and module != package:
                    targets.add(package)
        graph[module] = targets
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One shortest way round for every group of modules that import each other."""
    reach = {module: reachable(graph, module) for module in graph}
    groups = {frozenset(other for other in reach[module] if module in reach[other]) for module in graph}
    return [shortest(graph, min(group), min(group).__eq__) for group in sorted(groups, key=sorted) if group]


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """What a module imports, directly or through others."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting.extend(graph[module])
    return found


def shortest(graph: Mapping[str, set[str]], start: str, wanted: Callable[[str], bool]) -> list[str]:
    """The shortest chain of imports from a module to one that is wanted."""
    chains, seen = [[start]], set()
    for chain in chains:
        for target in sorted(graph[chain[-1]] - seen):
            if wanted(target):
                return [*chain, target]
            seen.add(target)
            chains.append([*chain, target])
    raise AssertionError(f"{start} reaches nothing that is wanted")


def pointing_up(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yields the imports of a room after one's own, or of a stranger."""
    for module, targets in graph.items():
        room = room_of(module)
        for target in sorted(targets):
            other = room_of(target)
            if room and other and (ROOMS.index(other) > ROOMS.index(room) or (room, other) in STRANGERS):
                yield [module, target]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def words_of(name: str) -> str:
    """A module's name without inflections: `adapting` and `adapt`, `methods` and `method` are the same."""
    words = map(_once, name.strip("_").split("_"))
    return " ".join(re.sub(r"(?<=\w{3})((?<!s)s|ed|ing|ion|e)$", "", word) for word in words)


def _once(word: str) -> str:
    """`planning` -> `planing`, so that `plan` is its beginning; `ss` of `less` stays."""
    return re.sub(r"([bdgklmnprt])\1(?=ed$|ing$)", r"\1", word)


def may_share_a_name(one: str, other: str) -> bool:
    names = [module.split(".")[-1] for module in (one, other)]
    rooms = {room_of(one), room_of(other)}
    if rooms & set(FACES) and len(rooms) > 1:
        return True
    if rooms <= set(CORE) and len(rooms) > 1:
        return True
    return names[0] == names[1] in ROLES and len(rooms) > 1


def confusable(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    by_words: dict[str, list[str]] = {}
    for module in modules:
        by_words.setdefault(words_of(module.split(".")[-1]), []).append(module)
    for alike in by_words.values():
        yield from (pair for pair in itertools.combinations(alike, 2) if not may_share_a_name(*pair))


@pytest.fixture(scope="module")
def imports() -> dict[str, list[Import]]:
    modules = modules_below(ROOT)
    assert {"moe_jax.training.step", "moe_jax.conversion.table", "moe_jax.checkpoints.orbax_store"} <= modules.keys()
    return {module: imports_of(file.read_text(encoding="utf-8"), modules) for module, file in modules.items()}


@pytest.fixture(scope="module")
def graph(imports) -> dict[str, set[str]]:
    return graph_of(imports)


def test_there_is_no_import_cycle(graph):
    found = [" -> ".join(cycle) for cycle in cycles(graph)]
    assert not found, "import cycles; let the lower of the two be given what it needs:\n" + "\n".join(found)


def test_dependencies_point_down(graph):
    found = [" -> ".join(chain) for chain in pointing_up(graph)]
    assert not found, f"imports of a later room, or between {STRANGERS[0]}; rooms {ROOMS}:\n" + "\n".join(found)


def test_every_file_is_in_a_room_and_no_room_is_full():
    package = ROOT / "moe_jax"
    assert [file.name for file in package.glob("*.py")] == ["__init__.py"]
    assert {folder.name for folder in package.iterdir() if (folder / "__init__.py").exists()} == set(ROOMS)
    folders = [folder for folder in package.rglob("*") if folder.is_dir() and folder.name not in LISTS]
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("[!_]*.py"))) for folder in folders}
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_there_is_no_symbolic_link():
    folders = ("moe_jax", "train", "convert", "tests", "benchmarks", "docs", "examples")
    assert not [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_symlink()]


def test_what_is_imported_exists(imports):
    """Also inside functions, where a module that was renamed would be missed only when the function runs."""
    modules = imports.keys()
    files = [file for folder in ("tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    others = {str(file): imports_of(file.read_text(encoding="utf-8"), modules) for file in files}
    found = [f"{name}:{i.line} imports {i.module}" for name, all_ in {**imports, **others}.items() for i in all_
             if _is_of(i.module, "moe_jax") and i.module not in modules]  # fmt: skip
    assert not found, f"modules that do not exist: {found}"


def test_one_file_imports_orbax(imports):
    importers = {module for module, found in imports.items() if any(_is_of(i.module, "orbax") for i in found)}
    assert importers == {ONLY_IMPORTER_OF_ORBAX}


def test_nobody_outside_of_files_asks_whether_a_path_is_in_a_bucket():
    """What is different there is a method or an attribute of `StoragePath`."""
    words = re.compile(r"\b(BucketPath|BucketDirectory|is_in_bucket|in_bucket)\b")
    files = {file.relative_to(ROOT): file for file in (ROOT / "moe_jax").rglob("*.py")}
    found = [str(name) for name, file in files.items() if name.parts[1] != "files" and words.search(file.read_text())]
    assert not found


def test_the_library_imports_no_other_framework(imports):
    found = [f"{module}:{i.line} imports {i.module}" for module, all_ in imports.items() for i in all_
             if any(_is_of(i.module, name) for name in FORBIDDEN)]  # fmt: skip
    assert not found, f"{', '.join(FORBIDDEN)} belong into tests and benchmarks: {found}"


def test_names_tell_modules_apart(imports):
    files = [module for module in imports if not any(other.startswith(f"{module}.") for other in imports)]
    found = [f"{one} and {other}" for one, other in confusable(sorted(files))]
    assert not found, "confusable names; rename a module after what it holds, or join them:\n" + "\n".join(found)


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


# --- the rules themselves -------------------------------------------------------------------------


def graph_from(sources: Mapping[str, str]) -> dict[str, set[str]]:
    return graph_of({module: imports_of(source, sources) for module, source in sources.items()})


def test_imports_inside_functions_count_and_those_for_types_do_not():
    sources = {
        "moe_jax.a": "def f():\n    from moe_jax import b",
        "moe_jax.b": "from moe_jax.c import x",
        "moe_jax.c": "import moe_jax.a",
    }
    assert cycles(graph_from(sources)) == [["moe_jax.a", "moe_jax.b", "moe_jax.c", "moe_jax.a"]]
    sources["moe_jax.c"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import moe_jax.a"
    assert cycles(graph_from(sources)) == []


def test_an_import_runs_the_packages_above_it():
    sources = {
        "moe_jax.room": "from moe_jax.room.inside import x",
        "moe_jax.room.inside": "from moe_jax.room.other import y",
        "moe_jax.room.other": "",
        "moe_jax.outside": "from moe_jax.room.other import y",
    }
    assert cycles(graph_from(sources)) == []
    sources["moe_jax.room.inside"] = "import moe_jax.outside"
    (found,) = cycles(graph_from(sources))
    assert found == ["moe_jax.outside", "moe_jax.room", "moe_jax.room.inside", "moe_jax.outside"]


def test_what_points_up_is_found():
    sources = {
        "moe_jax.functional.f": "",
        "moe_jax.nn.n": "import moe_jax.functional.f\ndef f():\n    import moe_jax.conversion.c",
        "moe_jax.conversion.c": "import moe_jax.nn.n",
        "moe_jax.training.t": "import moe_jax.conversion.c",
        "moe_jax.commands.cli": "import moe_jax.training.t",
    }
    assert list(pointing_up(graph_from(sources))) == [
        ["moe_jax.nn.n", "moe_jax.conversion.c"],
        ["moe_jax.training.t", "moe_jax.conversion.c"],
    ]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("commands.adapt", "commands.adapting", True),
        ("commands.train", "commands.trained", True),
        ("commands.upcycle", "commands.upcycling", True),
        ("compress.deltas", "functional.deltas", True),
        ("compress.method", "compress.methods", True),
        ("peft.merging", "convert.merged", True),
        ("plan", "upcycle.planning", True),
        ("train.run", "demo.run", True),
        ("commands.plan", "plan", False),
        ("functional.routing", "nn.router", False),
        ("functional.attention", "nn.attention", False),
        ("upcycling.spec", "peft.spec", False),
        ("loss", "los", False),
    ],
)
def test_confusable_names(one, other, alike):
    assert bool(list(confusable([f"moe_jax.{one}", f"moe_jax.{other}"]))) == alike
