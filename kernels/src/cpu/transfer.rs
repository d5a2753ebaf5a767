//! Copies between the host and tensors.

use super::CpuBackend;
use super::access::Access;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Scatters row-major bytes into a view.
pub(super) fn upload(target: &Tensor<CpuBackend>, bytes: &[u8]) -> Result<()> {
    sized("upload", target, bytes.len())?;
    let _held = Access::lock(&[target]);
    let mut read = 0;
    for_each_run(target, |run, length| {
        // SAFETY: the run lies within the buffer, whose lock is held; `sized` has counted the bytes.
        unsafe { run.copy_from_nonoverlapping(bytes[read..read + length].as_ptr(), length) };
        read += length;
    });
    Ok(())
}

/// Gathers a view into row-major bytes.
pub(super) fn download(source: &Tensor<CpuBackend>, bytes: &mut [u8]) -> Result<()> {
    sized("download", source, bytes.len())?;
    let _held = Access::lock(&[source]);
    let mut written = 0;
    for_each_run(source, |run, length| {
        let part = &mut bytes[written..written + length];
        // SAFETY: as in `upload`.
        unsafe { run.copy_to_nonoverlapping(part.as_mut_ptr(), length) };
        written += length;
    });
    Ok(())
}

fn sized(op: &'static str, tensor: &Tensor<CpuBackend>, bytes: usize) -> Result<()> {
    let needed = tensor.elements() * tensor.dtype().size();
    if bytes == needed {
        return Ok(());
    }
    Err(Error::Argument {
        op,
        what: format!("{tensor:?} holds {needed} bytes, got {bytes}"),
    })
}

/// Calls `visit` with the start and the length, in bytes, of every gapless run of a view, in row-major order.
fn for_each_run(tensor: &Tensor<CpuBackend>, mut visit: impl FnMut(*mut u8, usize)) {
    let (shape, strides, size) = (tensor.shape(), tensor.strides(), tensor.dtype().size());
    if tensor.elements() == 0 {
        return;
    }
    // The innermost axes that lie without gaps make one run.
    let mut run = 1;
    let mut outer = shape.len();
    while outer > 0 && (shape[outer - 1] == 1 || strides[outer - 1] == run) {
        outer -= 1;
        run *= shape[outer];
    }
    let runs: usize = shape[..outer].iter().product();
    for number in 0..runs {
        let (mut rest, mut offset) = (number, tensor.offset());
        for axis in (0..outer).rev() {
            offset += rest % shape[axis] * strides[axis];
            rest /= shape[axis];
        }
        // SAFETY: `Tensor` keeps every element of a view within its buffer.
        visit(
            unsafe { tensor.buffer().start().as_ptr().add(offset * size) },
            run * size,
        );
    }
}
