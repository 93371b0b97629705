"""The hostcall buffer and printf, without a kernel: a device written here speaks the protocol."""

import ctypes
import gc
import struct
import sys

import pytest

from mori_triton.emulator import hostcalls, state
from mori_triton.emulator.hostcalls import HostcallBuffer
from mori_triton.emulator.launch import Launch
from mori_triton.emulator.machine import Event, Machine
from mori_triton.emulator.printf import printf
from mori_triton.errors import KernelFault

from .harness import Wave
from .snippets import kernel

pytestmark = pytest.mark.cpu


def words(*parts):
    """Strings padded to 8 bytes with at least one null, floats as doubles, integers of 64 bits."""
    data = b""
    for part in parts:
        if isinstance(part, float):
            data += struct.pack("<d", part)
        elif isinstance(part, int):
            data += struct.pack("<Q", part & 0xFFFFFFFFFFFFFFFF)
        else:
            data += part + bytes(8 - len(part) % 8)
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ([b"plain"], b"plain"),
        ([b""], b""),
        ([b"12345678"], b"12345678"),
        ([b"100%% of %d", 7], b"100% of 7"),
        ([b"%d %i %u", -1, -2, 3], b"-1 -2 3"),
        ([b"%u %d", 2**32 + 5, 2**32 - 1], b"5 -1"),
        ([b"%lld %llu %llx", -(2**40), 2**63, 2**64 - 1], b"-1099511627776 9223372036854775808 ffffffffffffffff"),
        ([b"0x%08x|%5u|%-5u|", 255, 7, 7], b"0x000000ff|    7|7    |"),
        ([b"%f %.2f %e %g", 1.5, -0.125, 1e10, 0.5], b"1.500000 -0.12 1.000000e+10 0.5"),
        ([b"%f %f %f", float("inf"), float("nan"), -float("nan")], b"inf nan -nan"),
        ([b"%p", 0x7F00], b"0x7f00"),
        ([b"<%s|%s>", b"12345678", b"", 9], b"<12345678|>"),
        ([b"%s%d", b"long enough for three words", 9], b"long enough for three words9"),
        ([b"%c%c", 65, 66], b"AB"),
        ([b"%*d|%-*d|%.*f", 5, 7, 3, 8, 1, 2.25], b"    7|8  |2.2"),
        # of no effect, with an argument
        ([b"%n%d", 1, 2], b"2"),
        # arguments that are missing end the text
        ([b"a %d b %d c", 1], b"a 1 b "),
        ([b"a %*d", 1], b"a "),
        # and so does a specifier without an end
        ([b"a %d b %", 1], b"a 1 b "),
        ([b"%s", b"x" * 5000], b"x" * 5000),
        ([b"\xff%d", 1], b"\xff1"),
        # the size of an argument is what an integer is cut to; others have one size, whatever the specifier says
        (
            [b"%hhd %hd %d %ld %lld", *[2**40 + 2**31 + 0x8081] * 5],
            b"-127 -32639 -2147450751 1101659144321 1101659144321",
        ),
        ([b"%hhx %hX %jx %zx %tx", *[2**40 + 0xABCD] * 5], b"cd ABCD 1000000abcd 1000000abcd 1000000abcd"),
        ([b"%ls|%hs|%-5lls|%.2Ls|", b"one", b"two", b"x", b"long"], b"one|two|x    |lo|"),
        ([b"%hhs%js%zs%ts", b"a", b"b", b"c", b"d"], b"abcd"),
        ([b"%Lf %lf %.2Le %hg %lla", 1.5, -0.25, 1e10, 0.5, 1.0], b"1.500000 -0.250000 1.00e+10 0.5 0x1p+0"),
        ([b"%lc%hhc %lp", 0xE9, 66, 0x7F00], b"\xe9B 0x7f00"),
        # arguments come in the order of their specifiers
        ([b"%2$d %1$s", 7, b"x"], b"7 x"),
        ([b"%9$s|%8$d", b"x", 3], b"x|3"),
        ([b"%1$*2$d|%3$.*4$f", 5, 7, 1, 2.25], b"    7|2.2"),
        # what is no specifier of C is printed as it is, and has an argument
        ([b"%S and %d", 1, 2], b"%S and 2"),
        ([b"%5%d %v4d %d", 1, 2, 3], b"%5%d %v4d 3"),
    ],
)
def test_printf(given, want):
    assert printf(words(*given)) == want


