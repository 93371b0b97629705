"""A parser of AMD's instruction pseudocode: a text becomes Python closures over an environment of `Num` values.

`S0`, `D0`, `VCC`, ... are 64-bit values of kind B, arrays are lists, `.u32` and `[7 : 0]` are views.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tests.emulator.pcode_num import BINARY, BUILTINS, Num, SignedZero, cast, encode
from tests.emulator.pcode_views import (
    CONSTANTS,
    KINDS,
    VIEW,
    Env,
    Node,
    Slice,
    View,
    bit_not,
    concat,
    literal,
    negate,
    store,
    tokenize,
)


class _Return(Exception):
    pass


class _Break(Exception):
    pass


class Parser:
    """Recursive descent over the tokens; every method returns a closure."""

    def __init__(self, text: str, functions: Callable[[str], Callable]) -> None:
        self.tokens, self.at, self.functions = tokenize(text), 0, functions

    def peek(self) -> str:
        return self.tokens[self.at][1]

    def take(self, text: str | None = None) -> str:
        got = self.tokens[self.at][1]
        if text is not None and got != text:
            raise SyntaxError(f"pseudocode: want {text!r}, got {got!r}")
        self.at += 1
        return got

    def accept(self, text: str) -> bool:
        if self.tokens[self.at][1] == text and self.tokens[self.at][0] != "end":
            self.at += 1
            return True
        return False

    # statements

    def block(self, *ends: str) -> Callable[[Env], None]:
        body = []
        while self.peek() not in ends:
            if self.accept(";"):
                continue
            body.append(self.statement())

        def run(env: Env) -> None:
            for s in body:
                s(env)

        return run

    def statement(self) -> Callable[[Env], None]:
        if self.accept("if"):
            return self.conditional()
        if self.accept("for"):
            return self.loop()
        if self.accept("declare"):
            return self.declaration()
        if self.accept("break"):
            return self.leave(_Break)
        if self.accept("return"):
            return self.result()
        if (
            self.tokens[self.at][0] == "name"
            and self.tokens[self.at + 1][1] == "="
            and self.tokens[self.at + 2][1] == "lambda"
        ):
            return self.function()
        if self.peek() == "{":
            return self.split_assignment()
        start = self.at
        path = self.place() if self.tokens[self.at][0] == "name" else None
        if path and self.peek() in ("=", "+=", "-=", "|="):
            return self.assignment(path)
        self.at = start
        return self.result()

    @staticmethod
    def leave(error: type[Exception]) -> Callable[[Env], None]:
        def run(env: Env) -> None:
            raise error

        return run

    def result(self) -> Callable[[Env], None]:
        value = self.expression()

        def run(env: Env) -> None:
            env["return"] = value(env)
            raise _Return

        return run

    def conditional(self) -> Callable[[Env], None]:
        arms, other = [], None
        while True:
            cond = self.expression()
            self.take("then")
            arms.append((cond, self.block("elsif", "else", "endif")))
            if not self.accept("elsif"):
                break
        if self.accept("else"):
            other = self.block("endif")
        self.take("endif")

        def run(env: Env) -> None:
            for cond, body in arms:
                if cond(env):
                    return body(env)
            return other(env) if other else None

        return run

    def loop(self) -> Callable[[Env], None]:
        name = self.take()
        self.take("in")
        first = self.expression()
        self.take(":")
        last = self.expression()
        self.take("do")
        body = self.block("endfor")
        self.take("endfor")

        def run(env: Env) -> None:
            for i in range(first(env).value(), last(env).value() + 1):
                env[name] = Num(i, 32, "I")
                try:
                    body(env)
                except _Break:
                    return

        return run

    def declaration(self) -> Callable[[Env], None]:
        name = self.take()
        self.take(":")
        width, kind = self.take().split("'")
        size = None
        if self.accept("["):
            size = self.expression()({}).value()
            self.take("]")

        def run(env: Env) -> None:
            zero = Num(0, int(width), kind)
            env[name] = zero if size is None else [zero] * size

        return run

    def function(self) -> Callable[[Env], None]:
        name = self.take()
        self.take("=")
        self.take("lambda")
        self.take("(")
        params = [self.take()]
        while self.accept(","):
            params.append(self.take())
        self.take(")")
        self.take("(")
        body = self.block(")")
        self.take(")")

        def call(*args: Num) -> Num:
            env = dict(zip(params, args, strict=True))
            with contextlib.suppress(_Return):
                body(env)
            return env["return"]

        def run(env: Env) -> None:
            env[name] = call

        return run

    def place(self) -> tuple[str, list]:
        """A name and the views behind it."""
        name, views = self.take(), []
        while self.peek() in (".", "["):
            if self.accept("."):
                m = VIEW.match(self.peek())
                if m:
                    self.take()
                    views.append(View(int(m[2]), KINDS[m[1]]))
                elif self.peek() in ("fp8", "bf8"):
                    self.take()
                    views.append(View(8, "B"))
                else:
                    name += "." + self.take()
            else:
                self.take("[")
                a = self.expression()
                mode = "bit" if self.peek() == "]" else self.take()
                b = None if mode == "bit" else self.expression()
                self.take("]")
                views.append(Slice(a, b, mode))
        return name, views

    def assignment(self, path: tuple[str, list]) -> Callable[[Env], None]:
        op, (name, views) = self.take(), path
        value = self.chained() or self.expression()
        if op != "=":
            old, fn, new = self.read(name, views), dict(_OPERATORS)[op[0]], value
            value = lambda env: fn(op[0], old(env), new(env))  # noqa: E731
        return lambda env: store(env, name, views, value(env))

    def chained(self) -> Node | None:
        """The `b = value` of `a = b = value`, as an expression; None, and nothing read, if it is not there."""
        start = self.at
        if self.tokens[start][0] == "name" and self.tokens[start + 1][1] != "(":
            name, views = self.place()
            if self.peek() == "=":
                store, read = self.assignment((name, views)), self.read(name, views)
                return lambda env: (store(env), read(env))[1]
        self.at = start
        return None

    def split_assignment(self) -> Callable[[Env], None]:
        """`{ high, low } = value`"""
        self.take("{")
        places = [self.place()]
        while self.accept(","):
            places.append(self.place())
        self.take("}")
        self.take("=")
        value = self.expression()

        def run(env: Env) -> None:
            bits = value(env).bits
            for name, views in reversed(places):
                width = views[-1].width
                store(env, name, views, Num(bits, width, "B"))
                bits >>= width

        return run

    # expressions

    def expression(self) -> Node:
        cond = self.binary(0)
        if not self.accept("?"):
            return cond
        a = self.expression()
        self.take(":")
        b = self.expression()
        return lambda env: a(env) if cond(env) else b(env)

    def binary(self, level: int) -> Node:
        if level == len(BINARY):
            return self.unary()
        ops, fn = BINARY[level]
        a = self.binary(level + 1)
        while self.peek() in ops and self.tokens[self.at][0] == "op":
            op = self.take()
            a = self.apply(fn, op, a, self.binary(level + 1))
        return a

    @staticmethod
    def apply(fn: Callable, op: str, a: Node, b: Node) -> Node:
        if op == "&&":
            return lambda env: Num(int(bool(a(env)) and bool(b(env))), 1, "U")
        return lambda env: fn(op, a(env), b(env))

    def unary(self) -> Node:
        if self.peek() in "+-" and self.tokens[self.at + 1][1].startswith("0.0"):
            negative = self.take() == "-"
            zero = literal(self.take())
            x = SignedZero(int(negative) << (zero.width - 1), zero.width, "F")
            return lambda env: x
        if self.accept("~"):
            a = self.unary()
            return lambda env: bit_not(a(env))
        if self.accept("!"):
            a = self.unary()
            return lambda env: Num(int(not a(env)), 1, "U")
        if self.accept("-"):
            a = self.unary()
            return lambda env: negate(a(env))
        if self.accept("+"):
            return self.unary()
        return self.primary()

    def primary(self) -> Node:
        kind, text = self.tokens[self.at]
        if kind == "num":
            self.take()
            x = literal(text)
            return lambda env: x
        if kind == "cast":
            width, to = self.take().split("'")
            self.take("(")
            a = self.expression()
            self.take(")")
            return lambda env: cast(a(env), int(width), to)
        if self.accept("("):
            a = self.expression()
            self.take(")")
            return a
        if self.accept("{"):
            parts = [self.expression()]
            while self.accept(","):
                parts.append(self.expression())
            self.take("}")
            return lambda env: concat([p(env) for p in parts])
        if kind == "name":
            if self.tokens[self.at + 1][1] == "(":
                return self.call()
            return self.read(*self.place())
        raise SyntaxError(f"pseudocode: {text!r}")

    def call(self) -> Node:
        name = self.take()
        self.take("(")
        args = [self.expression()]
        while self.accept(","):
            args.append(self.expression())
        self.take(")")
        known = BUILTINS.get(name)

        def run(env: Env) -> Num:
            fn = known or env.get(name) or self.functions(name)
            return fn(*(a(env) for a in args))

        return run

    def read(self, name: str, views: list) -> Node:
        if name == "DENORM":
            denorm = Num(0, 64, "DENORM")
            return lambda env: denorm
        if name in CONSTANTS:
            width = views[0].width if views else 32 if name.endswith("32") else 64
            constant = Num(encode(CONSTANTS[name], width), width, "F")
            return lambda env: constant
        if not views:
            return lambda env: env[name]

        def run(env: Env) -> Num:
            x = env[name]
            for v in views:
                x = v.get(env, x)
            return x

        return run


_OPERATORS = [(op, fn) for ops, fn in BINARY for op in ops]
