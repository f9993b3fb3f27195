"""Which variables code reads and sets while it is watched."""

import os

from ft_plugins.launcher.preload.traces import EnvironmentReads


def test_names_that_code_reads_are_noted_and_what_it_sets_is_known(monkeypatch):
    for name, value in {"A": "1", "GONE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("E", raising=False)
    reads = EnvironmentReads()
    with reads.watching():
        os.environ.get("A"), os.getenv("B"), "C" in os.environ, os.environb.get(b"D")
        os.environ.setdefault("E", "new")
        os.environ.pop("GONE")
    os.environ.get("LATER")
    assert reads.used == {"A", "B", "C", "D", "E", "GONE"} and reads.written() == {"GONE": None, "E": "new"}
    assert type(vars(os.environ)["_data"]) is dict
    del os.environ["E"]


def test_copying_the_environment_or_searching_it_reads_no_name(monkeypatch):
    monkeypatch.setenv("A", "1")
    reads = EnvironmentReads()
    with reads.watching():
        assert os.environ.copy()["A"] == "1" and dict(os.environ)["A"] == "1"
        assert [name for name, value in os.environ.items() if value.startswith("1")]
        assert reads.used == set()
        os.environ["A"]
    assert reads.used == {"A"}
