"""Opening RDMA libraries: what errors say, what functions that fail turn into, and that nothing is opened unasked."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mori_triton.errors import DriverError, StateError
from mori_triton.host.nic import libraries
from mori_triton.host.nic.libraries import SOURCES, RdmaLibrary, load, open_provider, open_verbs
from tests.host.nic.fake_rdma import FakeLibrary, FakeVerbs

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "libibverbs": ["libibverbs1", "RHEL: libibverbs"],
    "libmlx5": ["ibverbs-providers", "RHEL: libibverbs"],
    "libbnxt_re": ["Broadcom", "ibverbs-providers"],
    "libionic": ["Pensando", "ibverbs-providers"],
}


@pytest.mark.parametrize("name", SOURCES)
def test_k1_a_missing_library_says_what_was_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def dlopen(file: str, **options):
        tried.append(file)
        raise OSError(f"{file}: cannot open shared object file")

    monkeypatch.setattr(libraries.ctypes, "CDLL", dlopen)
    with pytest.raises(StateError) as caught:
        load(name, SOURCES[name].files)
    assert tried == list(SOURCES[name].files)
    for part in [name, *tried, "cannot open shared object file", *PACKAGES[name]]:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", SOURCES)
def test_k1_a_missing_function_is_named(name: str) -> None:
    made = type("Fake", (FakeLibrary,), {"source": name})
    required = [key for key in SOURCES[name].functions if key not in SOURCES[name].optional]
    for key in required:
        with pytest.raises(StateError) as caught:
            made(lacks=(key,)).library()
        for part in (f"no function {SOURCES[name].functions[key].symbol}:", f"fake {name}", *PACKAGES[name]):
            assert part in str(caught.value)
    library = made(lacks=tuple(SOURCES[name].optional)).library()
    for key in SOURCES[name].optional:
        assert not library.has(key)
        with pytest.raises(StateError, match=SOURCES[name].functions[key].symbol):
            library.call(key)
    assert all(made().library().has(key) for key in SOURCES[name].functions)


def test_k1_only_the_name_with_a_version_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And K6: whichever of the names there is will do."""
    fake = FakeVerbs()
    for only in SOURCES["libibverbs"].files:

        def dlopen(file: str, only: str = only, **options):
            if file != only:
                raise OSError(file)
            return fake

        monkeypatch.setattr(libraries.ctypes, "CDLL", dlopen)
        assert load("libibverbs", SOURCES["libibverbs"].files).path == only


def test_k1_a_bad_override(tmp_path: Path) -> None:
    file = tmp_path / "libibverbs.so.1"
    with pytest.raises(StateError, match=rf"MORI_IBVERBS_LIB={file}: .*No such file"):
        open_verbs(str(file))
    file.write_text("not a library")
    with pytest.raises(StateError, match=rf"MORI_IBVERBS_LIB={file}: .*tried {file}: .*(invalid ELF|too short)"):
        open_verbs(str(file))


def test_k2_a_provider_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "libibverbs.so.1: version `IBVERBS_PRIVATE_34' not found (required by libmlx5.so.1)"

    def dlopen(file: str, **options):
        raise OSError(text)

    monkeypatch.setattr(libraries.ctypes, "CDLL", dlopen)
    with pytest.raises(StateError, match="IBVERBS_PRIVATE_34"):
        load("libmlx5", SOURCES["libmlx5"].files)


