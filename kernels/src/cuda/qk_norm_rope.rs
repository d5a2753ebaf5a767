//! Per-head norm and partial rotary embedding, and its gradient.

use m3_spec::dtype::DType;

use super::CudaBackend;
use super::launch::{Grid, Parameter, Parameters, address, code};
use super::slices::{Slices, add_slices};
use super::stream::Enqueue;
use crate::error::{Error, Result};
use crate::ops;
use crate::tensor::Tensor;

const FILE: &str = "qk_norm_rope.cu";

/// Warps of a block.
const WARPS: usize = 8;

/// Heads that a warp of the forward pass handles; `SHARE` of the kernels.
const SHARE: usize = 32;

/// Widest head that half a warp holds, eight channels a lane.
const HEAD_DIM_NARROW: usize = 128;

/// Widest head the kernels hold.
const HEAD_DIM_MAX: usize = 256;

/// Slices that d_weight is summed over: a warp each, enough to fill a large GPU, and the same on every one.
const SLICES: Slices = Slices {
    most: 4096,
    rows_least: 8,
};

/// Heads `[T, heads, D]` with dense channels; `struct Heads` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heads {
    data: u64,
    token_stride: i64,
    head_stride: i64,
}

// SAFETY: eight-byte fields alone.
unsafe impl Parameter for Heads {}

impl Heads {
    fn of(tensor: &Tensor<CudaBackend>) -> Self {
        Heads {
            data: address(tensor),
            token_stride: tensor.strides()[0] as i64,
            head_stride: tensor.strides()[1] as i64,
        }
    }
}

/// `struct Extents` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Extents {
    tokens: i32,
    heads: i32,
    head_dim: i32,
    half: i32,
    positions: i32,
    unused: i32,
}

// SAFETY: six four-byte fields, no padding.
unsafe impl Parameter for Extents {}

impl Extents {
    fn of(op: &'static str, dims: &ops::QkNormRopeDims) -> Result<Self> {
        if dims.head_dim > HEAD_DIM_MAX {
            return Err(Error::Argument {
                op,
                what: format!(
                    "head_dim {} is above the kernel's {HEAD_DIM_MAX}",
                    dims.head_dim
                ),
            });
        }
        Ok(Extents {
            tokens: dims.tokens as i32,
            heads: dims.heads as i32,
            head_dim: dims.head_dim as i32,
            half: (dims.rotary_dim / 2) as i32,
            positions: dims.positions as i32,
            unused: 0,
        })
    }
}

pub(super) fn qk_norm_rope(
    queue: &mut Enqueue<'_>,
    args: &ops::QkNormRope<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .with(Heads::of(args.x))
        .tensor(args.weight)
        .with(code(args.weight.dtype()))
        .tensor(args.cos_sin)
        .tensor(args.positions)
        .with(Heads::of(args.out))
        .tensor(args.rstd)
        .with(Extents::of(queue.op, &dims)?)
        .with(args.eps)
        .with(queue.fault())
        .with(queue.site("positions"));
    let warps = (dims.tokens * dims.heads).div_ceil(SHARE);
    let grid = Grid::line(warps.div_ceil(WARPS), 32 * WARPS as u32);
    let name = match (dims.head_dim <= HEAD_DIM_NARROW, args.x.dtype()) {
        (true, DType::BF16) => "qk_norm_rope_16_bf16",
        (true, _) => "qk_norm_rope_16_f32",
        (false, DType::BF16) => "qk_norm_rope_32_bf16",
        (false, _) => "qk_norm_rope_32_f32",
    };
    // SAFETY: the kernel's parameters; a warp handles its heads, and positions outside the table are not followed.
    unsafe { queue.launch(FILE, name, grid, parameters) }
}

pub(super) fn qk_norm_rope_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::QkNormRopeBackward<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let extents = Extents::of(queue.op, &dims)?;
    let (slices, rows_per_slice) = SLICES.of(dims.tokens * dims.heads);
    let narrow = dims.head_dim <= HEAD_DIM_NARROW;
    // Each half of a warp keeps a sum of its own where it has heads of its own.
    let parts = if narrow { 2 * slices } else { slices };
    let [partial] = queue.scratch([parts * dims.head_dim * 4])?;
    let parameters = Parameters::default()
        .with(Heads::of(args.x))
        .tensor(args.weight)
        .with(code(args.weight.dtype()))
        .tensor(args.cos_sin)
        .tensor(args.positions)
        .tensor(args.rstd)
        .with(Heads::of(args.d_out))
        .with(Heads::of(args.dx))
        .with(partial)
        .with(extents)
        .with(rows_per_slice as i64)
        .with(slices as i64)
        .with(queue.fault())
        .with(queue.site("positions"));
    let grid = Grid::line(slices.div_ceil(WARPS), 32 * WARPS as u32);
    let name = match (narrow, args.x.dtype(), args.d_out.dtype()) {
        (true, DType::BF16, DType::BF16) => "qk_norm_rope_backward_16_bf16_bf16",
        (true, DType::BF16, _) => "qk_norm_rope_backward_16_bf16_f32",
        (true, _, DType::BF16) => "qk_norm_rope_backward_16_f32_bf16",
        (true, _, _) => "qk_norm_rope_backward_16_f32_f32",
        (false, DType::BF16, DType::BF16) => "qk_norm_rope_backward_32_bf16_bf16",
        (false, DType::BF16, _) => "qk_norm_rope_backward_32_bf16_f32",
        (false, _, DType::BF16) => "qk_norm_rope_backward_32_f32_bf16",
        (false, _, _) => "qk_norm_rope_backward_32_f32_f32",
    };
    // SAFETY: as above; a warp writes one slice of the partial sums.
    unsafe { queue.launch(FILE, name, grid, parameters)? };
    add_slices(queue, partial, parts, dims.head_dim, address(args.d_weight))
}
