//! Functions of one f32, with the same bits on every machine.
//!
//! Polynomials over explicit fused multiply-adds, without branches and without a table, so that a loop over them
//! vectorises inside a `dispatch!` body, and without the platform's libm, whose last bits differ between machines.
//! Coefficients are minimax fits (Remez exchange, relative error), rounded to f32.

// Coefficients carry one digit more than an f32 holds.
#![allow(clippy::excessive_precision)]

use half::bf16;

use super::simd::dispatch;

/// Adding this to |x| < 2²² leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// ln 2 with its twelve lowest bits cleared: n·LN_2_HIGH is exact for |n| < 2¹².
const LN_2_HIGH: f32 = 0.693_115_234_4;
/// ln 2 - LN_2_HIGH.
const LN_2_LOW: f32 = 3.194_618_33e-5;

/// eˣ within 1 ulp. exp(-inf) = 0, exp(inf) = inf; what is too small for a normal f32 is rounded to a subnormal.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these the result is inf and 0; a NaN passes through.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -105.0 { -105.0 } else { x };

    // x = n·ln 2 + r, |r| ≤ ln 2 / 2.
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));

    // eʳ = 1 + r + r²·q(r), relative error 2⁻²⁸.
    let q = 1.383_890_165e-3_f32
        .mul_add(r, 8.369_192_481e-3)
        .mul_add(r, 4.166_810_215e-2)
        .mul_add(r, 1.666_651_666e-1)
        .mul_add(r, 4.999_999_404e-1);
    let power = (r * r).mul_add(q, r) + 1.0;

    // 2ⁿ in two factors: both are normal numbers where 2ⁿ itself may not be, and only the second product rounds.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    power * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// 2ⁿ for -127 < n < 128.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32).wrapping_shl(23))
}

/// ln x within 1 ulp, of subnormals too. log(0) = -inf, log(x < 0) is NaN, log(inf) = inf.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    const TWO_POW_23: f32 = 8_388_608.0;
    const SQRT_HALF_BITS: u32 = std::f32::consts::FRAC_1_SQRT_2.to_bits();

    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * TWO_POW_23 } else { x };
    let lowered = if subnormal { -23.0 } else { 0.0 };

    // x = 2ᵉ·(1 + f), √½ ≤ 1 + f < √2.
    let offset = scaled.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let e = ((offset as i32) >> 23) as f32 + lowered;
    let f = f32::from_bits((offset & 0x007f_ffff).wrapping_add(SQRT_HALF_BITS)) - 1.0;

    // ln(1 + f) = f - f²/2 + f³·p(f), relative error 2⁻²⁸.
    let p = 6.746_598_333e-2_f32
        .mul_add(f, -1.167_561_412e-1)
        .mul_add(f, 1.188_816_056e-1)
        .mul_add(f, -1.240_559_518e-1)
        .mul_add(f, 1.421_955_377e-1)
        .mul_add(f, -1.666_799_486e-1)
        .mul_add(f, 2.000_211_924e-1)
        .mul_add(f, -2.500_000_894e-1)
        .mul_add(f, 3.333_331_347e-1);
    let square = f * f;
    let tail = e.mul_add(LN_2_LOW, (square * f) * p);
    let finite = e.mul_add(LN_2_HIGH, square.mul_add(-0.5, tail) + f);

    let value = if x == f32::INFINITY { x } else { finite };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    if x >= 0.0 { value } else { f32::NAN }
}

/// 1 / (1 + e⁻ˣ) within 2.5 ulp, small values of large negative x included; 1 exactly where it rounds to 1.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    // The exponent is never positive, so nothing overflows.
    let e = exp(-x.abs());
    let small = e / (1.0 + e);
    // Not 1 / (1 + e): that sum would swallow an e that still shows in the result, and routers would see ties.
    if x < 0.0 { small } else { 1.0 - small }
}

/// 1 / √x, both operations correctly rounded.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}

/// Rounds to nearest, ties to even; a NaN stays a NaN.
#[inline(always)]
pub fn to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let even = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff + even) >> 16;
    // Rounding up could carry a NaN's payload away; its quiet bit keeps it a NaN.
    let quiet = (bits >> 16) | 0x0040;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

/// Exact.
#[inline(always)]
pub fn from_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

