"""The size of the project, held against tests/size.json.

    python tests/size.py [--lower]

Prints each figure with its bound; status 1 if one has grown beyond it. Code that needs more room raises the bound in
tests/size.json by hand, in a commit that says why. --lower tightens the bounds to the present figures.

    FOLDER.files        Python files that git knows
    FOLDER.statements   of the syntax tree, so that dense lines, blank lines and docstrings change nothing
    FOLDER.fmt_skips    lines that the formatter is to leave alone
    ft_plugins.docstring_words   a public module, class or function, on average; the only figure that must not fall
    hand_written_words  of README, CONTRIBUTING and docs, without what a command writes
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = ROOT / "tests" / "size.json"
FOLDERS = ("ft_plugins", "patches", "launch", "benchmarks", "tests")
AT_LEAST = "ft_plugins.docstring_words"
_NAMED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_GENERATED = re.compile(r"<!-- (rules|versions|results)[^>]*-->.*?<!-- end of \1 -->", re.DOTALL)
_WHOLE_PAGE = "<!-- Generated"


def measured(root):
    """All figures of the checkout at `root`."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout
    paths = [path for path in map(root.joinpath, listed.split("\n")) if path.is_file() and not path.is_symlink()]
    figures = {}
    for folder in FOLDERS:
        texts = [path.read_text() for path in paths if path.relative_to(root).parts[0] == folder]
        trees = [ast.parse(text) for text in texts]
        figures[f"{folder}.files"] = len(texts)
        figures[f"{folder}.statements"] = sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))
        figures[f"{folder}.fmt_skips"] = sum(text.count("fmt: skip") for text in texts)
        if folder == "ft_plugins":
            figures[AT_LEAST] = _docstring_words(trees)
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    figures["hand_written_words"] = sum(_hand_written(path.read_text()) for path in pages)
    return figures


def exceeded(figures, bounds):
    """The names of figures that break their bound, or have none. Pure."""
    return [name for name, value in figures.items() if name not in bounds or _breaks(name, value, bounds[name])]


def lowered(figures, bounds):
    """The bounds, tightened to `figures` where these have room. Pure."""
    return {name: bound if _breaks(name, figures[name], bound) else figures[name] for name, bound in bounds.items()}


def _breaks(name, value, bound):
    return value < bound if name == AT_LEAST else value > bound


def _docstring_words(trees):
    named = [node for tree in trees for node in ast.walk(tree) if isinstance(node, _NAMED)]
    public = [node for node in named if isinstance(node, ast.Module) or not node.name.startswith("_")]
    words = sum(len((ast.get_docstring(node) or "").split()) for node in public)
    return round(words / max(len(public), 1), 1)


def _hand_written(text):
    return 0 if text.startswith(_WHOLE_PAGE) else len(_GENERATED.sub("", text).split())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write bounds that have room down to the present figures")
    lower = parser.parse_args().lower
    figures, bounds = measured(ROOT), json.loads(BOUNDS.read_text())
    if lower:
        bounds = lowered(figures, bounds)
        BOUNDS.write_text(json.dumps(bounds, indent=4) + "\n")
    beyond = exceeded(figures, bounds)
    for name, value in figures.items():
        print(f"{name:<28}{value:>10g}{bounds.get(name, float('nan')):>10g}{'   beyond its bound' * (name in beyond)}")
    if beyond:
        sys.exit(f"{', '.join(beyond)}: make it smaller, or raise {BOUNDS.relative_to(ROOT)} in a commit that says why")


if __name__ == "__main__":
    main()
