//! One Rust body, three instruction sets, the same bits.
//!
//! `dispatch!` compiles a body for AVX-512, for AVX2 with FMA, and portably, and picks at run time. The compiler never
//! contracts, reassociates or approximates floating point by itself, so a body gives equal bits in all three as long as
//! - every fused multiply-add is written as [`f32::mul_add`] (a correctly rounded library call where the machine has no
//!   instruction for it),
//! - every reduction goes through [`fold`], which fixes lanes and tree whatever the width of a register,
//! - functions of one element come from [`math`](super::math).
//!
//! Sign and payload of a NaN are excepted: no instruction set promises them.

use std::hint::black_box;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

/// Lanes of a [`fold`]: one AVX-512 register of f32.
pub const LANES: usize = 16;

/// Instruction set that a kernel body is compiled for, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Isa {
    /// What every machine of the target has.
    Portable = 1,
    /// AVX2 and FMA.
    Avx2 = 2,
    /// AVX-512 F, BW, DQ and VL, besides AVX2 and FMA.
    Avx512 = 3,
}

/// The set in use; 0 before the first question.
static CURRENT: AtomicU8 = AtomicU8::new(0);

/// Held while a set is forced, so that two forced sections never overlap.
static FORCED: Mutex<()> = Mutex::new(());

impl Isa {
    /// The highest set that this machine has.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 {
                return if avx512 { Isa::Avx512 } else { Isa::Avx2 };
            }
        }
        Isa::Portable
    }

    /// The set that kernels use now: the highest one, unless [`with_isa`] forces a lower one. Never above
    /// [`Isa::detect`].
    #[inline]
    pub fn current() -> Isa {
        match CURRENT.load(Ordering::Relaxed) {
            3 => Isa::Avx512,
            2 => Isa::Avx2,
            1 => Isa::Portable,
            _ => {
                let detected = Isa::detect();
                // A set that is being forced meanwhile stays.
                let _ = CURRENT.compare_exchange(
                    0,
                    detected as u8,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                detected
            }
        }
    }

    /// Every set that this machine has, ascending.
    pub fn available() -> impl Iterator<Item = Isa> {
        let detected = Isa::detect();
        [Isa::Portable, Isa::Avx2, Isa::Avx512]
            .into_iter()
            .filter(move |&isa| isa <= detected)
    }
}

/// Runs `f` with every kernel of this process on `isa`, on whatever thread; one such section at a time, not nested.
///
/// For tests that show equal bits. Kernels that other threads run meanwhile use `isa` as well.
///
/// # Panics
/// When the machine does not have `isa`: see [`Isa::available`].
pub fn with_isa<R>(isa: Isa, f: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.store(Isa::detect() as u8, Ordering::Relaxed);
        }
    }

    assert!(isa <= Isa::detect(), "this machine does not have {isa:?}");
    let _held = FORCED.lock().unwrap_or_else(PoisonError::into_inner);
    let _restore = Restore;
    CURRENT.store(isa as u8, Ordering::Relaxed);
    f()
}

/// Defines a function whose body is compiled once for each [`Isa`] and picked at run time.
///
/// ```ignore
/// dispatch! {
///     /// y = exp(x)
///     pub fn exp_row<T: Storage>(x: &[T], y: &mut [f32]) {
///         for (y, x) in y.iter_mut().zip(x) {
///             *y = math::exp(x.to_f32());
///         }
///     }
/// }
/// ```
///
/// What the body calls must be `#[inline(always)]` (or small, like a closure) to be compiled for the set as well. A
/// generic parameter has exactly one bound, which may be `Fn(f32) -> f32`.
macro_rules! dispatch {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident $(<$($generic:ident: $bound:path),+>)? (
            $($argument:ident: $type:ty),* $(,)?
        ) $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$attribute])*
        $visibility fn $name $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn portable $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
            fn avx2 $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $result)? {
                portable($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(
                enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt"
            )]
            fn avx512 $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $result)? {
                portable($($argument),*)
            }

            match $crate::cpu::simd::Isa::current() {
                // SAFETY: the current set is never above what the machine has.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::Isa::Avx512 => unsafe { avx512($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::Isa::Avx2 => unsafe { avx2($($argument),*) },
                _ => portable($($argument),*),
            }
        }
    )*};
}
pub(crate) use dispatch;

