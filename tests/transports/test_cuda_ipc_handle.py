"""A handle of device memory comes from another process: one that lies is no handle."""

import msgspec
import pytest

from flyweight.errors import TransportError
from flyweight.transports.cuda_ipc import CudaIpcHandle, ExportedFile

FIELDS = {
    "session": "0123456789abcdef", "pid": 5, "slot": 1, "number": 3, "register": "key",
    "device": "GPU-x", "allocation": 7, "offset": 0, "nbytes": 400, "allocation_bytes": 400,
}  # fmt: skip
PLAIN = CudaIpcHandle(**FIELDS, ipc=b"x" * 64)
MAPPED = CudaIpcHandle(**FIELDS, pieces=(ExportedFile("a", 300), ExportedFile("b", 100)))


def pieces(*sizes):
    return {"pieces": [{"key": "a", "nbytes": size} for size in sizes]}


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
@pytest.mark.parametrize("handle", [PLAIN, MAPPED], ids=["plain", "mapped"])
def test_a_handle_is_the_same_after_its_way(handle, codec):
    assert codec.decode(codec.encode(handle), type=CudaIpcHandle) == handle


@pytest.mark.parametrize(
    ("handle", "lie"),
    [
        *((PLAIN, {name: -1}) for name in ("pid", "slot", "number", "offset", "nbytes")),
        *((PLAIN, {name: 2**63}) for name in ("pid", "number", "offset", "allocation_bytes")),
        (PLAIN, {"slot": 2**20 + 1}),
        (PLAIN, {"offset": 1}),
        (PLAIN, {"nbytes": 401}),
        (PLAIN, {"ipc": ""}),
        (PLAIN, {"ipc": "AAAA"}),
        (PLAIN, pieces(400)),
        (PLAIN, {"session": "../../etc"}),
        (PLAIN, {"session": "0123456789abcdef\n"}),
        (PLAIN, {"device": "G" * 65}),
        (PLAIN, {"register": "r" * 65}),
        (MAPPED, pieces()),
        (MAPPED, pieces(300)),
        (MAPPED, pieces(0, 400)),
        (MAPPED, pieces(-1, 401)),
    ],
    ids=str,
)
def test_a_handle_that_lies_is_refused(handle, lie):
    told = msgspec.json.decode(msgspec.json.encode(handle)) | lie
    with pytest.raises((TransportError, msgspec.ValidationError)):
        msgspec.json.decode(msgspec.json.encode(told), type=CudaIpcHandle)
