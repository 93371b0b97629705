"""Agents: what acts beside hosts and device in a seeded world. Who runs when, when nothing can, and what fails."""

import numpy as np
import pytest

from mori_triton.emulator import launch, scheduler
from mori_triton.errors import Deadlock
from tests.emulator.hosts import cause, in_threads
from tests.emulator.snippets import ADD_ONE, ASK, POINTER, SPIN, kernel

pytestmark = pytest.mark.cpu


class Answers:
    """Answers requests one by one; every so often a step puts it off."""

    def __init__(self, words, late=0):
        self.words, self.late, self.given = words, late, []
        self.coordinator, self.asked_at = None, []

    def pending(self):
        if self.coordinator is not None:
            self.asked_at.append(self.coordinator.machine.instructions)
        return bool(self.words[1] < self.words[0])

    def step(self, word):
        if self.late and word % self.late:
            return False
        self.given.append(word)
        self.words[1] += 1
        return True

    def describe(self):
        return [f"answers: {self.words[1]} of {self.words[0]} given"]


def executes(body, words, groups=1, name="k"):
    return lambda host: host.execute(
        launch.Launch(kernel(body, args=[POINTER], name=name), (groups, 1, 1), [words], num_warps=1)
    )


def asks(words, rounds=5, groups=1, think=1):
    return executes(ASK.format(rounds=rounds, think=think), words, groups)


def spins(words):
    return executes(SPIN, words, name="spins")


@pytest.mark.parametrize("late", [0, 2, 50])
def test_kernels_and_hosts_wait_for_what_an_agent_does(late):
    for seed in range(6):
        words = [np.zeros(3, np.uint32) for _ in range(2)]
        agents = [Answers(w, late) for w in words]
        coordinator = scheduler.Coordinator(3, seed, agents=agents)

        def waits(host, words=words):
            host.wait(lambda: all(w[1] == 10 for w in words), "all answers")

        assert in_threads(coordinator, asks(words[0], groups=2), asks(words[1], 10), waits) == [None] * 3, seed
        assert [w.tolist() for w in words] == [[10, 10, 0]] * 2


def test_the_seed_decides_when_an_agent_acts_and_what_it_does():
    def run(seed):
        words = np.zeros(3, np.uint32)
        agents = [Answers(words, 3), Answers(words, 3)]
        coordinator = scheduler.Coordinator(2, seed, agents=agents)
        assert in_threads(coordinator, asks(words, groups=3), asks(words)) == [None] * 2
        return coordinator.trace_hash, [agent.given for agent in agents]

    assert run(3) == run(3)
    outcomes = [run(seed) for seed in range(8)]
    assert len({str(outcome) for outcome in outcomes}) == 8
    assert all(0 <= word < 1 << 64 for _, given in outcomes for words in given for word in words)
    assert max(word for _, given in outcomes for words in given for word in words) > 1 << 60


def test_every_choice_is_in_the_trace():
    """Which of two agents acts shows, even where no kernel runs and none of them changes anything that is seen."""

    class Counts:
        def __init__(self, log, name):
            self.log, self.name = log, name

        def pending(self):
            return len(self.log) < 6

        def step(self, word):
            self.log.append(self.name)
            return False

        def describe(self):
            return []

    def run(seed):
        log = []
        coordinator = scheduler.Coordinator(1, seed, agents=[Counts(log, "a"), Counts(log, "b")])
        assert in_threads(coordinator, lambda host: host.wait(lambda: len(log) == 6, "six steps")) == [None]
        return "".join(log), coordinator.trace_hash

    outcomes = {run(seed) for seed in range(30)}
    assert len(outcomes) > 15
    assert len({trace for _, trace in outcomes}) == len(outcomes)


def test_nobody_else_runs_during_a_step():
    turn, words = [], np.zeros(3, np.uint32)

    class Alone(Answers):
        def step(self, word):
            assert not turn
            turn.append("agent")
            before = self.coordinator.machine.instructions
            assert super().step(word)
            assert self.coordinator.machine.instructions == before
            turn.pop()
            return True

    agent = Alone(words)
    coordinator = agent.coordinator = scheduler.Coordinator(3, 4, agents=[agent])

    def body(host):
        for _ in range(20):
            assert not turn
            turn.append(host.index)
            turn.pop()
            host.wait(lambda: True, "a turn")

    assert in_threads(coordinator, body, body, asks(words)) == [None] * 3


def test_an_agent_is_asked_often_while_kernels_run():
    """A kernel that waits for an agent polls all the while: what lies between must not be long."""
    words = np.zeros(3, np.uint32)
    agent = Answers(words)
    coordinator = agent.coordinator = scheduler.Coordinator(1, 1, agents=[agent])
    assert in_threads(coordinator, asks(words, rounds=50)) == [None]
    assert coordinator.machine.instructions > 20_000
    # the longest turn of the device, and a wave's last quantum
    assert np.diff(agent.asked_at).max() <= 12_000


