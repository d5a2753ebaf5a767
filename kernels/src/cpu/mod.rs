//! The CPU backend: tiled, threaded, with the rounding points of the GPU kernels. A subject of the gates, not an oracle.
//!
//! Operations run at once, one at a time, on the backend's own thread pool; a stream is only an order. Every reduction
//! has a fixed order, so the number of threads never shows in the bits.

mod access;
mod adamw;
mod attention;
mod block_select;
mod buffer;
mod elementwise;
mod embedding;
#[cfg(debug_assertions)]
pub mod fault;
pub mod gemm;
mod grouped_gemm;
mod grpo_loss;
mod linear;
mod log_prob;
pub mod math;
mod moe_combine;
mod moe_permute;
mod msa_attention;
mod msa_score;
mod paged;
mod qk_norm_rope;
mod rms_norm;
mod router;
mod rows;
mod sample;
pub mod simd;
mod strided;
mod swigluoai;
mod tile_map;
mod transfer;

use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{Backend, for_each_operation};
use crate::error::{Error, Result};
use crate::launch::Arch;
use crate::ops;
use crate::tensor::Tensor;

pub use buffer::CpuBuffer;

/// The CPU as a device.
#[derive(Clone)]
pub struct CpuBackend {
    pool: Arc<rayon::ThreadPool>,
    /// Held by the one operation that runs on the pool. A worker that waits for tasks of its operation would otherwise
    /// take up the next one, and wait for itself where both use one buffer.
    turn: Arc<Mutex<()>>,
    /// Takes every call instead of the operation.
    #[cfg(debug_assertions)]
    fault: Option<fault::Fault>,
}

/// Operations run when they are enqueued, so a stream holds nothing.
#[derive(Debug, Default)]
pub struct CpuStream;

impl Default for CpuBackend {
    /// One worker per core.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        CpuBackend::new(threads).expect("the operating system starts a thread per core")
    }
}

/// More workers than any machine has cores for; starting them would take longer than the work.
pub const THREADS_MAX: usize = 1024;

impl CpuBackend {
    /// A backend with `threads` worker threads.
    ///
    /// # Errors
    /// [`Error::Argument`] for zero threads or when the operating system refuses a thread.
    pub fn new(threads: usize) -> Result<Self> {
        let refused = |what: String| Error::Argument { op: "cpu", what };
        if threads == 0 || threads > THREADS_MAX {
            let what = format!("threads must be from 1 to {THREADS_MAX}, got {threads}");
            return Err(refused(what));
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        Ok(CpuBackend {
            pool: Arc::new(pool.map_err(|error| refused(error.to_string()))?),
            turn: Arc::default(),
            #[cfg(debug_assertions)]
            fault: None,
        })
    }

    /// Number of worker threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

macro_rules! implement {
    ($($(#[$doc:meta])* $name:ident: $args:ident in $module:ident,)*) => {
        impl Backend for CpuBackend {
            type Buffer = CpuBuffer;
            type Stream = CpuStream;

            fn name(&self) -> String {
                format!("cpu, {} threads", self.threads())
            }

            fn arch(&self) -> Arch {
                Arch::Cpu
            }

            fn stream(&self) -> CpuStream {
                CpuStream
            }

            fn alloc(&self, bytes: usize) -> Result<CpuBuffer> {
                CpuBuffer::zeroed(bytes)
            }

            fn buffer_bytes(buffer: &CpuBuffer) -> usize {
                buffer.bytes()
            }

            fn buffer_id(buffer: &CpuBuffer) -> usize {
                buffer.start().as_ptr() as usize
            }

            fn upload(&self, _: &CpuStream, target: &Tensor<Self>, bytes: &[u8]) -> Result<()> {
                transfer::upload(target, bytes)
            }

            fn download(&self, _: &CpuStream, source: &Tensor<Self>, bytes: &mut [u8]) -> Result<()> {
                transfer::download(source, bytes)
            }

            fn sync(&self, _: &CpuStream) -> Result<()> {
                Ok(())
            }

            $(fn $name(&self, _: &CpuStream, args: &ops::$args<'_, Self>) -> Result<()> {
                #[cfg(debug_assertions)]
                if let Some(fault) = &self.fault {
                    return fault(&self.sound(), fault::Call::$args(args));
                }
                let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
                self.pool.install(|| $module::$name(self, args))
            })*
        }
    };
}
for_each_operation!(implement);
