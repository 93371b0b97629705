"""The unique-id bootstrap: PEs are threads here. No torch."""

import contextlib
import os
import random
import socket
import struct
import threading
import time

import pytest

from mori_triton.errors import ArgumentError, EnvError, PeerTimeout, StateError
from mori_triton.host.bootstrap import hub, interfaces, tcp
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.bootstrap.tcp import TcpBootstrap, UniqueId, new_unique_id
from tests.host.worlds import error_of, run_threads

pytestmark = pytest.mark.cpu


def hub_of(unique_id):
    return tcp._hubs[UniqueId.unpack(unique_id).magic]


def wait_until(condition, seconds=5.0):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.005)
    return condition()


def test_collectives_and_sizes():
    unique_id = new_unique_id()
    sizes = [0, 1, 70_000, 3_000_000]

    def program(pe):
        boot = TcpBootstrap(unique_id, pe, 4, timeout_s=20)
        assert isinstance(boot, Bootstrap)
        out = []
        for i in range(4):
            out.append(boot.allgather(bytes([pe]) * sizes[(pe + i) % 4]))
            out.append(boot.broadcast(b"%d" % pe, root=i))
        for _ in range(100):
            boot.barrier()
        boot.close()
        boot.close()
        return out

    for out in run_threads(4, program):
        for i in range(4):
            assert out[2 * i] == [bytes([pe]) * sizes[(pe + i) % 4] for pe in range(4)]
            assert out[2 * i + 1] == b"%d" % i
    assert wait_until(lambda: not hub_of(unique_id).alive), "the server ends with its world"


def test_i1_worlds_again_and_again_leave_nothing():
    def cycle():
        unique_id = new_unique_id()
        run_threads(2, lambda pe: TcpBootstrap(unique_id, pe, 2, timeout_s=20).close())
        assert wait_until(lambda: not hub_of(unique_id).alive)

    cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    new_unique_id()
    assert sum(not server.alive for server in tcp._hubs.values()) == 0


def test_two_worlds_at_once():
    ids = [new_unique_id(), new_unique_id()]
    assert ids[0] != ids[1]

    def program(k):
        boot = TcpBootstrap(ids[k % 2], k // 2, 2, timeout_s=20)
        return boot.allgather(b"world %d" % (k % 2))

    assert run_threads(4, program) == [[b"world 0"] * 2, [b"world 1"] * 2] * 2


def test_unique_id_bytes():
    unique_id = new_unique_id()
    assert len(unique_id) == 128
    assert UniqueId.unpack(unique_id).pack() == unique_id
    v6 = UniqueId(socket.AF_INET6, "fe80::1", 4242, 3, bytes(range(16)))
    assert UniqueId.unpack(v6.pack()) == v6
    assert v6.where == ("fe80::1", 4242, 0, 3)
    for bad in (b"", unique_id[:-1], unique_id + b"\0"):
        with pytest.raises(ArgumentError, match=f"want 128 bytes, got {len(bad)}"):
            TcpBootstrap(bad, 0, 1)
    flipped = bytes([*unique_id[:30], unique_id[30] ^ 1, *unique_id[31:]])
    for bad in (bytes(128), b"\xff" * 128, flipped):
        with pytest.raises(ArgumentError, match="shmem_get_unique_id"):
            TcpBootstrap(bad, 0, 1)


def test_rank_and_count():
    unique_id = new_unique_id()
    for pe, n_pes in ((-1, 2), (2, 2), (0, 0), (0, -1), ("0", 2), (0, "2"), (0.0, 1)):
        with pytest.raises(ArgumentError, match=r"rank|nranks"):
            TcpBootstrap(unique_id, pe, n_pes, timeout_s=5)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two PEs call themselves PE 1"),
        ([(0, 3), (1, 3), (1, 2)], "a world of"),
    ],
)
def test_ranks_that_do_not_fit_together(ranks, text):
    """Everybody hears of it at once, not at the limit."""
    unique_id = new_unique_id()
    start = time.monotonic()
    errors = run_threads(3, lambda i: error_of(TcpBootstrap, unique_id, *ranks[i], timeout_s=30))
    assert time.monotonic() - start < 10
    for error in errors:
        assert isinstance(error, StateError)
        assert text in str(error)


def test_who_comes_after_the_quarrel_hears_of_it_too():
    """The others have left by then: the server is still there, until everybody has been told or has stopped to wait."""
    unique_id = new_unique_id()
    first = run_threads(2, lambda i: error_of(TcpBootstrap, unique_id, *[(1, 2), (0, 3)][i], timeout_s=30))
    assert wait_until(lambda: not hub_of(unique_id)._clients)
    last = error_of(TcpBootstrap, unique_id, 2, 3, timeout_s=30)
    for error in (*first, last):
        assert isinstance(error, StateError)
        assert "a world of" in str(error)
    assert wait_until(lambda: not hub_of(unique_id).alive), "nobody else can come"
    unique_id = new_unique_id()
    run_threads(2, lambda i: error_of(TcpBootstrap, unique_id, *[(1, 2), (0, 3)][i], timeout_s=1))
    assert wait_until(lambda: not hub_of(unique_id).alive), "who is missing would have given up"


