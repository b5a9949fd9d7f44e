"""Writes the files of this directory, and the table in its README, from what stands here."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def safetensors(head: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(
    dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls a function with one string, the classic way to run code."""
    return b"\x80\x02c%s\n%s\nX%s%s\x85R." % (
        module.encode(),
        name.encode(),
        struct.pack("<I", len(argument)),
        argument.encode(),
    )


def array(payload: bytes = b"\0" * 16, *, shape: bytes = b"K\x04\x85", code: bytes = b"f4",
          order: bytes = b"<", fortran: bytes = b"\x89") -> bytes:  # fmt: skip
    """The opcodes of one numpy array."""
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\x01b\x87R(K\x01"
        + shape
        + b"cnumpy\ndtype\nX%s%s\x89\x88\x87R(K\x03X\x01\0\0\0%sNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        % (struct.pack("<I", len(code)), code, order)
        + fortran
        + b"B%s%stb" % (struct.pack("<I", len(payload)), payload)
    )


def dictionary(*pairs: tuple[bytes, bytes]) -> bytes:
    body = b"".join(b"X%s%s%s" % (struct.pack("<I", len(k)), k, v) for k, v in pairs)
    return b"\x80\x03}(" + body + b"u."


def bomb(levels: int = 40) -> bytes:
    """A dict of dicts that share their insides: small in the file, 2**levels leaves if walked."""
    inner = b"}X\x01\0\0\0aK\x01sq\0"
    for level in range(levels):
        inner += b"0}(X\x01\0\0\0ah%cX\x01\0\0\0bh%cuq%c" % (level, level, level + 1)
    return b"\x80\x03" + inner + b"."


