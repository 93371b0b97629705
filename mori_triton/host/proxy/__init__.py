"""The proxy provider: one-sided operations between hosts through UCX, for PEs that cannot post to a NIC themselves."""

from __future__ import annotations

from mori_triton.host.proxy.layout import Op
from mori_triton.host.proxy.proxy import Proxy
from mori_triton.host.proxy.ring import ErrorRecord, Ring, descriptor

__all__ = ["ErrorRecord", "Op", "Proxy", "Ring", "descriptor"]
