"""Small bugs to plant: each is one edit of one source file, made by a rule or written down by hand.

Rules walk over the syntax tree of a file and change one expression or statement at a time: a comparison, an arithmetic
operator, a constant, a condition, a keyword argument, an axis, a bound of a slice, a function for its opposite, a
dropped statement. The edit is made in the text, so that the rest of the file keeps its lines. What is only said to
people or to type checkers (docstrings, messages, annotations) is left alone.

`semantic_mutants.toml` holds bugs that no rule would make; `equivalent_mutants.toml` those that no test can tell from
the original, each with the reason.
"""

import ast
import builtins
import copy
import dataclasses
import hashlib
import itertools
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
OPPOSITES = [
    ("min", "max"), ("minimum", "maximum"), ("any", "all"), ("argmin", "argmax"), ("floor", "ceil"), ("zeros", "ones"),
    ("zeros_like", "ones_like"), ("sum", "mean"), ("sin", "cos"), ("psum", "pmean"), ("pmax", "pmin"),
    ("silu", "gelu"), ("softmax", "log_softmax"), ("startswith", "endswith"), ("repeat", "tile"),
]  # fmt: skip
OPPOSITE = {**dict(OPPOSITES), **{b: a for a, b in OPPOSITES}}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One edit: in `path` (from the root of the checkout) the text from `start` to `end` becomes `new`."""

    path: str
    rule: str
    description: str
    start: int
    end: int
    new: str
    source: str = dataclasses.field(repr=False)

    @property
    def mutated(self) -> str:
        return self.source[: self.start] + self.new + self.source[self.end :]

    @property
    def lines(self) -> range:
        """Numbers of the lines that change, from 1 on."""
        first = self.source.count("\n", 0, self.start) + 1
        return range(first, first + self.source.count("\n", self.start, self.end) + 1)

    @property
    def change(self) -> tuple[str, str]:
        """The lines that change, before and after, without their indentation."""
        begin = self.source.rfind("\n", 0, self.start) + 1
        end = self.source.find("\n", self.end)
        end = len(self.source) if end < 0 else end
        return self.source[begin:end].strip(), (
            self.source[begin : self.start] + self.new + self.source[self.end : end]
        ).strip()

    @property
    def readers(self) -> list[str]:
        """Tests that read what changes as text, which no measurement of the lines that run can tell."""
        if "dataclass(" in self.change[0]:
            return [
                "tests/project/test_records.py::test_dataclasses_are_frozen_and_made_by_keyword",
                "tests/project/test_interface.py::test_defaults_are_those_of_the_table",
            ]
        if self.rule == "dropped keyword strict":
            return ["tests/project/test_lint.py::test_ruff_finds_nothing[strict]"]
        if self.rule == "dropped keyword encoding":
            return ["tests/project/test_lint.py::test_text_is_read_and_written_in_a_named_encoding"]
        if self.rule in ("constant", "dropped keyword default"):
            return ["tests/project/test_interface.py::test_defaults_are_those_of_the_table"]
        return []

    @property
    def identity(self) -> str:
        """The same for the same edit of the same text, whatever stands above it."""
        before, after = self.change
        digest = hashlib.sha256("\0".join((self.path, self.rule, before, after)).encode()).hexdigest()
        return f"{self.path}:{self.rule}:{digest[:10]}"


class _Rules(ast.NodeVisitor):
    """Collects `(rule, node, text that takes its place)` from a syntax tree."""

    def __init__(self, source: str):
        self.source = source
        self.found: list[tuple[str, ast.AST, str]] = []

    def expression(self, rule: str, node: ast.AST, **changes) -> None:
        changed = copy.copy(node)
        for name, value in changes.items():
            setattr(changed, name, value)
        self.found.append((rule, node, f"({ast.unparse(changed)})"))

    def visit_Compare(self, node):
        for index, operator in enumerate(node.ops):
            ops = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
            self.expression("comparison", node, ops=ops)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if type(node.op) in ARITHMETIC and not text:
            self.expression("arithmetic", node, op=ARITHMETIC[type(node.op)]())
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self.found.append(("dropped statement", node, "pass"))
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.expression("and/or", node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
            self.found.append(("sign or negation", node, f"({ast.unparse(node.operand)})"))
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.expression("branches", node, body=node.orelse, orelse=node.body)
        self.generic_visit(node)

    def visit_If(self, node):
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if not isinstance(node.test, ast.Compare):  # whose operators are changed anyway
            self.found.append(("condition", node.test, f"(not ({ast.unparse(node.test)}))"))
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.found.append(("constant", node, str(not node.value)))
        elif isinstance(node.value, int):
            self.found.extend(("constant", node, f"({node.value + step})") for step in (1, -1))
        elif isinstance(node.value, float):
            self.found.append(("constant", node, repr(2 * node.value or 1.0)))

    def visit_Call(self, node):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                keywords = [*node.keywords[:index], *node.keywords[index + 1 :]]
                self.expression(f"dropped keyword {keyword.arg}", node, keywords=keywords)
            value = keyword.value
            if keyword.arg in ("axis", "dimension") and isinstance(value, ast.Constant | ast.UnaryOp):
                self.found.append(("axis", value, "0" if ast.unparse(value) != "0" else "-1"))
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if called in OPPOSITE and (isinstance(node.func, ast.Attribute) or OPPOSITE[called] in dir(builtins)):
            name = copy.copy(node.func)
            setattr(name, "attr" if isinstance(name, ast.Attribute) else "id", OPPOSITE[called])
            self.found.append(("opposite function", node.func, ast.unparse(name)))
        self.generic_visit(node)

    def visit_Slice(self, node):
        for bound in ("lower", "upper"):
            if getattr(node, bound) is not None:
                changed = copy.copy(node)
                setattr(changed, bound, None)
                self.found.append(("bound of a slice", node, ast.unparse(changed)))
        self.generic_visit(node)

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.found.append(("dropped statement", node, "pass"))
            self.generic_visit(node)

    def visit_Assign(self, node):
        names = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        used = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        if names & used or not names:  # something keeps its old value
            self.found.append(("dropped statement", node, "pass"))
        self.visit(node.value)

    def visit_Raise(self, node):
        self.found.append(("dropped statement", node, "pass"))

    def visit_FunctionDef(self, node):
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node):
        pass  # a message

    visit_Assert = visit_Import = visit_ImportFrom = visit_JoinedStr


def by_rules(path: str, source: str) -> list[Mutant]:
    """All edits that the rules make of a file, in the order of the text."""
    rules = _Rules(source)
    rules.visit(ast.parse(source))
    # The parser counts bytes of UTF-8 within a line.
    lines = source.splitlines(keepends=True)
    begins = [0, *itertools.accumulate(map(len, lines))]

    def offset(line: int, column: int) -> int:
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    mutants = {}
    for rule, node, new in rules.found:
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        what = f"{_shortened(source[start:end])} → {_shortened(new)}"
        mutant = Mutant(path, rule, what, start, end, new, source)
        mutants.setdefault((start, end, new), mutant)
    return sorted(mutants.values(), key=lambda mutant: (mutant.start, mutant.end))


def _shortened(text: str, width: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width // 2] + " … " + text[-width // 2 :]


def sample(sources: dict[str, str], count: int, seed: int) -> list[Mutant]:
    """`count` edits by rules, as evenly as can be over the files and within a file over the rules.

    The first edits of a file depend on the seed and its own text alone; a larger count adds to a smaller one. Files
    come in an order that is drawn, so that a count below their number is not of the first by name.
    """
    queues = []
    for path, source in sorted(sources.items(), key=lambda item: hashlib.sha256(f"{seed} {item[0]}".encode()).digest()):
        draw = random.Random(f"{seed} {path}")
        by_rule: dict[str, list[Mutant]] = {}
        for mutant in by_rules(path, source):
            by_rule.setdefault(mutant.rule.split(" keyword")[0], []).append(mutant)
        for mutants in by_rule.values():
            draw.shuffle(mutants)
        turns = list(by_rule.values())
        draw.shuffle(turns)
        queues.append([m for turn in itertools.zip_longest(*turns) for m in turn if m is not None])
    rounds: Iterator[Mutant | None] = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    return list(itertools.islice((mutant for mutant in rounds if mutant is not None), count))


def semantic(root: Path) -> tuple[list[Mutant], list[str]]:
    """The edits written down by hand, and a line for each whose text is not found exactly once."""
    mutants, problems = [], []
    for entry in tomllib.loads((HERE / "semantic_mutants.toml").read_text())["mutant"]:
        path, old, new, what = entry["path"], entry["old"].strip("\n"), entry["new"].strip("\n"), entry["what"]
        source = (root / path).read_text() if (root / path).is_file() else None
        if source is None or source.count(old) != 1:
            found = "there is no such file" if source is None else f"its text occurs {source.count(old)} times"
            problems.append(f"{path}: {what}: {found}")
            continue
        start = source.index(old)
        mutants.append(Mutant(path, "semantic", what, start, start + len(old), new, source))
    return mutants, problems


def equivalents() -> dict[tuple[str, str, str], str]:
    """Why no test can see an edit, by its file and its changed lines before and after."""
    entries = tomllib.loads((HERE / "equivalent_mutants.toml").read_text()).get("mutant", [])
    return {(entry["path"], entry["before"], entry["after"]): entry["why"] for entry in entries}
