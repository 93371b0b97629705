"""Settings from the environment: what is accepted, what is refused, when it is read."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mori_triton import env
from mori_triton.errors import ArgumentError, EnvError

pytestmark = pytest.mark.cpu

DOC = Path(__file__).parent.parent / "docs" / "env.md"

SIZES = {
    "6G": 6 << 30,
    "2GiB": 2 << 30,
    "2gib": 2 << 30,
    "2GIB": 2 << 30,
    "512m": 512 << 20,
    "64KB": 64 << 10,
    "64kib": 64 << 10,
    "4096": 4096,
    "4096B": 4096,
    " 6G": 6 << 30,
    "6G ": 6 << 30,
    "\t6 G\n": 6 << 30,
    "2T": 2 << 40,
    "2TB": 2 << 40,
    "1e9": 10**9,
    "1E9": 10**9,
    "1.5e9": 1_500_000_000,
    "1.5G": 3 << 29,
    "0.5G": 1 << 29,
    ".5m": 1 << 19,
    # OpenSHMEM's own example
    "3.1m": 3_250_586,
    "9223372036854775807": 2**63 - 1,
}
BAD_SIZES = [
    "", " ", "20Mabc", "-1", "-1G", "0", "0G", "0e9", "0x100", "1_000", "abc", "G", "1e", "1e9G", "1.5", "1..5G", "+5",
    "17179869184G", "9223372036854775808", "1e19", "8388608T", "5 5", "6 G iB", "٤G", "²", "1e-3", "nan", "inf",
]  # fmt: skip


@pytest.mark.parametrize(("text", "num_bytes"), SIZES.items())
def test_j1_size(text, num_bytes):
    assert env.parse_size(text) == num_bytes
    assert env.get("MORI_SHMEM_HEAP_SIZE", {"MORI_SHMEM_HEAP_SIZE": text}) == num_bytes


@pytest.mark.parametrize("text", BAD_SIZES)
def test_j1_bad_size(text):
    """The message shows the variable, the text and the accepted forms."""
    with pytest.raises(EnvError) as caught:
        env.snapshot({"MORI_SHMEM_HEAP_SIZE": text})
    for part in ("MORI_SHMEM_HEAP_SIZE", repr(text), "4096", "512M", "1.5G", "2GiB", "64KB", "1e9"):
        assert part in str(caught.value)


def test_size_as_argument():
    assert env.parse_size(4096) == 4096
    for value in (0, -1, 2**63, True, 1.5, None, b"4G"):
        with pytest.raises(ArgumentError, match="heap_size"):
            env.parse_size(value)
    with pytest.raises(ArgumentError) as caught:
        env.parse_size("x")
    assert not isinstance(caught.value, EnvError)


def test_i13_bootstrap_timeout():
    def read(text):
        return env.snapshot({"MORI_BOOTSTRAP_TIMEOUT": text}).bootstrap_timeout_s

    assert env.snapshot({}).bootstrap_timeout_s == 300
    assert (read("5"), read(" 0.5 "), read("1e3"), read("99999999999")) == (5, 0.5, 1000, 86400)
    for text in ("0", "0.0", "-1", "abc", "", "5s", "nan", "inf", "1e999", "0x5"):
        if text == "1e999":
            assert read(text) == 86400
            continue
        with pytest.raises(EnvError, match="MORI_BOOTSTRAP_TIMEOUT") as caught:
            read(text)
        assert repr(text) in str(caught.value)


def test_seconds_as_argument():
    assert env.parse_seconds(2, "timeout_s") == 2.0
    for value in (0, -1.0, float("nan"), True, None):
        with pytest.raises(ArgumentError, match="timeout_s"):
            env.parse_seconds(value, "timeout_s")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("MORI_SHMEM_HEAP_TYPE", {"normal": "normal", "Uncached": "uncached"}, ["", "cached"]),
        ("MORI_SHMEM_MODE", {"static_heap": "static_heap", "VMM": "vmm", "vmm_heap": "vmm"}, ["heap", "ISOLATION"]),
        ("MORI_TRITON_DEVICE", {"cpu": "cpu", "CUDA": "cuda"}, ["tpu", ""]),
        ("MORI_TRITON_GPUS_PER_NODE", {"8": 8, " 1 ": 1}, ["0", "-1", "two", "1.5", ""]),
        ("MORI_NUM_QP_PER_PE", {"1": 1}, ["0", "x"]),
        ("MORI_SOCKET_IFNAME", {"eth0, eth1 ,": ("eth0", "eth1")}, ["", ","]),
        ("MORI_NODE_ID", {" a ": "a"}, [""]),
        ("MORI_DISABLE_P2P", {"1": True, "on": True, "0": False, "": False, "No": False, "false": False}, []),
        (
            "MORI_TRITON_TRANSPORT",
            {"mlx5": "mlx5", " Bnxt_RE ": "bnxt_re", "AUTO": "auto"},
            ["", "rdma", "mlx5_0", "mlx5,proxy"],
        ),
        ("TRITON_INTERPRET", {"1": True, "0": False}, []),
    ],
)
def test_other_variables(name, good, bad):
    for text, value in good.items():
        assert env.get(name, {name: text}) == value
    for text in bad:
        with pytest.raises(EnvError, match=name):
            env.get(name, {name: text})


def test_defaults_are_texts_of_the_variable():
    settings = env.snapshot({})
    assert settings.heap_bytes == 4 << 30
    assert settings.heap_type == "uncached"
    assert settings.wait_timeout_s == 30
    assert settings.arch == "gfx1201"
    assert settings.gpus_per_node is None
    assert settings.num_qp_per_pe == 4
    fields = {variable.field for variable in env.VARIABLES if variable.field}
    assert fields == {field.name for field in dataclasses.fields(env.Settings)}


def test_i10_snapshot_does_not_follow_the_environment(monkeypatch):
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "1M")
    settings = env.snapshot()
    monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", "2M")
    assert settings.heap_bytes == 1 << 20
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.heap_bytes = 5


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("MORI_TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "mori_triton"
    # relative ones do not count, by the XDG text
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.cache_dir() == Path.home() / ".cache" / "mori_triton"
    monkeypatch.setenv("MORI_TRITON_CACHE_DIR", str(tmp_path / "own"))
    assert env.cache_dir() == tmp_path / "own"
    assert not (tmp_path / "own").exists()


def test_readers_by_need(monkeypatch):
    monkeypatch.setenv("MORI_SHMEM_BC", "/some/file.bc")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("MORI_TRITON_ARCH", "gfx942")
    assert (env.bitcode_override(), env.triton_interpret(), env.arch()) == ("/some/file.bc", True, "gfx942")
    with pytest.raises(KeyError):
        env.get("HOME")


def test_doc_lists_each_variable():
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| (.+?) \|", DOC.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [variable.name for variable in env.VARIABLES]
    for (name, default), variable in zip(rows, env.VARIABLES, strict=True):
        wanted = "unset" if variable.default is None else f"`{variable.default}`"
        assert default == wanted, name


def test_only_env_reads_the_environment():
    """By sources, and by running: importing the host side reads no variable of ours."""
    root = Path(env.__file__).parent
    readers = [p for p in root.rglob("*.py") if re.search(r"\bos\.(environ|getenv|putenv)|\bgetenv\b", p.read_text())]
    assert readers == [root / "env.py"]
    program = "import mori_triton.shmem, mori_triton.host.state, sys; sys.exit('torch' in sys.modules)"
    bad = {"MORI_SHMEM_HEAP_SIZE": "nonsense", "MORI_TRITON_ARCH": "", "PYTHONPATH": str(root.parent)}
    assert subprocess.run([sys.executable, "-c", program], env=bad, check=False).returncode == 0
