//! Elementary functions in f64 whose bits do not depend on the platform.
//!
//! The standard library hands `sin`, `ln` and `exp` to the system's libm, whose last bits differ between systems.
//! Here only `+ - * /`, `sqrt` and rounding are used, which IEEE 754 fixes, and no fused multiply-add, which would
//! depend on the target. Errors stay within one ulp on the domains named below.

/// π/2 in three parts: the first two have 33 significant bits, so a product with an integer below 2^20 is exact.
const HALF_PI: [f64; 3] = [
    f64::from_bits(0x3ff9_21fb_5440_0000),
    f64::from_bits(0x3dd0_b461_1a60_0000),
    f64::from_bits(0x3ba3_198a_2e03_7073),
];
/// ln 2 in two parts, the first of 33 significant bits.
const LN_2: [f64; 2] = [
    f64::from_bits(0x3fe6_2e42_fef0_0000),
    f64::from_bits(0x3dd4_73de_6af2_78ed),
];

/// Largest magnitude that [`sin_cos`] takes: the quotient by π/2 must stay below 2^20.
pub const SIN_COS_MAX: f64 = 1_600_000.0;

/// `(sin x, cos x)` for |x| ≤ [`SIN_COS_MAX`], within one ulp; `(NaN, NaN)` outside and for a NaN.
///
/// The argument is reduced to [-π/4, π/4] in twice the precision, then both Taylor series are summed.
pub fn sin_cos(x: f64) -> (f64, f64) {
    if !(x.abs() <= SIN_COS_MAX) {
        return (f64::NAN, f64::NAN);
    }
    let n = (x * std::f64::consts::FRAC_2_PI).round_ties_even();
    // Exact: for n != 0 both operands are multiples of 2^-53, and the difference is below one.
    let a = x - n * HALF_PI[0];
    let b = n * HALF_PI[1];
    let s = a - b;
    // The rounding error of a - b (Knuth's two-sum), less the third part.
    let t = s - a;
    let s_error = (a - (s - t)) + (-b - t);
    let correction = s_error - n * HALF_PI[2];
    let r = s + correction;
    let r_error = (s - r) + correction;
    let (sin, cos) = (sin_kernel(r, r_error), cos_kernel(r, r_error));
    match (n as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

/// sin(r + e) for |r| ≤ π/4 and tiny e: r + (r³·P(r²) + e·cos r).
fn sin_kernel(r: f64, e: f64) -> f64 {
    let z = r * r;
    let mut p = 0.0;
    // The series of (sin r - r)/r³ = -1/3! + z/5! - …; the first term left out is below 2^-63 of the sum.
    for k in (1..=8).rev() {
        let sign = if k % 2 == 1 { -1.0 } else { 1.0 };
        p = p * z + sign / factorial(2 * k + 1);
    }
    r + (r * z * p + e * (1.0 - 0.5 * z))
}

/// cos(r + e) for |r| ≤ π/4 and tiny e; the rounding of 1 - z/2 is carried along.
fn cos_kernel(r: f64, e: f64) -> f64 {
    let z = r * r;
    let mut p = 0.0;
    // The series of (cos r - 1 + z/2)/z² = 1/4! - z/6! + ….
    for k in (2..=9).rev() {
        let sign = if k % 2 == 0 { 1.0 } else { -1.0 };
        p = p * z + sign / factorial(2 * k);
    }
    let half_z = 0.5 * z;
    let w = 1.0 - half_z;
    w + (((1.0 - w) - half_z) + (z * z * p - r * e))
}

/// k! as an f64, exact up to 18! (and 19! = 121645100408832000 < 2^57 with 16 trailing zero bits).
fn factorial(k: u32) -> f64 {
    (2..=k).fold(1.0, |product, i| product * f64::from(i))
}

/// Natural logarithm of a finite x > 0, within one ulp; -inf at 0, NaN below it, +inf at +inf.
///
/// x = m·2^k with m in [√½, √2); ln m = 2·atanh((m-1)/(m+1)).
pub fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return x;
    }
    let subnormal_shift = if x < f64::MIN_POSITIVE { 54 } else { 0 };
    let bits = (x * f64::from_bits((1023 + subnormal_shift) << 52)).to_bits();
    let mut k = (bits >> 52) as i64 - 1023 - subnormal_shift as i64;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1;
    }
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let mut p = 0.0;
    // atanh(s)/s - 1 = z/3 + z²/5 + …, z ≤ 0.0295.
    for j in (1..=12u32).rev() {
        p = (p + 1.0 / f64::from(2 * j + 1)) * z;
    }
    // ln m = 2s(1 + p) and 2s = f - s·f, so that the leading term f is exact.
    let tail = s * (f - 2.0 * p);
    let k = k as f64;
    k * LN_2[0] + (f - (tail - k * LN_2[1]))
}

