"""Moves between lanes, compares that write exec, DPP and SDWA operands, and whole divisions."""

from __future__ import annotations

import numpy as np
import pytest

from mori_triton.emulator import state
from tests.emulator import operands
from tests.emulator.documents import PCODE
from tests.emulator.harness import Wave
from tests.emulator.pcode import Num

pytestmark = pytest.mark.cpu


def full(wave: Wave) -> int:
    return (1 << wave.lanes) - 1


def fill(wave: Wave, rng: np.random.Generator) -> None:
    wave.v[:] = rng.integers(0, 1 << 32, wave.v.shape, dtype=np.uint64)


def whole_wave(arch: str, mnemonic: str, wave: Wave, **extra) -> dict:
    """Run a text that works on all lanes: registers 0 (VDST), 1 (SRC0), 2 (SRC1) of every lane."""
    lanes = [{r: Num(int(wave.v[r, lane]), 32, "U") for r in range(3)} for lane in range(wave.lanes)]
    env = {"VGPR": lanes, "SRC0": Num(1, 32, "U"), "SRC1": Num(2, 32, "U"), "VDST": Num(0, 32, "U")}
    env |= {"EXEC": Num(wave.exec, 64, "B"), "EXEC_LO": Num(wave.exec & 0xFFFFFFFF, 32, "U"), "D0": Num(0, 64, "B")}
    env |= {"WAVE32": Num(int(wave.lanes == 32), 1, "U"), "WAVE64": Num(int(wave.lanes == 64), 1, "U")}
    env["wave32.u1"] = env["WAVE32"]
    return PCODE[arch].run(mnemonic, env | extra)


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_lane_access(arch):
    wave = Wave(arch, ["v_readfirstlane_b32 s4, v1", "v_readlane_b32 s5, v1, s7", "v_writelane_b32 v0, s6, s7"])
    rng = np.random.default_rng(1)
    for i in range(40):
        fill(wave, rng)
        wave.exec = 0 if i == 0 else int(rng.integers(1, 1 << 62)) << int(rng.integers(0, 20)) & full(wave)
        wave.s[6:8] = rng.integers(0, 1 << 32, 2)
        source = {"S0": Num(int(wave.s[6]), 64, "B"), "S1": Num(int(wave.s[7]), 64, "B")}
        first = whole_wave(arch, "v_readfirstlane_b32", wave)["D0"].bits
        read = whole_wave(arch, "v_readlane_b32", wave, **source)["D0"].bits
        written = whole_wave(arch, "v_writelane_b32", wave, **source)["VGPR"]
        wave.run()
        assert (int(wave.s[4]), int(wave.s[5])) == (first, read)
        assert [int(x) for x in wave.v[0]] == [lane[0].bits for lane in written]


@pytest.mark.parametrize("mnemonic", ["v_permlane16_b32", "v_permlanex16_b32"])
@pytest.mark.parametrize("mode", ["", " op_sel:[1,0]", " op_sel:[0,1]", " op_sel:[1,1]"])
def test_permlane(mnemonic, mode):
    """op_sel: read inactive lanes too; lanes that read nothing get 0. (The text leaves both out.)"""
    wave, rng = Wave("gfx1201", [f"{mnemonic} v0, v1, s4, s5{mode}"]), np.random.default_rng(2)
    fetch_inactive, bound = "[1" in mode, "1]" in mode
    for _ in range(10):
        fill(wave, rng)
        wave.exec = int(rng.integers(0, 1 << 32)) if mode != " op_sel:[1,0]" else 0xFFFF0F0F
        wave.s[4:6] = rng.integers(0, 1 << 32, 2)
        select = {"S1": Num(int(wave.s[4]), 32, "B"), "S2": Num(int(wave.s[5]), 32, "B")}
        before = wave.v.copy()
        want = np.array([lane[0].bits for lane in whole_wave("gfx1201", mnemonic, wave, **select)["VGPR"]])
        if not fetch_inactive:
            # the same text on a register that tells which lanes are active
            mask, flags = wave.exec, Wave("gfx1201", [f"{mnemonic} v0, v1, s4, s5"])
            flags.v[1] = [mask >> lane & 1 for lane in range(32)]
            flags.exec = mask
            live = [lane[0].bits for lane in whole_wave("gfx1201", mnemonic, flags, **select)["VGPR"]]
            active = np.array([mask >> lane & 1 for lane in range(32)], bool)
            want = np.where(active & (np.array(live) == 0), 0 if bound else before[0], want)
        wave.run()
        assert (wave.v[0] == want).all(), mode


