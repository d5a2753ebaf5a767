//! The CUDA backend: kernels of `kernels/cuda` compiled at run time, one launcher per operation here.
//!
//! Nothing of CUDA is needed to build; the driver and NVRTC are loaded when a GPU is opened. An index in a buffer that
//! points nowhere is noted by the kernel that finds it and returned by the next [`Backend::sync`] or
//! [`Backend::download`], since no operation waits for the device.

mod adamw;
mod attention;
mod block_select;
pub mod compile;
mod device;
mod elementwise;
mod embedding;
mod fault;
mod grouped_gemm;
mod grpo_loss;
mod launch;
mod linear;
mod log_prob;
mod memory;
mod moe_combine;
mod moe_permute;
mod msa_attention;
mod msa_score;
mod paged;
mod qk_norm_rope;
mod rms_norm;
mod router;
mod sample;
mod slices;
mod stream;
mod swigluoai;
mod tile_map;
mod transfer;

use std::sync::Arc;

use cudarc::driver::result::DriverError;

use crate::backend::{Backend, for_each_operation};
use crate::error::{Error, Result};
use crate::launch::Arch;
use crate::ops;
use crate::tensor::Tensor;

pub use memory::{CudaBuffer, MemoryReport};
pub use stream::CudaStream;

/// A GPU.
#[derive(Clone)]
pub struct CudaBackend {
    device: Arc<device::Device>,
}

impl CudaBackend {
    /// Opens the GPU `ordinal`; all memory that is free now may be used.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Library`], [`Error::UnsupportedArch`], or what the driver reports.
    pub fn open(ordinal: usize) -> Result<Self> {
        let device = Arc::new(device::Device::open(ordinal, None)?);
        Ok(CudaBackend { device })
    }

    /// Opens the GPU `ordinal`; at most `limit_bytes` of its memory may be used.
    ///
    /// # Errors
    /// As [`CudaBackend::open`].
    pub fn open_with_limit(ordinal: usize, limit_bytes: usize) -> Result<Self> {
        let device = Arc::new(device::Device::open(ordinal, Some(limit_bytes))?);
        Ok(CudaBackend { device })
    }

    /// Whether the GPU `ordinal` could be opened, without opening it.
    ///
    /// # Errors
    /// [`Error::NoDevice`] or [`Error::Library`].
    pub fn probe(ordinal: usize) -> Result<()> {
        device::probe(ordinal)?;
        compile::version().map(|_| ())
    }

    /// Name of the GPU.
    pub fn gpu(&self) -> &str {
        &self.device.name
    }

    /// Version of CUDA that the driver knows, e.g. `13.0`.
    pub fn driver(&self) -> String {
        let version = self.device.driver;
        format!("{}.{}", version / 1000, version % 1000 / 10)
    }

    /// Where the memory stands.
    pub fn memory(&self) -> MemoryReport {
        self.device.pool.report()
    }
}

/// Names what the driver refused.
fn failed(op: &'static str, what: String, error: DriverError) -> Error {
    let name = error
        .error_name()
        .map(|name| name.to_string_lossy().into_owned());
    let words = error
        .error_string()
        .map(|words| words.to_string_lossy().into_owned());
    let [name, words] = [name, words].map(|text| text.unwrap_or_else(|_| format!("{:?}", error.0)));
    Error::Device {
        op,
        what: format!("{what}: {name}, {words}"),
    }
}

/// The error of an operation that has no kernel here.
fn not_built(op: &'static str) -> Error {
    Error::NotBuilt {
        op,
        backend: "CUDA",
    }
}

macro_rules! implement {
    ($($(#[$doc:meta])* $name:ident: $args:ident in $module:ident,)*) => {
        impl Backend for CudaBackend {
            type Buffer = CudaBuffer;
            type Stream = CudaStream;

            fn name(&self) -> String {
                self.device.name.clone()
            }

            fn arch(&self) -> Arch {
                let (major, minor) = self.device.capability;
                Arch::Sm((10 * major + minor) as u32)
            }

            fn stream(&self) -> CudaStream {
                CudaStream::new(&self.device)
            }

            fn alloc(&self, bytes: usize) -> Result<CudaBuffer> {
                self.device.pool.alloc(bytes)
            }

            fn buffer_bytes(buffer: &CudaBuffer) -> usize {
                buffer.bytes()
            }

            fn buffer_id(buffer: &CudaBuffer) -> usize {
                buffer.address() as usize
            }

            fn upload(&self, stream: &CudaStream, target: &Tensor<Self>, bytes: &[u8]) -> Result<()> {
                transfer::upload(&mut stream.enqueue("upload")?, target, bytes)
            }

            fn download(
                &self,
                stream: &CudaStream,
                source: &Tensor<Self>,
                bytes: &mut [u8],
            ) -> Result<()> {
                transfer::download(&mut stream.enqueue("download")?, source, bytes)
            }

            fn sync(&self, stream: &CudaStream) -> Result<()> {
                stream.enqueue("sync")?.wait()
            }

            $(fn $name(&self, stream: &CudaStream, args: &ops::$args<'_, Self>) -> Result<()> {
                $module::$name(&mut stream.enqueue(stringify!($name))?, args)
            })*
        }
    };
}
for_each_operation!(implement);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_gets_a_clear_message() {
        let Err(refused) = CudaBackend::open(usize::MAX) else {
            panic!("no machine has that many GPUs");
        };
        let refused = refused.to_string();
        assert!(refused.starts_with("no CUDA device: ") && refused.ends_with("use --device cpu"));
        assert_eq!(
            CudaBackend::probe(usize::MAX).unwrap_err().to_string(),
            refused
        );
    }
}
