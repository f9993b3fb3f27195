"""Two processes know each other by the job's secret, and whoever stands between them can only end the connection."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ProtocolError
from ft_plugins.transport.channel import TAG, ClientHandshake, Party, ServerHandshake

SECRET = b"sixteen bytes or more"
CLIENT = Party("smp", "gpt", "a")
SERVER = Party("smp", "gpt", "b")


def meet(client=CLIENT, server=SERVER, secret=SECRET, other=SECRET):
    calling, called = ClientHandshake(secret, client), ServerHandshake(other, server)
    answer, near = calling.answer(called.challenge(calling.hello()))
    return near, called.finish(answer)


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_one_side_seals_the_other_opens(encrypt):
    near, far = meet(replace(CLIENT, encrypt=encrypt), replace(SERVER, encrypt=encrypt))
    assert (near.node, far.node) == ("b", "a")
    for one, other in ((near, far), (far, near)):
        for unit in (b"first", b"", bytes(range(256)) * 4096):
            body, tag = one.sealer.seal(unit)
            assert len(body) == len(unit) and len(tag) == TAG
            assert (bytes(body) != unit) is (encrypt and unit != b"")
            assert bytes(other.opener.open(body, tag)) == unit


def test_a_side_without_the_secret_is_found_out_by_either():
    with pytest.raises(ProtocolError, match="does not know the secret"):
        meet(other=b"another secret, as long")
    calling, called = ClientHandshake(b"another secret, as long", CLIENT), ServerHandshake(SECRET, SERVER)
    called.challenge(calling.hello())
    with pytest.raises(ProtocolError, match="does not know the secret"):
        called.finish({"proof": bytes(32)})


@pytest.mark.parametrize(
    "server", [Party("rendezvous", "gpt", "b"), Party("smp", "bert", "b"), Party("smp", "gpt", "b", True)]
)
def test_two_that_mean_different_things_do_not_agree(server):
    with pytest.raises(ProtocolError, match="expected"):
        meet(server=server)


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_side_that_differs_in_encryption_is_named_and_its_word_cannot_be_changed(encrypt):
    def begun():
        client = ClientHandshake(SECRET, replace(CLIENT, encrypt=encrypt))
        return client, ServerHandshake(SECRET, replace(SERVER, encrypt=not encrypt))

    calling, called = begun()
    challenge = called.challenge(calling.hello())
    with pytest.raises(ProtocolError, match=f"--ftp-encrypt: expected {encrypt} .* found {not encrypt}; .* the same"):
        calling.answer(challenge)
    calling, called = begun()
    challenge = called.challenge({**calling.hello(), "encrypt": not encrypt})
    for said in (challenge, {**challenge, "encrypt": encrypt}):
        with pytest.raises(ProtocolError, match="does not know the secret"):
            calling.answer(said)


def test_a_proof_is_worth_nothing_in_the_other_direction_or_a_second_time():
    calling, called = ClientHandshake(SECRET, CLIENT), ServerHandshake(SECRET, SERVER)
    challenge = called.challenge(calling.hello())
    with pytest.raises(ProtocolError):
        called.finish({"proof": challenge["proof"]})
    answer, _ = calling.answer(challenge)
    again = ServerHandshake(SECRET, SERVER)
    again.challenge(calling.hello())
    with pytest.raises(ProtocolError):
        again.finish(answer)


def test_a_node_cannot_be_renamed_on_the_way():
    calling, called = ClientHandshake(SECRET, CLIENT), ServerHandshake(SECRET, SERVER)
    with pytest.raises(ProtocolError):
        calling.answer({**called.challenge(calling.hello()), "node": "c"})
    calling, called = ClientHandshake(SECRET, CLIENT), ServerHandshake(SECRET, SERVER)
    with pytest.raises(ProtocolError):
        calling.answer(called.challenge({**calling.hello(), "node": "c"}))


@pytest.mark.parametrize("encrypt", [False, True])
@given(unit=st.binary(min_size=1, max_size=64), at=st.integers(0, 63), bit=st.integers(0, 7))
def test_a_changed_bit_of_a_unit_or_its_tag_is_refused(encrypt, unit, at, bit):
    near, far = meet(replace(CLIENT, encrypt=encrypt), replace(SERVER, encrypt=encrypt))
    body, tag = near.sealer.seal(unit)
    whole = bytearray(bytes(body) + tag)
    whole[at % len(whole)] ^= 1 << bit
    with pytest.raises(ProtocolError, match="changed on the way"):
        far.opener.open(bytes(whole[:-TAG]), bytes(whole[-TAG:]))


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,)])
def test_units_cannot_be_swapped_repeated_or_left_out(order):
    near, far = meet()
    sent = [near.sealer.seal(unit) for unit in (b"one", b"two")]
    with pytest.raises(ProtocolError):
        for index in order:
            far.opener.open(*sent[index])


def test_a_unit_cannot_be_returned_to_its_sender():
    near, _ = meet()
    with pytest.raises(ProtocolError):
        near.opener.open(*near.sealer.seal(b"read"))


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"purpose": "smp", "job": "gpt", "node": "a"},
        {"purpose": "smp", "job": "gpt", "node": "a", "nonce": b"short"},
        {"purpose": "smp", "job": "gpt", "node": "a", "nonce": "x" * 32},
        {"purpose": "smp", "job": "gpt", "node": "\ud800", "nonce": bytes(32)},
        {"purpose": "smp", "job": "gpt", "node": "\x1b[2J", "nonce": bytes(32)},
        {"purpose": "smp", "job": ["gpt"], "node": "a", "nonce": bytes(32)},
        {"purpose": "smp", "job": "g" * 257, "node": "a", "nonce": bytes(32)},
    ],
)
def test_a_malformed_hello_is_the_projects_own_error(hello):
    with pytest.raises(ProtocolError, match="handshake"):
        ServerHandshake(SECRET, SERVER).challenge(hello)
