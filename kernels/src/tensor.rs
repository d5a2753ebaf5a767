//! Tensors: a view {buffer, dtype, shape, strides, offset} on device memory, and the arena that hands them out.

use std::fmt;
use std::ops::{Deref, Range};

use m3_spec::dtype::DType;

use crate::backend::Backend;
use crate::error::{Error, Result};

/// Highest rank of a tensor.
pub const MAX_RANK: usize = 4;

/// Alignment of every tensor an [`Arena`] hands out, in bytes: a cache line here, a TMA-friendly address on a GPU.
pub const ALIGNMENT: usize = 256;

/// Up to four extents (or strides, in elements), held inline.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    extents: [usize; MAX_RANK],
    rank: usize,
}

impl Shape {
    /// Product of the extents; 1 for rank 0.
    pub fn elements(&self) -> usize {
        self.iter().product()
    }

    /// Strides of a row-major tensor of this shape.
    pub fn contiguous_strides(&self) -> Shape {
        let mut strides = *self;
        let mut step = 1;
        for axis in (0..self.rank).rev() {
            strides.extents[axis] = step;
            step *= self.extents[axis];
        }
        strides
    }

    fn with(mut self, axis: usize, extent: usize) -> Shape {
        self.extents[axis] = extent;
        self
    }

    fn swapped(mut self, a: usize, b: usize) -> Shape {
        self.extents.swap(a, b);
        self
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.extents[..self.rank]
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(extents: [usize; N]) -> Shape {
        const { assert!(N <= MAX_RANK) };
        let mut shape = Shape {
            extents: [0; MAX_RANK],
            rank: N,
        };
        shape.extents[..N].copy_from_slice(&extents);
        shape
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &**self)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A strided view of device memory. Cloning shares the memory.
///
/// Inputs and outputs of operations are both passed as `&Tensor`; which one is written is said by its field name, and
/// every operation refuses an output that overlaps another operand.
pub struct Tensor<B: Backend> {
    buffer: B::Buffer,
    dtype: DType,
    shape: Shape,
    strides: Shape,
    offset: usize,
}

impl<B: Backend> Clone for Tensor<B> {
    fn clone(&self) -> Self {
        Tensor {
            buffer: self.buffer.clone(),
            ..*self
        }
    }
}

impl<B: Backend> fmt::Debug for Tensor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}{} strides {} offset {}",
            self.dtype, self.shape, self.strides, self.offset
        )
    }
}

impl<B: Backend> Tensor<B> {
    /// A row-major tensor over the start of `buffer`, from `offset` elements on.
    ///
    /// # Errors
    /// [`Error::Argument`] when the buffer is too small for it.
    pub fn over(
        buffer: B::Buffer,
        dtype: DType,
        shape: impl Into<Shape>,
        offset: usize,
    ) -> Result<Self> {
        let shape = shape.into();
        let needed = (offset + shape.elements()) * dtype.size();
        let bytes = B::buffer_bytes(&buffer);
        if needed > bytes {
            let what = format!(
                "{dtype:?}{shape} at element {offset} needs {needed} bytes, the buffer has {bytes}"
            );
            return Err(Error::Argument { op: "tensor", what });
        }
        Ok(Tensor {
            buffer,
            dtype,
            shape,
            strides: shape.contiguous_strides(),
            offset,
        })
    }