def test_agents_come_and_go_during_a_run():
    words = np.zeros(3, np.uint32)
    coordinator = scheduler.Coordinator(2, 2)

    def brings(host):
        agent = Answers(words)
        coordinator.agents.append(agent)
        host.wait(lambda: words[1] == 5, "all answers")
        coordinator.agents.remove(agent)

    assert in_threads(coordinator, asks(words), brings) == [None] * 2
    assert coordinator.agents == []


@pytest.mark.parametrize("weak_memory", [False, True])
def test_a_standstill_with_an_idle_agent_is_a_deadlock(weak_memory):
    words = np.zeros(3, np.uint32)
    coordinator = scheduler.Coordinator(2, 1, weak_memory=weak_memory, agents=[Answers(words)])
    error = cause(in_threads(coordinator, spins(words), lambda host: host.wait(lambda: False, "PE 1 waits for rain")))
    assert isinstance(error, Deadlock)
    text = str(error)
    assert "spins, workgroup 0, wave 0, line" in text
    assert "PE 1 waits for rain" in text
    assert "answers: 0 of 0 given" in text


def test_hosts_alone_with_an_idle_agent_are_a_deadlock():
    coordinator = scheduler.Coordinator(1, 1, agents=[Answers(np.zeros(3, np.uint32))])
    error = cause(in_threads(coordinator, lambda host: host.wait(lambda: False, "PE 0 waits for rain")))
    assert isinstance(error, Deadlock)
    assert "PE 0 waits for rain\n  answers: 0 of 0 given" in str(error)


@pytest.mark.parametrize("kernel_waits", [False, True])
def test_an_agent_that_never_gets_anywhere_is_a_deadlock(kernel_waits):
    class Stuck(Answers):
        def step(self, word):
            return False

    words = np.array([1, 0, 0], np.uint32)
    coordinator = scheduler.Coordinator(1, 1, agents=[Stuck(words)])
    body = spins(words[2:]) if kernel_waits else lambda host: host.wait(lambda: False, "PE 0 waits for rain")
    error = cause(in_threads(coordinator, body))
    assert isinstance(error, Deadlock)
    assert "nothing has changed in 10000 steps" in str(error)
    assert "answers: 0 of 1 given" in str(error)
    assert ("spins, workgroup 0" if kernel_waits else "PE 0 waits for rain") in str(error)


def test_waves_that_had_gone_quiet_poll_again():
    """The agent acts long after every wave was found to be unable to go on, and what they do then changes nothing."""

    class Slow(Answers):
        left = 3000

        def pending(self):
            return self.words[1] < 2

        def step(self, word):
            self.left -= 1
            return self.left in (0, -3000) and self.words[0] > self.words[1] and super().step(word)

    for seed in range(3):
        words = np.zeros(3, np.uint32)
        coordinator = scheduler.Coordinator(1, seed, agents=[Slow(words)])
        events, run = [], coordinator.machine.run
        coordinator.machine.run = lambda limit, run=run, events=events: events.append(run(limit)) or events[-1]
        assert in_threads(coordinator, asks(words, rounds=2, think=0x40000)) == [None]
        assert events.count(scheduler.Event.QUIET) >= 2


