"""The rules as they stand in docs/limits.md, between two marks for each framework. Run as a module it writes the page
that it is given."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from .deepspeed import DEEPSPEED
from .hugging_face import HUGGING_FACE
from .megatron import MEGATRON
from .megatron_forks import GPT_NEOX, MEGATRON_DEEPSPEED
from .rule import Rule, Treatment

_TABLES = {
    "Megatron": MEGATRON, "DeepSpeed": DEEPSPEED, "Hugging Face": HUGGING_FACE,
    "Megatron-DeepSpeed": MEGATRON_DEEPSPEED, "gpt-neox": GPT_NEOX,
}  # fmt: skip
_SPELT = {"sync": "local SGD", "reft": "REFT", "baft": "BAFT", "paft": "PAFT"}
_END = "<!-- end of rules -->"


def with_rules(page: str) -> str:
    """The page with today's rules between its marks. Raises ValueError if it lacks one."""
    for name, rules in _TABLES.items():
        begin = f"<!-- rules of {name}: written by `python -m ft_plugins.adapters.rules.page docs/limits.md` -->"
        place = re.compile(f"{re.escape(begin)}.*?{_END}", re.DOTALL)
        if not place.search(page):
            raise ValueError(f"expected '{begin}' and '{_END}' in the page")
        text = "\n".join([begin, *_lines(rules), _END])
        page = place.sub(lambda _, text=text: text, page, count=1)  # type: ignore[misc]  # as a literal
    return page


def _lines(rules: Iterable[Rule]) -> Iterator[str]:
    listed = list(rules)
    yield from ("| refused | written as | because |", "|---|---|---|")
    for rule in listed:
        if rule.treatment is Treatment.REFUSED:
            only = f" (with {' or '.join(_SPELT[one] for one in rule.systems)})" if rule.systems else ""
            option = f"`{_written(rule)}`" if rule.option else "seen when it is built"
            yield f"| {rule.name}{only} | {option} | {rule.reason} |"
    for treatment, begin in ((Treatment.FOLLOWED, "Followed by name"), (Treatment.INEFFECTIVE, "Without effect")):
        chosen = [rule for rule in listed if rule.treatment is treatment]
        if chosen:
            yield ""
            text = f"{begin}: {'; '.join(_phrase(rule) for rule in chosen)}."
            yield from textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _phrase(rule: Rule) -> str:
    only = f", with {' or '.join(_SPELT[one] for one in rule.systems)}" if rule.systems else ""
    return f"{rule.name} (`{_written(rule)}`{only})"


def _written(rule: Rule) -> str:
    return f"{rule.option} {rule.given}".strip()


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_rules(file.read_text()))
