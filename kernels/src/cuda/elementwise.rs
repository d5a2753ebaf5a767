//! Copies, fills, sums and the digest, over strided views.

use m3_spec::dtype::DType;

use super::CudaBackend;
use super::launch::{Grid, Parameters, View, kernel};
use super::stream::Enqueue;
use crate::error::{Error, Result};
use crate::ops;
use crate::tensor::{MAX_RANK, Tensor};

const FILE: &str = "elementwise.cu";

/// Threads of a block; each handles [`RUN`] elements.
const THREADS: u32 = 256;

/// Elements of the innermost axis that one thread handles.
const RUN: usize = 8;

/// Blocks of the digest; each walks the tensor with this stride, so the number only bounds the launch.
const DIGEST_BLOCKS: usize = 2048;

pub(super) fn copy(queue: &mut Enqueue<'_>, args: &ops::Copy<'_, CudaBackend>) -> Result<()> {
    args.dims()?;
    let (source, target) = (View::of(args.source), View::of(args.target));
    match (args.source.dtype(), args.target.dtype()) {
        (DType::F32, DType::BF16) => runs(queue, "convert_f32_bf16", source, target),
        (DType::BF16, DType::F32) => runs(queue, "convert_bf16_f32", source, target),
        (dtype, _) => move_bits(queue, dtype, source, target),
    }
}

pub(super) fn fill(queue: &mut Enqueue<'_>, args: &ops::Fill<'_, CudaBackend>) -> Result<()> {
    args.dims()?;
    let target = View::of(args.target);
    let [target, _] = merged([target, target]);
    let (chunks, count) = count_runs(&target);
    let parameters = Parameters::default().with(target).with(chunks).with(count);
    let (name, grid) = (kernel!(args.target.dtype(), "fill"), run_grid(count));
    // SAFETY: the kernel's parameters; the runs cover the view and no more.
    unsafe { queue.launch(FILE, name, grid, parameters.with(args.value)) }
}

pub(super) fn accumulate(
    queue: &mut Enqueue<'_>,
    args: &ops::Accumulate<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    let name = kernel!(args.source.dtype(), "accumulate");
    runs(queue, name, View::of(args.source), View::of(args.target))
}

pub(super) fn digest(queue: &mut Enqueue<'_>, args: &ops::Digest<'_, CudaBackend>) -> Result<()> {
    args.dims()?;
    let [source, _] = merged([View::of(args.source); 2]);
    let name = if args.source.dtype().size() == 2 {
        "digest_2"
    } else {
        "digest_4"
    };
    let elements = args.source.elements();
    let blocks = elements.div_ceil(THREADS as usize).min(DIGEST_BLOCKS);
    let parameters = Parameters::default()
        .with(source)
        .with(elements as i64)
        .with(args.start)
        .tensor(args.sums);
    // SAFETY: the kernel's parameters; it reads the view's elements and adds to two sums.
    unsafe { queue.launch(FILE, name, Grid::line(blocks, THREADS), parameters) }
}

/// Packs a view, row-major, at `address`.
pub(super) fn gather(
    queue: &Enqueue<'_>,
    source: &Tensor<CudaBackend>,
    address: u64,
) -> Result<()> {
    move_bits(
        queue,
        source.dtype(),
        View::of(source),
        packed(source, address),
    )
}

/// Packs a view of F32 or BF16, row-major and in F32, at `address`.
pub(super) fn widen(queue: &Enqueue<'_>, source: &Tensor<CudaBackend>, address: u64) -> Result<()> {
    let target = packed(source, address);
    match source.dtype() {
        DType::BF16 => runs(queue, "convert_bf16_f32", View::of(source), target),
        dtype => move_bits(queue, dtype, View::of(source), target),
    }
}

/// Spreads what lies row-major at `address` over a view.
pub(super) fn scatter(
    queue: &Enqueue<'_>,
    address: u64,
    target: &Tensor<CudaBackend>,
) -> Result<()> {
    move_bits(
        queue,
        target.dtype(),
        packed(target, address),
        View::of(target),
    )
}

