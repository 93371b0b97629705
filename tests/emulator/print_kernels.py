"""Kernels that print and assert, the first ones those of Triton's own tests."""

import triton
import triton.language as tl


@triton.jit
def block(x, N: tl.constexpr):
    tl.device_print("x: ", tl.load(x + tl.arange(0, N)))


@triton.jit
def hexadecimal(x, N: tl.constexpr):
    tl.device_print("x: ", tl.load(x + tl.arange(0, N)), hex=True)


@triton.jit
def scalar(x):
    # Triton adds a blank after this prefix
    print("x:", tl.load(x))


@triton.jit
def large(M: tl.constexpr, N: tl.constexpr):
    # Triton makes this prefix "x: "
    tl.device_print("x ", tl.full([M, N], 1, tl.int32))


@triton.jit
def operands(x, N: tl.constexpr):
    tl.device_print("", tl.load(x + tl.arange(0, N)), tl.full((N,), 1, tl.int32))


@triton.jit
def mixed(x, y, n, N: tl.constexpr):
    """A block, a pointer, a scalar of a 64-bit type, under a prefix of several packets."""
    i = tl.arange(0, N)
    tl.device_print("of a prefix that is longer than one packet of seven words: ", tl.load(x + i), y + i, n)


@triton.jit
def matrix(x, M: tl.constexpr, N: tl.constexpr):
    tl.device_print("", tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]))


@triton.jit
def no_operand():
    print("no arg")


@triton.jit
def twice(x, N: tl.constexpr):
    """Prints, changes memory, prints what it has become. A row of x for each program."""
    i = tl.arange(0, N)
    at = x + tl.program_id(0) * N + i
    tl.device_print("before", tl.load(at))
    tl.store(at, 2 * tl.load(at))
    tl.device_print("after", tl.load(at))


@triton.jit
def branch(x, N: tl.constexpr):
    """Only programs of an even number print."""
    pid = tl.program_id(0)
    if pid % 2 == 0:
        tl.device_print("even", tl.load(x + tl.arange(0, N)) + pid)


@triton.jit
def assertion(x, N: tl.constexpr):
    at = x + tl.program_id(0) * N + tl.arange(0, N)
    v = tl.load(at)
    tl.device_assert(v >= 0, "negative")
    tl.store(at, v + 7)


@triton.jit
def masked_assertion(x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.device_assert(tl.load(x + i) >= 0, "negative", mask=i < n)
    tl.store(x + i, 7)


@triton.jit
def fault_between(x, far, N: tl.constexpr):
    """Prints, stores far past the tensor, prints again."""
    i = tl.arange(0, N)
    tl.device_print("before", i)
    tl.store(x + far + i, i)
    tl.device_print("after", i)
