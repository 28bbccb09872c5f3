"""Types the commands of README.md in a new clone, in their order, and says which failed or printed something else.

    python -m tests.tooling.type_readme FOLDER [--leave-out 'make test'] [--python python3]

FOLDER, which must not exist, receives the clone. `llama-dir` is the language model of the demo; the texts are documents
of the repository, and the recipe is that of the quick start. The printed block after `make demo` is compared line by
line, without numbers. Exits with 1 if a command failed or did not print what is shown.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.support.environment import ROOT
from tests.support.walkthroughs import Command, Ran, blocks_of, not_printed


def run(words: str, clone: Path, python: str) -> tuple[int, str]:
    """Runs a line in the clone as a shell would, with its environment activated; returns exit code and output."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["PATH"] = f"{clone / '.venv' / 'bin'}:{clean['PATH']}"
    words = re.sub(r"^make\b", f"make PYTHON={python}", words)
    begun = time.monotonic()
    ran = subprocess.run(
        words, shell=True, cwd=clone, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(
        f"{'ok' if ran.returncode == 0 else f'FAILED ({ran.returncode})'}  {time.monotonic() - begun:.0f} s  $ {words}",
        flush=True,
    )
    if ran.returncode:
        print(ran.stdout[-2000:], flush=True)
    return ran.returncode, ran.stdout


def prepare(clone: Path) -> None:
    """Puts what the commands name into the clone: a dense model, texts, a recipe."""
    (clone / "llama-dir").symlink_to(clone / "moe-jax-demo" / "dense")
    for name, page in (("text.txt", "methods"), ("my.txt", "methods"), ("held-out.txt", "what-runs-where")):
        (clone / name).write_text((clone / "docs" / f"{page}.md").read_text(encoding="utf-8"), encoding="utf-8")
    (recipe,) = [
        block
        for block in blocks_of((clone / "docs/quick-start.md").read_text(encoding="utf-8"))
        if block.kind == "toml"
    ]
    (clone / "my-recipe.toml").write_text(recipe.text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--leave-out", action="append", default=[], metavar="COMMAND")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists already; choose another FOLDER")
    options.folder.mkdir(parents=True)
    clone = options.folder.resolve() / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    wrong, printed = 0, {}
    for block in blocks_of((clone / "README.md").read_text(encoding="utf-8")):
        if block.kind == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = line.partition("  #")[0].strip()
                if not words or words in options.leave_out:
                    continue
                if words.startswith("pip "):  # before there is the environment that `make` sets up
                    run(f"{options.python} -m venv .venv", clone, options.python)
                if words.startswith("moe-jax plan"):
                    prepare(clone)
                code, printed[words] = run(words, clone, options.python)
                wrong += code != 0
        elif block.kind == "text":
            shown = Command([], [line for line in block.text.splitlines() if line.strip()])
            for line in not_printed(Ran(shown, 0, printed.get("make demo", ""))):
                print(f"NOT PRINTED: {line}", flush=True)
                wrong += 1
        elif block.kind == "python":
            (clone / "program.py").write_text(block.text.replace("hf-dir", "python-hf-dir"), encoding="utf-8")
            wrong += run("python program.py", clone, options.python)[0] != 0
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