@pytest.mark.parametrize("mnemonic", ["v_permlane16_swap_b32", "v_permlane32_swap_b32"])
def test_permlane_swap(mnemonic):
    wave, rng = Wave("gfx950", [f"{mnemonic} v0, v1"]), np.random.default_rng(2)
    fill(wave, rng)
    want = whole_wave("gfx942", mnemonic, wave)["VGPR"]
    wave.run()
    for r in (0, 1):
        assert [int(x) for x in wave.v[r]] == [lane[r].bits for lane in want]


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_swap(arch):
    wave, rng = Wave(arch, ["v_swap_b32 v0, v1"]), np.random.default_rng(2)
    fill(wave, rng)
    wave.exec = 0x0F0F0FF1
    before = wave.v.copy()
    wave.run()
    active = np.array([wave.exec >> lane & 1 for lane in range(wave.lanes)], bool)
    assert (wave.v[:2] == np.where(active, before[1::-1], before[:2])).all()


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("compare", ["lt_i32", "ne_u64", "nge_f32", "class_f32"])
def test_compare_to_exec(arch, compare):
    """v_cmpx writes exec (and on gfx9 the register it names) and clears inactive lanes."""
    wide = compare.endswith("64")
    ops = "v[2:3], v[4:5]" if wide else "v2, v4"
    wave = Wave(arch, [f"v_cmpx_{compare}_e64 {ops}" if arch == "gfx1201" else f"v_cmpx_{compare}_e64 s[4:5], {ops}"])
    letter = {"lt_i32": "i", "ne_u64": "q", "nge_f32": "f", "class_f32": "f"}[compare]
    rng = np.random.default_rng(4)
    for _ in range(5):
        for r in (2, 4):
            x = operands.values(rng, letter, wave.lanes)
            wave.v[r], wave.v[r + 1] = x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)
        wave.v[4, ::3] = wave.v[2, ::3]
        active = wave.exec = int(rng.integers(0, 1 << 62)) & full(wave)
        want = 0
        for lane in range(wave.lanes):
            env = {"laneId": Num(lane, 32, "U"), "EXEC": Num(0, 64, "B"), "D0": Num(0, 64, "B")}
            for i, r in ((0, 2), (1, 4)):
                env[f"S{i}"] = Num(int(wave.v[r, lane]) | int(wave.v[r + 1, lane]) << 32, 64, "B")
            PCODE[arch].run(f"v_cmpx_{compare}", env)
            want |= env["EXEC"].bits & active
        wave.run()
        assert wave.exec == want
        if arch == "gfx942":
            assert int(wave.s[4]) | int(wave.s[5]) << 32 == want


def dpp_source(control: str, lane: int, lanes: int) -> int | None:
    """Lane that DPP reads, as AMD's ISA documents describe each control; None: outside."""
    name, _, value = control.partition(":")
    row, at = lane // 16 * 16, lane % 16
    if name == "quad_perm":
        return lane // 4 * 4 + int(value[1 + 2 * (lane % 4)])
    n = int(value or 0)
    if name in ("row_shl", "row_shr"):
        to = at + n if name == "row_shl" else at - n
        return row + to if 0 <= to < 16 else None
    if name == "row_bcast":
        if n == 15:
            return row - 1 if lane >= 16 else None
        return 31 if lane >= 32 else None
    if name in ("wave_shl", "wave_shr"):
        to = lane + 1 if name == "wave_shl" else lane - 1
        return to if 0 <= to < lanes else None
    return {
        "row_ror": row + (at - n) % 16,
        "row_mirror": row + 15 - at,
        "row_half_mirror": lane // 8 * 8 + 7 - lane % 8,
        "row_share": row + n,
        "row_newbcast": row + n,
        "row_xmask": row + (at ^ n),
    }[name]