    /// A zero-filled row-major tensor with memory of its own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn zeros(backend: &B, dtype: DType, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let buffer = backend.alloc(shape.elements() * dtype.size())?;
        Tensor::over(buffer, dtype, shape, 0)
    }

    /// A row-major tensor with memory of its own that holds `values`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or [`Error::Shape`] when the number of values is another one.
    pub fn from_slice<E: Element>(
        backend: &B,
        stream: &B::Stream,
        values: &[E],
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        let tensor = Tensor::zeros(backend, E::DTYPE, shape)?;
        backend.upload(stream, &tensor, as_bytes(values))?;
        Ok(tensor)
    }

    /// The values in row-major order; strided views are gathered.
    ///
    /// # Errors
    /// [`Error::DType`] when the tensor holds another type; what the device reports.
    pub fn to_vec<E: Element>(&self, backend: &B, stream: &B::Stream) -> Result<Vec<E>> {
        if E::DTYPE != self.dtype {
            let expected = E::NAME;
            return Err(Error::DType {
                op: "download",
                tensor: "source",
                expected,
                got: self.dtype,
            });
        }
        let mut values = vec![E::default(); self.elements()];
        backend.download(stream, self, as_bytes_mut(&mut values))?;
        Ok(values)
    }

    /// Memory this view looks at.
    pub fn buffer(&self) -> &B::Buffer {
        &self.buffer
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Strides, in elements.
    pub fn strides(&self) -> Shape {
        self.strides
    }

    /// First element, counted in elements from the start of the buffer.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.elements()
    }

    /// Whether the elements lie row-major without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        self.shape
            .iter()
            .zip(self.strides.iter())
            .rev()
            .all(|(&extent, &stride)| {
                let fits = extent == 1 || stride == step;
                step *= extent;
                fits || self.elements() == 0
            })
    }

    /// The part `range` of `axis`.
    ///
    /// # Panics
    /// When the range leaves the axis: ranges come from configurations, never from user data.
    pub fn slice(&self, axis: usize, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.shape[axis],
            "slice {range:?} of {self:?}"
        );
        let mut view = self.clone();
        view.offset += range.start * self.strides[axis];
        view.shape = self.shape.with(axis, range.end - range.start);
        view
    }

    /// The view with two axes exchanged; no element moves.
    pub fn transpose(&self, a: usize, b: usize) -> Self {
        let mut view = self.clone();
        view.shape = self.shape.swapped(a, b);
        view.strides = self.strides.swapped(a, b);
        view
    }

    /// The last axis split into `[.., extent / inner, inner]`: heads out of a fused row.
    ///
    /// # Panics
    /// When `inner` does not divide the last extent or the rank is already [`MAX_RANK`].
    pub fn split_last(&self, inner: usize) -> Self {
        let last = self.shape.rank - 1;
        let extent = self.shape[last];
        assert!(
            self.shape.rank < MAX_RANK && inner > 0 && extent.is_multiple_of(inner),
            "split {self:?} by {inner}"
        );
        let mut view = self.clone();
        view.shape.rank += 1;
        view.strides.rank += 1;
        view.shape.extents[last] = extent / inner;
        view.shape.extents[last + 1] = inner;
        view.strides.extents[last + 1] = self.strides[last];
        view.strides.extents[last] = self.strides[last] * inner;
        view
    }

    /// The same elements under another shape.
    ///
    /// # Panics
    /// When the view has gaps or the number of elements differs.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        assert!(
            self.is_contiguous() && shape.elements() == self.elements(),
            "reshape {self:?} to {shape}"
        );
        let mut view = self.clone();
        view.shape = shape;
        view.strides = shape.contiguous_strides();
        view
    }
}

/// A Rust type that a tensor can hold.
pub trait Element: Copy + Default + Send + Sync + sealed::Sealed + 'static {
    /// Its dtype.
    const DTYPE: DType;
    /// Its name in messages.
    const NAME: &'static str;
}

mod sealed {
    /// Types whose every bit pattern is valid and that have no padding.
    pub trait Sealed {}
}

macro_rules! element {
    ($($type:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            const NAME: &'static str = stringify!($dtype);
        }
    )*};
}
element!(f32 => F32, half::bf16 => BF16, i32 => I32, u32 => U32, u64 => U64, u8 => U8);

