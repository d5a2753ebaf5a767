//! Launches of kernels.

use std::ffi::c_void;

use cudarc::driver::{result, sys};
use m3_spec::dtype::DType;

use super::CudaBackend;
use super::stream::Enqueue;
use crate::error::{Error, Result};
use crate::tensor::{MAX_RANK, Tensor};

/// Dynamic shared memory that a kernel gets without asking, in bytes.
const SHARED_BYTES_DEFAULT: usize = 48 * 1024;

/// A value that a kernel takes as a parameter.
///
/// # Safety
/// The type has no padding and the layout of the kernel's parameter.
pub(super) unsafe trait Parameter: Copy {}

// SAFETY: plain numbers.
unsafe impl Parameter for u32 {}
// SAFETY: as above.
unsafe impl Parameter for i32 {}
// SAFETY: as above.
unsafe impl Parameter for u64 {}
// SAFETY: as above.
unsafe impl Parameter for i64 {}
// SAFETY: as above.
unsafe impl Parameter for f32 {}

/// A strided view as kernels take it; `struct View` of `common.cuh`. Axes are padded in front to the highest rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) data: u64,
    pub(super) extents: [i64; MAX_RANK],
    pub(super) strides: [i64; MAX_RANK],
    pub(super) dtype: i64,
}

// SAFETY: eight-byte fields alone, mirrored in `common.cuh`.
unsafe impl Parameter for View {}

impl View {
    pub(super) fn of(tensor: &Tensor<CudaBackend>) -> Self {
        let (mut extents, mut strides) = ([1; MAX_RANK], [0; MAX_RANK]);
        let first = MAX_RANK - tensor.shape().len();
        for axis in 0..tensor.shape().len() {
            extents[first + axis] = tensor.shape()[axis] as i64;
            strides[first + axis] = tensor.strides()[axis] as i64;
        }
        View {
            data: address(tensor),
            extents,
            strides,
            dtype: code(tensor.dtype()),
        }
    }
}

/// First element of a view, as the device sees it.
pub(super) fn address(tensor: &Tensor<CudaBackend>) -> u64 {
    tensor.buffer().address() + (tensor.offset() * tensor.dtype().size()) as u64
}

/// Number of a storage dtype in kernels: 0 for F32, 1 for BF16; others are moved as bits and have no number.
pub(super) fn code(dtype: DType) -> i64 {
    match dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        _ => -1,
    }
}

/// The name of a kernel for a storage dtype: `kernel!(x.dtype(), "rms_norm")` is `rms_norm_f32` or `rms_norm_bf16`.
macro_rules! kernel {
    ($dtype:expr, $stem:literal) => {
        match $dtype {
            m3_spec::dtype::DType::BF16 => concat!($stem, "_bf16"),
            _ => concat!($stem, "_f32"),
        }
    };
}
pub(super) use kernel;

/// Shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// Blocks along x, y and z.
    pub(super) blocks: [usize; 3],
    /// Threads of a block.
    pub(super) threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(super) shared_bytes: usize,
}

impl Grid {
    /// `blocks` blocks of `threads` threads.
    pub(super) fn line(blocks: usize, threads: u32) -> Self {
        Grid {
            blocks: [blocks, 1, 1],
            threads,
            shared_bytes: 0,
        }
    }
}

/// Parameters of one launch, in the kernel's order.
#[derive(Default)]
pub(super) struct Parameters {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Parameters {
    /// One more parameter.
    pub(super) fn with<P: Parameter>(mut self, value: P) -> Self {
        let start = self.words.len();
        self.starts.push(start);
        self.words.resize(start + size_of::<P>().div_ceil(8), 0);
        // SAFETY: the words reserved cover the value, and `u64` accepts any bits.
        unsafe {
            self.words[start..]
                .as_mut_ptr()
                .cast::<P>()
                .write_unaligned(value)
        };
        self
    }

    /// The address of a view's first element.
    pub(super) fn tensor(self, tensor: &Tensor<CudaBackend>) -> Self {
        self.with(address(tensor))
    }

    /// The address of a matrix or of a stack of rows, and the distance of its rows, in elements.
    pub(super) fn rows(self, tensor: &Tensor<CudaBackend>) -> Self {
        let row = tensor.strides()[tensor.shape().len().saturating_sub(2)];
        self.with(address(tensor)).with(row as i64)
    }
}

impl Enqueue<'_> {
    /// Enqueues a kernel. A grid of no blocks is not launched: the driver would refuse it, and nothing is to be done.
    ///
    /// # Safety
    /// The parameters are those of the kernel, and every address it reads or writes through them lies in a buffer that
    /// stays alive: the operands' handles are the caller's, and the pool gives memory away only after a wait.
    pub(super) unsafe fn launch(
        &self,
        file: &'static str,
        name: &'static str,
        grid: Grid,
        mut parameters: Parameters,
    ) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let function = self.device.function(file, name)?;
        let what = || format!("launch of {name} with {grid:?}");
        let blocks = self.checked(grid)?;
        if grid.shared_bytes > SHARED_BYTES_DEFAULT {
            let attribute =
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let raised = function.set_attribute(attribute, grid.shared_bytes as i32);
            raised.map_err(|error| self.failed(what(), error))?;
        }
        let base = parameters.words.as_mut_ptr();
        let mut pointers: Vec<*mut c_void> = parameters
            .starts
            .iter()
            // SAFETY: every start lies within the words.
            .map(|&start| unsafe { base.add(start) }.cast())
            .collect();
        // SAFETY: the caller's promise; the function's module lives as long as the device.
        let launched = unsafe {
            result::launch_kernel(
                function.cu_function(),
                blocks,
                (grid.threads, 1, 1),
                grid.shared_bytes as u32,
                self.stream,
                &mut pointers,
            )
        };
        launched.map_err(|error| self.failed(what(), error))
    }

    fn checked(&self, grid: Grid) -> Result<(u32, u32, u32)> {
        let [x, y, z] = grid.blocks;
        let fits = x <= i32::MAX as usize && y <= u16::MAX as usize && z <= u16::MAX as usize;
        if !fits {
            return Err(Error::Argument {
                op: self.op,
                what: format!("{:?} blocks are more than a launch has", grid.blocks),
            });
        }
        Ok((x as u32, y as u32, z as u32))
    }
}
