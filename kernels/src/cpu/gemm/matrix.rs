//! Strided matrices.

use std::marker::PhantomData;
use std::ops::Range;

/// A matrix to read, with any distance between its rows and between its columns.
pub struct Matrix<'a, T> {
    start: *const T,
    layout: Layout,
    held: PhantomData<&'a [T]>,
}

/// A matrix to write.
pub struct MatrixMut<'a, T> {
    start: *mut T,
    layout: Layout,
    held: PhantomData<&'a mut [T]>,
}

#[derive(Clone, Copy)]
struct Layout {
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl Layout {
    /// Offset of an element, in elements and in 64 bits.
    fn offset(&self, row: usize, col: usize) -> usize {
        row * self.row_stride + col * self.col_stride
    }

    /// Elements from the first to the last, both included.
    fn extent(&self) -> usize {
        match (self.rows, self.cols) {
            (0, _) | (_, 0) => 0,
            (rows, cols) => self.offset(rows - 1, cols - 1) + 1,
        }
    }

    /// No two elements share a place.
    fn is_injective(&self) -> bool {
        let nested = |inner, inner_stride, outer, outer_stride| {
            inner == 0
                || outer == 0
                || (inner == 1 || inner_stride > 0)
                    && (outer == 1 || outer_stride > (inner - 1) * inner_stride)
        };
        nested(self.cols, self.col_stride, self.rows, self.row_stride)
            || nested(self.rows, self.row_stride, self.cols, self.col_stride)
    }

    /// Offset and layout of a block.
    fn block(&self, rows: Range<usize>, cols: Range<usize>) -> (usize, Layout) {
        assert!(
            rows.start <= rows.end && rows.end <= self.rows,
            "rows {rows:?} of {}",
            self.rows
        );
        assert!(
            cols.start <= cols.end && cols.end <= self.cols,
            "columns {cols:?} of {}",
            self.cols
        );
        let block = Layout {
            rows: rows.len(),
            cols: cols.len(),
            ..*self
        };
        // An empty block may begin behind the last element.
        let offset = match block.extent() {
            0 => 0,
            _ => self.offset(rows.start, cols.start),
        };
        (offset, block)
    }
}

// SAFETY: a matrix only reads what it borrows.
unsafe impl<T: Sync> Send for Matrix<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Matrix<'_, T> {}
// SAFETY: a matrix writes what it borrows exclusively; blocks that are shared out are disjoint, see `block`.
unsafe impl<T: Send> Send for MatrixMut<'_, T> {}
// SAFETY: as above: nothing is written through a shared reference but by `block`'s promise.
unsafe impl<T: Send + Sync> Sync for MatrixMut<'_, T> {}

impl<T> Clone for Matrix<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Matrix<'_, T> {}

impl<'a, T> Matrix<'a, T> {
    /// A matrix `[rows, cols]` whose element (i, j) is `elements[i·row_stride + j·col_stride]`.
    ///
    /// # Panics
    /// When an element lies outside `elements`.
    pub fn new(
        elements: &'a [T],
        [rows, cols]: [usize; 2],
        [row_stride, col_stride]: [usize; 2],
    ) -> Self {
        // SAFETY: the extent is checked here.
        let matrix =
            unsafe { Matrix::from_raw(elements.as_ptr(), [rows, cols], [row_stride, col_stride]) };
        let extent = matrix.layout.extent();
        assert!(
            extent <= elements.len(),
            "a matrix of extent {extent} in {} elements",
            elements.len()
        );
        matrix
    }

    /// A row-major matrix.
    ///
    /// # Panics
    /// When `elements` is too short.
    pub fn row_major(elements: &'a [T], rows: usize, cols: usize) -> Self {
        Matrix::new(elements, [rows, cols], [cols, 1])
    }

