//! Copies between the host and tensors.

use cudarc::driver::result;

use super::CudaBackend;
use super::elementwise::{gather, scatter};
use super::launch::address;
use super::stream::Enqueue;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Scatters row-major bytes into a view.
pub(super) fn upload(
    queue: &mut Enqueue<'_>,
    target: &Tensor<CudaBackend>,
    bytes: &[u8],
) -> Result<()> {
    sized(queue.op, target, bytes.len())?;
    if bytes.is_empty() {
        return Ok(());
    }
    let packed = target.is_contiguous();
    let at = if packed {
        address(target)
    } else {
        queue.scratch([bytes.len()])?[0]
    };
    let failed = |error| queue.failed(format!("{target:?} from the host"), error);
    // SAFETY: the destination holds as many bytes; the host's are consumed before the wait below returns.
    unsafe { result::memcpy_htod_async(at, bytes, queue.stream) }.map_err(failed)?;
    if !packed {
        scatter(queue, at, target)?;
    }
    // SAFETY: the stream is alive.
    unsafe { result::stream::synchronize(queue.stream) }.map_err(failed)
}

/// Gathers a view into row-major bytes.
pub(super) fn download(
    queue: &mut Enqueue<'_>,
    source: &Tensor<CudaBackend>,
    bytes: &mut [u8],
) -> Result<()> {
    sized(queue.op, source, bytes.len())?;
    if bytes.is_empty() {
        return queue.wait();
    }
    let at = if source.is_contiguous() {
        address(source)
    } else {
        let [at] = queue.scratch([bytes.len()])?;
        gather(queue, source, at)?;
        at
    };
    let failed = |error| queue.failed(format!("{source:?} to the host"), error);
    // SAFETY: the source holds as many bytes, and the wait below outlasts the copy.
    unsafe { result::memcpy_dtoh_async(bytes, at, queue.stream) }.map_err(failed)?;
    queue.wait()
}

fn sized(op: &'static str, tensor: &Tensor<CudaBackend>, bytes: usize) -> Result<()> {
    let needed = tensor.elements() * tensor.dtype().size();
    if bytes == needed {
        return Ok(());
    }
    Err(Error::Argument {
        op,
        what: format!("{tensor:?} holds {needed} bytes, got {bytes}"),
    })
}
