"""DType: how many bits an element has, and what each framework calls it.

Dtypes narrower than a byte stay packed, as in their files: shapes count elements,
`TensorSpec.stored` counts the bytes that they are packed into.
"""

from __future__ import annotations

from dataclasses import dataclass

from flyweight.errors import SpecError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. Two dtypes are the same if their names are."""

    name: str
    bits: int
    safetensors: str | None
    """Its name in a safetensors header; a dtype with None is stored there as packed U8."""
    torch: str | None
    paddle: str | None
    numpy: str | None
    """The numpy dtype of the same values; None where numpy has none of its own."""

    def __str__(self) -> str:
        return self.name

    def nbytes(self, num_elements: int) -> int:
        """Return the bytes that `num_elements` take, which must fill whole bytes."""
        bits = self.bits * num_elements
        if bits % 8:
            raise SpecError(f"{num_elements} elements of {self.name} do not fill whole bytes")
        return bits // 8


# name, bits, safetensors, torch, paddle, numpy
_TABLE = (
    DType("bool", 8, "BOOL", "bool", "bool", "bool"),
    DType("u8", 8, "U8", "uint8", "uint8", "uint8"),
    DType("i8", 8, "I8", "int8", "int8", "int8"),
    DType("u16", 16, "U16", "uint16", "uint16", "uint16"),
    DType("i16", 16, "I16", "int16", "int16", "int16"),
    DType("u32", 32, "U32", "uint32", "uint32", "uint32"),
    DType("i32", 32, "I32", "int32", "int32", "int32"),
    DType("u64", 64, "U64", "uint64", "uint64", "uint64"),
    DType("i64", 64, "I64", "int64", "int64", "int64"),
    DType("f16", 16, "F16", "float16", "float16", "float16"),
    DType("bf16", 16, "BF16", "bfloat16", "bfloat16", None),
    DType("f32", 32, "F32", "float32", "float32", "float32"),
    DType("f64", 64, "F64", "float64", "float64", "float64"),
    DType("c64", 64, "C64", "complex64", "complex64", "complex64"),
    DType("c128", 128, None, "complex128", "complex128", "complex128"),
    DType("f8_e4m3", 8, "F8_E4M3", "float8_e4m3fn", "float8_e4m3fn", None),
    DType("f8_e5m2", 8, "F8_E5M2", "float8_e5m2", "float8_e5m2", None),
    DType("f8_e4m3fnuz", 8, "F8_E4M3FNUZ", "float8_e4m3fnuz", None, None),
    DType("f8_e5m2fnuz", 8, "F8_E5M2FNUZ", "float8_e5m2fnuz", None, None),
    DType("f8_e8m0", 8, "F8_E8M0", "float8_e8m0fnu", None, None),
    DType("f6_e2m3", 6, "F6_E2M3", None, None, None),
    DType("f6_e3m2", 6, "F6_E3M2", None, None, None),
    DType("f4", 4, "F4", "float4_e2m1fn_x2", None, None),
    DType("i4", 4, None, None, None, None),
    DType("u4", 4, None, None, None, None),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}
BY_TORCH = {dtype.torch: dtype for dtype in _TABLE if dtype.torch}
BY_PADDLE = {dtype.paddle: dtype for dtype in _TABLE if dtype.paddle}
BY_NUMPY = {dtype.numpy: dtype for dtype in _TABLE if dtype.numpy}
# The names of the dtypes that the ml_dtypes package adds to numpy.
BY_NUMPY |= {
    "bfloat16": DTYPES["bf16"],
    "float8_e4m3fn": DTYPES["f8_e4m3"],
    "float8_e5m2": DTYPES["f8_e5m2"],
    "float8_e4m3fnuz": DTYPES["f8_e4m3fnuz"],
    "float8_e5m2fnuz": DTYPES["f8_e5m2fnuz"],
    "float8_e8m0fnu": DTYPES["f8_e8m0"],
}


def dtype_named(name: object) -> DType:
    """Return our dtype of that name."""
    if not isinstance(name, str) or name not in DTYPES:
        raise SpecError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]