def test_latecomer_with_a_taken_rank_does_not_disturb():
    unique_id = new_unique_id()
    boots = run_threads(2, lambda pe: TcpBootstrap(unique_id, pe, 2, timeout_s=10))
    with pytest.raises(PeerTimeout, match=r"cannot reach|lost the connection"):
        TcpBootstrap(unique_id, 1, 2, timeout_s=2)
    assert run_threads(2, lambda pe: boots[pe].allgather(b"%d" % pe)) == [[b"0", b"1"]] * 2


def test_i13_missing_pes_are_named_within_the_limit():
    unique_id = new_unique_id()
    start = time.monotonic()
    errors = run_threads(4, lambda pe: error_of(TcpBootstrap, unique_id, pe, 4, timeout_s=1) if pe in (0, 2) else None)
    assert 0.9 < time.monotonic() - start < 5
    for pe in (0, 2):
        assert isinstance(errors[pe], PeerTimeout)
        assert f"PE {pe} of 4" in str(errors[pe])
        assert "PEs 1, 3 of 4 did not join within 1 s" in str(errors[pe])
    # one who comes after that hears the same
    with pytest.raises(PeerTimeout, match=r"PEs 1, 3|cannot reach|lost the connection"):
        TcpBootstrap(unique_id, 1, 4, timeout_s=1)


def test_d20_collective_without_one_pe():
    unique_id = new_unique_id()

    def program(pe):
        boot = TcpBootstrap(unique_id, pe, 3, timeout_s=1)
        boot.barrier()
        if pe == 1:
            time.sleep(1.6)
            return error_of(boot.barrier, "too late"), None
        return error_of(boot.barrier, "the meeting"), error_of(boot.barrier, "another")

    results = run_threads(3, program)
    for pe in (0, 1, 2):
        assert isinstance(results[pe][0], PeerTimeout)
        assert "PE 1 did not take part in the meeting (number 1) within 1 s" in str(results[pe][0])
    # the world is over, for every call and at once
    assert "PE 1 did not take part in the meeting" in str(results[0][1])


def test_different_calls_are_named_and_the_world_goes_on():
    unique_id = new_unique_id()

    def program(pe):
        boot = TcpBootstrap(unique_id, pe, 2, timeout_s=5)
        return error_of(boot.barrier, "first" if pe else "second"), boot.allgather(b"%d" % pe)

    for error, data in run_threads(2, program):
        assert isinstance(error, StateError)
        assert "PE 0: second (number 0); PE 1: first (number 0)" in str(error)
        assert data == [b"0", b"1"]


def test_a_pe_that_left_is_not_waited_for():
    unique_id = new_unique_id()

    def program(pe):
        boot = TcpBootstrap(unique_id, pe, 2, timeout_s=30)
        boot.barrier()
        if pe == 1:
            boot.close()
            return error_of(boot.barrier)
        return error_of(boot.barrier)

    start = time.monotonic()
    errors = run_threads(2, program)
    assert time.monotonic() - start < 10
    assert isinstance(errors[0], PeerTimeout)
    assert "PE 1 has left (finalized or exited)" in str(errors[0])
    assert isinstance(errors[1], StateError)


def test_strangers_are_ignored():
    """Connections that do not know the id's secret, or speak something else, or nothing."""
    unique_id = new_unique_id()
    where = UniqueId.unpack(unique_id).where
    words = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        hub.frame(hub.HELLO, hub.HELLO_BODY.pack(bytes(16), 0, 2, 5.0)),
        hub.frame(hub.CALL, b"early"),
        b"",
    ]
    strangers = [socket.create_connection(where) for _ in words]
    for stranger, word in zip(strangers, words, strict=True):
        stranger.sendall(word)
    boots = run_threads(2, lambda pe: TcpBootstrap(unique_id, pe, 2, timeout_s=5))
    assert run_threads(2, lambda pe: boots[pe].allgather(b"%d" % pe)) == [[b"0", b"1"]] * 2
    for stranger, word in zip(strangers, words, strict=True):
        stranger.settimeout(2)
        if word:
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        stranger.close()


def test_the_listening_socket_stays_open_from_the_start():
    """No time between getting the id and joining in which another program could take the port."""
    unique_id = new_unique_id()
    family, address, port, *_ = UniqueId.unpack(unique_id)
    with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port))
    assert TcpBootstrap(unique_id, 0, 1, timeout_s=5).allgather(b"x") == [b"x"]