_GFX12 = "quad_perm:[3,0,2,1] row_shl:1 row_shr:8 row_ror:3 row_mirror row_half_mirror row_share:5 row_xmask:9"
_GFX9 = "quad_perm:[1,0,3,2] row_shl:15 row_shr:2 row_ror:12 row_bcast:15 row_bcast:31 wave_shl:1 wave_shr:1 row_mirror"
CONTROLS = {"gfx1201": _GFX12.split(" "), "gfx942": [*_GFX9.split(" "), "row_newbcast:7"]}


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_dpp(arch):
    """Lanes without a source keep their value, or read 0 with bound_ctrl; an inactive source counts as none."""
    masks = [" row_mask:0xf bank_mask:0xf", " row_mask:0xa bank_mask:0xf", " row_mask:0xf bank_mask:0x5 bound_ctrl:0"]
    cases = [(control, mask) for control in CONTROLS[arch] for mask in masks]
    lines = [f"v_add_u32_dpp v{4 + i}, v0, v1 {c}{m}" for i, (c, m) in enumerate(cases)]
    wave, rng = Wave(arch, lines), np.random.default_rng(6)
    for active in (full(wave), 0xF7DE5A3CF7DE5A3C & full(wave)):
        fill(wave, rng)
        wave.exec = active
        before = wave.v.copy()
        wave.run()
        for i, (control, mask) in enumerate(cases):
            rows, banks = int(mask.split("row_mask:")[1][:3], 16), int(mask.split("bank_mask:")[1][:3], 16)
            for lane in range(wave.lanes):
                source = dpp_source(control, lane, wave.lanes)
                live = source is not None and active >> source & 1
                enabled = active >> lane & 1 and rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1
                want = int(before[4 + i, lane])
                if enabled and (live or "bound_ctrl" in mask):
                    want = ((int(before[0, source]) if live else 0) + int(before[1, lane])) & 0xFFFFFFFF
                assert int(wave.v[4 + i, lane]) == want, (lines[i], lane)


def test_sdwa():
    """A byte or word of each source, extended; a byte or word of the destination, the rest kept or cleared."""
    selects = ["BYTE_0", "BYTE_3", "WORD_0", "WORD_1", "DWORD"]
    lines, cases = [], []
    for i, (a, b) in enumerate(zip(selects, [*selects[2:], *selects[:2]], strict=True)):
        for signed in (False, True):
            for k, dst in enumerate(["BYTE_1", "WORD_1", "DWORD"]):
                unused = ("UNUSED_PRESERVE", "UNUSED_PAD")[(i + k) % 2]
                x = f"sext(v{0})" if signed and a != "DWORD" else "v0"
                mods = f"dst_sel:{dst} dst_unused:{unused} src0_sel:{a} src1_sel:{b}"
                lines.append(f"v_add_u32_sdwa v{4 + len(cases)}, {x}, v1 {mods}")
                cases.append((a, b, "sext" in x, dst, unused))

    def part(x: int, sel: str, signed: bool) -> int:
        bits = {"B": 8, "W": 16, "D": 32}[sel[0]]
        x = x >> bits * int(sel[-1] if sel != "DWORD" else 0) & ((1 << bits) - 1)
        return x - (1 << bits) if signed and x >> (bits - 1) else x

    wave, rng = Wave("gfx942", lines), np.random.default_rng(8)
    fill(wave, rng)
    before = wave.v.copy()
    wave.run()
    for i, (a, b, signed, dst, unused) in enumerate(cases):
        for lane in range(64):
            r = part(int(before[0, lane]), a, signed) + part(int(before[1, lane]), b, False)
            bits = {"B": 8, "W": 16, "D": 32}[dst[0]]
            shift = bits * int(dst[-1] if dst != "DWORD" else 0)
            ones = ((1 << bits) - 1) << shift
            rest = int(before[4 + i, lane]) if unused == "UNUSED_PRESERVE" else 0
            assert int(wave.v[4 + i, lane]) == (r << shift & ones | rest & ~ones) & 0xFFFFFFFF, lines[i]


DIVISION = """v_div_scale_f32 v2, null, v1, v1, v0
v_div_scale_f32 v3, vcc_lo, v0, v1, v0
v_rcp_f32 v4, v2
v_fma_f32 v5, -v2, v4, 1.0
v_fmac_f32 v4, v5, v4
v_mul_f32 v5, v3, v4
v_fma_f32 v6, -v2, v5, v3
v_fmac_f32 v5, v6, v4
v_fma_f32 v6, -v2, v5, v3
v_div_fmas_f32 v6, v6, v4, v5
v_div_fixup_f32 v7, v6, v1, v0""".splitlines()


def test_division_is_correctly_rounded():
    """The sequence that compilers emit for a / b in fp32, with denormals, near overflow and underflow."""
    wave, rng = Wave("gfx1201", DIVISION), np.random.default_rng(9)
    for i in range(400):
        a, b = (operands.values(rng, "f", 32).astype(np.uint32) for _ in range(2))
        if i % 2:
            # any exponents, so that quotients reach both ends of the range
            a, b = (rng.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32) for _ in range(2))
        wave.v[0], wave.v[1] = a, b
        wave.run()
        with np.errstate(all="ignore"):
            want = a.view(np.float32) / b.view(np.float32)
        got = wave.v[7].view(np.float32)
        same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
        assert same.all(), [(hex(x), hex(y)) for x, y in zip(a[~same], b[~same], strict=True)]