def test_the_library_in_use_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that libibverbs has opened are only good with the provider that it has loaded."""
    opened = []

    def dlopen(file: str, **options):
        opened.append(file)
        return type("Fake", (FakeLibrary,), {"source": "libbnxt_re"})(lacks=("umem_reg",))

    monkeypatch.setattr(libraries.ctypes, "CDLL", dlopen)
    monkeypatch.setattr(libraries, "loaded", lambda stem: [f"/lib/libibverbs/{stem}-rdmav34.so"])
    with pytest.raises(
        StateError, match=r"/lib/libibverbs/libbnxt_re-rdmav34\.so, has no function bnxt_re_dv_umem_reg"
    ):
        open_provider("libbnxt_re")
    assert opened == ["/lib/libibverbs/libbnxt_re-rdmav34.so"]


def test_failures_carry_the_systems_text() -> None:
    fake = FakeVerbs()
    library = fake.library()
    fake.fail = {"alloc_pd": errno.ENOMEM, "dealloc_pd": errno.EBUSY}
    with pytest.raises(DriverError, match=r"^ibv_alloc_pd \(mlx5_0\): ENOMEM: Cannot allocate memory$"):
        library.call("alloc_pd", 5, about="mlx5_0")
    with pytest.raises(DriverError, match=r"^ibv_dealloc_pd: EBUSY: Device or resource busy$"):
        library.call("dealloc_pd", 5)


@pytest.mark.parametrize("result", [-1, -errno.EPERM])
def test_statuses_below_zero(result: int) -> None:
    class Negative(FakeVerbs):
        def do_destroy_cq(self, cq):
            ctypes.set_errno(errno.EPERM)
            return result

    with pytest.raises(DriverError, match="EPERM: Operation not permitted"):
        Negative().library().call("destroy_cq", 7)


def test_k4_addresses_above_4_gib_stay_whole() -> None:
    class Echo(FakeVerbs):
        def do_alloc_pd(self, context):
            return context

    library = Echo().library()
    assert library.call("alloc_pd", 0x7FFFDEADBEEF0000).value == 0x7FFFDEADBEEF0000


def test_handles_of_one_kind_are_not_taken_for_another() -> None:
    library = FakeVerbs().library()
    pd = library.call("alloc_pd", 5)
    with pytest.raises(ctypes.ArgumentError):
        library.call("close_device", pd)


def test_nothing_is_opened_unasked() -> None:
    """Importing everything of the host layer loads no RDMA library, and the package imports none of their tables."""
    program = (
        "import mori_triton, mori_triton.shmem, mori_triton.host.state, sys\n"
        "nic = {name.rpartition('.')[2] for name in sys.modules if name.startswith('mori_triton.host.nic.')}\n"
        "assert nic <= {'status', 'discover'}, nic\n"
        "import mori_triton.host.nic.libraries, mori_triton.host.nic.select, mori_triton.host.nic.verbs\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert not any(name in maps for name in ('libibverbs', 'libmlx5', 'libbnxt_re', 'libionic', 'libucp'))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_library_is_typed_by_its_table() -> None:
    fake = FakeVerbs()
    RdmaLibrary("libibverbs", fake, "x")
    for row in SOURCES["libibverbs"].functions.values():
        function = getattr(fake, row.symbol)
        assert list(function.argtypes) == list(row.argtypes)
        assert function.restype is row.restype


@pytest.mark.parametrize("name", ["libibverbs", "libmlx5"])
def test_the_real_libraries_have_every_function(name: str) -> None:
    """Where MORI_TEST_RDMA_LIBS names their directories, as LD_LIBRARY_PATH does; they need no card for this."""
    if "MORI_TEST_RDMA_LIBS" not in os.environ:
        pytest.skip("MORI_TEST_RDMA_LIBS is not set: no RDMA libraries to open")
    program = (
        "from mori_triton.host.nic import libraries, verbs\n"
        "from mori_triton.errors import StateError\n"
        "opened = libraries.open_verbs()\n"
        f"opened = opened if {name!r} == 'libibverbs' else libraries.open_provider({name!r})\n"
        f"assert all(opened.has(key) for key in libraries.SOURCES[{name!r}].functions)\n"
        "try:\n"
        "    verbs.OpenDevice(libraries.open_verbs(), 'no_such_device')\n"
        "except StateError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": os.environ["MORI_TEST_RDMA_LIBS"]}
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert "libibverbs (libibverbs.so.1) shows no device no_such_device" in ran.stdout
