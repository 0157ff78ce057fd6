//! The Rust side of `kernels/params.h`: what kernels take, byte for byte.

use super::memory::Ptr;
use crate::format::Codec;
use crate::format::layout::Planes;
use crate::model::Mask;

/// A struct that is copied into a kernel's argument as it lies in memory.
///
/// # Safety
/// `repr(C)`, no padding that is not spelled out, and the same layout in the kernel's source.
pub unsafe trait Params: Copy {}

/// A weight matrix in the tile layout, in device memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MatrixParams {
    /// Device address of the codes plane.
    pub base: Ptr,
    /// Byte offsets of the other planes.
    pub high: u64,
    /// `d`, or FP8's block scales.
    pub d: u64,
    /// `m` or `dmin`.
    pub m: u64,
    /// `sc`.
    pub sc: u64,
    /// `mn`.
    pub mn: u64,
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub cols: u32,
    /// [`Codec`] as its number.
    pub codec: u32,
    /// Zero.
    pub pad: u32,
}
const _: () = assert!(size_of::<MatrixParams>() == 64);

impl MatrixParams {
    /// Describes a matrix at `base`.
    pub fn new(codec: Codec, rows: usize, cols: usize, planes: &Planes, base: Ptr) -> MatrixParams {
        let at = |p: crate::format::layout::Plane| p.offset as u64;
        MatrixParams {
            base,
            high: at(planes.high),
            d: at(planes.d),
            m: at(planes.m),
            sc: at(planes.sc),
            mn: at(planes.mn),
            rows: rows as u32,
            cols: cols as u32,
            codec: codec as u32,
            pad: 0,
        }
    }

    /// The codec.
    pub fn codec(&self) -> Codec {
        crate::format::codec::TABLE[self.codec as usize].codec
    }
}

/// Where the rows of a step lie: device addresses of `u32` positions, `u32` table starts, `u64` page addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RowMap {
    /// `(rows)` u32
    pub position: Ptr,
    /// `(rows)` u32: index into `pages`.
    pub table: Ptr,
    /// u64 page addresses.
    pub pages: Ptr,
}
const _: () = assert!(size_of::<RowMap>() == 24);

impl RowMap {
    /// The rows from `first` on.
    pub fn from_row(self, first: usize) -> RowMap {
        let skip = first as u64 * 4;
        RowMap { position: self.position.at(skip), table: self.table.at(skip), pages: self.pages }
    }
}

/// A layer's mask.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskParams {
    /// `MASK_*` of params.h.
    pub kind: u32,
    /// Positions of the window.
    pub window: u32,
    /// Distance of strided positions.
    pub stride: u32,
    /// Stride by which positions are placed in pages.
    pub placement: u32,
}
const _: () = assert!(size_of::<MaskParams>() == 16);

impl From<Mask> for MaskParams {
    fn from(mask: Mask) -> MaskParams {
        let (kind, window, stride) = match mask {
            Mask::Full => (0, 0, 1),
            Mask::Sliding { window } => (1, window, 1),
            Mask::Strided { stride } => (2, 0, stride),
            Mask::LocalStrided { window, stride } => (3, window, stride),
        };
        MaskParams { kind, window: window as u32, stride: stride as u32, placement: mask.stride() as u32 }
    }
}

/// One routed pick.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct PickParams {
    /// The expert.
    pub expert: u32,
    /// What its output is multiplied by.
    pub weight: f32,
}
const _: () = assert!(size_of::<PickParams>() == 8);
