"""Agents that share a store with strangers believe what carries a proof by the job's secret, made for their meeting."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistError, HashStore, PrefixStore

from ft_plugins.errors import ConfigError
from ft_plugins.launcher.agent.agent_channel import AgentChannel

SECRET = b"sixteen bytes or more"
SHORT = timedelta(seconds=0.2)


def meet(store, *secrets):
    def enter(rank):
        try:
            return AgentChannel(store, secrets[rank], "job", rank, len(secrets))
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(enter, range(len(secrets))))


def exchanges(store):
    a, b = meet(store, SECRET, SECRET)
    assert isinstance(a, AgentChannel) and isinstance(b, AgentChannel)
    return a, b


def test_each_hears_what_the_others_said():
    a, b = exchanges(HashStore())
    a.publish("opened", b"0")
    b.publish("opened", b"1")
    assert a.read_all("opened") == b.read_all("opened", SHORT) == [b"0", b"1"]
    a.publish("ended", b"1")
    with pytest.raises(DistError):
        a.read_all("ended", SHORT)


@pytest.mark.parametrize("forged", [b"", b"1", b"1" + bytes(32)])
def test_a_word_of_a_stranger_is_none(forged):
    store = HashStore()
    a, b = exchanges(store)
    a.publish("ended", b"1")
    b.publish("other", b"1")
    store.set("ended/1", forged)
    assert a.read_all("ended") == [b"1", None]
    for kept in ("ended/0", "other/1"):  # a real one, of another rank or for another thing
        store.set("ended/1", store.get(kept))
        assert a.read_all("ended") == [b"1", None]


def test_a_word_of_another_incarnation_is_none():
    store = HashStore()
    for_first, for_second = PrefixStore("1", store), PrefixStore("2", store)
    a, b = exchanges(for_first)
    b.publish("ended", b"1")
    second, _ = exchanges(for_second)
    second.publish("ended", b"1")
    for_second.set("ended/1", for_first.get("ended/1"))
    assert second.read_all("ended") == [b"1", None]


class Replaying:
    """The store of an agent of group rank 0, in which a stranger repeats what stood in another one."""

    def __init__(self, store, old):
        self._store, self._old = store, old

    def set(self, key, value):
        self._store.set(key, value)

    def multi_get(self, keys):
        for key in keys:
            self._store.set(key, self._old.get(key))
        return list(self._store.multi_get(keys))


def test_words_of_another_incarnation_are_none_also_where_its_numbers_are_repeated():
    old = HashStore()
    meet(old, SECRET, SECRET)
    with pytest.raises(ConfigError, match="group rank 0: expected the nonces of 2 agents .* another process wrote"):
        AgentChannel(Replaying(HashStore(), old), SECRET, "job", 0, 2)


def test_nodes_of_different_jobs_do_not_believe_each_other():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        entered = [pool.submit(AgentChannel, store, SECRET, job, rank, 2) for rank, job in enumerate(("one", "two"))]
        for each in entered:
            with pytest.raises(ConfigError, match="has a different secret"):
                each.result(60)


def test_nodes_with_different_secrets_all_say_so():
    for found in meet(HashStore(), SECRET, b"another secret, as long"):
        assert isinstance(found, ConfigError) and "--ftp-secret-file" in str(found)


class Overwritten:
    """A store in which a stranger overwrites a value before it is read."""

    def __init__(self, store, key):
        self._store, self._key = store, key

    def set(self, key, value):
        self._store.set(key, value)

    def multi_get(self, keys):
        if self._key in keys:
            self._store.set(self._key, b"")
        return list(self._store.multi_get(keys))


def test_a_stranger_is_named_too_where_the_secrets_may_be_the_same():
    with pytest.raises(ConfigError, match="different secret .* or another process wrote .* drop --rdzv-backend"):
        AgentChannel(Overwritten(HashStore(), "here/0"), SECRET, "job", 0, 1)
