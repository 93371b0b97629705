"""Every symbol with every scope over every transport: its value and how often it happens, as the document has it.

`python -m tests.ir.conformance` prints the table.
"""

from __future__ import annotations

import pytest

from mori_triton import ir
from tests.ir import conformance
from tests.ir.conformance import WARPS, WAYS, Shown, Way, column, documented, measure, scope_of, table

pytestmark = pytest.mark.cpu

SYMBOLS = {entry["symbol"]: name for name, entry in ir.MORI_DEVICE_FUNCTIONS.items()}


def requests_of(name: str, way: Way) -> int | None:
    """What one call by PE 0 for the last PE gives to the network, after docs/queue_pairs.md and docs/proxy.md."""
    if way.transport == "p2p":
        return None
    proxy = way.transport == "proxy"
    if name.startswith("barrier"):
        # PE 0 signals the up to 7 others, unless they are mapped; the proxy is asked first whether all before is done
        assert way.num_pes <= 8
        return way.num_pes - (way.gpus_per_node or 1) + proxy
    if name.startswith(("quiet", "fence")):
        return int(proxy)
    if "signal" in name:
        # the proxy takes both at once
        return 1 if proxy else 2
    return int(name.startswith(("put", "get", "atomic")) or "_atomic_" in name or name.endswith("_p"))


@pytest.mark.slow
@pytest.mark.parametrize("title", WAYS)
def test_each_way(title: str) -> None:
    way = WAYS[title]
    shown = {num_warps: measure(way, num_warps) for num_warps in WARPS}
    cells = column(shown)
    print(table({title: cells}, {name: row.told_by for name, row in shown[WARPS[0]].items()}))
    for of in shown.values():
        assert set(of) == set(ir.MORI_DEVICE_FUNCTIONS)
        assert {name: row for name, row in of.items() if not row.value or row.operations not in (1, None)} == {}
        assert {name: row.requests for name, row in of.items()} == {name: requests_of(name, way) for name in of}
    assert documented()[title] == {symbol: cells[name] for symbol, name in SYMBOLS.items()}


def test_the_document_has_every_symbol_and_way() -> None:
    columns = documented()
    assert list(columns) == ["symbol", "scope", *WAYS, "operations told by"]
    assert list(columns["symbol"]) == list(SYMBOLS)
    assert len(SYMBOLS) == 98
    assert columns["scope"] == {symbol: scope_of(name) for symbol, name in SYMBOLS.items()}
    told_by = columns["operations told by"]
    # what adds is told by the sum, everywhere
    adds = [symbol for symbol in SYMBOLS if "atomic" in symbol or "signal" in symbol]
    assert [symbol for symbol in SYMBOLS if told_by[symbol] == "the sum"] == adds
    assert len(adds) == 16
    for title, way in WAYS.items():
        for symbol, name in SYMBOLS.items():
            requests = requests_of(name, way)
            count = (None if told_by[symbol] == "–" else 1) if requests is None else requests
            # from programs of 4 and of 8 warps
            assert columns[title][symbol] == ("right" if count is None else f"right: {count}, {count}")


def test_a_wrong_value_and_a_second_operation_show(capsys: pytest.CaptureFixture[str]) -> None:
    names = list(ir.MORI_DEVICE_FUNCTIONS)

    def measured(way: Way, warps: int) -> dict[str, Shown]:
        found = {name: Shown(True, 1, "the sum", requests=None if way.transport == "p2p" else 2) for name in names}
        if way.transport == "ionic":
            found[names[0]] = Shown(warps == WARPS[0])
            found[names[1]] = Shown(True, warps, "the sum", requests=2)
            found[names[2]] = Shown(True, 1, "the sum", requests=warps)
        return found

    conformance.main(False, measured)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    ionic = [row[rows[0].index("ionic, 2 + 2 PEs")] for row in rows[2:]]
    assert ionic[:4] == ["WRONG", "WRONG: 2, 2", "right: 4, 8", "right: 2, 2"]
    assert [row[rows[0].index("mapped, 4 PEs")] for row in rows[2:]] == ["right: 1, 1"] * len(names)
