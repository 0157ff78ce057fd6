#!/usr/bin/env python3
"""Makes tests/data/codecs/*.bin: random blocks of every codec and the values that gguf-py gives them.

    pip install gguf numpy ml_dtypes
    python tools/make_codec_vectors.py tests/data/codecs

A file is the blocks as a GGUF has them, then as many little-endian f32 values as they hold. All random bits are allowed
but the scales: f16 scales are finite (NaN payloads are not what is tested), and e8m0 stays clear of its NaN code.
"""
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants

BLOCKS = {32: 16, 256: 4}
# Byte offsets of f16 fields in a block.
F16_FIELDS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}


def main(out: Path) -> None:
    rng = np.random.default_rng(20)
    out.mkdir(parents=True, exist_ok=True)

    def save(name, blocks, values):
        values = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
        assert np.isfinite(values).all() or name == "f8_e4m3", name
        (out / f"{name}.bin").write_bytes(blocks.tobytes() + values.tobytes())

    for name, fields in F16_FIELDS.items():
        block_len, block_bytes = GGML_QUANT_SIZES[T[name]]
        blocks = rng.integers(0, 256, (BLOCKS[block_len], block_bytes), dtype=np.uint8)
        for at in fields:
            # Any sign, exponents up to 2^4: subnormals too, products far from overflow.
            bits = rng.integers(0, 20 << 10, BLOCKS[block_len]) | rng.integers(0, 2, BLOCKS[block_len]) << 15
            blocks[:, at : at + 2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
        if name == "MXFP4":
            # Both subnormal scales, then all sizes that stay finite.
            blocks[:, 0] = [0, 1, 2] + list(rng.integers(3, 252, BLOCKS[32] - 3))
        save(name.lower(), blocks, quants.dequantize(blocks, T[name]))
    every16 = np.arange(0, 1 << 16, 61, dtype="<u2")
    f16 = every16[np.isfinite(every16.view("<f2"))]
    save("f16", f16, f16.view("<f2").astype("<f4"))
    bf16 = every16[(every16 & 0x7F80) != 0x7F80]
    save("bf16", bf16, quants.dequantize(bf16.view(np.uint8), T.BF16))
    every8 = np.arange(256, dtype=np.uint8)
    save("f8_e4m3", every8, every8.view(ml_dtypes.float8_e4m3fn).astype("<f4"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