/// e^x, within one ulp where the result is a normal number; 0 below, +inf above, NaN for a NaN.
pub fn exp(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x > 710.0 {
        return f64::INFINITY;
    }
    if x < -746.0 {
        return 0.0;
    }
    let k = (x * std::f64::consts::LOG2_E).round_ties_even();
    let hi = x - k * LN_2[0];
    let lo = k * LN_2[1];
    let r = hi - lo;
    let r_error = (hi - r) - lo;
    let mut p = 0.0;
    // e^r - 1 - r = r²(1/2! + r/3! + …), |r| ≤ 0.347.
    for j in (2..=15).rev() {
        p = p * r + 1.0 / factorial(j);
    }
    let y = 1.0 + (r + (r * r * p + r_error));
    // Two factors, so that neither leaves the range of normal numbers.
    let half = (k as i64) / 2;
    y * power_of_two(half) * power_of_two(k as i64 - half)
}

/// theta^y for theta > 0.
pub fn pow(theta: f64, y: f64) -> f64 {
    exp(y * ln(theta))
}

fn power_of_two(e: i64) -> f64 {
    f64::from_bits(((1023 + e) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::splitmix64;

    fn ulps(a: f64, b: f64) -> u64 {
        let key = |x: f64| {
            let bits = x.to_bits() as i64;
            if bits < 0 { i64::MIN - bits } else { bits }
        };
        key(a).abs_diff(key(b))
    }

    /// Angles as RoPE makes them: f32 products, of every magnitude up to 2^20.
    fn angles() -> impl Iterator<Item = f64> {
        (0..400_000u64).map(|i| {
            let bits = splitmix64(11, i);
            let magnitude = f64::from_bits((1023 - 20 + bits % 40) << 52);
            let x = (bits >> 11) as f64 * 2f64.powi(-53) * magnitude;
            if bits & 64 == 0 {
                f64::from(x as f32)
            } else {
                -x
            }
        })
    }

    #[test]
    fn sin_and_cos_are_within_one_ulp_of_std_and_round_to_the_same_f32() {
        let mut f32_differences = 0;
        for x in angles() {
            let (sin, cos) = sin_cos(x);
            assert!(
                ulps(sin, x.sin()) <= 1,
                "sin {x:e}: {sin:e}, std {:e}",
                x.sin()
            );
            assert!(
                ulps(cos, x.cos()) <= 1,
                "cos {x:e}: {cos:e}, std {:e}",
                x.cos()
            );
            f32_differences += u32::from(sin as f32 != x.sin() as f32);
            f32_differences += u32::from(cos as f32 != x.cos() as f32);
        }
        assert_eq!(f32_differences, 0);
    }

    #[test]
    fn sin_and_cos_next_to_multiples_of_half_pi_keep_their_relative_precision() {
        for n in (1..1_000_000u32).step_by(37) {
            let x = f64::from(n) * std::f64::consts::FRAC_PI_2;
            for x in [x, x.next_up(), f64::from(x as f32)] {
                let (sin, cos) = sin_cos(x);
                assert!(ulps(sin, x.sin()) <= 1 && ulps(cos, x.cos()) <= 1, "{x:e}");
            }
        }
    }

    #[test]
    fn outside_their_domain_sin_and_cos_are_nan() {
        for x in [f64::NAN, f64::INFINITY, -2.0 * SIN_COS_MAX] {
            assert!(sin_cos(x).0.is_nan() && sin_cos(x).1.is_nan());
        }
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }

    #[test]
    fn ln_is_within_one_ulp_of_std() {
        for i in 0..400_000u64 {
            let bits = splitmix64(12, i);
            let anywhere = f64::from_bits(bits >> 1);
            let near_one = 0.5 + (bits >> 11) as f64 * 2f64.powi(-53);
            for x in [anywhere, near_one] {
                if x.is_finite() && x > 0.0 {
                    assert!(
                        ulps(ln(x), x.ln()) <= 1,
                        "ln {x:e}: {:e}, std {:e}",
                        ln(x),
                        x.ln()
                    );
                }
            }
        }
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert!(ln(-1.0).is_nan() && ln(f64::NAN).is_nan());
    }

    #[test]
    fn exp_is_within_one_ulp_of_std() {
        for i in 0..400_000u64 {
            let x = ((splitmix64(13, i) >> 11) as f64 * 2f64.powi(-53) - 0.5) * 1400.0;
            for x in [x, x / 1000.0] {
                assert!(
                    ulps(exp(x), x.exp()) <= 1,
                    "exp {x:e}: {:e}, std {:e}",
                    exp(x),
                    x.exp()
                );
            }
        }
        assert_eq!((exp(0.0), exp(-1e4), exp(1e4)), (1.0, 0.0, f64::INFINITY));
        assert!(exp(f64::NAN).is_nan());
    }
}
