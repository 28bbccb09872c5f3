"""The options that all quality benchmarks have."""

import argparse
import tempfile
from pathlib import Path

from evidence.results import RESULTS


def quality_parser(description: str, name: str, work: str) -> argparse.ArgumentParser:
    """A parser with DATA, --out, --work, --seeds and --report-only.

    Args:
      description: of the program.
      name: of the program; what it keeps lies in a temporary folder of this name unless told otherwise.
      work: what lies there.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    folder = Path(tempfile.gettempdir()) / f"moe_jax_{name}"
    parser.add_argument("--work", type=Path, default=folder, help=f"folder of {work} (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default %(default)s)")
    parser.add_argument("--report-only", action="store_true", help="run nothing, draw what there is")
    return parser
