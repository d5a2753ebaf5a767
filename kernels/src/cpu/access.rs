//! Typed access to the operands of a running operation.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::MutexGuard;

use half::bf16;

use super::{CpuBackend, math};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::tensor::{Element, Shape, Tensor};

type CpuTensor = Tensor<CpuBackend>;

/// An element type in which activations and weights are stored.
pub trait Storage: Element {
    /// Exact.
    fn to_f32(self) -> f32;
    /// One rounding to nearest even.
    fn from_f32(value: f32) -> Self;
}

impl Storage for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> f32 {
        value
    }
}

impl Storage for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        math::from_bf16(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> bf16 {
        math::to_bf16(value)
    }
}

/// Runs `$body` with `$type` bound to the storage type of `$dtype`; the operands' check has refused every other dtype.
macro_rules! with_storage {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            m3_spec::dtype::DType::BF16 => {
                type $type = half::bf16;
                $body
            }
            _ => {
                type $type = f32;
                $body
            }
        }
    };
}
pub(super) use with_storage;

/// Holds the locks of every buffer an operation touches, and hands out typed views that live as long.
pub(super) struct Access<'a> {
    _locks: Vec<MutexGuard<'a, ()>>,
}

impl<'a> Access<'a> {
    /// Locks the operands' buffers, each once and in the order of their addresses, so that two operations never wait
    /// for each other.
    ///
    /// The operands' check has shown that no output overlaps another operand; that and the locks make the views sound.
    pub(super) fn lock(operands: &[&'a CpuTensor]) -> Self {
        let mut buffers: Vec<_> = operands.iter().map(|tensor| tensor.buffer()).collect();
        buffers.sort_by_key(|buffer| CpuBackend::buffer_id(buffer));
        buffers.dedup_by_key(|buffer| CpuBackend::buffer_id(buffer));
        let held = |buffer: &&'a super::CpuBuffer| {
            buffer
                .lock()
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
        };
        Access {
            _locks: buffers.iter().map(held).collect(),
        }
    }

    /// A view to read from.
    pub(super) fn read<T: Element>(&self, tensor: &CpuTensor) -> View<'_, T> {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        View {
            start: first(tensor),
            shape,
            strides,
            held: PhantomData,
        }
    }

    /// A view to write to.
    pub(super) fn write<T: Element>(&self, tensor: &CpuTensor) -> ViewMut<'_, T> {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        ViewMut {
            start: first(tensor),
            shape,
            strides,
            held: PhantomData,
        }
    }
}

fn first<T: Element>(tensor: &CpuTensor) -> *mut T {
    assert_eq!(
        T::DTYPE,
        tensor.dtype(),
        "an operation reads its operand under another dtype"
    );
    // SAFETY: `Tensor` keeps offset and extents within the buffer.
    unsafe {
        tensor
            .buffer()
            .start()
            .cast::<T>()
            .as_ptr()
            .add(tensor.offset())
    }
}

/// A strided view that is read.
#[derive(Clone, Copy)]
pub(super) struct View<'a, T> {
    start: *const T,
    shape: Shape,
    strides: Shape,
    held: PhantomData<&'a T>,
}

// SAFETY: a view only reads; the operation holds the buffer's lock and writes none of these elements.
unsafe impl<T: Element> Send for View<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for View<'_, T> {}

impl<'a, T: Element> View<'a, T> {
    /// Extents.
    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Strides, in elements.
    pub(super) fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// First element of the view.
    pub(super) fn as_ptr(&self) -> *const T {
        self.start
    }

    /// One element.
    #[inline]
    pub(super) fn at<const N: usize>(&self, index: [usize; N]) -> T {
        debug_assert_eq!(N, self.shape.len());
        // SAFETY: `position` has checked the index against the shape.
        unsafe { *self.start.add(position(&self.shape, &self.strides, &index)) }
    }

    /// The innermost row at an index of the outer axes; the operand's check has shown that rows are dense.
    #[inline]
    pub(super) fn row<const N: usize>(&self, index: [usize; N]) -> &'a [T] {
        debug_assert!(N + 1 == self.shape.len() && (self.strides[N] == 1 || self.shape[N] <= 1));
        // SAFETY: `position` has checked the index; a row of a dense last axis lies within the view.
        unsafe {
            let start = self.start.add(position(&self.shape, &self.strides, &index));
            std::slice::from_raw_parts(start, self.shape[N])
        }
    }

    /// All elements of a row-major view.
    pub(super) fn as_slice(&self) -> &'a [T] {
        debug_assert!(is_contiguous(&self.shape, &self.strides));
        // SAFETY: a row-major view has its elements in one range.
        unsafe { std::slice::from_raw_parts(self.start, self.shape.elements()) }
    }
}