/// The bytes of a slice of elements.
pub fn as_bytes<E: Element>(values: &[E]) -> &[u8] {
    // SAFETY: `Element` is sealed to types without padding, and u8 has alignment 1.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of a slice of elements, to be written.
pub fn as_bytes_mut<E: Element>(values: &mut [E]) -> &mut [u8] {
    // SAFETY: as in `as_bytes`; every bit pattern is a valid element.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Hands out tensors front to back from chunks of memory. The addresses depend on the sequence of requests alone, so a
/// step that asks for the same capacities gets the same addresses and can be replayed as a CUDA graph.
pub struct Arena<B: Backend> {
    chunks: Vec<B::Buffer>,
    chunk_bytes: usize,
    limit_bytes: usize,
    at: Mark,
}

/// A point an arena can be cut back to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    chunk: usize,
    used: usize,
}

impl<B: Backend> Arena<B> {
    /// An arena that takes memory in chunks of `chunk_bytes` (more for a larger tensor), `limit_bytes` in all.
    pub fn new(chunk_bytes: usize, limit_bytes: usize) -> Self {
        Arena {
            chunks: Vec::new(),
            chunk_bytes,
            limit_bytes,
            at: Mark::default(),
        }
    }

    /// The next tensor. Its content is whatever was there before.
    ///
    /// # Errors
    /// [`Error::ArenaFull`] above the limit, [`Error::OutOfMemory`].
    pub fn alloc(
        &mut self,
        backend: &B,
        dtype: DType,
        shape: impl Into<Shape>,
    ) -> Result<Tensor<B>> {
        let shape = shape.into();
        let asked = (shape.elements() * dtype.size()).next_multiple_of(ALIGNMENT);
        while self.remaining() < asked {
            if self.at.chunk >= self.chunks.len() {
                self.grow(backend, asked)?;
            } else {
                self.at = Mark {
                    chunk: self.at.chunk + 1,
                    used: 0,
                };
            }
        }
        let buffer = self.chunks[self.at.chunk].clone();
        let tensor = Tensor::over(buffer, dtype, shape, self.at.used / dtype.size())?;
        self.at.used += asked;
        Ok(tensor)
    }

    /// Where the arena stands.
    pub fn mark(&self) -> Mark {
        self.at
    }

    /// Gives back everything that was handed out after `mark`.
    pub fn reset(&mut self, mark: Mark) {
        self.at = mark;
    }

    /// Memory held, in bytes: the most that was ever in use, in whole chunks.
    pub fn held_bytes(&self) -> usize {
        self.chunks.iter().map(B::buffer_bytes).sum()
    }

    fn remaining(&self) -> usize {
        self.chunks
            .get(self.at.chunk)
            .map_or(0, |chunk| B::buffer_bytes(chunk) - self.at.used)
    }

    fn grow(&mut self, backend: &B, asked: usize) -> Result<()> {
        let (held, bytes) = (self.held_bytes(), self.chunk_bytes.max(asked));
        if held + bytes > self.limit_bytes {
            return Err(Error::ArenaFull {
                limit: self.limit_bytes,
                held,
                asked: bytes,
            });
        }
        self.chunks.push(backend.alloc(bytes)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuBackend;

    fn counting(shape: impl Into<Shape>) -> (CpuBackend, Tensor<CpuBackend>) {
        let shape = shape.into();
        let backend = CpuBackend::default();
        let values: Vec<i32> = (0..shape.elements() as i32).collect();
        let tensor =
            Tensor::from_slice(&backend, &backend.stream(), &values, [values.len()]).unwrap();
        (backend, tensor.reshape(shape))
    }

    #[test]
    fn views_gather_the_elements_they_name() {
        let (backend, t) = counting([2, 6]);
        let read = |t: &Tensor<CpuBackend>| t.to_vec::<i32>(&backend, &backend.stream()).unwrap();
        assert_eq!(read(&t.slice(1, 2..4)), [2, 3, 8, 9]);
        assert_eq!(
            read(&t.transpose(0, 1)),
            [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
        );
        let heads = t.slice(1, 0..4).split_last(2);
        assert_eq!(heads.shape(), Shape::from([2, 2, 2]));
        assert_eq!(read(&heads.slice(1, 1..2)), [2, 3, 8, 9]);
        assert!(t.is_contiguous() && !heads.is_contiguous());
    }

    #[test]
    fn a_view_larger_than_its_buffer_is_refused() {
        let backend = CpuBackend::default();
        let buffer = backend.alloc(8).unwrap();
        assert!(Tensor::<CpuBackend>::over(buffer.clone(), DType::F32, [2], 0).is_ok());
        assert!(Tensor::<CpuBackend>::over(buffer, DType::F32, [2], 1).is_err());
    }

    #[test]
    fn an_arena_repeats_its_addresses_and_says_when_it_is_full() {
        let backend = CpuBackend::default();
        let mut arena = Arena::new(1024, 4096);
        let start = arena.mark();
        let mut take = |elements: usize| {
            let tensor = arena.alloc(&backend, DType::F32, [elements]).unwrap();
            (CpuBackend::buffer_id(tensor.buffer()), tensor.offset())
        };
        let requests = [3, 3, 200, 500];
        let first = requests.map(&mut take);
        assert_eq!((first[0].1, first[1].1), (0, ALIGNMENT / 4));
        assert_ne!(first[1].0, first[2].0);
        arena.reset(start);
        let mut take = |elements: usize| {
            let tensor = arena.alloc(&backend, DType::F32, [elements]).unwrap();
            (CpuBackend::buffer_id(tensor.buffer()), tensor.offset())
        };
        assert_eq!(first, requests.map(&mut take));
        let full = arena.alloc(&backend, DType::F32, [256]).unwrap_err();
        assert_eq!(
            full,
            Error::ArenaFull {
                limit: 4096,
                held: 4096,
                asked: 1024
            }
        );
    }
}
