"""The table of all benchmarks: what each figure is to be, what the paper has, what peers reached in the same run. Pure.

Invariant: a figure that was not measured is shown as such, and a quick run is called one.

In: the last lines of benchmarks, by name. Out: Markdown: the page `docs/results.md`, and the lines of README.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Lines = Mapping[str, Mapping[str, Any]]  # the last line of each benchmark
_NONE = "-"


@dataclass(frozen=True)
class ResultRow:
    """One figure of the table. `least`, `most`: the goal; `limit`: what the machine or the setting allows, a number or
    another figure; `peers`: figures of others in the same run, by name; `paper`: what it has; `share`: shown in %."""

    benchmark: str
    figure: str
    meaning: str
    least: float | None = None
    most: float | None = None
    limit: float | str | None = None
    peers: Mapping[str, str] | None = None
    paper: str = ""
    share: bool = False
    headline: bool = False

    @property
    def goal(self) -> str:
        """As text."""
        if self.most is not None:
            return f"at most {self.text(self.most)}"
        return f"at least {self.text(self.least)}" if self.least is not None else _NONE

    def text(self, value: float | bool | None) -> str:
        """A value as text."""
        if value is None:
            return _NONE
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{100 * value:.3g}%" if self.share else f"{value:.3g}"

    def holds(self, value: float | bool) -> bool:
        """Whether the goal is reached."""
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    def cells(self, lines: Lines) -> tuple[str, ...]:
        """Figure, limit, best peer, paper, goal, here."""
        line = lines.get(self.benchmark, {})
        figures: Mapping[str, float | bool] = line.get("figures", {})
        limit = figures.get(self.limit) if isinstance(self.limit, str) else self.limit
        quick = " (quick run)" if line.get("quick") and self.figure in figures else ""
        here = self._here(figures) + quick
        return (self.meaning, self.text(limit), self._peer(figures), self.paper or _NONE, self.goal, here)

    def _peer(self, figures: Mapping[str, float | bool]) -> str:
        found = {name: figures[figure] for name, figure in (self.peers or {}).items() if figure in figures}
        if not found:
            return _NONE
        best = (min if self.most is not None else max)(found, key=found.__getitem__)
        return f"{self.text(found[best])} ({best})"

    def _here(self, figures: Mapping[str, float | bool]) -> str:
        value = figures.get(self.figure)
        if value is None:
            return "not measured"
        if self.goal == _NONE:
            return self.text(value)
        return f"**{self.text(value)}**" if self.holds(value) else f"{self.text(value)}, missed"


_LOCAL, _DREAM = "local_sgd", "dreamddp"
_PEERS = ("torchsnapshot", "dlrover", "checkfreq")
ROWS = (
    ResultRow("snapshot_stall", "stall_x", "wait of training for a snapshot of 1 GiB, in multiples of copying it",
              most=0.05, limit=0.0, headline=True, peers={name: f"{name}_stall_matmul_x" for name in _PEERS}),
    ResultRow("snapshot_stall", "committed_x", "a snapshot with its digests, in multiples of copying it", most=1.5,
              limit=1.0, peers={name: f"{name}_committed_matmul_x" for name in _PEERS}),
    *(ResultRow("snapshot_stall", f"over_{peer}_x", f"speed of saving over {name}'s, one rank", least=1.0, paper=paper)
      for peer, name, paper in (("torchsnapshot", "TorchSnapshot", "14.1 (24 replicas)"),
                                ("checkfreq", "CheckFreq", "106 (24 replicas, of which it uses one)"))),
    *(ResultRow("snapshot_stall", f"step_{step}_x", f"a snapshot {meaning}, nothing else to do, in the same",
                paper="by a curve")
      for step, meaning in (("memory", "to shared memory"), ("storage", "from there to storage"))),
    ResultRow("gpu_snapshot", "1gib_registered_x", "copies from a device to a segment, in multiples of pinned memory",
              least=0.9, limit=1.0),
    ResultRow("gpu_snapshot", "slowdown", "cost of a snapshot after every step of a GPT that keeps the device busy",
              most=0.01, limit=0.0, share=True),
    ResultRow("double_capture", "double_worst", "capture with parity of replicas, over capture without", most=2.5,
              limit=2.0),
    ResultRow("double_capture", "sent_worst", "of a share, what then is sent to other nodes", most=0.01, share=True),
    ResultRow("double_capture", "weak_scaling", "speed of saving with most replicas over one, of as many times (weak "
              "scaling)", least=0.78, limit=1.0, paper="78% (24 replicas)", share=True),
    ResultRow("double_capture", "strong_scaling", "the same with most stages over one (strong scaling)", least=0.78,
              limit=1.0, paper="by a curve", share=True),
    ResultRow("ledger_cost", "share", "of an iteration, what the ledger of inputs takes", most=0.001, share=True),
    ResultRow("watch_cost", "share", "of a second, what metrics, events and scalars take", most=0.001, share=True),
    ResultRow("parity", "encode_x", "RAIM5 encoding, in multiples of an XOR in place", least=0.9, limit=1.0),
    ResultRow("parity", "decode_x", "RAIM5 decoding with all digests verified, in the same", least=0.7, limit=1.0),
    ResultRow("parity", "double_encode_x", "RAIM6 encoding, in the same", least=0.8),
    ResultRow("parity", "double_decode_x", "RAIM6 decoding of two lost nodes, in the same", least=0.7),
    ResultRow("recovery", "load_x_loopback", "reading of a lost node's share, in multiples of a loopback socket",
              least=0.5, limit=1.0),
    ResultRow("recovery", "two_load_x_loopback", "of two lost nodes at once, in the same", least=0.4, limit=1.0),
    ResultRow("recovery", "lost_iterations", "iterations lost with a node", most=2, limit=0.0, headline=True),
    ResultRow("recovery", "megatron_recovery_seconds", "s from a kill to the iteration it came in, Megatron, 8 ranks",
              peers={"torchrun and checkpoints": "megatron_own_checkpoint_recovery_seconds"}, most=5.0, headline=True),
    ResultRow("recovery", "deepspeed_recovery_seconds", "the same, DeepSpeed",
              peers={"torchrun and checkpoints": "deepspeed_own_checkpoint_recovery_seconds"}, most=5.0),
    ResultRow("recovery", "recovery_x", "the same under torchrun with checkpoints, in multiples; the worse", least=5.0),
    ResultRow("bubble_overhead", "overhead_worst", "cost of copies in bubbles, upper end of its interval, worst shape",
              most=0.01, limit=0.0, peers={"sent at once": "unplanned_overhead_worst"}, share=True, headline=True),
    ResultRow("bubble_overhead", "in_bubble_share", "of copied bytes, those that arrived in their bubble", least=0.9,
              limit=1.0, share=True),
    ResultRow("bubble_overhead", "filled_share", "of planned windows, what was filled", least=0.95, limit=1.0,
              share=True),
    ResultRow("bubble_overhead", "iterations_per_checkpoint_worst", "iterations between two copies", most=3.0,
              limit=1.0, paper="1 to 3"),
    ResultRow("simulate", "plan_seconds", "s to plan 64 stages with 512 microbatches", most=1.0),
    ResultRow("simulate", "analytic_error_worst", "error of simulated bubbles against closed forms", most=1e-9,
              limit=0.0),
    ResultRow("simulate", "bubble_share_least", "bubbles of the stage with fewest, the paper's shapes with GPT-2",
              least=0.2, paper="20%", share=True),
    ResultRow("simulate", "bert_bubble_share_least", "the same with its two BERT models", least=0.2, paper="20%",
              share=True),
    ResultRow("simulate", "bert_iterations_middle", "iterations between two copies of what it sends, BERT, median",
              most=3.0, paper="1 to 3"),
    ResultRow("simulate", "bert_iterations_reserved_middle", "the same with time reserved for messages"),
    ResultRow("simulate", "chimera_of_1f1b", "bubbles with Chimera's schedule over those with 1f1b, 16 stages",
              most=1.0, paper="below 1, by a curve"),
    ResultRow("sync_overhead", "paft_dyn_of_sync", "cost of averaging in the background, over waiting for it",
              most=0.5, limit=0.0, paper="0.51"),
    *(ResultRow("sync_overhead", f"paft_dyn_of_sync_{ranks}", f"the same, {ranks} ranks that sleep, not compute",
                most=1.0, limit=0.0, paper=paper)
      for ranks, paper in ((8, "0.76"), (16, "0.52"), (32, "0.51"))),
    ResultRow("sync_overhead", "audit_10", "of an iteration, an audit after every tenth", most=0.005, share=True),
    ResultRow("sdc", "order_holds", "corrupted gradients: methods are in the paper's order", least=True, paper="yes"),
    ResultRow("sdc", "audit_identical", "corrupted and audited runs end as the clean one, bit for bit", least=True),
    ResultRow("sdc", "sigma_error", "error of the estimated noise", most=0.05, limit=0.0, share=True),
    ResultRow("sdc", "divergence_error", "squared divergence, sigma^2 up to 1: error of the corrected Lemma 3.1",
              most=0.05, limit=0.0, paper="of the form of Lemma 3.1", share=True),
    ResultRow("sdc", "digits_state_gain", "a small ResNet, sigma^2 1e-2: points of accuracy that averaging optimizer "
              "state adds", paper="few, by a curve"),
    ResultRow(_LOCAL, "edit_stall_x", "stall of a synchronisation, EDiT over Post Local SGD", most=0.125,
              limit="edit_stall_x_bound", paper="0.12"),
    ResultRow(_LOCAL, "a_edit_straggler_x", "one replica of 8 always lags: A-EDiT over plain", least=1.8,
              limit="a_edit_straggler_x_bound", paper="1.92"),
    ResultRow(_LOCAL, "edit_random_straggler_x", "a random one lags: EDiT over plain", least=1.7,
              limit="edit_random_straggler_x_bound", paper="1.82"),
    ResultRow(_LOCAL, "edit_traffic_x", "40 times the traffic: EDiT over plain", least=2.7,
              limit="edit_traffic_x_bound", paper="2.78"),
    *(ResultRow(_LOCAL, f"{policy}_{kind}_{degree}_x", f"{meaning.format(degree)} over plain", least=0.93 * paper,
                limit=f"{policy}_{kind}_{degree}_x_bound", paper=f"{paper:.3g}")
      for policy, kind, meaning, gains in (
          ("a_edit", "consistent", "one always lags {} of 4.75 s: A-EDiT", {1.5: 1.314, 2.5: 1.517, 3.5: 1.721}),
          ("edit", "random", "a random one lags {} of 4.75 s: EDiT", {1.5: 1.302, 2.5: 1.462, 3.5: 1.637}),
          ("edit", "traffic", "{} times the traffic: EDiT", {10: 1.141, 20: 1.729, 30: 2.251}))
      for degree, paper in gains.items()),
    ResultRow(_LOCAL, "edit_bytes", "bytes per parameter that EDiT holds, in replicas of one rank", most=9.0,
              peers={"Post Local SGD": "post_local_sgd_bytes", "DiLoCo": "diloco_bytes", "like CO2": "co2_like_bytes"},
              paper="of sizes that fit only"),
    *(ResultRow("local_sgd_quality", f"{learner}_{figure}", f"{title}: {meaning}", most=most,
                peers={"DiLoCo": f"{learner}_{figure.replace('edit', 'diloco')}"})
      for learner, title in (("noisy_digits", "digits"), ("text", "GPT"))
      for figure, meaning, most in (("edit_loss_x", "loss of EDiT over that of plain training", 1.01),
                                    ("edit_garbage_x", "loss with one of 4 replicas fed garbage over without", 1.02))),
    *(ResultRow("local_sgd_quality", f"noisy_digits_edit_without_{part}_garbage_x",
                f"digits: garbage on one of 4 replicas, EDiT without {what}",
                peers={"EDiT": "noisy_digits_edit_garbage_x"}, paper="worse than EDiT, by a curve")
      for part, what in (("elimination", "anomaly elimination"), ("weighting", "weighted averages"),
                         ("clipping", "clipping"), ("all", "all three"))),
    *(ResultRow("local_sgd_quality", f"{learner}_{prefix}edit_low_rate_loss_x",
                f"{title}: loss of EDiT at a quarter of the inner rate over plain{more}", most=1.01, paper="below 1")
      for learner, title in (("noisy_digits", "digits"),
                             ("text", "GPT, tau times that rate 0.05 (paper: 0.02 to 0.08)"))
      for prefix, more in (("", ""), ("longer_", ", 4 times as many iterations"))),
    *(ResultRow("local_sgd_quality", f"{learner}_edit_best_rate_x", f"{title}: best inner rate of EDiT with 8 replicas "
                "over that with 2", least=1.0, most=1.0, peers={"plain": f"{learner}_plain_best_rate_x"},
                paper="1 (plain: more)")
      for learner, title in (("noisy_digits", "digits"), ("text", "GPT"))),
    *(ResultRow("local_sgd_quality", f"noisy_digits_{way}_x", f"digits: loss of EDiT over plain, {numbers} replicas",
                most=1.0, paper="perplexity " + paper)
      for way, numbers, paper in (("growing", "2, 4, then 8", "4.5% lower"),
                                  ("shrinking", "8, 4, then 2", "2.6% lower"))),
    ResultRow(_DREAM, "over_overlapped_x", "DreamDDP over overlapped data parallelism, least of all columns",
              least=1.73, paper="1.73 to 5.22", headline=True),
    ResultRow(_DREAM, "over_asc_x", "over reductions of several layers at a time, as ASC-WFBP has them, least",
              least=1.73, paper="1.73 to 5.22"),
    ResultRow(_DREAM, "over_full_x", "over local SGD that waits, least", least=1.16, paper="1.16 to 1.50"),
    ResultRow(_DREAM, "over_enp_x", "over equal numbers of layers, least", least=1.02, paper="1.02 to 1.24"),
    ResultRow(_DREAM, "search_planned_x", "planned period over the best of contiguous sets, by brute force; median",
              most=1.0, peers={"the paper's search": "search_paper_search_x", "equal": "search_equal_x"},
              paper="1 to slightly more"),
    ResultRow(_DREAM, "search_planned_200_seconds", "s to plan 200 layers, H 5", most=1.0,
              peers={"the paper's search": "search_paper_search_200_seconds"}),
    ResultRow(_DREAM, "h5_planned_x_most", "planned iteration with H 5 over that with 10, most of all columns"),
    ResultRow(_DREAM, "real_x", "a real job on slow links, over DistributedDataParallel", least=1.0),
    *(ResultRow("dreamddp_quality", f"{learner}_loss_x", f"{title}: loss of DreamDDP over that of local SGD", most=1.01)
      for learner, title in (("deep_noisy_digits", "digits"), ("deep_text", "GPT"))),
    *(ResultRow("dreamddp_quality", f"deep_noisy_digits_{figure}", f"digits, 4 replicas of a small network: {meaning}",
                most=most, paper=paper)
      for figure, meaning, most, paper in (
          ("time_x", "time to the loss of local SGD, over its", 1.0, "0.64 to 0.84"),
          ("divergence_x", "divergence of partial over full synchronisation", 1.0, "below 1"),
          ("peak_divergence_x", "the same, where it is largest in a period", 1.0, "below 1"),
          ("h2_loss_x", "loss with H 2 over that with H 5", 1.0, "below 1"))),
    ResultRow("scale", "plans_4096_seconds", "s for all plans of 4,096 ranks, worst process", most=10.0),
    ResultRow("scale", "ranks_4096_store_operations", "of a rank of 4,096, operations of the store at start",
              most=20),
    ResultRow("scale", "lead_512_form_seconds", "s until 512 nodes have formed a round", most=3.0),
    ResultRow("scale", "lead_512_waiting_share", "of a processor, the lead while 512 nodes wait", most=0.05,
              share=True),
    ResultRow("scale", "smps_2048_share", "of a processor, the busiest of 2,048 SMPs", most=0.1, share=True),
    ResultRow("scale", "node_2048_sockets", "sockets of a node of 2,048", most=64),
)  # fmt: skip

_HEAD = ("| figure | limit | best peer, same run | paper | goal | here |", "|---|---|---|---|---|---|")
_PAGE = """\
<!-- Generated by `python benchmarks/all.py`; do not edit. -->
# Results

