"""The one place that imports transformers, and the message for when it is missing or too old."""

from __future__ import annotations

from collections.abc import Callable

# before, `set_experts_implementation` took a fixed list of names and refused registered ones
MINIMUM = (5, 7)


def register_experts(name: str, forward: Callable) -> None:
    """Make `model.set_experts_implementation(name)` call `forward(experts_module, hidden_states, index, weights)`.

    Registering the same name again replaces it, so importing twice is harmless. The registry is imported here, on the
    importing thread: PEs may be threads, and two of them must not be the first to import transformers' lazy modules.

    Raises:
        ImportError: transformers is missing or older than `MINIMUM`; names the extra that brings it.
    """
    wanted = f"mori_triton.layers needs transformers >= {'.'.join(map(str, MINIMUM))}"
    remedy = "install it with: pip install 'mori_triton[demo]'"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{wanted}, which cannot be imported ({error}); {remedy}", name="transformers") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < MINIMUM:
        raise ImportError(f"{wanted}, found {transformers.__version__}; {remedy}", name="transformers")
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(name, forward)
