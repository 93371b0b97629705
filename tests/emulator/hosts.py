"""Host threads of a seeded world, without a world around them."""

import threading


def in_threads(coordinator, *bodies):
    """Run one function per host thread under the coordinator; the results, or the error of each."""
    results = [None] * len(bodies)

    def main(host, body):
        try:
            host.begin()
            results[host.index] = body(host)
        except BaseException as error:
            results[host.index] = error
            coordinator.fail(error)
        finally:
            host.end()

    threads = [threading.Thread(target=main, args=pair) for pair in zip(coordinator.hosts, bodies, strict=True)]
    for thread in threads:
        thread.start()
    coordinator.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def cause(results):
    """The error that ended a run: whoever finds out has it, the others were ended because of it."""
    errors = [x for x in results if isinstance(x, BaseException)]
    assert errors
    return next((x.__cause__ for x in errors if x.__cause__ is not None), errors[0])
