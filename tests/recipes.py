"""Count the recipes of checkouts that would be refused, by the rules that jobs ask at their start.

Invariant: nothing of a recipe is executed. A recipe of Megatron-LM is read by the parser of its own checkout, in a
process of its own; options of a shell script whose values only the shell knows are left out. Inference is not counted.
A configuration that the installed DeepSpeed refuses itself, because it no longer has what that asks for, counts apart.

    python tests/recipes.py ROOT...                      checkouts: Megatron-LM's, or any with DeepSpeed configurations
    python tests/recipes.py --system baft ROOT...        with another system than REFT

Recipes: of Megatron-LM the model_config.yaml of its functional tests and the shell scripts of its examples that train;
of others JSON files, JSON in shell scripts, and the yml files of gpt-neox, if they hold settings of DeepSpeed.

In: folders. Out: for each one how many recipes each rule refuses, the most frequent first, and which.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import yaml

from ft_plugins.adapters.rules import DEEPSPEED, MEGATRON, findings, refused
from ft_plugins.adapters.rules.rule import at
from ft_plugins.errors import FtError

_TRAINS = re.compile(r"--(train-iters|train-samples|lr)\b")
_SETTINGS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
_NEVER = "inference"  # MODE, or a folder, of a recipe that trains nothing
_LARGEST = 1 << 18  # bytes of a file that is a configuration
_HEREDOC = re.compile(r"<<\s*-?['\"]?(\w+)['\"]?[^\n]*\n(.*?)\n\s*\1\b", re.DOTALL)
_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+)?(\w+)=([^\s;]+)", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_WORD = r"(?<![\w.$])(?!true\b|false\b|null\b)(?:\$\{[^}]*\}|\$?[A-Za-z_]\w*)"  # of a template, outside of quotes
_OPTION = re.compile(r"(?<![\w-])(--[A-Za-z][\w-]*)((?:[ \t=]+[^\s\-()|;&<>][^\s()|;&<>]*)*)")


@dataclass(frozen=True)
class Recipe:
    """A recipe and the rules that refuse it: name and phrase. `outdated`: why its framework refuses it itself."""

    path: str
    refused: tuple[tuple[str, str], ...]
    outdated: str = ""


# ---- Megatron-LM


def megatron_words(root):
    """The recipes of a checkout that train, as command lines."""
    for path in sorted(root.glob("tests/functional_tests/test_cases/**/model_config.yaml")):
        recipe = yaml.safe_load(path.read_text())
        if recipe.get("MODE") != _NEVER:
            yield str(path.parent.relative_to(root)), list(_of_yaml(recipe.get("MODEL_ARGS") or {}))
    for path in sorted(root.glob("examples/**/*.sh")):
        text = path.read_text(errors="replace")
        if _TRAINS.search(text):
            yield str(path.relative_to(root)), list(_of_shell(text))


def _of_yaml(options):
    for name, value in options.items():
        if not str(name).startswith("--") or value is None or value is False:
            continue
        yield name
        if value is not True:
            listed = value if isinstance(value, list) else str(value).strip("[]").split()
            yield from (str(one) for one in listed)


def _of_shell(text):
    """The options in a script, with what it assigns to variables in a plain way."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)(^|\s)#.*$", "", text))
    assigned = {name: value.strip("\"'") for name, value in _ASSIGNED.findall(text)}
    for name, values in _OPTION.findall(text):
        yield name
        for word in values.replace("=", " ").split():
            yield _resolved(word.strip("\"'"), assigned)


def _resolved(word, assigned):
    for _ in range(3):  # a variable may be assigned from another
        word = _VARIABLE.sub(lambda one: assigned.get(one[1] or one[3], one[2] or ""), word)
    return word


def read_megatron(root, systems):
    """Runs in a process whose Megatron-LM is that of `root`."""
    from ft_plugins.adapters.megatron.arguments import import_arguments, read_arguments

    parser = import_arguments(root).add_megatron_arguments(_Parser(allow_abbrev=False))
    for name, words in megatron_words(root):
        values = read_arguments(root, list(_understood(parser, words))).values
        yield Recipe(name, _refused(findings(MEGATRON, values, systems=systems)))


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def _understood(parser, words):
    """The options, with their values, that a version's parser knows and accepts one by one."""
    starts = [at for at, word in enumerate(words) if word.startswith("--")]
    for begin, end in pairwise([*starts, len(words)]):
        option = [word for word in words[begin:end] if word]
        for given in (option, option[:2], option[:1]):  # a script's own words may follow
            try:
                _, unknown = parser.parse_known_args(given)
            except (ValueError, SystemExit):
                continue
            if not unknown:
                yield from given
                break