def test_modifiers_of_results():
    lines = ["v_mul_f32_e64 v4, v0, v1 clamp", "v_add_f32_e64 v5, v0, v1 mul:2", "v_mul_f32_e64 v6, v0, v1 div:2 clamp"]
    lines += ["v_add_nc_u32_e64 v7, v2, v3 clamp", "v_sub_nc_u32_e64 v8, v2, v3 clamp"]
    lines += ["v_max_num_f32_e64 v9, -|v0|, v1", "v_fma_f32 v10, -v0, |v1|, -|v0|"]
    # a move of floats, with their signs
    lines += ["v_cndmask_b32_e64 v11, |v0|, -v1, s4"]
    wave = Wave("gfx1201", lines)
    x = np.array([0.25, -3.0, 0.5, 9.0, np.nan, np.inf, -np.inf, 2.0] * 4, np.float32)
    y = np.array([2.0, 2.0, 0.5, 0.25, 1.0, 0.5, 1.0, -1.5] * 4, np.float32)
    m = np.array([0, 1, 0xFFFFFFFF, 7] * 8, np.uint32)
    n = np.array([5, 1, 2, 0xFFFFFFF9] * 8, np.uint32)
    wave.s[4] = 0xF0F00FAA
    wave.v[0], wave.v[1], wave.v[2], wave.v[3] = x.view(np.uint32), y.view(np.uint32), m, n
    wave.run()

    def clamp(z):
        return np.where(np.isnan(z), 0, np.clip(z, 0, 1)).astype(np.float32)

    v = wave.v.view(np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(v[4], clamp(x * y))
        np.testing.assert_array_equal(v[5], (x + y) * np.float32(2))
        np.testing.assert_array_equal(v[6], clamp(x * y / np.float32(2)))
        np.testing.assert_array_equal(v[9], np.fmax(-np.abs(x), y))
        np.testing.assert_array_equal(v[10], -x * np.abs(y) - np.abs(x))
    chosen = np.array([0xF0F00FAA >> lane & 1 for lane in range(32)], bool)
    np.testing.assert_array_equal(v[11], np.where(chosen, -y, np.abs(x)))
    wide_m, wide_n = m.astype(np.int64), n.astype(np.int64)
    assert (wave.v[7] == np.minimum(wide_m + wide_n, 0xFFFFFFFF)).all()
    assert (wave.v[8] == np.maximum(wide_m - wide_n, 0)).all()


def test_dual_issue_reads_before_it_writes():
    wave, rng = Wave("gfx1201", ["v_dual_mov_b32 v0, v1 :: v_dual_add_f32 v1, v0, v2"]), np.random.default_rng(1)
    x = rng.standard_normal((3, 32)).astype(np.float32)
    wave.v[:3] = x.view(np.uint32)
    wave.exec = 0x00FF00FF
    wave.run()
    active = np.array([wave.exec >> lane & 1 for lane in range(32)], bool)
    v = wave.v.view(np.float32)
    assert (v[0] == np.where(active, x[1], x[0])).all()
    assert (v[1] == np.where(active, x[0] + x[2], x[1])).all()


def test_wave_ends():
    wave = Wave("gfx1201", ["v_mov_b32 v0, 1"])
    assert wave.run() == state.DONE


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_permute_with_a_known_selector(arch):
    """Constants get code of their own: runs of bytes as shifts, zeros, ones, and the copies of signs."""
    rng = np.random.default_rng(12)
    constants = [0x07060302, 0x05040100, 0x03020706, 0x0C0C0100, 0x0D0C0706, 0x00010203, 0x08090A0B, 0x0C0C0C0C]
    constants += [int.from_bytes(rng.integers(0, 14, 4, dtype=np.uint8).tobytes(), "little") for _ in range(40)]
    wave = Wave(arch, [f"v_perm_b32 v{2 + i}, v0, v1, {c:#x}" for i, c in enumerate(constants)])
    fill(wave, rng)
    wave.run()
    for i, c in enumerate(constants):
        for lane in range(wave.lanes):
            env = {f"S{k}": Num(int(wave.v[k, lane]), 64, "B") for k in range(2)}
            env |= {"S2": Num(c, 64, "B"), "D0": Num(0, 64, "B")}
            assert int(wave.v[2 + i, lane]) == PCODE[arch].run("v_perm_b32", env)["D0"].bits, hex(c)