    /// A matrix from its first element.
    ///
    /// # Safety
    /// Every element may be read, and none is written, during `'a`.
    pub unsafe fn from_raw(
        start: *const T,
        [rows, cols]: [usize; 2],
        [row_stride, col_stride]: [usize; 2],
    ) -> Self {
        Matrix {
            start,
            layout: Layout {
                rows,
                cols,
                row_stride,
                col_stride,
            },
            held: PhantomData,
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.layout.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.layout.cols
    }

    /// Distance between rows and between columns, in elements.
    pub fn strides(&self) -> (usize, usize) {
        (self.layout.row_stride, self.layout.col_stride)
    }

    /// The transposed view.
    pub fn transposed(self) -> Self {
        let layout = Layout {
            rows: self.layout.cols,
            cols: self.layout.rows,
            row_stride: self.layout.col_stride,
            col_stride: self.layout.row_stride,
        };
        Matrix { layout, ..self }
    }

    /// A part of it.
    ///
    /// # Panics
    /// When it reaches beyond the matrix.
    pub fn block(&self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let (offset, layout) = self.layout.block(rows, cols);
        Matrix {
            start: self.start.wrapping_add(offset),
            layout,
            ..*self
        }
    }

    /// Address of an element; the caller sees to the range.
    pub(super) fn at(&self, row: usize, col: usize) -> *const T {
        self.start.wrapping_add(self.layout.offset(row, col))
    }
}

impl<'a, T> MatrixMut<'a, T> {
    /// A matrix `[rows, cols]` whose element (i, j) is `elements[i·row_stride + j·col_stride]`.
    ///
    /// # Panics
    /// When an element lies outside `elements`, or when rows or columns overlap.
    pub fn new(
        elements: &'a mut [T],
        [rows, cols]: [usize; 2],
        [row_stride, col_stride]: [usize; 2],
    ) -> Self {
        let start = elements.as_mut_ptr();
        // SAFETY: extent and overlap are checked here.
        let matrix = unsafe { MatrixMut::from_raw(start, [rows, cols], [row_stride, col_stride]) };
        let extent = matrix.layout.extent();
        assert!(
            extent <= elements.len() && matrix.layout.is_injective(),
            "[{rows}, {cols}] with strides [{row_stride}, {col_stride}] overlaps or leaves {} elements",
            elements.len()
        );
        matrix
    }

    /// A row-major matrix.
    ///
    /// # Panics
    /// When `elements` is too short.
    pub fn row_major(elements: &'a mut [T], rows: usize, cols: usize) -> Self {
        MatrixMut::new(elements, [rows, cols], [cols, 1])
    }

    /// A matrix from its first element.
    ///
    /// # Safety
    /// Every element may be written, nothing else touches one during `'a`, and no two share a place.
    pub unsafe fn from_raw(
        start: *mut T,
        [rows, cols]: [usize; 2],
        [row_stride, col_stride]: [usize; 2],
    ) -> Self {
        MatrixMut {
            start,
            layout: Layout {
                rows,
                cols,
                row_stride,
                col_stride,
            },
            held: PhantomData,
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.layout.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.layout.cols
    }

    /// Distance between rows and between columns, in elements.
    pub fn strides(&self) -> (usize, usize) {
        (self.layout.row_stride, self.layout.col_stride)
    }

    /// A part of it.
    ///
    /// # Safety
    /// While the block lives, nothing else touches its elements, through this matrix or another block of it.
    ///
    /// # Panics
    /// When it reaches beyond the matrix.
    pub unsafe fn block(&self, rows: Range<usize>, cols: Range<usize>) -> MatrixMut<'_, T> {
        let (offset, layout) = self.layout.block(rows, cols);
        MatrixMut {
            start: self.start.wrapping_add(offset),
            layout,
            held: PhantomData,
        }
    }

    /// Address of an element; the caller sees to the range.
    pub(super) fn at(&self, row: usize, col: usize) -> *mut T {
        self.start.wrapping_add(self.layout.offset(row, col))
    }

    /// Sets every element.
    pub(super) fn fill(self, value: T)
    where
        T: Copy,
    {
        for row in 0..self.layout.rows {
            for col in 0..self.layout.cols {
                // SAFETY: in range, and exclusive as the whole matrix is.
                unsafe { *self.at(row, col) = value }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_have_64_bits() {
        // 262,145 tokens of 64 heads x 128; only addresses are computed.
        let start = std::ptr::null::<u16>();
        // SAFETY: no element is read.
        let tokens = unsafe { Matrix::from_raw(start, [262_145, 8192], [8192, 1]) };
        assert_eq!(tokens.layout.offset(262_143, 0), 2_147_475_456);
        assert_eq!(tokens.layout.offset(262_144, 0), 2_147_483_648);
        assert_eq!(tokens.at(262_144, 0) as usize, 2 * 2_147_483_648);
        assert_eq!(
            tokens.block(262_144..262_145, 0..8192).start as usize,
            2 * 2_147_483_648
        );
    }

    #[test]
    #[should_panic(expected = "overlaps")]
    fn a_result_whose_rows_overlap_is_refused() {
        MatrixMut::new(&mut [0.0; 8], [2, 4], [3, 1]);
    }

    #[test]
    fn any_order_of_the_axes_is_a_result() {
        MatrixMut::new(&mut [0.0; 8], [2, 4], [4, 1]);
        MatrixMut::new(&mut [0.0; 8], [2, 4], [1, 2]);
        MatrixMut::new(&mut [0.0; 0], [0, 4], [0, 0]);
        MatrixMut::new(&mut [0.0; 4], [1, 4], [0, 1]);
    }
}