/// The view of a tensor's shape without gaps, at `address`.
fn packed(tensor: &Tensor<CudaBackend>, address: u64) -> View {
    let mut view = View::of(tensor);
    view.data = address;
    let mut step = 1;
    for axis in (0..MAX_RANK).rev() {
        view.strides[axis] = step;
        step *= view.extents[axis];
    }
    view
}

fn move_bits(queue: &Enqueue<'_>, dtype: DType, source: View, target: View) -> Result<()> {
    let name = match dtype.size() {
        1 => "move_1",
        2 => "move_2",
        4 => "move_4",
        8 => "move_8",
        size => {
            return Err(Error::Argument {
                op: queue.op,
                what: format!("elements of {size} bytes are not moved"),
            });
        }
    };
    runs(queue, name, source, target)
}

/// A kernel that pairs the runs of two views of one shape.
fn runs(queue: &Enqueue<'_>, name: &'static str, source: View, target: View) -> Result<()> {
    let [source, target] = merged([source, target]);
    let (chunks, count) = count_runs(&source);
    let parameters = Parameters::default()
        .with(source)
        .with(target)
        .with(chunks)
        .with(count);
    // SAFETY: the kernel's parameters; both views have this shape.
    unsafe { queue.launch(FILE, name, run_grid(count), parameters) }
}

/// Runs per row of the innermost axis, and runs in all.
fn count_runs(view: &View) -> (i64, i64) {
    let chunks = (view.extents[MAX_RANK - 1] as usize).div_ceil(RUN) as i64;
    let rows: i64 = view.extents[..MAX_RANK - 1].iter().product();
    (chunks, rows * chunks)
}

fn run_grid(count: i64) -> Grid {
    Grid::line((count as usize).div_ceil(THREADS as usize), THREADS)
}

/// Views of one shape with the axes merged that lie without gaps in both.
pub(super) fn merged(views: [View; 2]) -> [View; 2] {
    let mut merged = views;
    for view in &mut merged {
        (view.extents, view.strides) = ([1; MAX_RANK], [0; MAX_RANK]);
    }
    let mut last = MAX_RANK - 1;
    let mut empty = true;
    for axis in (0..MAX_RANK).rev() {
        let extent = views[0].extents[axis];
        if extent == 1 {
            continue;
        }
        let continues = !empty
            && (0..2).all(|i| {
                let inner = &merged[i];
                views[i].strides[axis] == inner.strides[last] * inner.extents[last]
            });
        if !(empty || continues) {
            last -= 1;
        }
        for (view, original) in merged.iter_mut().zip(&views) {
            if !continues {
                view.strides[last] = original.strides[axis];
            }
            view.extents[last] *= extent;
        }
        empty = false;
    }
    if empty {
        merged.iter_mut().for_each(|view| view.strides[last] = 1);
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(extents: [i64; 4], strides: [i64; 4]) -> View {
        View {
            data: 0,
            extents,
            strides,
            dtype: 0,
        }
    }

    #[test]
    fn axes_without_gaps_in_both_views_become_one() {
        let dense = view([2, 3, 4, 5], [60, 20, 5, 1]);
        let rows = view([2, 3, 4, 5], [120, 40, 10, 1]);
        let [a, b] = merged([dense, dense]);
        assert_eq!((a.extents, a.strides[3]), ([1, 1, 1, 120], 1));
        assert_eq!(b.extents, a.extents);
        let [a, b] = merged([dense, rows]);
        assert_eq!(
            (a.extents, a.strides[2], b.strides[2]),
            ([1, 1, 24, 5], 5, 10)
        );
        let [t, _] = merged([view([1, 1, 3, 2], [0, 0, 1, 3]); 2]);
        assert_eq!((t.extents, t.strides), ([1, 1, 3, 2], [0, 0, 1, 3]));
        let [one, _] = merged([view([1, 1, 1, 1], [9, 9, 9, 9]); 2]);
        assert_eq!((one.extents, one.strides[3]), ([1; 4], 1));
        let [none, _] = merged([view([1, 0, 4, 5], [60, 20, 5, 1]); 2]);
        assert_eq!(count_runs(&none).1, 0);
    }
}
