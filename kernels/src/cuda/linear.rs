//! Matrix products: one, and the core that the products of experts and of the language-model head share.

use m3_spec::dtype::DType;

use super::CudaBackend;
use super::launch::{Grid, Parameter, Parameters, address, code};
use super::stream::Enqueue;
use crate::error::{Error, Result};
use crate::ops;
use crate::tensor::Tensor;

const FILE: &str = "gemm.cu";

/// Rows and columns of a tile of the bf16 core; `SIDE` of the kernels.
const SIDE: usize = 128;

/// Shared memory of a block of the bf16 core, in bytes: three stages of two operands of 128 × 64.
const SHARED_BYTES: usize = 3 * 2 * SIDE * 64 * 2;

/// Rows and columns of a tile of the fp32 core; `SIDE_FMA` of the kernels.
const SIDE_FMA: usize = 64;

/// Threads of a block of either core.
const THREADS: u32 = 256;

/// A strided matrix on the device; `struct Matrix` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    data: u64,
    strides: [i64; 2],
    dtype: i64,
}

impl Matrix {
    /// The last two axes of a tensor, at its first element.
    pub(super) fn of(tensor: &Tensor<CudaBackend>) -> Self {
        let axes = tensor.strides().len();
        Matrix {
            data: address(tensor),
            strides: [
                tensor.strides()[axes - 2] as i64,
                tensor.strides()[axes - 1] as i64,
            ],
            dtype: code(tensor.dtype()),
        }
    }

    /// A row-major matrix with rows of `width` elements.
    pub(super) fn row_major(data: u64, width: usize, dtype: DType) -> Self {
        Matrix {
            data,
            strides: [width as i64, 1],
            dtype: code(dtype),
        }
    }

    /// Rows and columns exchanged.
    pub(super) fn transposed(mut self) -> Self {
        self.strides.swap(0, 1);
        self
    }

    /// The matrix that begins at row `row`.
    pub(super) fn at_row(mut self, row: usize) -> Self {
        let size = if self.dtype == code(DType::F32) { 4 } else { 2 };
        self.data += row as u64 * self.strides[0] as u64 * size;
        self
    }

    fn is_bf16(&self) -> bool {
        self.dtype == code(DType::BF16)
    }
}

/// How the experts cut a product; the kernels' modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// One product.
    Dense,
    /// Rows of `a` and `c` belong to experts, each with a `b` of its own.
    Rows,
    /// k belongs to experts, each with a `c` of its own.
    Weights,
}

/// A product and its operands; see the kernels' `struct Product`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) a: Matrix,
    pub(super) b: Matrix,
    pub(super) c: Matrix,
    pub(super) extents: [usize; 3],
    pub(super) accumulate: bool,
}

/// The experts of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    pub(super) cut: Cut,
    pub(super) count: usize,
    pub(super) offsets: u64,
    pub(super) b_stride: usize,
    pub(super) c_stride: usize,
}

impl Experts {
    /// None: one product.
    pub(super) const NONE: Experts = Experts {
        cut: Cut::Dense,
        count: 0,
        offsets: 0,
        b_stride: 0,
        c_stride: 0,
    };
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Passed {
    a: Matrix,
    b: Matrix,
    c: Matrix,
    b_expert: i64,
    c_expert: i64,
    offsets: u64,
    fault: u64,
    m: i32,
    n: i32,
    k: i32,
    experts: i32,
    mode: i32,
    accumulate: i32,
    site: u32,
    unused: u32,
}

// SAFETY: eight-byte fields, then eight of four bytes: no padding. Mirrored in `gemm.cu`.
unsafe impl Parameter for Passed {}

pub(super) fn gemm(queue: &mut Enqueue<'_>, args: &ops::Gemm<'_, CudaBackend>) -> Result<()> {
    let dims = args.dims()?;
    let product = Product {
        a: Matrix::of(args.a),
        b: Matrix::of(args.b),
        c: Matrix::of(args.c),
        extents: [dims.m, dims.n, dims.k],
        accumulate: args.accumulate,
    };
    enqueue(queue, &product, &Experts::NONE)
}

/// Enqueues a product. The core and its tile are a function of the dtypes alone, never of the number of rows.
pub(super) fn enqueue(queue: &Enqueue<'_>, product: &Product, experts: &Experts) -> Result<()> {
    let [m, n, k] = product.extents;
    if [m, n, k]
        .into_iter()
        .any(|extent| i32::try_from(extent).is_err())
    {
        return Err(Error::Argument {
            op: queue.op,
            what: format!("extents [{m}, {n}, {k}] reach past 32 bits"),
        });
    }
    let fits = product.a.is_bf16() && product.b.is_bf16();
    let (name, side, shared_bytes) = if fits {
        (mma_name(product), SIDE, SHARED_BYTES)
    } else {
        ("gemm_fma", SIDE_FMA, 0)
    };
    let (row_tiles, column_tiles) = (m.div_ceil(side), n.div_ceil(side));
    let blocks = match experts.cut {
        Cut::Dense => [row_tiles * column_tiles, 1, 1],
        // Every expert may end in a tile that it does not fill, and so may the rows of none.
        Cut::Rows if m == 0 => [0; 3],
        Cut::Rows => [(row_tiles + experts.count + 1) * column_tiles, 1, 1],
        Cut::Weights => [row_tiles * column_tiles, 1, experts.count],
    };
    let passed = Passed {
        a: product.a,
        b: product.b,
        c: product.c,
        b_expert: experts.b_stride as i64,
        c_expert: experts.c_stride as i64,
        offsets: experts.offsets,
        fault: queue.fault(),
        m: m as i32,
        n: n as i32,
        k: k as i32,
        experts: experts.count as i32,
        mode: experts.cut as i32,
        accumulate: i32::from(product.accumulate),
        site: queue.site("expert_offsets"),
        unused: 0,
    };
    let grid = Grid {
        blocks,
        threads: THREADS,
        shared_bytes,
    };
    // SAFETY: the kernel's parameter; a block reads and writes within the extents, and offsets are checked there.
    unsafe { queue.launch(FILE, name, grid, Parameters::default().with(passed)) }
}

/// The kernel for the axes along which the operands lie dense; one that is dense along neither is gathered along k.
fn mma_name(product: &Product) -> &'static str {
    let [_, _, k] = product.extents;
    let along_k = |k_stride: i64, side_stride: i64| k_stride == 1 || side_stride != 1 || k == 1;
    let a_along_k = along_k(product.a.strides[1], product.a.strides[0]);
    let b_along_k = along_k(product.b.strides[0], product.b.strides[1]);
    match (a_along_k, b_along_k) {
        (true, true) => "gemm_mma_kk",
        (true, false) => "gemm_mma_kn",
        (false, true) => "gemm_mma_mk",
        (false, false) => "gemm_mma_mn",
    }
}