/// Folds rows of equal length in a fixed order: lane l takes elements l, l + 16, l + 32, … in turn, then the lanes are
/// merged as a tree, lane l with lane l + 8, then + 4, + 2, + 1.
///
/// Every lane starts at `start`, which must be neutral for `merge`. For use inside a `dispatch!` body.
#[inline(always)]
pub fn fold<const N: usize>(
    rows: [&[f32]; N],
    start: f32,
    step: impl Fn(f32, [f32; N]) -> f32,
    merge: impl Fn(f32, f32) -> f32,
) -> f32 {
    let length = rows[0].len();
    assert!(
        rows.iter().all(|row| row.len() == length),
        "rows to fold have different lengths"
    );
    let mut lanes = [start; LANES];
    let whole = length / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        let chunks = rows.map(|row| &row[first..first + LANES]);
        for lane in 0..LANES {
            lanes[lane] = step(lanes[lane], chunks.map(|chunk| chunk[lane]));
        }
    }
    // Through memory once, or the tree below tears the loop's registers into its own uneven parts.
    let mut lanes = black_box(lanes);
    for at in whole..length {
        lanes[at - whole] = step(lanes[at - whole], rows.map(|row| row[at]));
    }
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] = merge(lanes[lane], lanes[lane + width]);
        }
    }
    lanes[0]
}

/// Sum of a row, in the order of [`fold`].
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    fold([x], 0.0, |sum, [x]| sum + x, |a, b| a + b)
}

/// Σ x·y, in the order of [`fold`], each product fused into its sum.
#[inline(always)]
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    fold([x, y], 0.0, |sum, [x, y]| x.mul_add(y, sum), |a, b| a + b)
}

/// Largest element; -inf of an empty row, NaN if there is one.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    fold([x], f32::NEG_INFINITY, |max, [x]| greater(max, x), greater)
}

/// The greater of two; NaN if either is.
#[inline(always)]
pub fn greater(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    dispatch! {
        fn sum_row(x: &[f32]) -> f32 { sum(x) }
        fn dot_row(x: &[f32], y: &[f32]) -> f32 { dot(x, y) }
        fn max_row(x: &[f32]) -> f32 { max(x) }
        fn map_row<F: Fn(f32) -> f32>(x: &mut [f32], f: F) {
            for x in x {
                *x = f(*x);
            }
        }
    }

    fn row(length: usize, seed: u32) -> Vec<f32> {
        let mut state = seed | 1;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0 - 0.5
        };
        (0..length).map(next).collect()
    }

    #[test]
    fn the_current_set_is_the_forced_one_and_then_the_highest_again() {
        for isa in Isa::available() {
            assert_eq!(with_isa(isa, Isa::current), isa);
        }
        with_isa(Isa::detect(), || assert_eq!(Isa::current(), Isa::detect()));
    }

    #[test]
    fn reductions_have_equal_bits_on_every_set() {
        for length in (0..70).chain([128, 1000, 6144]) {
            let (x, y) = (row(length, 3), row(length, 5));
            let on = |isa| {
                with_isa(isa, || {
                    [sum_row(&x), dot_row(&x, &y), max_row(&x)].map(f32::to_bits)
                })
            };
            for isa in Isa::available() {
                assert_eq!(on(isa), on(Isa::Portable), "{isa:?}, {length} elements");
            }
        }
    }

    #[test]
    fn reductions_are_near_their_f64_value() {
        let (x, y) = (row(6144, 3), row(6144, 5));
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
        let (wide_x, wide_y) = (wide(&x), wide(&y));
        let exact: f64 = wide_x.iter().sum();
        assert!((f64::from(sum_row(&x)) - exact).abs() <= 1e-3);
        let exact: f64 = wide_x.iter().zip(&wide_y).map(|(x, y)| x * y).sum();
        assert!((f64::from(dot_row(&x, &y)) - exact).abs() <= 1e-3);
    }

    #[test]
    fn the_largest_element_is_found_and_a_nan_is_never_lost() {
        assert_eq!(max_row(&[]), f32::NEG_INFINITY);
        assert_eq!(max_row(&[-3.0, f32::NEG_INFINITY]), -3.0);
        for length in [1, 5, 16, 33, 100] {
            for at in 0..length {
                let mut x = row(length, 9);
                x[at] = 2.0;
                assert_eq!(max_row(&x), 2.0);
                x[at] = f32::NAN;
                assert!(max_row(&x).is_nan());
            }
        }
    }

    #[test]
    fn a_closure_is_a_body_too() {
        let mut x = row(100, 1);
        let expected: Vec<f32> = x.iter().map(|x| x * 2.0).collect();
        map_row(&mut x, |x| x * 2.0);
        assert_eq!(x, expected);
    }
}
