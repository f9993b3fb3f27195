"""What README, CONTRIBUTING and the pages in docs say that can be checked: commands, flags, links, names of files.

A block of `bash` is a list of commands; each of them is executed, or read by the real parser where it needs a job, a
cluster or minutes.
"""

import ast
import importlib.util
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from ft_plugins.cli import app
from ft_plugins.config import deepspeed_json, keys
from ft_plugins.events import catalogue
from ft_plugins.launcher import command
from ft_plugins.sync.layers.layer_profile import LayerProfile, LayerTimes, write_profile
from ft_plugins.transport.calls import read_secret

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README_LINES = 150


@dataclass(frozen=True)
class Block:
    """A fenced block of code: the page, its first line there, its language, its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(language):
    """All blocks in `language`."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in fence.finditer(text):
            line = text[: match.start()].count("\n") + 2
            found.append(Block(page.name, line, match[1], match[2]))
    return [block for block in found if block.language == language]


def commands():
    """Where each command stands, its line, and its words without a redirection."""
    for block in blocks("bash"):
        for number, line in enumerate(block.text.replace("\\\n", " ").splitlines()):
            if line.strip() and not line.startswith("#"):
                words = shlex.split(line, comments=True)
                words = words[next(at for at, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]
                yield f"{block.page}:{block.line + number}", line, words[: words.index(">")] if ">" in words else words


def extras():
    """The extras of setup.py."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXTRAS":
            return set(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no EXTRAS")


# ------------------------------------------------------------------------------------------------ commands


def run_bash(line, words, folder):
    """A script of the project: it is there, bash can read it, and what it is given is known."""
    script = ROOT / words[1]
    subprocess.run(["bash", "-n", script], check=True, timeout=300)
    source = script.read_text()
    if program := re.search(r"launch/\w+\.py", source):
        source = (ROOT / program[0]).read_text()
    for word in words[2:]:
        known = f'"{word}"' in source or f"`{word}`" in source or f"{word} " in source
        assert known or (ROOT / word).exists(), f"{words[1]} does not know {word}"


def run_ft_run(line, words, folder):
    """Read as ft-run reads it; scripts and configurations that it names are there."""
    for word in words:
        if word.endswith(".py"):
            (folder / word).parent.mkdir(parents=True, exist_ok=True)
            (folder / word).write_text("")
        if word.endswith(".json"):
            (folder / word).write_text(blocks("json")[0].text)
    planned = command.plan(words[1:], 1000, str(folder), "node-a")
    assert planned.protected
    left = [word for word in planned.torch.training_script_args if re.match(r"--(ftp|reft|baft|paft)", word)]
    assert not left, f"{left} would reach the script"


def run_ft_plugins(line, words, folder):
    """Read as ft-plugins reads it; `config` and `plan` are executed."""
    group, name, arguments = typer.main.get_command(app), "ft-plugins", words[1:]
    while hasattr(group, "resolve_command"):
        name, group, arguments = group.resolve_command(group.make_context(name, list(arguments)), arguments)
        assert group is not None, line
    group.make_context(name, list(arguments))
    if words[1] in ("config", "plan"):
        layers = LayerProfile(tuple(LayerTimes(f"layer {n}", 0.01, 0.02, 0.1, 1 << 20) for n in range(8)), 8)
        write_profile(layers, folder / "layer-profile.json")  # the file that the pages name
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            app(words[1:], standalone_mode=False)


def run_python(line, words, folder):
    """A module that can be found, or a script whose source has the flags."""
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None, line
        return
    source = (ROOT / words[1]).read_text() + (ROOT / "benchmarks" / "workloads" / "running.py").read_text()
    for word in words[2:]:
        assert not word.startswith("--") or f'"{word}"' in source, f"{words[1]} does not know {word}"


def run_pip(line, words, folder):
    """Extras that setup.py has."""
    named = {extra for word in words for part in re.findall(r"\[([\w,]+)\]", word) for extra in part.split(",")}
    assert named <= extras(), line


def run_sbatch(line, words, folder):
    """A batch script of the project that bash can read; what follows it, ft-run reads."""
    (at,) = [number for number, word in enumerate(words) if word.endswith(".sbatch")]
    subprocess.run(["bash", "-n", ROOT / words[at]], check=True, timeout=300)
    run_ft_run(line, ["ft-run", *words[at + 1 :]], folder)


def run_mkdocs(line, words, folder):
    """.ci/run builds the pages with the same command."""
    assert " ".join(words[1:]) in (ROOT / ".ci" / "run").read_text()


def run_secret(line, words, folder):
    """Executed; it writes a file that is accepted as a secret."""
    subprocess.run(["bash", "-c", line], cwd=folder, check=True, timeout=300)
    assert len(read_secret(folder / "job.secret")) >= 16


RUNNERS = {
    "bash": run_bash,
    "ft-run": run_ft_run,
    "ft-plugins": run_ft_plugins,
    "python": run_python,
    "pip": run_pip,
    "mkdocs": run_mkdocs,
    "sbatch": run_sbatch,
    "(umask": run_secret,
}


@pytest.mark.parametrize(("line", "words"), [pytest.param(line, words, id=at) for at, line, words in commands()])
def test_a_command_in_the_documentation_is_accepted(line, words, tmp_path):
    RUNNERS[words[0]](line, words, tmp_path)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_a_deepspeed_configuration_in_the_documentation_is_accepted(block, tmp_path):
    (tmp_path / "ds.json").write_text(block.text)
    config = deepspeed_json.from_arguments(["--deepspeed_config", "ds.json"], tmp_path)
    assert config.systems, "the block ft_plugins switches nothing on"


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_in_the_documentation_can_be_compiled(block):
    compile(block.text, str(block), "exec")


def test_every_kind_of_code_is_one_that_is_checked():
    fences = [match for page in PAGES for match in re.findall(r"^\s*```(\w+)$", page.read_text(), re.MULTILINE)]
    assert set(fences) <= {"bash", "json", "python"}


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_the_documentation_exist(page):
    known = {key.flag for key in keys()}
    named = set(re.findall(r"--(?:ftp|reft|baft|paft|sync)(?:-[a-z]+)*(?![a-z*-])", page.read_text()))
    assert named <= known, named - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_in_the_documentation_exist(page):
    assert set(re.findall(r"ft_plugins\[(\w+)\]", page.read_text())) <= extras()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_project_in_the_documentation_exist(page):
    named = re.findall(r"`((?:ft_plugins|launch|tests|benchmarks|docs|patches|\.ci)/[\w./]+)`", page.read_text())
    absent = [name for name in named if not (ROOT / name).exists()]
    assert not absent


def test_events_in_the_documentation_exist():
    named = {name for page in PAGES for name in re.findall(r"\[`([\w.]+)`\]\(events\.md", page.read_text())}
    assert named and named <= set(catalogue.EVENTS)


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_links_that_mkdocs_does_not_see_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"\W+", "-", title.lower()) for title in titles], target


def test_the_readme_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_memory_that_the_readme_names_is_what_plan_memory_computes(capsys):
    small = "--parameters 7e9 --tp 2 --pp 2 --nodes"
    computed = []
    for job in (f"{small} 1", f"{small} 4", "--parameters 70e9 --tp 8 --pp 8 --nodes 128"):
        flags = [] if job.endswith("nodes 1") else ["--", "--reft-checkpoint-dir", "/ck"]
        words = ["plan", "memory", *job.split(), "--ranks-per-node", "8", "--node-memory-gib", "2048", *flags]
        app(words, standalone_mode=False)
        shown = capsys.readouterr().out
        computed += re.findall(r"^  total +([\d.]+) +([\d.]+)$", shown, re.MULTILINE)
        computed += re.findall(r"up to \d+ slots, ([\d.]+) GiB \(([\d.]+) times\)", shown)
    line = (ROOT / "README.md").read_text().split("**Host memory**")[1].split("- **Time**")[0]
    alone, four, at_most, large, most = [f"{float(times):.2g}" for _, times in computed]
    gib = [f"{float(total):.0f}" for total, _ in computed[1:]]
    assert re.findall(r"(?:^|\b)(\d[\d.]*) times", line) == [alone, four]
    assert re.findall(r"(?:up to|70B) (\d\.?\d*)", line) == [at_most, large, most]
    assert re.findall(r"\((\d+) to (\d+) GiB", line) == [(gib[0], gib[1]), (gib[2], gib[3])]


def test_the_first_screen_says_what_was_tested_and_explains_its_words():
    first, rest = (ROOT / "README.md").read_text().split("## Is it for you?")
    assert "tested on CPU" in first and "one GPU" in first
    new = re.findall(r"\b(REFT|BAFT|PAFT|RAIM[56]|parity|sharding group)\b", first)
    explained = set(re.findall(r"\*(\w+)\*(?!\*)", first))
    assert set(new) <= explained, "a word of ours on the first screen that is not explained there"
    assert "sharding group" not in rest


def test_the_glossary_has_one_line_for_a_term_in_order():
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    terms = [row.lower() for row in rows if row not in ("term", "---")]
    assert len(terms) == len(set(terms))
    assert terms == sorted(terms)
