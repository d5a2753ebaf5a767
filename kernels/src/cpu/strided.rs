//! Views of any strides, walked in row-major order.

use std::ops::Range;

use rayon::prelude::*;

/// Elements of a task. Sums over a view are partial per task, so this is part of their definition.
const TASK_ELEMENTS: usize = 1 << 14;

/// The common shape of `N` views with the strides of each, adjacent axes merged where no view has a gap.
pub(super) struct Strided<const N: usize> {
    axes: Vec<(usize, [usize; N])>,
}

/// Elements of one axis that follow one another.
pub(super) struct Run<const N: usize> {
    /// Row-major position of its first element, counted from the start of the walked range.
    pub(super) first: usize,
    /// Number of elements.
    pub(super) length: usize,
    /// Offset of the first element in each view.
    pub(super) offsets: [usize; N],
    /// Stride in each view.
    pub(super) steps: [usize; N],
}

impl<const N: usize> Strided<N> {
    pub(super) fn new(shape: &[usize], strides: [&[usize]; N]) -> Self {
        let mut axes: Vec<(usize, [usize; N])> = Vec::new();
        for (axis, &extent) in shape.iter().enumerate() {
            let steps = strides.map(|strides| strides[axis]);
            match axes.last_mut() {
                _ if extent == 1 => {}
                Some(outer) if outer.1 == steps.map(|step| step * extent) => {
                    *outer = (outer.0 * extent, steps);
                }
                _ => axes.push((extent, steps)),
            }
        }
        if axes.is_empty() {
            axes.push((1, [1; N]));
        }
        Strided { axes }
    }

    /// Number of elements.
    pub(super) fn elements(&self) -> usize {
        self.axes.iter().map(|(extent, _)| extent).product()
    }

    /// Visits the runs of a range of row-major positions, in order.
    pub(super) fn for_each_run(&self, range: Range<usize>, mut visit: impl FnMut(Run<N>)) {
        let Some((&(extent, steps), outer)) = self.axes.split_last() else {
            return;
        };
        let mut at = range.start;
        while at < range.end {
            let (mut rest, column) = (at / extent, at % extent);
            let mut offsets = steps.map(|step| column * step);
            for &(extent, steps) in outer.iter().rev() {
                for (offset, step) in offsets.iter_mut().zip(steps) {
                    *offset += rest % extent * step;
                }
                rest /= extent;
            }
            let length = (extent - column).min(range.end - at);
            visit(Run {
                first: at - range.start,
                length,
                offsets,
                steps,
            });
            at += length;
        }
    }

    /// Ranges of row-major positions, one a task; the same for every layout and number of threads.
    pub(super) fn tasks(&self) -> impl IndexedParallelIterator<Item = Range<usize>> {
        let elements = self.elements();
        (0..elements.div_ceil(TASK_ELEMENTS))
            .into_par_iter()
            .map(move |task| {
                let first = task * TASK_ELEMENTS;
                first..(first + TASK_ELEMENTS).min(elements)
            })
    }

    /// Visits every run once, in parallel.
    pub(super) fn in_parallel(&self, visit: impl Fn(Run<N>) + Sync) {
        if self.elements() <= TASK_ELEMENTS {
            return self.for_each_run(0..self.elements(), visit);
        }
        self.tasks()
            .for_each(|range| self.for_each_run(range, &visit));
    }
}
