"""Worlds on GPUs, without one: streams and graphs are played by threads, kernels run on the emulated device."""

import time

import pytest
import torch
import triton

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device.launch import launch, load
from mori_triton.errors import ArgumentError, DriverError, PeerTimeout, StateError
from mori_triton.host import drivers, state
from mori_triton.world import gpus
from tests.fake_gpu_worlds import fake, world  # noqa: F401
from tests.fake_gpus import FakeGpus
from tests.world_programs import copy_kernel, put_right_kernel, tell_kernel, wait_kernel, words

pytestmark = pytest.mark.cpu


def test_each_pe_has_its_stream_on_its_gpu(fake, monkeypatch):  # noqa: F811
    monkeypatch.setattr(FakeGpus, "count", 2)
    driver_of = world(5).run(lambda pe: (state.current().driver.device_index, fake[0].current_stream()))
    assert [index for index, _ in driver_of] == [0, 1, 0, 1, 0]
    assert len({id(stream) for _, stream in driver_of}) == 5


@pytest.mark.parametrize("n", [1, 2, 3])
def test_waits_that_are_launched_before_what_they_wait_for(n):
    def program(pe):
        signal, out = words(), torch.full((1,), -1)
        gpus, side = mori.current_world()._run("test").gpus, side_stream(pe)

        def turn():
            load(wait_kernel, shmem.context(), signal, out, 1)
            with gpus.stream(side):
                load(tell_kernel, shmem.context(), signal, 1)

        mori.current_world().preload(turn)
        for step in range(1, 4):
            # every wait is on its stream before anybody is told
            launch(wait_kernel, (1,), shmem.context(), signal, out, step)
            state.current().meet("everybody waits")
            with gpus.stream(side):
                launch(tell_kernel, (1,), shmem.context(), signal, step)
            shmem.shmem_barrier_all()
            assert int(out) == step
        return int(out)

    def side_stream(pe):
        # a second stream of this PE: on the first the wait goes on
        run = mori.current_world()._run("test")
        if not hasattr(run, "sides"):
            run.sides = {}
        if pe not in run.sides:
            here = state.current()
            stream = run.gpus.take_stream(0, here.driver)
            stream.device.label = f"PE {pe}"
            for region in here.heap.regions():
                stream.device.allow(region.address, region.num_bytes, region.name)
            here.on_close.append(lambda: (stream.synchronize(), run.gpus.give_stream(stream)))
            run.sides[pe] = stream
        return run.sides[pe]

    assert world(n).run(program) == [3] * n


def test_meet_is_a_rendezvous():
    come = []

    def program(pe):
        time.sleep(0.05 * pe)
        come.append(pe)
        state.current().meet("here")
        return len(come)

    assert world(3).run(program) == [3] * 3
    # elsewhere it is nothing
    assert mori.local_world(2).run(lambda pe: state.current().meet("here") if pe else None) == [None] * 2


def test_a_meeting_that_a_peer_misses():
    def program(pe):
        if pe:
            state.current().meet("dispatch")
        else:
            shmem.shmem_malloc(8)

    with pytest.raises(StateError, match=r"different collective calls \(PE 0: symmetric malloc; PE 1: dispatch\)"):
        world(2).run(program)

    def leaves(pe):
        if pe:
            state.current().meet("dispatch")

    with pytest.raises(StateError, match=r"PE 0: shmem finalize; PE 1: dispatch"):
        world(2).run(leaves)


def test_a_dispatch_that_meets_a_combine():
    """Their kernels would wait for each other until the limit."""

    def program(pe):
        op = mori.ops.EpDispatchCombineOp(mori.ops.EpDispatchCombineConfig(torch.float32, pe, 2, 16, 0, 0, 4, 4, 2, 2))
        tokens, indices = torch.ones(4, 16), torch.arange(8, dtype=torch.int32).view(4, 2) % 4
        op.dispatch(tokens, None, None, indices)
        shmem.shmem_barrier_all()
        if pe == 0:
            op.combine(tokens.repeat(2, 1), None, indices)
        else:
            op.dispatch(tokens, None, None, indices)

    with pytest.raises(StateError, match=r"different collective calls \(PE 0: combine: .*; PE 1: dispatch: "):
        world(2).run(program)


def test_a_barrier_on_the_stream():
    def program(pe):
        x, out = words(), torch.full((1,), -1)
        for step in range(1, 4):
            launch(put_right_kernel, (1,), shmem.context(), x, 10 * step + pe)
            # also the first time, when each PE has to load it
            shmem.shmem_barrier_on_stream()
            launch(copy_kernel, (1,), x, out)
            shmem.shmem_barrier_on_stream()
            state.current().driver.synchronize()
            assert int(out) == 10 * step + (pe - 1) % shmem.shmem_npes()
        with pytest.raises(ArgumentError, match="stream: want None, a torch stream or its handle, got str"):
            shmem.shmem_barrier_on_stream("main")
        return True

    assert world(3).run(program) == [True] * 3
    # on the CPU there are no streams
    assert mori.local_world(2).run(lambda pe: shmem.shmem_barrier_on_stream()) == [None] * 2


def test_a_barrier_on_the_stream_that_a_peer_misses():
    def program(pe):
        if pe == 0:
            # meets nobody on the host
            state.current().rendezvous = None
            shmem.shmem_barrier_on_stream()
        shmem.shmem_barrier_all()

    with pytest.raises(PeerTimeout, match=r"barrier_all on PE 0 waiting for PE 1"):
        world(2, timeout_s=0.5).run(program)