# ---- DeepSpeed


def deepspeed_settings(root):
    """The configurations in a checkout."""
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".json", ".sh", ".yml", ".yaml") or not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        text, within = path.read_text(errors="replace"), path.relative_to(root)
        name = str(within)
        if _NEVER in within.parts:
            continue
        if path.suffix == ".sh":
            bodies = [match[2] for match in _HEREDOC.finditer(text)]
        else:
            bodies = [text]
        for body in bodies:
            settings = _as_yaml(body) if is_neox(name) else _as_json(body)
            if isinstance(settings, dict) and any(key in settings for key in _SETTINGS):
                yield name, settings


def _as_json(text):
    """JSON, in which words of a template stand for true where they switch something on, else for a number."""
    switched = re.sub(rf'("enabled"\s*:\s*){_WORD}', r"\1true", text)
    try:
        return json.loads(re.sub(rf'("(?:\\.|[^"\\\n])*")|{_WORD}', lambda one: one[1] or "1", switched))
    except ValueError:
        return None


def _as_yaml(text):
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return {str(key).replace("-", "_"): value for key, value in found.items()} if isinstance(found, dict) else None


def read_deepspeed(root, systems):
    for name, settings in deepspeed_settings(root):
        yield Recipe(name, _refused(findings(DEEPSPEED, settings, systems=systems)), outdated(settings, is_neox(name)))


def is_neox(name):
    """Whether a file is one of gpt-neox, which makes the optimizer itself."""
    return name.endswith((".yml", ".yaml"))


def outdated(settings, own_optimizer=False):
    """Why the installed DeepSpeed refuses a configuration, by its own table of what it no longer has and its own names
    of optimizers; '' if it takes it, or there is none."""
    if find_spec("deepspeed") is None:
        return ""
    import torch
    from deepspeed.runtime import config as installed

    try:
        getattr(installed, "_reject_removed_config_keys", lambda settings: None)(settings)
    except installed.DeepSpeedConfigError as error:
        return str(error)
    kind = "Adam" if own_optimizer else str(at(settings, "optimizer.type") or "Adam")
    known = kind.lower() in installed.DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, kind)
    return "" if known else f"it has no optimizer {kind}"


# ---- counting


def _refused(found):
    return tuple((f"{one.rule.name} ({one.rule.option})", one.text) for one in refused(found))


def recipes_of(root, systems):
    """The recipes of a checkout. Raises FtError."""
    if not (root / "megatron" / "training" / "arguments.py").exists() or not (root / "pretrain_gpt.py").exists():
        return list(read_deepspeed(root, systems))
    command = [sys.executable, __file__, "--read", str(root), *(f"--system={one}" for one in systems)]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise FtError(f"{root}: its arguments cannot be read: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    lines = [json.loads(one) for one in done.stdout.splitlines() if one.startswith("{")]
    return [Recipe(one["path"], tuple((name, text) for name, text in one["refused"])) for one in lines]


def table(name, recipes):
    """How many are refused, by which rule alone or with others, the most frequent first."""
    apart = [one for one in recipes if one.outdated]
    stopped = [one for one in recipes if one.refused and not one.outdated]
    yield f"{name}: {len(stopped)} of {len(recipes) - len(apart)} recipes are refused"
    counts = Counter(rule for one in stopped for rule in {name for name, _ in one.refused})
    alone = Counter(one.refused[0][0] for one in stopped if len(one.refused) == 1)
    for rule, count in counts.most_common():
        yield f"  {count:4} {alone[rule]:4} alone  {rule}"
    if apart:
        ours = sum(bool(one.refused) for one in apart)
        yield f"  {len(apart):4} more the installed DeepSpeed refuses itself, {ours} of which would be refused here too"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", type=Path, help="checkouts")
    parser.add_argument("--system", action="append", default=[], help="a system that is on; default reft")
    parser.add_argument("--which", action="store_true", help="also list the refused recipes")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    systems = args.system or ["reft"]
    if args.read is not None:
        for recipe in read_megatron(args.read.resolve(), systems):
            print(json.dumps({"path": recipe.path, "refused": recipe.refused}), flush=True)
        return 0
    everything = []
    for root in args.roots:
        recipes = recipes_of(root.resolve(), systems)
        print("\n".join(table(str(root), recipes)))
        if args.which:
            print(
                "\n".join(
                    f"    {one.path}: {one.outdated or '; '.join(text for _, text in one.refused)}"
                    for one in recipes
                    if one.refused or one.outdated
                )
            )
        everything += recipes
    if len(args.roots) > 1:
        print("\n".join(table("together", everything)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
