//! One product per expert over its own rows.

use std::ops::Range;

use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, segments, with_storage};
use super::gemm::{self, Matrix, MatrixMut};
use super::linear::{matrix, matrix_mut};
use crate::error::Result;
use crate::ops;

pub(super) fn grouped_gemm(_: &CpuBackend, args: &ops::GroupedGemm<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.a, args.b, args.expert_offsets, args.c]);
    let offsets = held.read::<i32>(args.expert_offsets).as_slice();
    let rows = segments("grouped_gemm", "expert_offsets", offsets, dims.rows)?;
    let end = rows.last().map_or(0, |last| last.end);
    with_storage!(args.a.dtype(), A => with_storage!(args.b.dtype(), B => {
        with_storage!(args.c.dtype(), C => {
            let (a, b) = (held.read::<A>(args.a), held.read::<B>(args.b));
            let c = held.write::<C>(args.c);
            for (row, col) in (end..dims.rows).flat_map(|row| (0..dims.n).map(move |col| (row, col))) {
                // SAFETY: no task runs yet.
                unsafe { c.set([row, col], C::default()) };
            }
            // SAFETY: experts have rows of their own.
            let (a, c) = (matrix(&a), unsafe { matrix_mut(&c) });
            for_experts(&rows, |expert, rows| {
                // SAFETY: as above.
                let c = unsafe { c.block(rows.clone(), 0..dims.n) };
                let strides = [b.strides()[1], b.strides()[2]];
                let start = b.as_ptr().wrapping_add(expert * b.strides()[0]);
                // SAFETY: the expert's part of the view.
                let b = unsafe { Matrix::from_raw(start, [dims.k, dims.n], strides) };
                gemm::gemm(a.block(rows, 0..dims.k), b, c, false);
            });
        })
    }));
    Ok(())
}

pub(super) fn grouped_gemm_weights(
    _: &CpuBackend,
    args: &ops::GroupedGemmWeights<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.a, args.b, args.expert_offsets, args.dw]);
    let offsets = held.read::<i32>(args.expert_offsets).as_slice();
    let rows = segments("grouped_gemm_weights", "expert_offsets", offsets, dims.rows)?;
    with_storage!(args.a.dtype(), A => with_storage!(args.b.dtype(), B => {
        let (a, b) = (held.read::<A>(args.a), held.read::<B>(args.b));
        let (a, b, dw) = (matrix(&a), matrix(&b), held.write::<f32>(args.dw));
        for_experts(&rows, |expert, rows| {
            let strides = [dw.strides()[1], dw.strides()[2]];
            let start = dw.as_mut_ptr().wrapping_add(expert * dw.strides()[0]);
            // SAFETY: the expert's part of the view, which belongs to one task.
            let dw = unsafe { MatrixMut::from_raw(start, [dims.k, dims.n], strides) };
            let a = a.block(rows.clone(), 0..dims.k).transposed();
            gemm::gemm(a, b.block(rows, 0..dims.n), dw, true);
        });
    }));
    Ok(())
}

/// Calls `product` for every expert that has rows; one without makes no call and is no error.
fn for_experts(rows: &[Range<usize>], product: impl Fn(usize, Range<usize>) + Sync) {
    rows.par_iter()
        .enumerate()
        .filter(|(_, rows)| !rows.is_empty())
        .for_each(|(expert, rows)| product(expert, rows.clone()));
}
