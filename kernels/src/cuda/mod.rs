//! The CUDA backend. It cannot be opened yet: the probe answers "no device".

use crate::backend::{Backend, for_each_operation};
use crate::error::{Error, Result};
use crate::launch::Arch;
use crate::ops;
use crate::tensor::Tensor;

/// A GPU. No value of this type exists until kernels are there to run on it.
#[derive(Clone, Copy, Debug)]
pub enum CudaBackend {}

impl CudaBackend {
    /// Opens the GPU `ordinal`.
    ///
    /// # Errors
    /// [`Error::NoDevice`].
    pub fn open(ordinal: usize) -> Result<Self> {
        let reason = format!("GPU {ordinal} was asked for and this build holds no CUDA kernels");
        Err(Error::NoDevice { reason })
    }
}

macro_rules! implement {
    ($($(#[$doc:meta])* $name:ident: $args:ident in $module:ident,)*) => {
        impl Backend for CudaBackend {
            type Buffer = std::convert::Infallible;
            type Stream = std::convert::Infallible;

            fn name(&self) -> String {
                match *self {}
            }

            fn arch(&self) -> Arch {
                match *self {}
            }

            fn stream(&self) -> Self::Stream {
                match *self {}
            }

            fn alloc(&self, _: usize) -> Result<Self::Buffer> {
                match *self {}
            }

            fn buffer_bytes(buffer: &Self::Buffer) -> usize {
                match *buffer {}
            }

            fn buffer_id(buffer: &Self::Buffer) -> usize {
                match *buffer {}
            }

            fn upload(&self, _: &Self::Stream, _: &Tensor<Self>, _: &[u8]) -> Result<()> {
                match *self {}
            }

            fn download(&self, _: &Self::Stream, _: &Tensor<Self>, _: &mut [u8]) -> Result<()> {
                match *self {}
            }

            fn sync(&self, _: &Self::Stream) -> Result<()> {
                match *self {}
            }

            $(fn $name(&self, _: &Self::Stream, _: &ops::$args<'_, Self>) -> Result<()> {
                match *self {}
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
        let refused = CudaBackend::open(0).unwrap_err().to_string();
        assert!(refused.starts_with("no CUDA device: ") && refused.ends_with("use --device cpu"));
    }
}