class Device:
    """Waves' side of the protocol, as ROCm's device library does it, on the buffer's memory."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.free, self.ready = self.buffer.address + 24, self.buffer.address + 32
        signal = self.word(self.buffer.address + 16)
        self.mailbox, self.event = self.word(signal + 16), self.word(signal + 24) & 0xFFFFFFFF

    @staticmethod
    def word(address, value=None):
        cell = ctypes.c_uint64.from_address(address)
        if value is not None:
            cell.value = value
        return cell.value

    def header(self, packet):
        return self.word(self.buffer.address) + 24 * (packet & self.word(self.buffer.address + 40))

    def payload(self, packet, lane):
        index = packet & self.word(self.buffer.address + 40)
        return self.word(self.buffer.address + 8) + 4096 * index + 64 * lane

    def take(self):
        """A packet off the free stack."""
        packet = self.word(self.free)
        self.word(self.free, self.word(self.header(packet)))
        return packet

    def push(self, packet, lanes, service=2):
        """Fill in a packet, `lanes`: {lane: words}, and put it onto the ready stack."""
        header = self.header(packet)
        self.word(header + 8, sum(1 << lane for lane in lanes))
        self.word(header + 16, service | 1 << 32)
        for lane, data in lanes.items():
            for i in range(8):
                self.word(self.payload(packet, lane) + 8 * i, data[i] if i < len(data) else 0)
        self.word(header, self.word(self.ready))
        self.word(self.ready, packet)

    def answer(self, packet, lane):
        assert self.word(self.header(packet) + 16) >> 32 == 0, "the host has not reset the ready flag"
        return self.word(self.payload(packet, lane))

    def put_back(self, packet):
        """Push a packet onto the free stack with the next tag."""
        mask = self.word(self.buffer.address + 40)
        packet = packet + mask + 1 or mask + 1
        self.word(self.header(packet), self.word(self.free))
        self.word(self.free, packet)

    def take_all(self):
        """Every packet of the free stack, with nothing left on it."""
        packets = []
        while self.word(self.free):
            packets.append(self.take())
        return packets

    def call(self, lanes, service=2):
        packet = self.take()
        self.push(packet, lanes, service)
        self.buffer.serve()
        answers = {lane: self.answer(packet, lane) for lane in lanes}
        self.put_back(packet)
        return answers


BEGIN, END = 1, 2


def part(head, *data):
    """Words of one packet: the message's number and flags, and how many words follow."""
    return [head & ~0xE0 | len(data) << 5, *data]


@pytest.mark.parametrize("num_waves", [1, 2, 3, 8, 100])
def test_every_wave_has_a_packet(num_waves):
    """And packets come back: 0 with a tag is one, without a tag it is the end of the stack."""
    device = Device(HostcallBuffer(num_waves))
    for _ in range(3):
        packets = device.take_all()
        assert len(packets) == max(2, num_waves)
        mask = device.word(device.buffer.address + 40)
        assert sorted(p & mask for p in packets) == list(range(len(packets)))
        low, high = device.buffer.address, device.buffer.address + device.buffer.num_bytes
        for packet in packets:
            assert low <= device.header(packet)
            assert device.header(packet) + 24 <= device.word(low + 8)
            assert device.payload(packet, 64) <= high
            device.put_back(packet)


INTERRUPT = "\ts_sendmsg sendmsg(MSG_INTERRUPT)\n\ts_endpgm"


@pytest.mark.parametrize(("groups", "waves", "packets"), [(1, 1, 2), (5, 3, 15), (1000, 4, 256), (0, 4, 2)])
def test_a_launch_has_a_packet_for_each_wave_in_flight(groups, waves, packets):
    module = kernel(INTERRUPT, args=[(4, "by_value"), (8, "hidden_hostcall_buffer")])
    launch = Launch(module, (groups, 1, 1), [7], num_warps=waves)
    assert Device.word(launch.kernarg.ctypes.data + 8) == launch.hostcalls.address
    assert len(Device(launch.hostcalls).take_all()) == packets


def test_a_kernel_that_sends_nothing_has_no_buffer():
    launch = Launch(kernel("\ts_endpgm", args=[(8, "hidden_hostcall_buffer")]), (5, 1, 1), [])
    assert launch.hostcalls is None
    assert Device.word(launch.kernarg.ctypes.data) == 0


def test_a_message_of_several_packets(capsys):
    device = Device(HostcallBuffer(1))
    text = words(b"%s and %d\n", b"a long string", -5)
    lanes = {0: part(BEGIN, 0), 63: part(BEGIN, 0)}
    numbers = device.call(lanes)
    assert len(set(numbers.values())) == 2
    for at in range(0, len(text), 3):
        last = END if at + 3 >= len(text) else 0
        numbers = device.call({lane: part(n & ~7 | last, *text[at : at + 3]) for lane, n in numbers.items()})
    assert capsys.readouterr() == ("a long string and -5\n" * 2, "")
    # what printf returns
    assert numbers == {0: 21, 63: 21}
    with pytest.raises(KernelFault, match="message 0, which never began or has ended"):
        device.call({0: part(0, *text[:1])})


