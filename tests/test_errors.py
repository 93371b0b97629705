"""The checks at the public edge name the argument, what was wanted and what came."""

import pytest
import torch

from mori_triton import errors
from mori_triton.errors import ArgumentError, check_tensor, require

pytestmark = pytest.mark.cpu


def test_require() -> None:
    require(True, "x", 1, 2)
    with pytest.raises(ArgumentError, match=r"^num_tokens: want at most 8, got 9$"):
        require(False, "num_tokens", "at most 8", 9)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ([1.0], r"x: want a torch\.Tensor, got list"),
        (torch.zeros(2, 3, dtype=torch.int64), r"x\.dtype: want torch\.float32 or torch\.float16, got torch\.int64"),
        (torch.zeros(2, 4), r"x\.shape: want \[any, 3\], got \[2, 4\]"),
        (torch.zeros(3), r"x\.shape: want \[any, 3\], got \[3\]"),
        (torch.zeros(3, 2).T, r"x: want contiguous memory, got strides \(1, 2\)"),
        (torch.zeros(2, 3, device="meta"), r"x\.device: want cpu, got meta"),
    ],
)
def test_check_tensor(tensor: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_tensor("x", tensor, (torch.float32, torch.float16), (None, 3), torch.device("cpu"))


def test_check_tensor_accepts() -> None:
    check_tensor("x", torch.zeros(0, 3), torch.float32, (None, 3), torch.device("cpu"))


def test_every_error_is_a_mori_error_and_a_builtin_one() -> None:
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(kinds) > 10
    for kind in kinds:
        assert issubclass(kind, errors.MoriError)
        assert kind is errors.MoriError or issubclass(
            kind, (ValueError, RuntimeError, TimeoutError, NotImplementedError)
        )