*Limit* is what the machine or the setting allows at best; a *peer* was measured in the same run; figures in bold reach
their *goal*. `--help` of each benchmark says what its figures are. All of them, one after another, on a machine that
does nothing else, as root because links are throttled:

```bash
python benchmarks/all.py
```
"""


def page(lines: Lines, pictures: Sequence[str] = (), before: str = "") -> str:
    """The page of all figures. `pictures`: their addresses. `before`: the page as it was, whose sections stay where
    `lines` has nothing newer; figures that they lack are added."""
    return "\n".join(_page(lines, pictures, before)).rstrip("\n") + "\n"


def headlines(text: str) -> str:
    """The five lines for README, of a page."""
    meanings = tuple(f"| {row.meaning} |" for row in ROWS if row.headline)
    return "\n".join([*_HEAD, *(line for line in text.splitlines() if line.startswith(meanings))])


def _page(lines: Lines, pictures: Sequence[str], before: str) -> Iterator[str]:
    yield _PAGE
    sections = dict(each.split("\n", 1) for each in f"\n{before}".split("\n## ")[1:])
    for name in dict.fromkeys(row.benchmark for row in ROWS):
        rows = [row for row in ROWS if row.benchmark == name]
        yield f"## {name}\n"
        if name in lines:
            yield f"{_where(lines[name])}\n"
        elif name in sections:
            kept = sections[name].strip("\n").splitlines()
            end = 1 + max(at for at, line in enumerate(kept) if line.startswith("|"))
            kept[end:end] = _table([row for row in rows if f"| {row.meaning} |" not in sections[name]], lines)
            yield "\n".join(kept) + "\n"
            continue
        yield from (*_HEAD, *_table(rows, lines), "")
        yield from (f"![{Path(each).stem}]({each})\n" for each in pictures if Path(each).parent.name == name)


def _table(rows: Sequence[ResultRow], lines: Lines) -> Iterator[str]:
    return (f"| {' | '.join(row.cells(lines))} |" for row in rows)


def _where(line: Mapping[str, Any]) -> str:
    """How and on what the figures of a benchmark were measured."""
    machine, figures = line["machine"], line["figures"]
    others = figures.get("others_share", 0.0) + figures.get("stolen_share", 0.0)
    quick = "a quick run, " if line.get("quick") else ""
    return (
        f"{line['date']}, {quick}{machine['cores']} cores of {machine['cpu']}, of whose time other programs took "
        f"{others:.0%}; Python {line['versions']['python']}, torch {line['versions'].get('torch', '-')}"
    )
