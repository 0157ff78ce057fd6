//! The kernels that travel in the binary: files, their variants, and the headers they share.

/// One `.cu` file.
#[derive(Debug)]
pub struct KernelFile {
    /// Its name without the ending.
    pub name: &'static str,
    /// Its text.
    pub source: &'static str,
    /// The defines that it is compiled with, one module each; `""` for none.
    pub variants: &'static [&'static str],
}

/// What kernels may include.
pub const HEADERS: &[(&str, &str)] = &[
    ("params.h", include_str!("../../../kernels/params.h")),
    ("codec.cuh", include_str!("../../../kernels/codec.cuh")),
    ("quantize.cuh", include_str!("../../../kernels/quantize.cuh")),
    ("halves.cuh", include_str!("../../../kernels/halves.cuh")),
    ("gemv.cuh", include_str!("../../../kernels/gemv.cuh")),
    ("few.cuh", include_str!("../../../kernels/few.cuh")),
    ("swiglu.cuh", include_str!("../../../kernels/swiglu.cuh")),
    ("gemm.cuh", include_str!("../../../kernels/gemm.cuh")),
    ("router.cuh", include_str!("../../../kernels/router.cuh")),
    ("attend.cuh", include_str!("../../../kernels/attend.cuh")),
    ("coded.cuh", include_str!("../../../kernels/coded.cuh")),
    ("tile.cuh", include_str!("../../../kernels/tile.cuh")),
    ("tile_coded.cuh", include_str!("../../../kernels/tile_coded.cuh")),
    ("decode.cuh", include_str!("../../../kernels/decode.cuh")),
    ("mma.cuh", include_str!("../../../kernels/mma.cuh")),
];

/// All files.
pub const FILES: &[KernelFile] = &[
    KernelFile { name: "quantize", source: include_str!("../../../kernels/quantize.cu"), variants: &[""] },
    KernelFile { name: "embed", source: include_str!("../../../kernels/embed.cu"), variants: BY_CODEC },
    KernelFile { name: "gemv", source: include_str!("../../../kernels/gemv.cu"), variants: BY_CODEC },
    KernelFile { name: "expert", source: include_str!("../../../kernels/expert.cu"), variants: BY_CODEC },
    KernelFile { name: "gemm", source: include_str!("../../../kernels/gemm.cu"), variants: BY_CODEC },
    KernelFile { name: "group", source: include_str!("../../../kernels/group.cu"), variants: &[""] },
    KernelFile { name: "norm", source: include_str!("../../../kernels/norm.cu"), variants: &[""] },
    KernelFile {
        name: "rope",
        source: include_str!("../../../kernels/rope.cu"),
        variants: &["KV=KV_F32", "KV=KV_F16", "KV=KV_I8"],
    },
    KernelFile {
        name: "attend",
        source: include_str!("../../../kernels/attend.cu"),
        variants: &[
            "ATTEND=81",
            "ATTEND=82",
            "ATTEND=84",
            "ATTEND=161",
            "ATTEND=162",
            "ATTEND=164",
            "ATTEND=321",
            "ATTEND=322",
            "ATTEND=324",
        ],
    },
    KernelFile {
        name: "latent",
        source: include_str!("../../../kernels/latent.cu"),
        variants: &["", "KV=KV_I8"],
    },
    KernelFile { name: "merge", source: include_str!("../../../kernels/merge.cu"), variants: &[""] },
    KernelFile {
        name: "flash",
        source: include_str!("../../../kernels/flash.cu"),
        variants: &[
            "HEAD=64",
            "HEAD=128",
            "HEAD=192",
            "HEAD=256",
            "CODED_HEAD=64",
            "CODED_HEAD=128",
            "CODED_HEAD=192",
            "CODED_HEAD=256",
        ],
    },
    KernelFile { name: "mla", source: include_str!("../../../kernels/mla.cu"), variants: &[""] },
    KernelFile { name: "router", source: include_str!("../../../kernels/router.cu"), variants: &[""] },
    KernelFile {
        name: "router_few",
        source: include_str!("../../../kernels/router_few.cu"),
        variants: &["CODEC=CODEC_F32", "CODEC=CODEC_F16", "CODEC=CODEC_BF16"],
    },
    KernelFile { name: "silu", source: include_str!("../../../kernels/silu.cu"), variants: &[""] },
    KernelFile { name: "roof", source: include_str!("../../../kernels/roof.cu"), variants: &[""] },
    KernelFile { name: "sample", source: include_str!("../../../kernels/sample.cu"), variants: &[""] },
];

/// One variant for each codec, for files that are compiled for the codecs that a model has.
pub const BY_CODEC: &[&str] = &[
    "CODEC=CODEC_F32",
    "CODEC=CODEC_F16",
    "CODEC=CODEC_BF16",
    "CODEC=CODEC_F8E4M3",
    "CODEC=CODEC_Q4_0",
    "CODEC=CODEC_Q4_1",
    "CODEC=CODEC_Q5_0",
    "CODEC=CODEC_Q5_1",
    "CODEC=CODEC_Q8_0",
    "CODEC=CODEC_Q2_K",
    "CODEC=CODEC_Q3_K",
    "CODEC=CODEC_Q4_K",
    "CODEC=CODEC_Q5_K",
    "CODEC=CODEC_Q6_K",
    "CODEC=CODEC_IQ4_NL",
    "CODEC=CODEC_IQ4_XS",
    "CODEC=CODEC_MXFP4",
];