def test_server_that_never_answers():
    """A process that is stopped keeps its connections open; the limit holds all the same."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        unique_id = UniqueId(socket.AF_INET, "127.0.0.1", silent.getsockname()[1], 0, bytes(16)).pack()
        original, tcp._GRACE_S = tcp._GRACE_S, 0.1
        try:
            with pytest.raises(PeerTimeout, match=r"127\.0\.0\.1 port \d+ does not answer within 0.2 s"):
                TcpBootstrap(unique_id, 0, 2, timeout_s=0.2)
        finally:
            tcp._GRACE_S = original
    with pytest.raises(PeerTimeout, match="cannot reach the process that made the unique id"):
        TcpBootstrap(unique_id, 0, 2, timeout_s=2)


def test_interfaces():
    assert interfaces.listen_address(("lo",)) == (socket.AF_INET, "127.0.0.1", 0)
    assert interfaces.listen_address(("nosuch0", "lo")) == (socket.AF_INET, "127.0.0.1", 0)
    with pytest.raises(EnvError, match=r"MORI_SOCKET_IFNAME: .*there are .*lo.*got 'nosuch0,nosuch1'"):
        interfaces.listen_address(("nosuch0", "nosuch1"))
    family, address, scope = interfaces.listen_address(None)
    with socket.socket(family) as probe:
        probe.bind((address, 0) if family == socket.AF_INET else (address, 0, 0, scope))
    named = {name for _, name in socket.if_nameindex()}
    assert {"lo"} <= named
    if address != "127.0.0.1":
        assert any(
            interfaces.listen_address((name,))[1] == address for name in named - {"lo"} if interfaces._ipv4(name)
        )
    v6 = interfaces._ipv6("lo")
    assert v6 is None or v6[:2] == (socket.AF_INET6, "::1")
    boot = TcpBootstrap(new_unique_id(("lo",)), 0, 1, timeout_s=5)
    assert boot.broadcast(b"z") == b"z"


def test_large_answer_to_a_slow_reader():
    """The server keeps what a socket does not take yet, and goes on serving others meanwhile."""
    unique_id = new_unique_id()
    fields = UniqueId.unpack(unique_id)
    data = random.Random(2).randbytes(24_000_000)
    with socket.create_connection(fields.where) as client:
        client.settimeout(10)
        client.sendall(hub.frame(hub.HELLO, hub.HELLO_BODY.pack(fields.magic, 0, 1, 20.0)))
        client.sendall(hub.frame(hub.CALL, hub.CALL_HEAD.pack(0, 4), b"what", data))
        time.sleep(0.2)
        assert hub_of(unique_id).alive
        wanted = hub.frame(hub.WELCOME) + hub.frame(hub.RESULT, struct.pack("<Q", len(data)), data)
        answer = bytearray()
        while len(answer) < len(wanted) and (piece := client.recv(1 << 20)):
            answer += piece
        assert answer == wanted
    assert wait_until(lambda: not hub_of(unique_id).alive)


def test_an_interrupted_call_is_not_answered_twice(monkeypatch):
    """After Ctrl-C in a collective the stream holds the answer to it, which must not be taken for the next one's."""
    boot = TcpBootstrap(new_unique_id(), 0, 1, timeout_s=5)
    receive = boot._receive

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(boot, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        boot.allgather(b"first", "the first")
    monkeypatch.setattr(boot, "_receive", receive)
    with pytest.raises(PeerTimeout, match=r"an earlier call \(the first \(number 0\)\) was interrupted"):
        boot.allgather(b"second")
    boot.close()


def test_frames_in_any_pieces():
    """The server puts frames together from whatever pieces arrive."""
    unique_id = new_unique_id()
    fields = UniqueId.unpack(unique_id)
    hello = hub.frame(hub.HELLO, hub.HELLO_BODY.pack(fields.magic, 0, 1, 5.0))
    call = hub.frame(hub.CALL, hub.CALL_HEAD.pack(0, 4), b"what", b"data")
    pieces, answer = random.Random(1), b""
    wanted = [hub.frame(hub.WELCOME), hub.frame(hub.RESULT, struct.pack("<Q", 4), b"data"), b""]
    with socket.create_connection(fields.where) as client:
        client.settimeout(5)
        for request, reply in zip([hello, call, hub.frame(hub.BYE)], wanted, strict=True):
            at = 0
            while at < len(request):
                size = pieces.randint(1, 9)
                client.sendall(request[at : at + size])
                at += size
                time.sleep(0.001)
            answer = b""
            while len(answer) < len(reply) and (piece := client.recv(100)):
                answer += piece
            assert answer == reply
        assert client.recv(100) == b""
