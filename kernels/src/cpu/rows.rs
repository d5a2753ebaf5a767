//! Rows in f32, whatever they are stored in, and how they are shared out over the threads.

use std::ops::Range;

use half::bf16;
use m3_spec::dtype::DType;
use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, View, ViewMut};
use super::math::{round_slice, widen_slice};
use super::simd::dispatch;
use crate::tensor::Tensor;

/// Elements of a task: below, waking a second worker costs more than it brings.
const TASK_ELEMENTS: usize = 1 << 15;

/// Rows whose contributions to a sum over rows are added up by one task. Part of such a sum's definition.
const ROWS_PER_PARTIAL: usize = 64;

/// Rows to read.
pub(super) enum Rows<'a> {
    F32(View<'a, f32>),
    Bf16(View<'a, bf16>),
}

impl<'a> Rows<'a> {
    /// The innermost rows of a tensor in storage dtype.
    pub(super) fn new(held: &'a Access<'_>, tensor: &Tensor<CpuBackend>) -> Self {
        match tensor.dtype() {
            DType::BF16 => Rows::Bf16(held.read(tensor)),
            _ => Rows::F32(held.read(tensor)),
        }
    }

    /// One row in f32; `scratch`, of its length, is used when it is stored otherwise.
    pub(super) fn row<'s, const N: usize>(
        &self,
        index: [usize; N],
        scratch: &'s mut [f32],
    ) -> &'s [f32]
    where
        'a: 's,
    {
        match self {
            Rows::F32(view) => view.row(index),
            Rows::Bf16(view) => {
                widen_slice(view.row(index), scratch);
                scratch
            }
        }
    }
}

/// A vector in f32.
pub(super) fn vector(held: &Access<'_>, tensor: &Tensor<CpuBackend>) -> Vec<f32> {
    let mut scratch = vec![0.0; tensor.elements()];
    Rows::new(held, tensor).row([], &mut scratch).to_vec()
}

/// Rows to write.
pub(super) enum RowsMut<'a> {
    F32(ViewMut<'a, f32>),
    Bf16(ViewMut<'a, bf16>),
}

impl<'a> RowsMut<'a> {
    /// The innermost rows of a tensor in storage dtype.
    pub(super) fn new(held: &'a Access<'_>, tensor: &Tensor<CpuBackend>) -> Self {
        match tensor.dtype() {
            DType::BF16 => RowsMut::Bf16(held.write(tensor)),
            _ => RowsMut::F32(held.write(tensor)),
        }
    }

    /// Stores one row, rounded once.
    ///
    /// # Safety
    /// No other task touches this row meanwhile.
    pub(super) unsafe fn store<const N: usize>(&self, index: [usize; N], values: &[f32]) {
        // SAFETY: exclusive by the caller's promise.
        unsafe {
            match self {
                RowsMut::F32(view) => view.row_mut(index).copy_from_slice(values),
                RowsMut::Bf16(view) => round_slice(values, view.row_mut(index)),
            }
        }
    }

    /// Stores one row and leaves in `values` what was stored.
    ///
    /// # Safety
    /// As [`RowsMut::store`].
    pub(super) unsafe fn store_and_round<const N: usize>(
        &self,
        index: [usize; N],
        values: &mut [f32],
    ) {
        // SAFETY: exclusive by the caller's promise.
        unsafe {
            self.store(index, values);
            if let RowsMut::Bf16(view) = self {
                widen_slice(view.row_mut(index), values);
            }
        }
    }
}

/// Shares out the rows of an operation whose rows do not meet; a task gets a range of them.
pub(super) fn for_rows(rows: usize, row_elements: usize, task: impl Fn(Range<usize>) + Sync) {
    let step = TASK_ELEMENTS.div_ceil(row_elements.max(1));
    let range = |index: usize| index * step..((index + 1) * step).min(rows);
    match rows.div_ceil(step) {
        0 => {}
        1 => task(0..rows),
        tasks => (0..tasks)
            .into_par_iter()
            .for_each(|index| task(range(index))),
    }
}

/// A sum over rows in one fixed order: `task` adds the contributions of a range of rows, in order, to a partial sum of
/// `width` elements; the partial sums are added in order.
pub(super) fn sum_over_rows(
    rows: usize,
    width: usize,
    task: impl Fn(Range<usize>, &mut [f32]) + Sync,
) -> Vec<f32> {
    let partial = |index: usize| {
        let first = index * ROWS_PER_PARTIAL;
        let mut sum = vec![0.0; width];
        task(first..(first + ROWS_PER_PARTIAL).min(rows), &mut sum);
        sum
    };
    let partials: Vec<Vec<f32>> = (0..rows.div_ceil(ROWS_PER_PARTIAL))
        .into_par_iter()
        .map(partial)
        .collect();
    let mut total = vec![0.0; width];
    for partial in &partials {
        add(partial, &mut total);
    }
    total
}

dispatch! {
    /// y += x
    pub(super) fn add(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }

    /// y += a·x, fused
    pub(super) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = a.mul_add(x, *y);
        }
    }

    /// y = a·x
    pub(super) fn scale(a: f32, x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = a * x;
        }
    }
}
