//! Matrix products of strided operands.

use super::CpuBackend;
use super::access::{Access, View, ViewMut, with_storage};
use super::gemm::{self, Matrix, MatrixMut};
use crate::error::Result;
use crate::ops;
use crate::tensor::Element;

pub(super) fn gemm(_: &CpuBackend, args: &ops::Gemm<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    let held = Access::lock(&[args.a, args.b, args.c]);
    with_storage!(args.a.dtype(), A => with_storage!(args.b.dtype(), B => {
        with_storage!(args.c.dtype(), C => {
            let (a, b) = (held.read::<A>(args.a), held.read::<B>(args.b));
            let c = held.write::<C>(args.c);
            // SAFETY: the only access to C.
            gemm::gemm(matrix(&a), matrix(&b), unsafe { matrix_mut(&c) }, args.accumulate);
        })
    }));
    Ok(())
}

/// A view of two axes.
pub(super) fn matrix<'a, T: Element>(view: &View<'a, T>) -> Matrix<'a, T> {
    let (shape, strides) = (view.shape(), view.strides());
    // SAFETY: a view keeps its elements within its buffer, and the operation holds the buffer's lock.
    unsafe {
        Matrix::from_raw(
            view.as_ptr(),
            [shape[0], shape[1]],
            [strides[0], strides[1]],
        )
    }
}

/// A view of two axes, to write.
///
/// # Safety
/// Nothing else touches an element of the view while the matrix lives.
pub(super) unsafe fn matrix_mut<'a, T: Element>(view: &ViewMut<'a, T>) -> MatrixMut<'a, T> {
    let (shape, strides) = (view.shape(), view.strides());
    // SAFETY: in range as in `matrix`; a tensor's elements have places of their own; exclusive by the caller's promise.
    unsafe {
        MatrixMut::from_raw(
            view.as_mut_ptr(),
            [shape[0], shape[1]],
            [strides[0], strides[1]],
        )
    }
}
