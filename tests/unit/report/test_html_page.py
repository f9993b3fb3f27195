"""The page of a job: whole in itself, and nothing in an event can become a part of it."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ft_plugins.events import Event
from ft_plugins.report.html_page import html_page

EPOCH = 1_700_000_000.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EMPTY = {"meta", "br", "rect"}  # elements without an end


def at(time, name, rank=None, node="a", /, **fields):
    return Event(name, EPOCH + time, node, rank, 0, fields)


def story(reason="no memory", node="a"):
    steps = {"began": 24.0, "built": 26.0, "restored": 28.0, "completed": 30.0}
    return [
        at(0, "job.started", None, node, nproc=4, script="train.py"),
        at(5, "rank.attached", 0, node, token=1, share_bytes=1, budget_bytes=3 << 20, resident_bytes=1),
        at(10, "ranks.resumed", 0, node, token=1, lineage=1, iteration=1, completed=10.0),
        at(12, "snapshot.sealed", 0, node, lineage=1, iteration=1, seconds=0.5, bytes=1 << 20, slot=0),
        at(20, "worker.failed", 3, node, exitcode=1, signal="", message=reason),
        at(23, "workers.restarted", None, node, restart=1, token=2, seen=20.0, ended=21.0, clock=22.0),
        at(30, "ranks.resumed", 0, node, token=2, lineage=2, iteration=2, count=4, **steps),
        at(31, "protection.lost", 0, node, reason=reason, max_steps=100),
        at(40, "job.ended", None, node, status="succeeded"),
    ]


class _Reader(HTMLParser):
    """The names of all elements, which must be closed in order, and the text."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.names = set()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(page):
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def test_the_page_has_the_figures_of_the_job_and_needs_nothing_else():
    page = html_page("my-job", story())
    shown = read(page)
    for words in ("my-job", "50.0 %", "of 40.0 s", "Restart 1, to iteration 2: 10.00 s, from detection", "3.0"):
        assert words in shown.text
    assert not shown.names & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?:|url\(|@import|\bsrc=", page)
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_the_bar_of_a_node_that_was_killed_ends_there_though_it_comes_back_as_a_spare():
    back = [at(30, "smp.started", None, "b"), at(30, "metrics.failed", None, "b"), at(30, "job.started", None, "b")]
    back = [*(replace(event, pid=7) for event in back), at(40, "job.ended", None, "b")]
    page = html_page("my-job", [*story()[:-1], *(event for event in story(node="b")[:4]), *back])
    bar = page[page.index("incarnations of b") :]
    left, width = re.findall(r'x="([\d.]+)" width="([\d.]+)"[^>]*><title>trains', bar)[0]
    assert (float(left), float(width)) == pytest.approx((960 * 10 / 40, 960 * 2 / 40)), "its last event is at 12"


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", '"><svg onload=alert(1)>', "</style><b>", "&lt;\x1b[31m"]
)
def test_text_of_an_event_stays_text(text):
    page = html_page(text, story(reason=text, node=text))
    usual = read(html_page("my-job", story()))
    shown = read(page)
    assert shown.names == usual.names and "onload" not in re.sub(r"&gt;&lt;svg onload", "", page)
    assert shown.text.count(text.replace("\x1b", "\\x1b")) >= 4 and "\x1b" not in page


def test_what_the_events_do_not_hold_is_said():
    shown = read(html_page("my-job", [at(0, "job.started")])).text
    assert "unknown" in shown and "No restart has completed an iteration." in shown
    assert "There are no events." in read(html_page("my-job", [])).text


@pytest.mark.all_configurations
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("width", [500, 1200])
def test_a_browser_shows_the_page_without_a_bar_to_scroll_sideways(width, tmp_path):
    probe = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    page = tmp_path / "page.html"
    page.write_text(html_page("my-job", story("word " * 50 + "/very/long" * 60)) + probe)
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    needed, given = re.findall(r"<title>(\d+) of (\d+)</title>", done.stdout)[0]
    assert int(needed) <= int(given)
