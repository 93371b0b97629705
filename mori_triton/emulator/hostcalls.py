"""Messages from kernels to the host: ROCm's hostcall buffer, and printf, its one service that is known here.

`tl.device_print` and `tl.device_assert` become calls of ROCm's device library, and those the protocol that the argument
`hidden_hostcall_buffer` is for. A wave

1. takes a packet off the free stack, writes the service's number, the active lanes and eight words for each of them;
2. pushes the packet onto the ready stack, adds to the doorbell, and sends the host an interrupt, as the doorbell has a
   mailbox for its event's number;
3. polls the packet until the host has reset its ready flag, and reads the eight words for the answer;
4. pushes the packet back onto the free stack.

The interrupt, `s_sendmsg`, is where the lifted code calls the host here, on the thread that runs the kernel: every
packet that is ready is answered before the wave goes on. So a line comes out when its wave prints it, also of a kernel
that never ends, and in the order of the seed.

Source: rocclr/device/devhostcall.cpp and devhcmessages.cpp of ROCm/clr, and the code that the device library becomes.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import weakref
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from mori_triton.emulator import state as lay
from mori_triton.emulator.printf import printf
from mori_triton.errors import KernelFault

# words of the buffer; those behind them are the doorbell: kind, value, address of the mailbox, event
HEADERS, PAYLOADS, DOORBELL, FREE, READY, INDEX_MASK = range(6)
_SIGNAL, _MAILBOX, _HEAD_WORDS = 8, 16, 24
_MAILBOX_ADDRESS, _EVENT = _SIGNAL + 2, _SIGNAL + 3
# words of a packet's header: the next packet of its stack, the active lanes, service | control << 32
NEXT, LANES, SERVICE = range(3)
READY_FLAG = 1 << 32
# a packet's payload
NUM_LANES, LANE_WORDS = 64, 8
PRINTF = 2
# a printf message comes in several packets; of the first word of each, the message's number stands above the rest
BEGIN, END, LENGTH_SHIFT, LENGTH_MASK, NUMBER_SHIFT = 1, 2, 5, 7, 8
TO_STDERR = 1

_events = itertools.count()
_buffers: weakref.WeakValueDictionary[int, HostcallBuffer] = weakref.WeakValueDictionary()


class HostcallBuffer:
    """The packets of one launch, at least one for each wave that may be in flight.

    address, num_bytes: of the memory that the kernel uses. error: what ended the kernel in `serve`. failed_assertion:
    the last line that went to stderr.
    """

    def __init__(self, num_waves: int) -> None:
        # an index of 0 with a tag of 0 is the end of a stack, so there is more than one
        num_packets = max(2, num_waves)
        payloads = _HEAD_WORDS + -(-3 * num_packets // 8) * 8
        words = payloads + num_packets * NUM_LANES * LANE_WORDS
        raw = np.zeros(words + 8, np.uint64)
        self._words = raw[-raw.ctypes.data % 64 // 8 :][:words]
        self.address, self.num_bytes = self._words.ctypes.data, self._words.nbytes
        self._headers = self._words[_HEAD_WORDS : _HEAD_WORDS + 3 * num_packets].reshape(-1, 3)
        self._payloads = self._words[payloads:].reshape(num_packets, NUM_LANES, LANE_WORDS)
        self._mask = (1 << (num_packets - 1).bit_length()) - 1
        self.error: BaseException | None = None
        self.failed_assertion = ""
        self._messages: dict[int, list[int]] = {}
        self._numbers = itertools.count()
        # a launch has one of 2**24 events, as the interrupt has so many bits
        event = next(_events) & 0xFFFFFF
        _buffers[event] = self
        head = self._words
        head[HEADERS], head[PAYLOADS] = self._headers.ctypes.data, self._payloads.ctypes.data
        head[DOORBELL], head[INDEX_MASK] = self.address + 8 * _SIGNAL, self._mask
        head[_MAILBOX_ADDRESS], head[_EVENT] = self.address + 8 * _MAILBOX, event
        self._headers[:, NEXT] = np.arange(num_packets) - 1
        self._headers[:2, NEXT] = 0, self._mask + 1
        head[FREE] = num_packets - 1

    def serve(self) -> None:
        """Answer every packet that is ready. Raises `KernelFault` for a service that is not known."""
        ready, self._words[READY] = int(self._words[READY]), 0
        # the latest comes first, as in ROCm: no two are of one wave
        while ready:
            packet = ready & self._mask
            ready, lanes, service = self._headers[packet].tolist()
            for lane in range(NUM_LANES):
                if lanes >> lane & 1:
                    self._answer(service & 0xFFFFFFFF, self._payloads[packet, lane])
            self._headers[packet, SERVICE] = service & ~READY_FLAG

    def _answer(self, service: int, payload: np.ndarray) -> None:
        head, *data = payload.tolist()
        if service != PRINTF:
            raise KernelFault(f"a message to the host for service {service}, which is not known")
        if head & BEGIN:
            number = next(self._numbers)
            self._messages[number] = []
            head = (head & ((1 << NUMBER_SHIFT) - 1) & ~BEGIN) | number << NUMBER_SHIFT
            payload[0] = head
        message = self._messages.get(head >> NUMBER_SHIFT)
        if message is None:
            raise KernelFault(f"part of message {head >> NUMBER_SHIFT}, which never began or has ended")
        message += data[: head >> LENGTH_SHIFT & LENGTH_MASK]
        if head & END:
            del self._messages[head >> NUMBER_SHIFT]
            payload[0] = self._print(message) & ((1 << 64) - 1)

    def _print(self, message: list[int]) -> int:
        """Print a message, control word first; what printf returns. One call of write(), so nobody tears the line."""
        control, *words = message or [-1]
        if control & ~TO_STDERR:
            return -1
        text = printf(words)
        line = text.decode(errors="backslashreplace")
        if control & TO_STDERR:
            self.failed_assertion = line.strip()
        stream = sys.stderr if control & TO_STDERR else sys.stdout
        # a process need not have one: as with print(), the line is lost then
        if stream is not None:
            stream.write(line)
        return len(text)


def _interrupt(wave: int, event: int, instruction: int) -> int:
    """An interrupt of a wave: 1, or 0 with the wave's fault set. Nothing can be raised into the lifted code."""
    buffer, fault = None, lay.UNKNOWN_EVENT
    try:
        # the event is what the kernel has in m0: it may be anything, also that of a launch that is gone
        buffer = _buffers.get(event)
        if buffer is not None:
            buffer.serve()
            return 1
    except BaseException as error:
        fault = lay.MESSAGE
        if buffer is not None:
            buffer.error = error
    ctypes.c_uint64.from_address(wave + lay.FAULT).value = fault
    ctypes.c_uint64.from_address(wave + lay.FAULT_PC).value = instruction
    return 0


@functools.cache
def _callback() -> Any:
    """`_interrupt` as C calls it; kept for ever."""
    u32 = ctypes.c_uint32
    return ctypes.CFUNCTYPE(u32, ctypes.c_void_p, u32, u32)(_interrupt)


@functools.cache
def ensure() -> None:
    """Let lifted code call `mori_emu_interrupt(wave, event, instruction)`."""
    llvm.add_symbol("mori_emu_interrupt", ctypes.cast(_callback(), ctypes.c_void_p).value)
