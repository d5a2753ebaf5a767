//! What can go wrong in an operation, in words a user can act on.

use m3_spec::dtype::DType;

use crate::tensor::Shape;

/// Result of every backend call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation was refused or failed. Nothing has been written when a check refused it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// An operand has another shape than the operation needs.
    #[error("{op}: {tensor} must have shape {expected}, got {got}")]
    Shape {
        /// Operation.
        op: &'static str,
        /// Operand, by its field name.
        tensor: &'static str,
        /// What the other operands require.
        expected: String,
        /// What was passed.
        got: Shape,
    },
    /// An operand has a dtype the operation does not take.
    #[error("{op}: {tensor} must be {expected}, got {got:?}")]
    DType {
        /// Operation.
        op: &'static str,
        /// Operand, by its field name.
        tensor: &'static str,
        /// Accepted dtypes.
        expected: &'static str,
        /// What was passed.
        got: DType,
    },
    /// A stride the operation cannot walk.
    #[error("{op}: {tensor} must be {expected}, got strides {got}; copy it first")]
    Layout {
        /// Operation.
        op: &'static str,
        /// Operand, by its field name.
        tensor: &'static str,
        /// Layout that is needed.
        expected: &'static str,
        /// Strides that were passed, in elements.
        got: Shape,
    },
    /// An output shares memory with another operand.
    #[error("{op}: {output} overlaps {other}; give it memory of its own")]
    Overlap {
        /// Operation.
        op: &'static str,
        /// The output.
        output: &'static str,
        /// The operand it overlaps.
        other: &'static str,
    },
    /// A plain argument outside its range.
    #[error("{op}: {what}")]
    Argument {
        /// Operation.
        op: &'static str,
        /// What is wrong and what is accepted.
        what: String,
    },
    /// An index held in a buffer points nowhere.
    #[error("{op}: {tensor}[{index}] = {value} is outside {lower}..{upper}")]
    Index {
        /// Operation.
        op: &'static str,
        /// Buffer that holds the index.
        tensor: &'static str,
        /// Flat position in that buffer.
        index: usize,
        /// Value found there.
        value: i64,
        /// Least accepted value.
        lower: i64,
        /// First value above the accepted ones.
        upper: i64,
    },
    /// A buffer could not be allocated.
    #[error("out of memory on {device}: asked for {bytes} bytes")]
    OutOfMemory {
        /// Device.
        device: String,
        /// Size of the request.
        bytes: usize,
    },
    /// The arena's limit is reached.
    #[error("arena is full: {held} of {limit} bytes held, {asked} more asked for")]
    ArenaFull {
        /// Most bytes the arena may hold.
        limit: usize,
        /// Bytes held.
        held: usize,
        /// Size of the next chunk.
        asked: usize,
    },
    /// The device is not there.
    #[error("no CUDA device: {reason}; use --device cpu")]
    NoDevice {
        /// What the probe found.
        reason: String,
    },
    /// A library of CUDA is not on the loader's path.
    #[error(
        "cannot load {library}, tried {tried}; put its folder on LD_LIBRARY_PATH or use --device cpu"
    )]
    Library {
        /// What is missing.
        library: &'static str,
        /// File names that were tried.
        tried: String,
    },
    /// The GPU is older than the kernels allow.
    #[error(
        "{device} has compute capability {major}.{minor}, the kernels need 8.0 or above; use --device cpu"
    )]
    UnsupportedArch {
        /// Name of the GPU.
        device: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// A kernel's source did not compile.
    #[error("{source_file} does not compile for {arch}:\n{log}")]
    Compile {
        /// File of the kernel.
        source_file: &'static str,
        /// Target.
        arch: String,
        /// What the compiler printed.
        log: String,
    },
    /// The device reported an error.
    #[error("{op}: {what}")]
    Device {
        /// Operation.
        op: &'static str,
        /// Launch or call, with shapes, and the device's own words.
        what: String,
    },
    /// The backend has no kernel for an operation.
    #[error("{op} is not built for {backend} yet; use --device cpu")]
    NotBuilt {
        /// Operation.
        op: &'static str,
        /// Backend.
        backend: &'static str,
    },
}
