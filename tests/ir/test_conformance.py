"""Every symbol with every scope over every transport: its value and how often it happens, as the document has it.

`python -m tests.ir.conformance` prints the table.
"""

from __future__ import annotations

import pytest

from mori_triton import ir
from tests.ir import conformance
from tests.ir.conformance import TRANSPORTS, WARPS, Shown, column, documented, measure, scope_of, table

pytestmark = pytest.mark.cpu


def check(transport: str) -> None:
    """Measure a transport; every function is right, counts as it must, and stands in the document like that."""
    shown = {num_warps: measure(transport, num_warps) for num_warps in WARPS}
    cells = column(shown)
    print(table({transport: cells}, {name: row.told_by for name, row in shown[WARPS[0]].items()}))
    assert set(shown[WARPS[0]]) == set(ir.MORI_DEVICE_FUNCTIONS)
    assert {row.operations for of in shown.values() for row in of.values()} == {1, None}
    assert {name for name, cell in cells.items() if "right" not in cell} == set()
    symbols = {name: entry["symbol"] for name, entry in ir.MORI_DEVICE_FUNCTIONS.items()}
    assert documented()[transport] == {symbols[name]: cell for name, cell in cells.items()}
    for name, row in shown[WARPS[-1]].items():
        # what adds up was counted in programs of both sizes
        assert row.told_by == shown[WARPS[0]][name].told_by


def test_mapped_memory() -> None:
    check("mapped")


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_each_network(transport: str) -> None:
    check(transport)


@pytest.mark.slow
def test_waves_of_64_show_the_same() -> None:
    shown = measure("mapped", 4, "gfx942")
    assert all(row.value and row.operations in (1, None) for row in shown.values()), shown
    assert {name: row.told_by for name, row in shown.items()} == {
        name: row.told_by for name, row in measure("mapped", 4).items()
    }


def test_the_document_has_every_symbol_and_transport() -> None:
    columns = documented()
    assert list(columns) == ["symbol", "scope", *TRANSPORTS, "operations told by"]
    symbols = {entry["symbol"]: name for name, entry in ir.MORI_DEVICE_FUNCTIONS.items()}
    assert list(columns["symbol"]) == list(symbols)
    assert len(symbols) == 98
    assert columns["scope"] == {symbol: scope_of(name) for symbol, name in symbols.items()}
    adds = [symbol for symbol in symbols if "atomic" in symbol or "signal" in symbol]
    assert len(adds) == 16
    for transport in TRANSPORTS:
        # once, from programs of 4 and of 8 warps
        assert {columns[transport][symbol] for symbol in adds} == {"right: 1, 1"}


def test_a_wrong_value_and_a_second_operation_show(capsys: pytest.CaptureFixture[str]) -> None:
    names = list(ir.MORI_DEVICE_FUNCTIONS)

    def measured(transport: str, warps: int) -> dict[str, Shown]:
        found = {name: Shown(True, 1, "the sum") for name in names}
        if transport == "ionic":
            found[names[0]] = Shown(False)
            found[names[1]] = Shown(True, warps, "the sum")
        return found

    conformance.main(False, measured)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    ionic = 3 + TRANSPORTS.index("ionic")
    assert [rows[2][ionic].strip(), rows[3][ionic].strip(), rows[4][ionic].strip()] == [
        "WRONG",
        "right: 4, 8",
        "right: 1, 1",
    ]
