"""The in-process bootstrap: results, mismatches, limits, aborts, an injected wait."""

import threading
import time

import pytest

from mori_triton.errors import ArgumentError, Deadlock, PeerTimeout, StateError
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.bootstrap.threads import ThreadGroup
from tests.host.worlds import error_of, run_threads

pytestmark = pytest.mark.cpu


def test_collectives():
    group = ThreadGroup(4, timeout_s=5)

    def program(pe):
        boot = group.bootstrap(pe)
        assert isinstance(boot, Bootstrap)
        out = []
        for i in range(50):
            out.append(boot.allgather(bytes([pe]) * (i * pe)))
            out.append(boot.broadcast(f"from {pe}".encode(), root=i % 4))
            boot.barrier()
        boot.close()
        return out

    for results in run_threads(4, program):
        assert results[::2] == [[bytes([pe]) * (i * pe) for pe in range(4)] for i in range(50)]
        assert results[1::2] == [f"from {i % 4}".encode() for i in range(50)]
    assert not group._rounds


def test_barrier_waits_for_all():
    group, order = ThreadGroup(3, timeout_s=5), []

    def program(pe):
        boot = group.bootstrap(pe)
        time.sleep(0.03 * pe)
        order.append("before")
        boot.barrier()
        order.append("after")

    run_threads(3, program)
    assert order == ["before"] * 3 + ["after"] * 3


def test_arguments():
    group = ThreadGroup(2, timeout_s=1)
    for pe in (-1, 2, "0"):
        with pytest.raises(ArgumentError, match="rank: want 0 to 1"):
            group.bootstrap(pe)
    with pytest.raises(ArgumentError, match="nranks"):
        ThreadGroup(0)
    with pytest.raises(ArgumentError, match="root: want 0 to 1, got 2"):
        group.bootstrap(0).broadcast(b"", root=2)


def test_different_calls_are_named_and_the_group_goes_on():
    group = ThreadGroup(3, timeout_s=5)

    def program(pe):
        boot = group.bootstrap(pe)
        error = error_of(boot.barrier) if pe == 1 else error_of(boot.allgather, b"x")
        roots = error_of(boot.broadcast, b"", root=pe % 2)
        return error, roots, boot.allgather(bytes([pe]))

    for error, roots, data in run_threads(3, program):
        assert isinstance(error, StateError)
        assert "PE 0: allgather; PE 1: barrier; PE 2: allgather" in str(error)
        assert "PE 1: broadcast from PE 1" in str(roots)
        assert data == [b"\0", b"\1", b"\2"]


def test_d20_missing_pe_is_named_within_the_limit():
    group = ThreadGroup(4, timeout_s=0.5)
    start = time.monotonic()
    errors = run_threads(4, lambda pe: None if pe in (1, 3) else error_of(group.bootstrap(pe).barrier, "the meeting"))
    assert 0.4 < time.monotonic() - start < 5
    for pe in (0, 2):
        assert isinstance(errors[pe], PeerTimeout)
        assert "the meeting (collective 0)" in str(errors[pe])
        assert "waiting for PEs 1, 3" in str(errors[pe])


def test_a_pe_that_left_is_not_waited_for():
    group = ThreadGroup(2, timeout_s=30)
    start = time.monotonic()

    def program(pe):
        boot = group.bootstrap(pe)
        boot.barrier()
        if pe == 1:
            boot.close()
            boot.close()
            return error_of(boot.barrier)
        return error_of(boot.barrier, "one too many")

    errors = run_threads(2, program)
    assert time.monotonic() - start < 10
    assert isinstance(errors[0], PeerTimeout)
    assert "PE 1 left the world" in str(errors[0])
    assert isinstance(errors[1], StateError)


def test_abort_ends_all_that_wait():
    group = ThreadGroup(3, timeout_s=30)
    cause = ValueError("broken on PE 2")

    def program(pe):
        boot = group.bootstrap(pe)
        if pe == 2:
            time.sleep(0.05)
            group.abort(cause)
            group.abort(ValueError("a later one"))
        return error_of(boot.barrier)

    start = time.monotonic()
    for error in run_threads(3, program):
        assert isinstance(error, StateError)
        assert "ValueError: broken on PE 2" in str(error)
        assert error.__cause__ is cause
    assert time.monotonic() - start < 10


def test_injected_wait():
    """A world's own scheduler decides when a PE goes on, and learns what each waits for."""
    seen, lock = [], threading.Lock()

    def wait(predicate, what):
        with lock:
            seen.append(str(what))
        for _ in range(2000):
            if predicate():
                return
            time.sleep(0.001)
        raise Deadlock(str(what))

    group = ThreadGroup(3, wait=wait)
    assert run_threads(3, lambda pe: group.bootstrap(pe).allgather(b"%d" % pe)) == [[b"0", b"1", b"2"]] * 3
    assert len(seen) == 3
    assert any("of PE 1: waiting for" in text for text in seen)

    def never(predicate, what):
        raise Deadlock(f"nothing moves: {what}")

    group = ThreadGroup(2, wait=never)
    with pytest.raises(Deadlock, match=r"barrier \(collective 0\) of PE 0: waiting for PE 1"):
        group.bootstrap(0).barrier()


def test_i15_64_threads_start_together():
    group, gate = ThreadGroup(64, timeout_s=20), threading.Barrier(64)

    def program(pe):
        gate.wait()
        boot = group.bootstrap(pe)
        return [boot.allgather(b"%d" % (pe * i)) for i in range(3)]

    wanted = [[b"%d" % (pe * i) for pe in range(64)] for i in range(3)]
    assert run_threads(64, program) == [wanted] * 64
