"""Worlds for tests of the host layer: PEs as threads, no device."""

import dataclasses
import threading

from mori_triton import env
from mori_triton.host import state
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver
from mori_triton.host.heap import SymmetricHeap

SETTINGS = dataclasses.replace(env.snapshot({}), heap_bytes=1 << 20, wait_timeout_s=5.0)


def run_threads(n, program, *, timeout_s=20.0):
    """`program(pe)` on n threads; results by PE. The first exception, by PE, is raised."""
    results, errors = [None] * n, {}

    def run(pe):
        try:
            results[pe] = program(pe)
        except BaseException as error:
            errors[pe] = error

    threads = [threading.Thread(target=run, args=(pe,), daemon=True) for pe in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a PE hangs"
    for pe in sorted(errors):
        raise errors[pe]
    return results


def run_world(n, program, *, group=None, driver=CpuDriver, finalize=True, **settings):
    """`program(state)` on n PEs that are initialised and bound; every PE is finalized after it."""
    group = group or ThreadGroup(n, timeout_s=5.0)
    chosen = dataclasses.replace(SETTINGS, **settings)

    def run(pe):
        here = state.open_state(group.bootstrap(pe), driver(), chosen)
        state.bind(here)
        try:
            result = program(here)
        except BaseException as error:
            group.abort(error)
            here.close(failed=True)
            raise
        if finalize:
            here.close()
        return result

    return run_threads(n, run)


def one_heap(num_bytes=1 << 20, **options):
    """The heap of a world of one PE."""
    return SymmetricHeap(CpuDriver(), ThreadGroup(1).bootstrap(0), num_bytes, **options)


def error_of(call, *args, **kwargs):
    """What the call raises, None if nothing."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    return None