def test_messages_of_two_waves_do_not_mix_and_the_latest_packet_comes_first(capsys):
    device = Device(HostcallBuffer(2))
    first, second = (device.call({0: part(BEGIN, 0)})[0] for _ in range(2))
    packets = [device.take(), device.take()]
    for packet, number, text in zip(packets, (first, second), (b"first\n", b"second\n"), strict=True):
        device.push(packet, {0: part(number | END, *words(text))})
    device.buffer.serve()
    assert capsys.readouterr() == ("second\nfirst\n", "")
    assert [device.answer(packet, 0) for packet in packets] == [6, 7]
    device.buffer.serve()
    assert capsys.readouterr() == ("", "")


def test_streams(capsys):
    device = Device(HostcallBuffer(1))
    assert device.call({0: part(BEGIN | END, 1, *words(b"error\n"))}) == {0: 6}
    assert device.buffer.failed_assertion == "error"
    assert device.call({0: part(BEGIN | END, 2, *words(b"neither"))}) == {0: 2**64 - 1}
    assert device.call({0: part(BEGIN | END)}) == {0: 2**64 - 1}
    assert device.call({0: part(BEGIN | END, 0, *words(b"caf\xc3\xa9 \xff\n"))}) == {0: 8}
    assert capsys.readouterr() == ("café \\xff\n", "error\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_without_a_stream_nothing_is_printed(stream, monkeypatch, capsys):
    """As print() does it, of a process that has none."""
    monkeypatch.setattr(sys, stream, None)
    device = Device(HostcallBuffer(1))
    answers = [device.call({0: part(BEGIN | END, control, *words(b"line\n"))}) for control in (0, 1)]
    assert answers == [{0: 5}, {0: 5}]
    assert device.buffer.failed_assertion == "line"
    assert capsys.readouterr() == (("", "line\n") if stream == "stdout" else ("line\n", ""))


@pytest.mark.parametrize(
    ("lanes", "service", "text"),
    [
        ({3: part(BEGIN | END, 0)}, 1, "for service 1, which is not known"),
        ({3: part(5 << 8, 0)}, 2, "message 5, which never began or has ended"),
    ],
)
def test_what_the_host_refuses(lanes, service, text):
    with pytest.raises(KernelFault, match=text):
        Device(HostcallBuffer(1)).call(lanes, service)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
def test_an_interrupt_calls_the_host_for_its_event(arch, capsys):
    devices = [Device(HostcallBuffer(1)), Device(HostcallBuffer(1))]
    for device, text in zip(devices, (b"0\n", b"1\n"), strict=True):
        device.push(device.take(), {1: part(BEGIN | END, 0, *words(text))})
    lines = ["s_mov_b32 m0, s3", "s_sendmsg sendmsg(MSG_INTERRUPT)", "s_mov_b32 s5, 1"]
    wave = Wave(arch, lines)
    wave.s[3] = devices[1].event
    assert wave.run() == state.DONE
    assert capsys.readouterr().out == "1\n"
    assert wave.s[5] == 1
    # a service that nobody knows
    packet = devices[1].take()
    devices[1].push(packet, {0: part(0)}, service=9)
    wave.s[5] = 0
    assert wave.run() == state.FAULTED
    assert (int(wave.memory[state.FAULT]), int(wave.memory[state.FAULT_PC])) == (state.MESSAGE, 1)
    assert wave.s[5] == 0
    assert isinstance(devices[1].buffer.error, KernelFault)


def test_events_are_of_24_bits_and_go_with_their_buffers():
    devices = [Device(HostcallBuffer(1)) for _ in range(3)]
    events = [device.event for device in devices]
    assert len(set(events)) == 3
    assert all(0 <= event < 1 << 24 for event in events)
    assert events[0] in hostcalls._buffers
    del devices
    gc.collect()
    assert not any(event in hostcalls._buffers for event in events)


@pytest.mark.parametrize("event", ["never given", "of a launch that is gone"])
def test_an_interrupt_for_nobody_is_a_fault(event, capfd):
    number = 0xFFFFFFFF if event == "never given" else Device(HostcallBuffer(1)).event
    gc.collect()
    m = Machine(1)
    m.submit(Launch(kernel(f"\ts_mov_b32 m0, {number}\n{INTERRUPT}", name="lost"), (1, 1, 1), []))
    assert m.run(1000) == Event.FAULT
    _, error = m.fault()
    assert str(error).startswith("message to the host for an event of no launch in flight: lost, ")
    # what ctypes prints of an error that it cannot raise
    assert capfd.readouterr() == ("", "")
