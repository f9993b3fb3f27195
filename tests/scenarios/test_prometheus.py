"""A real Prometheus scrapes a job of two emulated nodes: what it answers, for every panel of the dashboard."""

import json
import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from ft_plugins.metrics.derived import query
from ft_plugins.metrics.table import METRICS
from ft_plugins.smp.watch import liveness
from harness.emulated_nodes import network
from harness.fills_runs import FillsRun
from harness.job_control import wait_until
from harness.jobs import DETECT
from harness.multinode import MultiNodeJob

RULES = Path(__file__).parents[2] / "launch/prometheus/alerts.yml"
PORT, OWN = 9400, "127.0.0.1:9490"
SECONDS = 90.0
LACKING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
# what a job of this kind, on a CPU and without local SGD, has after a while
KNOWN = {
    "ftp_smp_answered", "ftp_iteration", "ftp_world_size", "ftp_restarts_total", "ftp_memory_claimed_bytes",
    "ftp_version_age_seconds", "ftp_parity_bytes", "ftp_snapshots_total", "ftp_captured_bytes_total",
    "ftp_exchanged_bytes_total", "ftp_versions_committed_total", "ftp_exchange_backlog_iterations",
    "ftp_alarms_total", "ftp_iteration_seconds",
}  # fmt: skip


class Prometheus:
    """A server in the network of a node, and what it answers."""

    def __init__(self, prefix):
        self._prefix = prefix

    def ask(self, expression):
        """The series of a query. Raises AssertionError if it is refused."""
        words = ["promtool", "query", "instant", "-o", "json", f"http://{OWN}", expression]
        done = subprocess.run([*self._prefix, *words], capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, f"{expression}: {done.stdout}{done.stderr}"
        return list(json.loads(done.stdout) or [])

    def nodes(self, expression):
        """The nodes of the series of a query; none while the server is not ready."""
        try:
            return {series["metric"]["node"] for series in self.ask(expression)}
        except AssertionError:
            return set()


@contextmanager
def prometheus(folder, places):
    """A server that scrapes these places each second and evaluates the rules."""
    targets = [f"{place.address}:{PORT}" for place in places]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "ft_plugins", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    prefix = ["ip", "netns", "exec", places[0].namespace] if places[0].namespace else []
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with open(folder / "prometheus.log", "w") as log:
        server = subprocess.Popen(
            [*prefix, "prometheus", *words, f"--web.listen-address={OWN}"], stdout=log, stderr=log,
            env={**os.environ, "GOMAXPROCS": "1"},
        )  # fmt: skip
        try:
            yield Prometheus(prefix)
        finally:
            server.kill()
            server.wait(SECONDS)


@pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")
def test_prometheus_scrapes_two_nodes_and_answers_every_query_of_the_dashboard(jobs, tmp_path):
    with network((41, 42)) as places:
        run = FillsRun("fills", tmp_path, 1_000_000, 2, 8, 0.05, False)
        with MultiNodeJob(jobs, run, 2, places) as story, prometheus(tmp_path, places) as server:
            for name, place in zip("ab", places, strict=True):
                story.start(name, place, DETECT, "30", "--ftp-metrics", f"{place.address}:{PORT}")
            story.until_committed(3)

            def known():
                return all(server.nodes(name) == {"a", "b"} for name in sorted(KNOWN))

            wait_until(known, SECONDS, lambda: f"known: {sorted(n for n in KNOWN if server.nodes(n) == {'a', 'b'})}")
            for metric in METRICS:
                server.ask(query(metric).replace("$job", ".+"))
            assert [series["value"][1] for series in server.ask("ftp_world_size")] == ["2", "2"]
            assert {series["metric"]["ftp_job"] for series in server.ask("ftp_iteration")} == {
                story.nodes["a"].spec.name
            }
            assert not server.ask('ALERTS{alertstate="firing"}'), "nothing is wrong"
            wait_until(lambda: not server.ask("ALERTS"), SECONDS, lambda: f"about to fire: {server.ask('ALERTS')}")
            for pid, _ in liveness.holder(story.nodes["a"].spec.run_dir / "smp.lock"):
                os.kill(pid, signal.SIGKILL)
            firing = 'ALERTS{alertname="FtpSmpLost",alertstate="firing"}'
            wait_until(lambda: server.nodes(firing) == {"a"}, SECONDS, lambda: str(server.ask("ftp_alarms_total > 0")))
            served = 'ftp_iteration and on(node) (ftp_alarms_total{alarm="smp.lost"} == 1)'
            wait_until(lambda: server.nodes(served) == {"a"}, SECONDS, lambda: "the SMP that took its place is silent")
            story.destroy("b")
            lost = 'up{job="ft_plugins"} == 0'
            wait_until(lambda: len(server.ask(lost)) == 1, SECONDS, lambda: f"up: {server.ask('up')}")
            unreachable = f'ALERTS{{alertname="FtpUnreachable",ftp_job="{story.nodes["a"].spec.name}"}}'
            wait_until(lambda: len(server.ask(unreachable)) == 1, SECONDS, lambda: str(server.ask("ftp_ranks")))