def cases() -> Iterator[tuple[str, bytes, str]]:
    """Yield (file, content, why it is refused)."""
    two = {"a": entry(), "b": entry(offsets=(2, 6))}
    yield "st-empty.safetensors", b"", "no bytes at all"
    yield "st-short.safetensors", b"\x01\0\0", "fewer bytes than the length field"
    yield (
        "st-head-beyond-file.safetensors",
        safetensors({}, length=1 << 20),
        "head ends after the file",
    )
    yield "st-head-huge.safetensors", safetensors({}, length=2**63), "head of 2**63 bytes"
    yield "st-head-not-json.safetensors", safetensors(b"{'a': 1}"), "head is not JSON"
    yield "st-head-not-utf8.safetensors", safetensors(b'{"\xff":1}'), "head is not UTF-8"
    yield "st-head-list.safetensors", safetensors([]), "head is a list"
    yield "st-head-deep.safetensors", safetensors(b'{"a":' * 20000), "head nests 20,000 deep"
    yield "st-name-twice.safetensors", safetensors(
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}', bytes(8)
    ), "one name, two places"  # fmt: skip
    yield (
        "st-name-control.safetensors",
        safetensors({"a\x1b[2J": entry()}, bytes(4)),
        "a name that clears the terminal",
    )
    yield (
        "st-name-empty.safetensors",
        safetensors({"": entry()}, bytes(4)),
        "a tensor without a name",
    )
    yield (
        "st-dtype-unknown.safetensors",
        safetensors({"a": entry("F128")}, bytes(4)),
        "a dtype nobody has",
    )
    yield (
        "st-dtype-list.safetensors",
        safetensors({"a": entry(["U8"])}, bytes(4)),
        "a dtype that is a list",
    )
    yield (
        "st-shape-negative.safetensors",
        safetensors({"a": entry(shape=(-2, -2))}, bytes(4)),
        "negative sizes whose product is right",
    )
    yield (
        "st-shape-overflow.safetensors",
        safetensors({"a": entry(shape=(2**62, 4))}, bytes(4)),
        "a product that wraps to 0 in 64 bits",
    )
    yield (
        "st-shape-fraction.safetensors",
        safetensors({"a": entry(shape=(4.0,))}, bytes(4)),
        "a size that is a fraction",
    )
    yield (
        "st-shape-dims.safetensors",
        safetensors({"a": entry(shape=[1] * 1000, offsets=(0, 1))}, bytes(1)),
        "a thousand dims",
    )
    yield (
        "st-offsets-outside.safetensors",
        safetensors({"a": entry(offsets=(8, 12))}, bytes(4)),
        "a tensor after the end of the file",
    )
    yield (
        "st-offsets-backwards.safetensors",
        safetensors({"a": entry(offsets=(4, 0))}, bytes(4)),
        "a tensor that ends before it starts",
    )
    yield (
        "st-offsets-three.safetensors",
        safetensors({"a": entry(offsets=(0, 4, 8))}, bytes(8)),
        "three offsets",
    )
    yield (
        "st-offsets-size.safetensors",
        safetensors({"a": entry(offsets=(0, 8))}, bytes(8)),
        "more room than the shape needs",
    )
    yield "st-overlap.safetensors", safetensors(two, bytes(6)), "two tensors share bytes"
    yield (
        "st-hole.safetensors",
        safetensors({"a": entry(), "b": entry(offsets=(6, 10))}, bytes(10)),
        "bytes between two tensors, where another file could hide",
    )
    yield (
        "st-tail.safetensors",
        safetensors({"a": entry()}, bytes(8)),
        "bytes after the last tensor",
    )
    yield (
        "st-cut.safetensors",
        safetensors({"a": entry()}, bytes(3)),
        "the last tensor is cut short",
    )
    yield (
        "st-fields.safetensors",
        safetensors({"a": {**entry(), "url": "x"}}, bytes(4)),
        "a field that is none of the format's",
    )
    yield "pk-system.pdparams", call("os", "system", "touch pwned"), "calls os.system"
    yield "pk-posix.pdparams", call("posix", "system", "touch pwned"), "calls posix.system"
    yield "pk-eval.pdparams", call("builtins", "eval", "open('pwned', 'w')"), "calls eval"
    yield (
        "pk-getattr.pdparams",
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.",
        "names getattr, on the stack",
    )
    yield (
        "pk-numpy-load.pdparams",
        call("numpy", "load", "pwned.npy"),
        "calls numpy.load, a numpy function that is not an array's",
    )
    yield "pk-torch.pdparams", call("torch", "load", "pwned.pt"), "calls torch.load"
    yield (
        "pk-instance.pdparams",
        b"\x80\x02(X\x0b\0\0\0touch pwnedios\nsystem\n.",
        "calls by the old INST opcode",
    )
    yield (
        "pk-object.pdparams",
        b"\x80\x02(cos\nsystem\nX\x0b\0\0\0touch pwnedo.",
        "calls by the old OBJ opcode",
    )
    yield (
        "pk-newobj.pdparams",
        b"\x80\x02ccollections\nOrderedDict\n)\x81.",
        "makes an object by NEWOBJ, which arrays never need",
    )
    yield "pk-persistent.pdparams", b"\x80\x02X\x01\0\0\0aQ.", "asks for a persistent id"
    yield "pk-extension.pdparams", b"\x80\x02\x82\x01.", "asks the extension registry"
    yield "pk-protocol-9.pdparams", b"\x80\x09}.", "a protocol there is not"
    yield "pk-empty-stack.pdparams", b"\x80\x03.", "stops with nothing"
    yield "pk-two-values.pdparams", b"\x80\x03}}.", "stops with two values"
    yield "pk-not-a-dict.pdparams", b"\x80\x03K\x05.", "a number, not a dict of arrays"
    yield "pk-no-mark.pdparams", b"\x80\x03}u.", "sets items back to a mark that is not there"
    yield "pk-no-memo.pdparams", b"\x80\x03h\x07.", "recalls what was never kept"
    yield "pk-cut.pdparams", dictionary((b"a", array()))[:-20], "cut short inside the array"
    yield "pk-no-stop.pdparams", dictionary((b"a", array()))[:-1], "cut short before its end"
    yield "pk-tail.pdparams", dictionary((b"a", array())) + b"more", "bytes after its end"
    yield (
        "pk-long-claim.pdparams",
        b"\x80\x03}X\x01\0\0\0aB\xff\xff\xff\xff",
        "claims 4 GiB it does not have",
    )
    yield "pk-huge-claim.pdparams", b"\x80\x04}\x8c\x01a\x8e" + b"\xff" * 8, "claims 2**64 bytes"
    yield "pk-long-number.pdparams", b"\x80\x02\x8b\xff\xff\xff\x7f", "a number of 2 GiB"
    yield (
        "pk-key-twice.pdparams",
        dictionary((b"a", array()), (b"a", array())),
        "one name, two arrays",
    )
    yield (
        "pk-bytes-short.pdparams",
        dictionary((b"a", array(bytes(12)))),
        "fewer bytes than its shape needs",
    )
    yield (
        "pk-bytes-long.pdparams",
        dictionary((b"a", array(bytes(20)))),
        "more bytes than its shape needs",
    )
    yield "pk-object-dtype.pdparams", dictionary((b"a", array(code=b"O8"))), "an array of objects"
    yield "pk-strange-dtype.pdparams", dictionary((b"a", array(code=b"f99"))), "a dtype numpy lacks"
    yield (
        "pk-big-endian.pdparams",
        dictionary((b"a", array(order=b">"))),
        "an array in the other byte order",
    )
    yield (
        "pk-fortran.pdparams",
        dictionary((b"a", array(shape=b"K\x02K\x02\x86", fortran=b"\x88"))),
        "an array in column order",
    )
    yield (
        "pk-shape-negative.pdparams",
        dictionary((b"a", array(shape=b"J\xff\xff\xff\xff\x85"))),
        "a negative size",
    )
    yield (
        "pk-shape-text.pdparams",
        dictionary((b"a", array(shape=b"X\x01\0\0\x004\x85"))),
        "a size that is text",
    )
    yield "pk-bomb.pdparams", bomb(), "2**40 leaves in a file of a thousand bytes"
    wide = b"]\x94" + b"".join(b"0(%sl\x94" % (b"h%c" % level * 250) for level in range(4))
    yield (
        "pk-wide.pdparams",
        b"\x80\x04}\x8c\x01a" + wide + b"s.",
        "one list 250 times in a list, four times over: gigabytes from a file of 2 KB",
    )
    same_hash = [(n * (2**61 - 1)).to_bytes(16, "little") for n in range(1000)]
    yield (
        "pk-key-hash.pdparams",
        b"\x80\x04}(" + b"".join(b"\x8a\x10" + key + b"N" for key in same_hash) + b"u.",
        "keys that all have one hash in Python: a dict of them takes time by its square",
    )
    yield "pk-name-list.pdparams", b"\x80\x04N]\x93.", "names a function by a list"
    deep = b")" + b"\x85" * 20000
    split = b"\x8c\x15UnpackBigParamInfor@@}\x8c\x01z}(\x8c\x0bOriginShape)\x8c\x06slices" + deep
    yield (
        "pk-split-deep.pdparams",
        b"\x80\x04}(" + split + b"usu.",
        "pieces nested so deep that hashing them overflows the stack",
    )
    yield (
        "pk-deep-shape.pdparams",
        dictionary((b"a", array(shape=deep))),
        "a shape nested 20,000 deep",
    )
    yield "pk-cycle.pdparams", b"\x80\x03}q\0X\x01\0\0\0ah\0s.", "a dict that holds itself"
    yield (
        "pk-class.pdparams",
        dictionary((b"a", pickle.dumps(pickle.PickleBuffer, 2)[2:-1])),
        "a class where an array should be",
    )
    yield (
        "xx-html.safetensors",
        b"<!doctype html><title>404</title>",
        "an error page saved under a model's name",
    )
    yield "xx-zip.pdparams", b"PK\x03\x04" + bytes(60), "a zip archive"


def table() -> str:
    rows = "\n".join(f"| `{name}` | {why} |" for name, _, why in cases())
    return f"""# Files that must be refused

Each is opened by `tests/test_attacks.py`, which expects a `FormatError` and that nothing ran: a
pickle that got its way would leave a file called `pwned`. `make.py` writes them all; damaged
snapshots are made from good ones in `tests/formats/test_snapshot.py` and `tests/verbs/`.

| file | why it is refused |
|---|---|
{rows}
"""


def main() -> None:
    for name, content, _ in cases():
        (HERE / name).write_bytes(content)
    (HERE / "README.md").write_text(table())


if __name__ == "__main__":
    main()
