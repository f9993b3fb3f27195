"""The list of fault points: it is that of the source, and a fault without effect is refused at start, by name."""

import ast
from pathlib import Path

import pytest
import torch

import ft_plugins
from ft_plugins.base import corruption, faults
from ft_plugins.base.faults import OF_HOSTS, POINTS
from ft_plugins.config import Config, launch_context
from ft_plugins.errors import ConfigError
from ft_plugins.session import attach
from ft_plugins.smp.serve import requests
from harness.plain_host import PlainHost

SOURCE = Path(ft_plugins.__file__).parent


def calls():
    """Every call of `faults.reach` in the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.reach":
                yield path, node


def names(call):
    """The points that a call can reach."""
    point = call.args[0]
    if isinstance(point, ast.Constant):
        return (str(point.value),)
    if isinstance(point, ast.JoinedStr):  # one for each request of the SMP
        before, after = (str(part.value) for part in point.values if isinstance(part, ast.Constant))
        return tuple(f"{before}{request}{after}" for request in requests.LOCAL)
    return corruption.POINTS  # a variable, in `corruption` alone


def test_the_list_of_points_is_that_of_the_source():
    reached = {name for _, call in calls() for name in names(call)}
    assert reached == set(POINTS)
    assert set(faults.REQUESTS) == set(requests.LOCAL)
    assert {name for name, point in POINTS.items() if point.actions is None} == set(corruption.POINTS)


def test_the_facts_of_each_point_are_those_that_the_source_reports():
    found = 0
    for path, call in calls():
        given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        for name in names(call):
            known, whole = set(POINTS[name].known_facts), all(keyword.arg for keyword in call.keywords)
            assert given <= known, f"{path}: {name} reports {given}, listed are {known}"
            if whole:  # else more are passed on: `**facts`
                assert set(POINTS[name].facts) <= given, f"{path}: {name}"
            found += 1
    assert found > 60


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("update.midle:kill", "no fault point 'update.midle'; similar ones: update.middle"),
        ("capture.bucket@iteration=3:kill", "similar ones: capture.bucket.end, capture.bucket.begin"),
        ("xyzzy:kill", "known are attach.after"),
        ("update.begin@iter=3:kill", "reports no fact 'iter', so the condition never holds; it reports iteration, hit"),
        ("persist.file@restart=0:kill", "no fact 'restart'"),  # in the SMP, which outlives restarts
        ("update.begin@iteration%5=0,rnk=1:kill", "no fact 'rnk'"),
        ("update.middle:kil", "no action 'kil'; expected one of kill, stop, exit, raise"),
        ("update.end:inf", "no action 'inf'"),
        ("update.begin:kill;update.bgin:kill", "'update.bgin'"),
    ],
)
def test_a_misspelt_fault_is_refused_by_name_and_the_similar_ones_are_listed(fault, named):
    with pytest.raises(ConfigError) as caught:
        Config.from_flags(["--reft", "--reft-checkpoint-dir", "/d", "--ftp-faults", fault])
    assert str(caught.value).startswith("--ftp-faults: ") and named in str(caught.value)


ON_STORAGE = ("--reft", "--reft-checkpoint-dir", "/d")


@pytest.mark.parametrize(
    ("flags", "fault", "remedy"),
    [
        (("--reft",), "update.gradients@rank=2,iteration=7:flip", "--paft is off; add it"),
        (("--reft",), "reduce.gradients:nan", "--paft is off"),
        (("--reft",), "sync.apply:kill", "--sync-policy"),
        (("--paft",), "capture.begin:kill", "add --reft or --baft"),
        (("--paft",), "smp.attach.before:kill", "add --reft or --baft"),
        (("--reft",), "persist.write:enospc", "--reft-checkpoint-dir is unset"),
        (("--reft", "--reft-redundancy", "none"), "exchange.frame:hold", "--reft-redundancy is none"),
        (("--baft",), "parity_store.xored:kill", "no parity is kept"),
    ],
)
def test_a_fault_that_needs_a_system_that_is_off_is_refused(flags, fault, remedy):
    with pytest.raises(ConfigError, match=f"^--ftp-faults: fault at {fault.partition('@')[0].partition(':')[0]}: has no"
                       " effect while") as caught:  # fmt: skip
        Config.from_flags([*flags, "--ftp-faults", fault])
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (("--paft",), "update.gradients@rank=2,iteration=7:flip"),
        (("--paft",), "update.gradients@iteration%5=0:gauss=0.1~7"),
        (("--sync-policy", "edit"), "sync.apply@module=a:kill"),
        (("--baft",), "exchange.frame@frame=3:hold"),
        (("--reft",), "parity_store.xored@position=1:stop"),
        (ON_STORAGE, "persist.write@rank=0,iteration=4:enospc"),
        (("--reft",), "iteration.forward@iteration=6,rank=3,restart=0,hit=1:kill;fence.kill:skip"),
    ],
)
def test_a_fault_with_effect_is_accepted(flags, fault):
    assert Config.from_flags([*flags, "--ftp-faults", fault])[0].faults == fault


def test_a_source_that_is_still_to_be_merged_may_name_a_fault_of_a_system_that_another_one_switches_on():
    first, _ = Config.from_flags(["--ftp-faults", "update.gradients:flip"], whole=False)
    assert first.faults == "update.gradients:flip"


@pytest.mark.parametrize(
    ("reached", "fault", "named"),
    [
        ({"update.begin": ()}, "update.middle:kill", "torch reaches update.begin"),
        ({}, "iteration.forward:kill", "torch reaches none of iteration.forward"),
        ({"update.begin": ()}, "update.begin:inf", "torch has no action 'inf' there"),
    ],
)
def test_a_fault_at_a_point_that_this_host_does_not_reach_is_refused_when_it_attaches(reached, fault, named):
    host = PlainHost({"w": torch.zeros(4)})
    host.framework, host.fault_points = "torch", reached
    config = Config.model_validate({"faults": fault})
    with pytest.raises(ConfigError) as caught:
        attach(host, config, launch_context({}))
    assert f"fault at {fault.partition(':')[0]}: " in str(caught.value) and named in str(caught.value)
    assert not any(map(faults.armed, OF_HOSTS))


def test_the_points_of_hosts_are_listed_and_each_adapter_names_those_that_its_source_reaches():
    assert set(OF_HOSTS) <= set(POINTS)
    for adapter in ("megatron/core.py", "deepspeed/core.py", "torch/torch_loop.py"):
        path = SOURCE / "adapters" / adapter
        source = ast.parse(path.read_text())
        named = next(
            node.value for node in ast.walk(source)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "fault_points"
        )  # fmt: skip
        shared = SOURCE / "adapters" / "host_parts.py" if "reach_fault_points(" in path.read_text() else path
        reached = {name for at, call in calls() for name in names(call) if at in (path, shared)}
        assert set(eval(ast.unparse(named))) == reached, adapter
