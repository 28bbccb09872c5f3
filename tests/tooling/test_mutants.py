"""The tool that plants bugs plants them where it says, and leaves alone what no test should look at."""

import ast
import types

from tests.support.environment import ROOT
from tests.tooling import mutants, mutate

SOURCE = '''"""Sums: 1 + 1."""

if TYPE_CHECKING:
    import sums

def first(x: "Array", *, axis: int = 0):
    if x < 1 and not x:
        raise ValueError(f"é {x + 1}")
    return total(x[1:], axis=axis)  # é


def total(é, axis): return "é", é * 2, é.sum(axis=1)
'''


def test_every_edit_is_one_edit_of_a_program():
    found = mutants.by_rules("module.py", SOURCE)
    assert len({mutant.identity for mutant in found}) == len(found) == len({mutant.mutated for mutant in found})
    for mutant in found:
        assert ast.unparse(ast.parse(mutant.mutated)) != ast.unparse(ast.parse(SOURCE))
        changed = [
            number
            for number, (old, new) in enumerate(zip(SOURCE.splitlines(), mutant.mutated.splitlines(), strict=True), 1)
            if old != new
        ]
        assert changed == list(mutant.lines)
    changes = {mutant.change for mutant in found}
    assert ("if x < 1 and not x:", "if (x <= 1) and not x:") in changes
    assert ("if x < 1 and not x:", "if (x < 1 or not x):") in changes
    assert ("if x < 1 and not x:", "if x < 1 and (x):") in changes
    assert ('raise ValueError(f"é {x + 1}")', "pass") in changes
    assert ("return total(x[1:], axis=axis)  # é", "return total(x[:], axis=axis)  # é") in changes
    assert ("return total(x[1:], axis=axis)  # é", "return (total(x[1:]))  # é") in changes
    for end in ("é * 2, é.mean(axis=1)", "é * 2, é.sum(axis=0)", "(é / 2), é.sum(axis=1)", "é * (3), é.sum(axis=1)"):
        assert any(new.endswith(end) for _, new in changes), end
    assert not any("x + 2" in new or "1 - 1" in new or "TYPE" in new for _, new in changes)


def test_a_larger_sample_adds_to_a_smaller_one():
    sources = {"a.py": SOURCE, "b.py": "x = 1\n", "c.py": SOURCE.replace("x", "y")}
    small, large = mutants.sample(sources, 6, seed=1), mutants.sample(sources, 9, seed=1)
    assert small == large[:6] and len(large) == 9
    order = [mutant.path for mutant in small]
    assert sorted(order[:3]) == ["a.py", "b.py", "c.py"] and order[3:] == order[:3]
    others = [mutants.sample(sources, 6, seed=seed) for seed in range(2, 9)]
    assert small not in others and len({found[0].path for found in others}) > 1


def test_what_is_written_down_is_about_the_present_code():
    planted, problems = mutants.semantic(ROOT)
    assert planted and not problems
    for mutant in planted:
        ast.parse(mutant.mutated)
    without_file = [pattern for pattern in mutate.TARGETS if not any(ROOT.glob(pattern))]
    assert not without_file
    stale = [
        f"{path}: {before}" for path, before, _ in mutants.equivalents() if before not in (ROOT / path).read_text()
    ]
    assert not stale


def test_tests_are_chosen_after_all_others_have_left_cases_out(tmp_path):
    items = [types.SimpleNamespace(nodeid=name) for name in ("a[0]", "a[1]", "b")]
    choosing = mutate.Chosen(["b", "a[1]"], tmp_path / "output").pytest_collection_modifyitems(items)
    next(choosing)
    assert len(items) == 3
    del items[0]  # as `one_in(2, first=1)` does
    assert next(choosing, None) is None
    assert [item.nodeid for item in items] == ["b", "a[1]"]


def test_what_is_read_as_text_has_a_test_that_reads_it():
    sources = {
        "frozen": "@dataclasses.dataclass(frozen=True)\nclass A: ...\n",
        "kw_only": "@dataclass(kw_only=True)\nclass A: ...\n",
        "strict": "for a, b in zip(x, y, strict=True): ...\n",
        "encoding": 'x = file.read_text(encoding="utf-8")\n',
        "axis": "y = sum(x, axis=1)\n",
    }
    for word, source in sources.items():
        (dropped,) = [m for m in mutants.by_rules("a.py", source) if m.rule == f"dropped keyword {word}"]
        assert bool(dropped.readers) == (word != "axis")
        for reader in dropped.readers:
            file, function = reader.split("[")[0].split("::")
            assert f"def {function}(" in (ROOT / file).read_text()