dispatch! {
    /// x = eˣ, element by element: see [`exp`].
    pub fn exp_slice(x: &mut [f32]) {
        for x in x {
            *x = exp(*x);
        }
    }

    /// x = ln x, element by element: see [`log`].
    pub fn log_slice(x: &mut [f32]) {
        for x in x {
            *x = log(*x);
        }
    }

    /// x = 1 / (1 + e⁻ˣ), element by element: see [`sigmoid`].
    pub fn sigmoid_slice(x: &mut [f32]) {
        for x in x {
            *x = sigmoid(*x);
        }
    }

    /// Widens a row, exactly.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn widen_slice(x: &[bf16], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "rows to convert have different lengths");
        for (y, &x) in y.iter_mut().zip(x) {
            *y = from_bf16(x);
        }
    }

    /// Rounds a row: see [`to_bf16`].
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn round_slice(x: &[f32], y: &mut [bf16]) {
        assert_eq!(x.len(), y.len(), "rows to convert have different lengths");
        for (y, &x) in y.iter_mut().zip(x) {
            *y = to_bf16(x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{Isa, with_isa};

    /// Every 1021st bit pattern: both signs, all exponents, subnormals, infinities' neighbours, NaNs.
    fn patterns() -> Vec<f32> {
        (0..=u32::MAX).step_by(1021).map(f32::from_bits).collect()
    }

    /// Greatest |got - exact| in units of the last place of the exact value.
    fn worst_ulp(slice: fn(&mut [f32]), exact: fn(f64) -> f64) -> f64 {
        let x = patterns();
        let mut got = x.clone();
        slice(&mut got);
        let mut worst = 0.0;
        for (&x, &got) in x.iter().zip(&got) {
            let exact = exact(f64::from(x));
            if exact.is_nan() || exact.abs() > f64::from(f32::MAX) {
                let expected = exact as f32;
                assert!(
                    got == expected || got.is_nan() && expected.is_nan(),
                    "x {x}: {got}"
                );
                continue;
            }
            let exponent = exact.abs().log2().floor().clamp(-126.0, 127.0);
            let ulp = (f64::from(got) - exact).abs() / (exponent - 23.0).exp2();
            assert!(ulp <= 2.5, "x {x:e}: {got:e}, exactly {exact:e}, {ulp} ulp");
            if ulp > worst {
                worst = ulp;
            }
        }
        worst
    }

    #[test]
    fn exp_is_within_one_ulp_everywhere() {
        let worst = worst_ulp(exp_slice, f64::exp);
        assert!(worst <= 1.0, "{worst} ulp");
    }

    #[test]
    fn log_is_within_one_ulp_everywhere() {
        let worst = worst_ulp(log_slice, f64::ln);
        assert!(worst <= 1.0, "{worst} ulp");
    }

    #[test]
    fn sigmoid_is_within_two_and_a_half_ulp_everywhere() {
        let worst = worst_ulp(sigmoid_slice, |x| {
            let e = (-x.abs()).exp();
            (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
        });
        assert!(worst <= 2.5, "{worst} ulp");
    }

    #[test]
    fn limits_are_exact() {
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(-104.0).to_bits(), 0);
        assert_eq!(exp(-103.0).to_bits(), 1);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(88.73), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());

        assert_eq!(log(1.0).to_bits(), 0);
        assert_eq!(log(0.0), f32::NEG_INFINITY);
        assert_eq!(log(-0.0), f32::NEG_INFINITY);
        assert_eq!(log(f32::INFINITY), f32::INFINITY);
        assert_eq!(log(f32::from_bits(1)), -103.278_93);
        assert!(log(-1.0).is_nan() && log(f32::NEG_INFINITY).is_nan() && log(f32::NAN).is_nan());

        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
        assert!(sigmoid(-100.0) > 0.0);
        assert!(sigmoid(f32::NAN).is_nan());
        assert_eq!(rsqrt(4.0), 0.5);
    }

    #[test]
    fn bits_are_equal_on_every_set() {
        // A NaN's sign and payload are not promised.
        let canonical = |x: f32| if x.is_nan() { f32::NAN } else { x }.to_bits();
        for slice in [exp_slice, log_slice, sigmoid_slice] {
            let on = |isa| {
                let mut x: Vec<f32> = patterns().into_iter().step_by(7).collect();
                with_isa(isa, || slice(&mut x));
                x.into_iter().map(canonical).collect::<Vec<_>>()
            };
            let portable = on(Isa::Portable);
            for isa in Isa::available() {
                assert!(on(isa) == portable, "{isa:?}");
            }
        }
    }

    #[test]
    fn bf16_conversions_agree_with_half_on_every_set() {
        let x = patterns();
        let expected: Vec<u16> = x.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        for isa in Isa::available() {
            let mut rounded = vec![bf16::ZERO; x.len()];
            with_isa(isa, || round_slice(&x, &mut rounded));
            let bits: Vec<u16> = rounded.iter().map(|x| x.to_bits()).collect();
            assert!(bits == expected, "{isa:?}");

            let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
            let mut wide = vec![0.0; all.len()];
            with_isa(isa, || widen_slice(&all, &mut wide));
            for (wide, narrow) in wide.iter().zip(&all) {
                assert_eq!(wide.to_bits(), u32::from(narrow.to_bits()) << 16);
            }
        }
    }
}