def test_a_pe_that_raises_ends_the_others():
    def program(pe):
        signal, out = words(), torch.full((1,), -1)
        if pe == 1:
            raise KeyError("mine")
        launch(wait_kernel, (1,), shmem.context(), signal, out, 5)
        state.current().meet("never")

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        world(3, timeout_s=1.0).run(program)
    # the others' kernels end by their own limit, and what they poll is there until then
    assert 1.0 < time.monotonic() - start < 8
    # that they did is no news
    assert "; ".join(getattr(caught.value, "__notes__", [str(caught.value.__cause__)])) == "raised by PE 1 of 3"


def test_a_peer_that_never_signals():
    def program(pe):
        signal, out = words(), torch.full((1,), -1)
        if pe == 0:
            launch(wait_kernel, (1,), shmem.context(), signal, out, 7)
        shmem.shmem_barrier_all()

    with pytest.raises(PeerTimeout, match=r"on PE 0 waiting for PE 1: allocation 0 of PE 0, expected >= 7, saw 0"):
        world(2, timeout_s=0.5).run(program)


def test_a_wait_whose_end_the_program_does_not_await():
    def program(pe):
        signal, out = words(), torch.full((1,), -1)
        if pe == 1:
            launch(wait_kernel, (1,), shmem.context(), signal, out, 7)

    with pytest.raises(PeerTimeout, match=r"on PE 1 waiting for PE 0"):
        world(2, timeout_s=0.5).run(program)


def test_a_world_can_run_again_after_a_failure(fake):  # noqa: F811
    one = world(2)
    with pytest.raises(ZeroDivisionError):
        one.run(lambda pe: 1 // (1 - pe))
    assert one.run(lambda pe: shmem.shmem_mype()) == [0, 1]
    assert len(fake) == 2


def test_finalize_and_init_again_inside():
    def program(pe):
        shmem.shmem_finalize()
        shmem.shmem_init_attr(1, pe, 2, bytes(128))
        state.current().meet("again")
        return int(words()[0])

    assert world(2).run(program) == [0, 0]


def test_calls_in_the_wrong_place():
    one, other = world(2), world(2)
    for call in (one.graph, one.preload):
        with pytest.raises(StateError, match="call it in the program"):
            call(lambda: None)
    with pytest.raises(StateError, match="current_world: this thread runs no program"):
        mori.current_world()
    with pytest.raises(ArgumentError, match="step: want a function without arguments, got int"):
        one.graph(5)

    def program(pe):
        assert mori.current_world() is one
        with pytest.raises(StateError, match="call it in the program"):
            other.graph(lambda: None)

    one.run(program)


def test_a_device_that_fails(fake, monkeypatch):  # noqa: F811
    """What cannot be given back is noted with the error, and the rest is taken down."""

    def program(pe):
        def broken():
            raise DriverError(f"illegal access on the GPU of PE {pe}")

        shmem.shmem_barrier_all()
        if pe == 1:
            monkeypatch.setattr(state.current().driver, "synchronize", broken)
        shmem.shmem_barrier_all()

    with pytest.raises(DriverError, match="illegal access on the GPU of PE 1") as caught:
        world(2).run(program)
    text = "; ".join(getattr(caught.value, "__notes__", [str(caught.value.__cause__)]))
    assert text == "raised by PE 1 of 2; while the world was taken down: illegal access on the GPU of PE 1"
    # streams of a GPU that has failed are of no use to a later world
    assert fake[0].given == 0
    for stream in fake[0].streams:
        fake[0].give_stream(stream)


def test_the_emulated_device_does_not_get_in_the_way_of_gpus(monkeypatch):
    """Triton has one active driver: kernels of a world on GPUs would be compiled for the emulated device."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(type(triton.runtime.driver), "active", object(), raising=False)
    here, there = gpus.Gpus("cuda"), gpus.Gpus("cuda")
    for one in (here, there):
        with pytest.raises(StateError, match="a world on GPUs runs in this process"):
            mori.local_world(2).run(lambda pe: pe)
        one.close()
    assert mori.local_world(2).run(lambda pe: pe) == [0, 1]


def test_auto_takes_a_gpu_unless_the_emulated_device_is_meant(monkeypatch):
    monkeypatch.setattr(drivers, "default_device", lambda: "cuda")
    assert mori.local_world(2, device="auto").device == "cuda"
    for only_emulated in ({"seed": 1}, {"arch": "gfx942"}, {"seed": 1, "weak_memory": True}):
        assert mori.local_world(2, device="auto", **only_emulated).device == "cpu"
    monkeypatch.setattr(drivers, "default_device", lambda: "cpu")
    one = mori.local_world(2, device="auto")
    assert (one.device, one.arch) == ("cpu", "gfx1201")

    def program(pe):
        assert mori.current_world() is one
        return one.preload(lambda: pe + 5)

    assert one.run(program) == [5, 6]


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.undo()
    kind, other = ("hip", "cuda") if torch.version.hip else ("cuda", "hip")
    with pytest.raises(ArgumentError, match=f'device: got "{other}", for which torch .* was not built'):
        mori.local_world(2, device=other)
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match=f'device: got "{kind}",'):
            mori.local_world(2, device=kind)