/// A strided view that is written. Tasks write disjoint rows of it in parallel.
#[derive(Clone, Copy)]
pub(super) struct ViewMut<'a, T> {
    start: *mut T,
    shape: Shape,
    strides: Shape,
    held: PhantomData<&'a mut [T]>,
}

// SAFETY: the operation holds the buffer's lock; its tasks write disjoint rows, as `row_mut` demands.
unsafe impl<T: Element> Send for ViewMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for ViewMut<'_, T> {}

impl<'a, T: Element> ViewMut<'a, T> {
    /// Extents.
    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Strides, in elements.
    pub(super) fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// First element of the view.
    pub(super) fn as_mut_ptr(&self) -> *mut T {
        self.start
    }

    /// Sets one element.
    ///
    /// # Safety
    /// No other task may touch this element meanwhile.
    #[inline]
    pub(super) unsafe fn set<const N: usize>(&self, index: [usize; N], value: T) {
        debug_assert_eq!(N, self.shape.len());
        // SAFETY: `position` has checked the index against the shape; exclusive by the caller's promise.
        unsafe { *self.start.add(position(&self.shape, &self.strides, &index)) = value }
    }

    /// The innermost row at an index of the outer axes; the operand's check has shown that rows are dense.
    ///
    /// # Safety
    /// No other task may touch this row while the slice lives.
    #[inline]
    pub(super) unsafe fn row_mut<const N: usize>(&self, index: [usize; N]) -> &'a mut [T] {
        debug_assert!(N + 1 == self.shape.len() && (self.strides[N] == 1 || self.shape[N] <= 1));
        // SAFETY: in range as in `View::row`; exclusive by the caller's promise.
        unsafe {
            let start = self.start.add(position(&self.shape, &self.strides, &index));
            std::slice::from_raw_parts_mut(start, self.shape[N])
        }
    }

    /// All elements of a row-major view.
    ///
    /// # Safety
    /// No other slice of this view may be alive.
    pub(super) unsafe fn as_mut_slice(&self) -> &'a mut [T] {
        debug_assert!(is_contiguous(&self.shape, &self.strides));
        // SAFETY: a row-major view has its elements in one range; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.shape.elements()) }
    }
}

/// Offset of an index, computed in 64 bits.
#[inline]
fn position(shape: &Shape, strides: &Shape, index: &[usize]) -> usize {
    let mut position = 0;
    for (axis, &i) in index.iter().enumerate() {
        assert!(i < shape[axis], "index {index:?} outside {shape}");
        position += i * strides[axis];
    }
    position
}

fn is_contiguous(shape: &Shape, strides: &Shape) -> bool {
    shape.elements() == 0
        || shape
            .iter()
            .zip(shape.contiguous_strides().iter())
            .zip(strides.iter())
            .all(|((&extent, &dense), &stride)| extent == 1 || dense == stride)
}

/// Token ranges of the sequences of a pack; unused entries give empty ranges.
///
/// # Errors
/// [`Error::Index`] when `cu_seqlens` does not start at 0, decreases or leaves the pack.
pub(super) fn sequences(
    op: &'static str,
    cu_seqlens: &[i32],
    tokens: usize,
) -> Result<Vec<Range<usize>>> {
    segments(op, "cu_seqlens", cu_seqlens, tokens)
}

/// Ranges of rows between offsets that start at 0, never decrease and stay within `rows`.
///
/// # Errors
/// [`Error::Index`] otherwise.
pub(super) fn segments(
    op: &'static str,
    tensor: &'static str,
    offsets: &[i32],
    rows: usize,
) -> Result<Vec<Range<usize>>> {
    let mut lower = 0;
    for (index, &value) in offsets.iter().enumerate() {
        let value = i64::from(value);
        let upper = if index == 0 { 1 } else { rows as i64 + 1 };
        if value < lower || value >= upper {
            return Err(Error::Index {
                op,
                tensor,
                index,
                value,
                lower,
                upper,
            });
        }
        lower = value;
    }
    Ok(offsets
        .windows(2)
        .map(|pair| pair[0] as usize..pair[1] as usize)
        .collect())
}

/// Refuses an index outside `0..upper`.
///
/// # Errors
/// [`Error::Index`] with the first one.
pub(super) fn indices(
    op: &'static str,
    tensor: &'static str,
    values: &[i32],
    upper: usize,
) -> Result<()> {
    let upper = upper as i64;
    let outside = |&value: &i32| value < 0 || i64::from(value) >= upper;
    match values.iter().position(outside) {
        None => Ok(()),
        Some(index) => Err(Error::Index {
            op,
            tensor,
            index,
            value: i64::from(values[index]),
            lower: 0,
            upper,
        }),
    }
}
