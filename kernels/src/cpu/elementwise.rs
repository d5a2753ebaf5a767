//! Copies and sums over views of any strides.

use half::bf16;
use m3_spec::digest;
use m3_spec::dtype::DType;
use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, Storage, View, ViewMut, with_storage};
use super::simd::dispatch;
use super::strided::Strided;
use crate::error::{Error, Result};
use crate::ops;
use crate::tensor::Element;

pub(super) fn copy(_: &CpuBackend, args: &ops::Copy<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    let held = Access::lock(&[args.source, args.target]);
    macro_rules! as_is {
        ($type:ty) => {
            update::<$type, $type>(
                held.read(args.source),
                held.write(args.target),
                |source, _| source,
            )
        };
    }
    match args.source.dtype() {
        DType::I32 => as_is!(i32),
        DType::U32 => as_is!(u32),
        DType::U64 => as_is!(u64),
        DType::U8 => as_is!(u8),
        from if from == args.target.dtype() => with_storage!(from, S => as_is!(S)),
        from => with_storage!(from, S => with_storage!(args.target.dtype(), T => {
            update::<S, T>(held.read(args.source), held.write(args.target), |source, _| {
                T::from_f32(source.to_f32())
            });
        })),
    }
    Ok(())
}

pub(super) fn fill(_: &CpuBackend, args: &ops::Fill<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    let held = Access::lock(&[args.target]);
    with_storage!(args.target.dtype(), T => {
        let (target, value) = (held.write::<T>(args.target), T::from_f32(args.value));
        Strided::new(target.shape(), [target.strides()]).in_parallel(|run| {
            for index in 0..run.length {
                let offset = run.offsets[0] + index * run.steps[0];
                // SAFETY: an element of the view, and of this run alone.
                unsafe { *target.as_mut_ptr().add(offset) = value };
            }
        });
    });
    Ok(())
}

pub(super) fn accumulate(_: &CpuBackend, args: &ops::Accumulate<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    let held = Access::lock(&[args.source, args.target]);
    with_storage!(args.source.dtype(), S => {
        update::<S, f32>(held.read(args.source), held.write(args.target), |source, target| {
            target + source.to_f32()
        });
    });
    Ok(())
}

pub(super) fn digest(_: &CpuBackend, args: &ops::Digest<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    let elements = args.source.elements() as u64;
    if args.start.checked_add(elements).is_none() {
        return Err(Error::Argument {
            op: "digest",
            what: format!(
                "start {} leaves no positions for {elements} elements",
                args.start
            ),
        });
    }
    let held = Access::lock(&[args.source, args.sums]);
    let (source, start) = (args.source, args.start);
    let sum = match source.dtype() {
        DType::BF16 => digest_of(held.read(source), start, |x: bf16| u32::from(x.to_bits())),
        DType::I32 => digest_of(held.read(source), start, |x: i32| x as u32),
        _ => digest_of(held.read(source), start, f32::to_bits),
    };
    let sums = held.write::<u64>(args.sums);
    for (seed, sum) in sum.0.into_iter().enumerate() {
        let offset = seed * sums.strides()[0];
        // SAFETY: an element of the view; no task runs any more.
        unsafe {
            let held = sums.as_mut_ptr().add(offset);
            *held = (*held).wrapping_add(sum);
        }
    }
    Ok(())
}

fn digest_of<T: Element>(
    source: View<'_, T>,
    start: u64,
    bits: impl Fn(T) -> u32 + Sync,
) -> digest::Digest {
    let walk = Strided::new(source.shape(), [source.strides()]);
    let part = |range: std::ops::Range<usize>| {
        let mut digest = digest::Digest::default();
        let first = start + range.start as u64;
        walk.for_each_run(range, |run| {
            for index in 0..run.length {
                let offset = run.offsets[0] + index * run.steps[0];
                // SAFETY: an element of the view.
                let element = unsafe { *source.as_ptr().add(offset) };
                digest.update(bits(element), first + (run.first + index) as u64);
            }
        });
        digest
    };
    // Sums of integers modulo 2⁶⁴ are exact in any order.
    walk.tasks()
        .map(part)
        .reduce(digest::Digest::default, |a, b| a + b)
}

/// `target = f(source, target)`, element by element.
fn update<S: Element, T: Element>(
    source: View<'_, S>,
    target: ViewMut<'_, T>,
    f: impl Fn(S, T) -> T + Copy + Sync,
) {
    let walk = Strided::new(source.shape(), [source.strides(), target.strides()]);
    walk.in_parallel(|run| {
        let [from, to] = run.offsets;
        // SAFETY: elements of the views; the target's are of this run alone.
        unsafe {
            let (from, to) = (source.as_ptr().add(from), target.as_mut_ptr().add(to));
            if run.steps == [1, 1] {
                let from = std::slice::from_raw_parts(from, run.length);
                return update_row(from, std::slice::from_raw_parts_mut(to, run.length), f);
            }
            for index in 0..run.length {
                let to = to.add(index * run.steps[1]);
                *to = f(*from.add(index * run.steps[0]), *to);
            }
        }
    });
}

dispatch! {
    fn update_row<S: Element, T: Element, F: Fn(S, T) -> T>(source: &[S], target: &mut [T], f: F) {
        for (target, &source) in target.iter_mut().zip(source) {
            *target = f(source, *target);
        }
    }
}