ASK_AT_THE_LIMIT = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\tv_mov_b32_e32 v1, 0
\tv_mov_b32_e32 v2, 1
\ts_mov_b32 exec_lo, 1
\ts_sendmsg_rtn_b64 s[8:9], sendmsg(MSG_RTN_GET_REALTIME)
early:
\tglobal_load_b32 v3, v1, s[2:3] offset:8 scope:SCOPE_SYS
\ts_sendmsg_rtn_b64 s[10:11], sendmsg(MSG_RTN_GET_REALTIME)
\ts_sub_co_u32 s10, s10, s8
\ts_sub_co_ci_u32 s11, s11, s9
\ts_cmp_eq_u32 s11, 0
\ts_cbranch_scc1 early
\tglobal_atomic_add_u32 v1, v2, s[2:3] scope:SCOPE_SYS
again:
\tglobal_load_b32 v3, v1, s[2:3] offset:4 scope:SCOPE_SYS
\tv_readfirstlane_b32 s5, v3
\ts_cmp_eq_u32 s5, 0
\ts_cbranch_scc1 again
\ts_endpgm
"""


def test_agents_act_while_waits_end_at_their_limit():
    """Nothing but time goes on; a kernel whose wait is over asks the agent once more, after another one has ended."""
    only_waits = ASK_AT_THE_LIMIT.partition("\tglobal_atomic")[0] + "\ts_endpgm"
    for seed in range(4):
        words = np.zeros(3, np.uint32)
        agent = Answers(words)
        agent.late = 20
        coordinator = scheduler.Coordinator(2, seed, agents=[agent])
        assert in_threads(coordinator, executes(ASK_AT_THE_LIMIT, words), executes(only_waits, words)) == [None] * 2
        assert words.tolist() == [1, 1, 0]


@pytest.mark.parametrize("where", ["pending", "step"])
def test_an_agent_that_fails_ends_the_world(where):
    class Fails(Answers):
        def pending(self):
            if where == "pending" and self.words[0]:
                raise RuntimeError("the card is on fire")
            return super().pending()

        def step(self, word):
            raise RuntimeError("the card is on fire")

    for seed in range(6):
        words = np.zeros(3, np.uint32)
        coordinator = scheduler.Coordinator(3, seed, agents=[Fails(words)])
        # the turn may be that of a host which has ended
        results = in_threads(coordinator, asks(words), spins(words[2:]), lambda host: None)
        assert results[2] is None or isinstance(results[2], scheduler.Aborted)
        assert str(cause(results[:2])) == "the card is on fire"
        assert str(coordinator.failure) == "the card is on fire"


def test_agents_are_left_alone_once_all_hosts_have_ended():
    class Late(Answers):
        def step(self, word):
            raise AssertionError("memory is gone")

        def pending(self):
            assert any(host.state != "done" for host in coordinator.hosts)
            return ended

    ended = False
    coordinator = scheduler.Coordinator(1, 1, agents=[Late(np.zeros(3, np.uint32))])

    def body(host):
        nonlocal ended
        ended = True

    assert in_threads(coordinator, body) == [None]
    assert coordinator.failure is None


# ------------------------------------------------------------------------------------------------- without agents
STORE_AND_POLL = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\tv_mov_b32_e32 v1, 0
\tv_mov_b32_e32 v2, 1
\ts_cmp_eq_u32 ttmp9, 0
\ts_cbranch_scc1 poll
\tglobal_store_b32 v1, v2, s[2:3]
\ts_movk_i32 s4, 0x300
work:
\tglobal_load_b32 v3, v1, s[2:3] offset:4
\ts_add_co_i32 s4, s4, -1
\ts_cmp_lg_u32 s4, 0
\ts_cbranch_scc1 work
\ts_wait_storecnt 0x0
\ts_endpgm
poll:
\tglobal_load_b32 v3, v1, s[2:3] scope:SCOPE_DEV
\tv_readfirstlane_b32 s5, v3
\ts_cmp_eq_u32 s5, 0
\ts_cbranch_scc1 poll
\ts_endpgm
"""


@pytest.mark.parametrize("weak_memory", [False, True])
def test_seeds_of_worlds_without_agents_keep_their_order(weak_memory):
    """A failure that was found under a seed is found under it again: hashes of the first release that had seeds."""

    def run(seed):
        flag = np.zeros(1, np.uint32)
        spin, write = kernel(SPIN, args=[POINTER]), kernel(ADD_ONE, args=[POINTER])
        coordinator = scheduler.Coordinator(3, seed, weak_memory=weak_memory)

        def waits(host):
            host.execute(launch.Launch(spin, (4, 1, 1), [flag], num_warps=2))
            host.wait(lambda: True, "a turn")
            host.execute(launch.Launch(write, (2, 1, 1), [flag], num_warps=1))

        def writes(host):
            for _ in range(3):
                host.wait(lambda: True, "a turn")
            host.execute(launch.Launch(write, (1, 1, 1), [flag], num_warps=1))

        assert in_threads(coordinator, waits, waits, writes) == [None] * 3
        return coordinator.trace_hash

    assert [run(seed) for seed in (1, 2, 7)] == [0xBA0CFEE1FA33B55B, 0xE81CF13BFB951A7B, 0xCCF97B734FA965CF]


def test_seeds_of_weak_memory_keep_what_they_draw():
    def run(seed):
        words = np.zeros(2, np.uint32)
        k = kernel(STORE_AND_POLL, args=[POINTER])
        coordinator = scheduler.Coordinator(2, seed, weak_memory=True)
        run_it = lambda host: host.execute(launch.Launch(k, (2, 1, 1), [words], num_warps=1))  # noqa: E731
        assert in_threads(coordinator, run_it, lambda host: None) == [None] * 2
        return coordinator.trace_hash, coordinator.weak._system.rng

    assert [run(seed) for seed in (1, 2)] == [
        (0xD95B3DEE1AC360A9, 8065036452450101528),
        (0xB241671E8C4DEEFD, 11097407116399181917),
    ]
