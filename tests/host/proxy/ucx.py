"""Whether the real UCX is here."""

import pytest

from mori_triton.errors import DriverError
from mori_triton.host.proxy import ucp_api


def _missing() -> str:
    try:
        ucp_api.Ucp()
    except DriverError as error:
        return str(error)
    return ""


_why = _missing()
needs_ucx = pytest.mark.skipif(bool(_why), reason=_why)
